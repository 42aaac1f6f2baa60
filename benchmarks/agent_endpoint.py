"""What the endpoint costs beside the engine, and what it withstands.

python -m benchmarks.agent_endpoint [--only overhead | fuzz | swaps] [--requests 50000] [--write]
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import logging
import random
import resource
import statistics
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx2

from benchmarks.measure import write_block
from tests.llm.agents.fuzz import bodies, raw, statuses
from tests.llm.agents.hosted import TOKENIZER, Hosted, hosted
from unirl.llm.agents.session import Session
from unirl.llm.engine import Completion, Request
from unirl.llm.models.model import flat_weights

FUZZED = 50_000
CLIENTS = 4
_LOGGERS = ("asyncio", "uvicorn.error", "unirl")
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
    counts = Counter(turn.origin for turn in turns)
    assert all(counts[origin] == session.counts[origin] for origin in counts)
    for number, turn in enumerate(turns):
        path = session.episode.tokens(turn.parent)
        assert session.prompt_tokens(number)[: len(path)] == path


def fuzz(count: int = FUZZED) -> str:
    """A quarter of them are bytes on a socket. A session for every 500 requests of a client, as
    episodes come and leave.
    """
    status: Counter[str] = Counter()
    logged = Logged()
    with hosted(retry_seconds=0.1) as host, logged:
        with ThreadPoolExecutor(CLIENTS) as pool:
            warm = list(pool.map(lambda i: _fuzzed(host, i, count // CLIENTS // 5), range(CLIENTS)))
            before = _memory()
            rest = [
                pool.submit(_fuzzed, host, CLIENTS + i, count // CLIENTS - count // CLIENTS // 5)
                for i in range(CLIENTS)
            ]
            for each in (*warm, *(one.result() for one in rest)):
                status += each
        grown = (_memory() - before) / 1024
        gc.collect()  # tasks that nobody has waited for complain when they are collected
    rows = [f"| {kind} | {number:,} |" for kind, number in sorted(status.items())]
    total = (
        f"{count:,} requests: memory + {grown:.0f} MB, {len(logged.found)} complaints in the log"
    )
    for each in logged.found[:5]:
        print(each)
    return "\n".join([total, "", "| sent as: answered with | answers |", "| --- | --- |", *rows])


def _fuzzed(host: Hosted, seed: int, count: int) -> Counter[str]:
    status: Counter[str] = Counter()
    address = ("127.0.0.1", int(host.endpoint.root.rpartition(":")[2]))
    with httpx2.Client(timeout=60) as client:
        for start in range(0, count, 500):
            session, key = host.open(_anything)
            number = min(500, count - start)
            for path, body, headers in bodies(seed + 1000 * start, number - number // 4):
                sent = {"authorization": f"Bearer {key}", **headers}
                answer = client.post(f"{host.endpoint.root}/v1/{path}", content=body, headers=sent)
                status[f"HTTP: {answer.status_code // 100}xx"] += 1
                if answer.status_code >= 500:
                    print(path, body[:300], answer.text, flush=True)
            for kind, data, must in raw(seed + 1000 * start + 1, number // 4, key):
                found = statuses(address, data, kind)
                assert found or not must, (kind, data[:300])
                found = [each for each in found if each >= 200]
                for each in found or [0]:
                    status[f"socket: {each // 100}xx" if each else "socket: none"] += 1
                if any(each >= 500 for each in found):
                    print(kind, found, data[:300], flush=True)
            _check_paths(session)
            host.endpoint.forget(key)
            host.sessions.remove(session)
    return status


async def _anything(request: Request) -> Completion:
    """At once or after a moment, any tokens."""
    chance = random.Random(request.seed)
    await asyncio.sleep(chance.choice([0.0, 0.0, 0.01]))
    tokens = tuple(chance.randrange(len(TOKENIZER)) for _ in range(chance.randrange(1, 9)))
    return Completion(tokens, (-1.0,) * len(tokens), (0,) * len(tokens), "stop")


class Logged(logging.Handler):
    """What asyncio, the server and we complain of."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.found: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        self.found.append(f"{record.getMessage()} {error!r}")

    def __enter__(self) -> Logged:
        for name in _LOGGERS:
            logging.getLogger(name).addHandler(self)
        return self

    def __exit__(self, *error: object) -> None:
        for name in _LOGGERS:
            logging.getLogger(name).removeHandler(self)


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
        answers = ", ".join(f"{number} of {code}" for code, number in status.items())
        return f"{count:,} swaps: answers {answers}; {mixed} have tokens of several versions"


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
