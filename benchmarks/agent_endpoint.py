"""What the endpoint costs beside the engine, and what it withstands.

python -m benchmarks.agent_endpoint [overhead | fuzz | swaps]
"""

from __future__ import annotations

import asyncio
import resource
import statistics
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx2

from tests.llm.agents.fuzz import bodies
from tests.llm.agents.hosted import hosted
from unirl.llm.engine import Completion, Request
from unirl.llm.models.model import flat_weights

FUZZED = 50_000
SWAPS = 1_000


async def _nothing(request: Request) -> Completion:
    return Completion((2,), (0.0,), (0,), "stop")


def overhead(repeats: int = 60) -> None:
    """Milliseconds of a request that draws nothing, by the length of its conversation."""
    with hosted() as host, httpx2.Client(timeout=60) as client:
        for count in (20, 200):
            _, key = host.open(_nothing)
            said: list[Any] = [
                {"role": "user" if i % 2 == 0 else "assistant", "content": "what is the sum? " * 34}
                for i in range(count - 1)
            ]
            took = []
            for number in range(repeats):
                body = {"messages": [*said, {"role": "user", "content": f"{number}"}]}
                started = time.perf_counter()
                url = f"{host.endpoint.url(key)}/chat/completions"
                answer = client.post(url, json=body).raise_for_status().json()
                took.append(time.perf_counter() - started)
                if number == 0:  # from here on a stored path is extended
                    said = [*body["messages"], answer["choices"][0]["message"]]
            p50, p95 = statistics.median(took[2:]), sorted(took[2:])[int(0.95 * len(took[2:]))]
            print(f"{count} messages: p50 {1e3 * p50:.1f} ms, p95 {1e3 * p95:.1f} ms")


def fuzz(count: int = FUZZED) -> None:
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
        print(f"{count} requests: {status}; memory + {(_memory() - before) / 1024:.0f} MB")


def _memory() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def swaps(count: int = SWAPS) -> None:
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
        print(f"{count} swaps: answers {status}; {mixed} with tokens of several versions")


def main() -> None:
    for name in sys.argv[1:] or ["overhead", "fuzz", "swaps"]:
        {"overhead": overhead, "fuzz": fuzz, "swaps": swaps}[name]()


if __name__ == "__main__":
    main()
