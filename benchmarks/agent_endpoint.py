"""What the endpoint costs beside the engine, and what it withstands.

python -m benchmarks.agent_endpoint [--only overhead | fuzz | swaps] [--requests 50000] [--write]
"""

from __future__ import annotations

import argparse
import asyncio
import resource
import statistics
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx2

from benchmarks.measure import write_block
from tests.llm.agents.fuzz import bodies
from tests.llm.agents.hosted import hosted
from unirl.llm.agents.episode import ROOT
from unirl.llm.agents.session import Session
from unirl.llm.engine import Completion, Request
from unirl.llm.models.model import flat_weights

FUZZED = 50_000
SWAPS = 1_000


async def _nothing(request: Request) -> Completion:
    return Completion((2,), (0.0,), (0,), "stop")


def overhead(repeats: int = 60) -> str:
    """Milliseconds of a request that draws nothing, by the length of its conversation."""
    lines = ["| messages | tokens | how | p50 ms | p95 ms |", "| --- | --- | --- | --- | --- |"]
    with hosted() as host, httpx2.Client(timeout=60) as client:
        for count in (20, 200):
            for grows in (False, True):
                session, key = host.open(_nothing)
                took = _asked(client, f"{host.endpoint.url(key)}/chat/completions", count, grows,
                              repeats)  # fmt: skip
                _check_paths(session)
                p50, p95 = statistics.median(took), sorted(took)[int(0.95 * len(took))]
                how = "grows" if grows else "forks"
                tokens = len(session.prompt_tokens(len(session.episode.turns) - 1))
                lines.append(
                    f"| {count} | {tokens:,} | {how} | {1e3 * p50:.1f} | {1e3 * p95:.1f} |"
                )
    return "\n".join(lines)


def _asked(client: Any, url: str, count: int, grows: bool, repeats: int) -> list[float]:
    """Seconds of requests of about `count` messages. grows: each continues the one before, from the
    first message; or they all continue the first one, which has the whole history.
    """
    words = "what is the sum? " * 34
    said: list[Any] = []
    if not grows:
        said = [{"role": ("user", "assistant")[i % 2], "content": words} for i in range(count - 1)]
    took = []
    for number in range(count // 2 + repeats // 2 if grows else repeats):
        new = {"role": "user", "content": words if grows else f"{number}"}
        started = time.perf_counter()
        answer = client.post(url, json={"messages": [*said, new]}).raise_for_status().json()
        took.append(time.perf_counter() - started)
        if grows or number == 0:  # from here on a stored path is extended
            said += [new, answer["choices"][0]["message"]]
    return took[-repeats:] if grows else took[2:]


def _check_paths(session: Session) -> None:
    """Each request's prompt begins with its parent's path, token by token, or is a counted root."""
    turns = session.episode.turns
    roots = sum(turn.parent == ROOT for turn in turns)
    assert roots == session.counts["prompt"] + session.counts["rewritten"] == 1
    for number, turn in enumerate(turns):
        path = session.episode.tokens(turn.parent)
        assert session.prompt_tokens(number)[: len(path)] == path


def fuzz(count: int = FUZZED) -> str:
    """A session for every 500 requests, as episodes come and leave."""
    status: dict[int, int] = {}
    with hosted() as host, httpx2.Client(timeout=60) as client:
        before, key = 0, ""
        for number, (path, body, headers) in enumerate(bodies(seed=1, count=count)):
            if number % 500 == 0:
                if number:
                    host.endpoint.forget(key)
                    host.sessions.clear()
                _, key = host.open(_nothing)
            if number == min(2000, count // 5):
                before = _memory()
            sent = {"authorization": f"Bearer {key}", **headers}
            answer = client.post(f"{host.endpoint.root}/v1/{path}", content=body, headers=sent)
            kind = answer.status_code // 100
            status[kind] = status.get(kind, 0) + 1
        return f"{count} requests: {status}; memory + {(_memory() - before) / 1024:.0f} MB"


def _memory() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def swaps(count: int = SWAPS) -> str:
    """Weights are swapped while requests are in flight."""
    with hosted(max_tokens=24) as host:
        session, key = host.open()
        done = threading.Event()

        async def swap() -> None:
            await host.engine.start()
            assert host.engine.generation is not None
            model = host.engine.generation.model
            weights = {name: value.clone() for name, value in flat_weights(model).items()}
            for version in range(count):
                await host.engine.pause("keep")
                await host.engine.load_weights(weights, version)
                await host.engine.resume()
                await asyncio.sleep(0.002)
            done.set()

        swapping = asyncio.run_coroutine_threadsafe(swap(), host.loop)
        status: dict[int, int] = {}

        def ask(number: int) -> None:
            while not done.is_set():
                body = {"messages": [{"role": "user", "content": f"swap {number}"}]}
                url = f"{host.endpoint.url(key)}/chat/completions"
                code = httpx2.post(url, json=body, timeout=60).status_code
                status[code] = status.get(code, 0) + 1

        with ThreadPoolExecutor(4) as pool:
            list(pool.map(ask, range(4)))
        swapping.result(60)
        mixed = sum(len(set(turn.completion.version)) > 1 for turn in session.episode.turns)
        return f"{count} swaps: answers {status}; {mixed} with tokens of several versions"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", choices=("overhead", "fuzz", "swaps"))
    parser.add_argument("--requests", type=int, default=FUZZED)
    parser.add_argument("--write", action="store_true", help="to RESULTS.md")
    flags = parser.parse_args()
    for name, work in (
        ("overhead", overhead), ("fuzz", lambda: fuzz(flags.requests)), ("swaps", swaps)
    ):  # fmt: skip
        if flags.only in (None, name):
            print(text := work())
            if flags.write:
                write_block(f"agent-endpoint-{name}", text)


if __name__ == "__main__":
    main()
