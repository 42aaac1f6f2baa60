"""A run of agent-products, evaluated by its own loop and by the OpenAI Agents SDK behind `unirl
serve`: is the same success reached?

    python benchmarks/language_models.py agent-products --model models/smollm2 --engine vllm
    sh benchmarks/agents/make_venvs.sh FOLDER
    python benchmarks/agent_products.py FOLDER runs/language-agent-products-sync-*
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import measure

from unirl.commands.export import language_config
from unirl.llm.generating import agent_of, make_prompts

CLIENT = Path(__file__).resolve().parent / "agents" / "products.py"


@contextmanager
def served(run: Path, max_tokens: int) -> Iterator[str]:
    """The base URL of an endpoint for the run's newest checkpoint."""
    command = [sys.executable, "-m", "unirl", "serve", str(run), "--port", "0"]
    command += ["--max-tokens", str(max_tokens)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        found = re.search(r"OPENAI_BASE_URL=(\S+)", line)
        if found is None:
            raise SystemExit(f"unirl serve said {line!r}")
        yield found[1]
    finally:
        process.terminate()
        process.wait(30)


def interval(share: float, number: int) -> float:
    """Half of 95 %."""
    return 1.96 * math.sqrt(share * (1 - share) / number)


def by_client(venvs: Path, run: Path, number: int) -> float:
    """Share of held-out questions that the Agents SDK answers right."""
    config = language_config(run)
    agent = agent_of(config)
    assert agent is not None
    prompts, _ = make_prompts(config, None, agent)
    asked = [prompts.held_out(i % prompts.num_eval) for i in range(number)]
    with served(run, config.sampling.max_tokens) as url:
        done = subprocess.run(
            [str(venvs / "sdk/bin/python"), str(CLIENT), json.dumps(agent.schemas[0])],
            input=json.dumps([list(each.messages) for each in asked]),
            env={**os.environ, "OPENAI_BASE_URL": url, "OPENAI_API_KEY": "none"},
            capture_output=True,
            text=True,
            timeout=3000,
        )
    if done.returncode:
        raise SystemExit(done.stderr[-3000:])
    said = json.loads(done.stdout)
    right = [text.strip() == each.answer for text, each in zip(said, asked, strict=True)]
    return sum(right) / number


def by_own_loop(run: Path, number: int) -> float:
    """The same by the agent that it was trained with."""
    command = [sys.executable, "-m", "unirl", "eval", str(run), "--episodes", str(number)]
    done = subprocess.run([*command, "--json"], capture_output=True, text=True, check=True)
    returns = json.loads(Path(json.loads(done.stdout)["file"]).read_text())["returns"]
    return sum(float(value) == 1.0 for value in returns) / number


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("venvs", type=Path)
    parser.add_argument("runs", type=Path, nargs="+")
    parser.add_argument("--episodes", type=int, default=200)
    parser.add_argument("--no-write", action="store_true", help="leave RESULTS.md as it is")
    flags = parser.parse_args()
    number, rows = flags.episodes, []
    for run in flags.runs:
        shares = by_own_loop(run, number), by_client(flags.venvs, run, number)
        words = [f"{share:.2f} +- {interval(share, number):.2f}" for share in shares]
        rows.append([run.name, *words])
        print(rows[-1], flush=True)
    body = measure.table(["run", "own loop, T = 1", "OpenAI Agents SDK, T = 1"], rows)
    print(body)
    if not flags.no_write:
        measure.write_block("agent-products-client", body)


if __name__ == "__main__":
    main()
