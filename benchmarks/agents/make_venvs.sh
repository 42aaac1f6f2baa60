#!/bin/sh
# make_venvs.sh FOLDER: an environment for each family of clients, as their requirements exclude each other.
set -e
make() {
    name=$1
    shift
    python3 -m venv "$folder/$name"
    "$folder/$name/bin/pip" install --quiet "$@"
}
folder=${1:?folder}
mkdir -p "$folder"
make sdk "openai>=3" "openai-agents>=0.24" "anthropic>=2"
make langgraph "langgraph>=1.2" "langchain-openai>=1.7"
make smolagents "smolagents[openai]>=1.26"
make mini "mini-swe-agent>=2.4"
