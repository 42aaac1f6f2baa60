"""How evaluations reach the engines of a run: no second model is loaded beside them.

The learner's process asks; a rollout answers held-out prompts with the newest weights, beside the
groups that it makes. In one process they share its event loop. Otherwise each rollout listens on
a socket in a folder that only this user can read, and both sides speak lines of JSON:

    {"numbers": [0, 2], "seed": 7, "deterministic": true}
    {"number": 2, "reward": 1.0, "length": 9}    or {"number": 0}: its reward failed
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from unirl.errors import UniRLError
from unirl.llm.rollout import Answer, Answering, Visitors
from unirl.llm.weights.own_folder import OwnFolder

log = logging.getLogger(__name__)

_PAUSE_SECONDS = 0.5
_ALIVE_SECONDS = 5.0
_LONGEST = 2**24
"""Bytes of a line."""


class EvaluationLink:
    """What a plan gives its learner, its evaluator and the rollouts of one pool.

    num_engines: rollouts of the pool. apart: they have processes of their own. seconds: how long
    an engine may say nothing before this process answers instead.
    """

    def __init__(self, num_engines: int, *, apart: bool, seconds: float) -> None:
        self._num_engines, self._apart, self._seconds = num_engines, apart, seconds
        self._here: dict[int, tuple[Answering, asyncio.AbstractEventLoop]] = {}
        self._folder: Path | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_here": {}}

    def open(self) -> None:
        """In the learner's process, before rollouts are made: a run has begun. (Elsewhere, as in
        `unirl eval`, there are no engines to ask.)
        """
        if self._apart and self._folder is None:
            own = OwnFolder("evaluation")
            self._folder = own.path()
            weakref.finalize(self, own.remove)

    def visitors(self, index: int) -> Visitors:
        """What the rollout of this number in its pool shall let in."""
        if self._apart and self._folder is not None:
            return _Listener(self._folder / f"{index}.sock")
        return _Here(self._here, index)

    def ask(
        self, num_episodes: int, *, seed: int, deterministic: bool
    ) -> Sequence[Answer | None] | None:
        """Rewards and lengths of so many held-out prompts; None: there is no engine to ask, or none
        that answers. Raises UniRLError for what no repetition fixes.
        """
        asked = {"seed": seed, "deterministic": deterministic}
        if self._here:
            rollouts = [rollout for rollout, _ in self._here.values()]
            loop = next(iter(self._here.values()))[1]
            return loop.run_until_complete(_all_of(rollouts, num_episodes, asked))
        if self._folder is None:
            return None
        found: dict[int, Answer | None] = {}
        with asyncio.Runner() as runner:
            runner.run(self._ask_all(found, num_episodes, asked))
        return None if len(found) < num_episodes else [found[i] for i in range(num_episodes)]

    async def _ask_all(
        self, found: dict[int, Answer | None], num_episodes: int, asked: dict[str, Any]
    ) -> None:
        shares = [range(i, num_episodes, self._num_engines) for i in range(self._num_engines)]
        jobs = [
            asyncio.ensure_future(self._ask_one(i, share, found, asked))
            for i, share in enumerate(shares)
            if share
        ]
        try:
            await asyncio.gather(*jobs)
        except TimeoutError:
            log.warning(
                "no engine has answered an evaluation for %g s: this process loads the model and "
                "evaluates itself, as long as that takes",
                self._seconds,
            )
        finally:
            for job in jobs:
                job.cancel()
            await asyncio.gather(*jobs, return_exceptions=True)

    async def _ask_one(
        self,
        index: int,
        share: Sequence[int],
        found: dict[int, Answer | None],
        asked: dict[str, Any],
    ) -> None:
        """The share of one engine, asked again where it is replaced meanwhile. Raises TimeoutError
        after too long a silence.
        """
        assert self._folder is not None
        path, loop = self._folder / f"{index}.sock", asyncio.get_running_loop()
        heard = loop.time()
        while left := [number for number in share if number not in found]:
            with contextlib.suppress(OSError):  # it starts, or has just died
                reader, writer = await asyncio.open_unix_connection(path)
                try:
                    writer.write(json.dumps({**asked, "numbers": left}).encode() + b"\n")
                    while line := await asyncio.wait_for(reader.readline(), self._seconds):
                        if not line.endswith(b"\n"):
                            break  # it died while it wrote
                        heard = loop.time()
                        said = json.loads(line)
                        if "error" in said:
                            raise UniRLError(*said["error"])
                        if "number" in said:
                            found[said["number"]] = (
                                Answer(said["reward"], said["length"]) if "reward" in said else None
                            )
                finally:
                    writer.close()
            if loop.time() - heard > self._seconds:
                raise TimeoutError
            if any(number not in found for number in left):
                await asyncio.sleep(_PAUSE_SECONDS)


async def _all_of(
    rollouts: Sequence[Answering], num_episodes: int, asked: dict[str, Any]
) -> list[Answer | None]:
    return await asyncio.gather(
        *(rollouts[i % len(rollouts)].answer(i, **asked) for i in range(num_episodes))
    )


class _Here:
    """The rollout is in the process of the learner, on a loop that rests between samples."""

    def __init__(
        self, known: dict[int, tuple[Answering, asyncio.AbstractEventLoop]], index: int
    ) -> None:
        self._known, self._index = known, index

    async def open(self, rollout: Answering) -> None:
        self._known[self._index] = rollout, asyncio.get_running_loop()

    async def close(self) -> None:
        self._known.pop(self._index, None)


class _Listener:
    """A rollout's end, where it has a process of its own."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._server: asyncio.Server | None = None
        self._is_open = False

    async def open(self, rollout: Answering) -> None:
        if self._is_open:
            return
        self._is_open = True  # before the first wait: many samples begin at once

        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            try:
                await _answer(rollout, reader, writer)
            except OSError:
                pass  # who asked is gone
            except Exception:
                log.exception("an evaluation failed")  # it is asked again, or elsewhere
            finally:
                writer.close()

        try:
            # That of one that was killed is still there.
            self._path.unlink(missing_ok=True)
            self._server = await asyncio.start_unix_server(answer, self._path, limit=_LONGEST)
        except OSError as error:  # its path is too long for a socket, say
            log.warning("the learner's process will evaluate: no socket %s (%s)", self._path, error)

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
            self._path.unlink(missing_ok=True)


async def _answer(
    rollout: Answering, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> None:
    asked = json.loads(await reader.readline())
    numbers = [int(number) for number in asked.pop("numbers")]

    async def one(number: int) -> dict[str, Any]:
        found = await rollout.answer(number, **asked)
        return {"number": number, **({} if found is None else found._asdict())}

    waiting = {asyncio.ensure_future(one(number)) for number in numbers}
    try:
        while waiting:
            done, waiting = await asyncio.wait(
                waiting, timeout=_ALIVE_SECONDS, return_when=asyncio.FIRST_COMPLETED
            )
            # A line without a number says that somebody is there.
            for said in [job.result() for job in done] or [{}]:
                writer.write(json.dumps(said).encode() + b"\n")
            await writer.drain()
    except UniRLError as error:
        writer.write(json.dumps({"error": error.parts}).encode() + b"\n")
        await writer.drain()
    finally:
        for job in waiting:
            job.cancel()
