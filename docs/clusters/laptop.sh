#!/usr/bin/env bash
# A cluster of this machine alone, which starts and ends with the run: no address is given.
set -euo pipefail

export RAY_AUTH_MODE=token
[ -n "${RAY_AUTH_TOKEN:-}" ] || RAY_AUTH_TOKEN=$(python -c 'import secrets; print(secrets.token_hex(32))')
export RAY_AUTH_TOKEN

unirl doctor || echo "see above: something would hold a run back" >&2
unirl train impala --env.id CartPole-v1 --runner.kind ray "$@"
