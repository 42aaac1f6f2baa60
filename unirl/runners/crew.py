"""The processes of a run: started, watched, restarted a bounded number of times, ended."""

from __future__ import annotations

import json
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import NamedTuple

from unirl.errors import ActorFailed, UniRLError
from unirl.runners.fork_server import interrupts_blocked, parent_pid, process_context
from unirl.runners.worker import EXIT_USER_ERROR, Job, Lifeline, process_main

log = logging.getLogger(__name__)

END_SECONDS = 5.0
_WATCH_SECONDS = 0.2


class Verdict(NamedTuple):
    """Why we kill a process ourselves: its signal alone would tell nobody what to do."""

    why: str
    """The setting that it broke, with the value: "it held a slot for longer than ..."."""
    remedy: str


@dataclass
class Member:
    """One place in the crew: whoever fills it now, and how often it had to be filled anew."""

    role: str
    """What messages call it: "actor", "environment worker"."""
    index: int
    make_work: Callable[[int], Callable[[], None]]
    """From the number of restarts to what the process does; picklable."""
    num_threads: int = 1
    niceness: int = 0
    num_restarts: int = 0
    process: BaseProcess | None = field(default=None, repr=False)
    report: Connection | None = field(default=None, repr=False)
    verdict: Verdict | None = None
    """Why its process was killed, if we did it and said why."""

    @property
    def name(self) -> str:
        """For messages: "actor 3"."""
        return f"{self.role} {self.index}"

    @property
    def file_name(self) -> str:
        """For its log: "actor-003.txt"."""
        return f"{self.role.replace(' ', '-')}-{self.index:03d}.txt"

    @property
    def alive(self) -> bool:
        """Whether its process runs."""
        return self.process is not None and self.process.is_alive()

    def kill(self, verdict: Verdict | None = None) -> None:
        """Kill its process; whoever watches starts another. verdict: why, for the message."""
        if self.process is not None:
            self.verdict = verdict or self.verdict  # first: the watcher reads it at once
            self.process.kill()


class Crew:
    """Starts the members, watches over them, ends them.

    dependants: who cannot go on without a dead member; they are killed with it. mourn: called when
    a dead member and its dependants are gone for good and before others take their places; returns
    a few words on what was lost. look: called several times a second, to kill what hangs.
    close_all: makes every member end by itself; is_closed: it was called, by whomever. modules,
    preload: what members import, see process_context.
    """

    def __init__(
        self,
        members: Sequence[Member],
        *,
        max_restarts: int,
        log_dir: Path | None,
        dependants: Callable[[Member], Sequence[Member]],
        mourn: Callable[[Member, Sequence[Member]], str],
        look: Callable[[], None],
        close_all: Callable[[], None],
        is_closed: Callable[[], bool],
        modules: Iterable[str] = (),
        preload: Iterable[str] = (),
    ) -> None:
        self.members = members
        self._max_restarts, self._log_dir = max_restarts, log_dir
        self._dependants, self._mourn, self._look = dependants, mourn, look
        self._close_all, self._is_closed = close_all, is_closed
        self._context = process_context(len(members), modules, preload)
        self._lifeline = Lifeline()
        self._error: UniRLError | None = None
        self._closing = threading.Event()
        self._idle, self._ended = threading.Event(), threading.Event()
        self._watcher: threading.Thread | None = None

    def start(self) -> None:
        """Start all members and watch them."""
        for member in self.members:
            self._start(member)
        self._watcher = threading.Thread(target=self._watch, name="crew-watcher", daemon=True)
        self._watcher.start()

    def raise_error(self) -> None:
        """Raise what made a member stop for good, if anything did."""
        if self._error is not None:
            raise self._error

    @property
    def num_restarts(self) -> int:
        """How often members died and were replaced."""
        return sum(member.num_restarts for member in self.members)

    def close(self) -> None:
        """End every process: first kindly, then not."""
        if self._closing.is_set():
            return
        self._closing.set()
        self._close_all()
        if self._watcher is not None:
            self._idle.wait(END_SECONDS)
        deadline = time.monotonic() + END_SECONDS
        for member in self.members:
            if member.process is not None:
                member.process.join(max(0.0, deadline - time.monotonic()))
                if member.process.is_alive():
                    member.process.kill()
                    member.process.join(END_SECONDS)
        self._ended.set()
        if self._watcher is not None:
            self._watcher.join(END_SECONDS)
        for member in self.members:
            if member.report is not None:
                member.report.close()
        self._lifeline.close()

    def _start(self, member: Member) -> None:
        receiver, sender = self._context.Pipe(duplex=False)
        path = self._log_dir / member.file_name if self._log_dir is not None else None
        job = Job(
            name=member.name,
            work=member.make_work(member.num_restarts),
            num_threads=member.num_threads,
            niceness=member.niceness,
            log_path=path,
            lifeline=self._lifeline,
            report=sender,
            parent_pid=parent_pid(self._context),
            environ=dict(os.environ),
        )
        process = self._context.Process(
            target=process_main, args=(job,), name=f"unirl-{member.name.replace(' ', '-')}"
        )
        with interrupts_blocked():  # until the child ignores it, Ctrl-C would kill it
            process.start()
        sender.close()
        if member.report is not None:
            member.report.close()
        member.process, member.report, member.verdict = process, receiver, None

    def _watch(self) -> None:
        try:
            self._watch_until_closing()
        finally:
            self._idle.set()
            # The kernel ends a spawned process together with the thread that started it, and this
            # thread started those that were restarted: it stays until all have ended in good order.
            self._ended.wait(4 * END_SECONDS)

    def _watch_until_closing(self) -> None:
        while not self._closing.is_set():
            # Only to be prompt: a child that a dead member left behind may hold its sentinel open.
            wait([m.process.sentinel for m in self.members if m.process], timeout=_WATCH_SECONDS)
            try:
                self._look()
                for member in self.members:
                    if self._closing.is_set() or self._is_closed():
                        return
                    if not member.alive:
                        self._bury(member)
            except UniRLError as error:
                self._give_up(error)
                return
            except Exception as error:
                log.exception("a process could not be restarted")
                self._give_up(
                    ActorFailed(
                        f"a process could not be restarted: {error}",
                        "the system must allow another process",
                        "check memory and process limits, then `unirl resume`",
                    )
                )
                return

    def _give_up(self, error: UniRLError) -> None:
        self._error = error
        self._close_all()

    def _bury(self, member: Member) -> None:
        """Clean up after the dead member and start its successor; raises UniRLError when there
        shall be none.
        """
        assert member.process is not None
        report = self._read_report(member)
        member.process.join()
        dependants = self._dependants(member)
        for other in dependants:
            other.kill()
        for other in dependants:
            if other.process is not None:
                other.process.join(END_SECONDS)
        lost = self._mourn(member, dependants)
        what = _cause_of_death(member, report)
        log.warning("%s; %s", what, lost)
        if member.process.exitcode == EXIT_USER_ERROR and "parts" in report:
            raise ActorFailed(*report["parts"])
        if member.num_restarts >= self._max_restarts:
            raise ActorFailed(
                what,
                f"it was restarted {self._max_restarts} of {self._max_restarts} times "
                "(runner.max_restarts)",
                self._remedy(member),
            )
        member.num_restarts += 1
        for one in (member, *dependants):
            self._start(one)

    def _read_report(self, member: Member) -> dict[str, list[str]]:
        # A process that the dead one started may hold the pipe open: no end of file ever comes.
        assert member.report is not None
        try:
            if not member.report.poll(1.0):
                return {}
            report: dict[str, list[str]] = json.loads(member.report.recv_bytes())
            return report
        except (EOFError, OSError):
            return {}

    def _remedy(self, member: Member) -> str:
        verdict = _verdict_on(member)
        if verdict is not None:
            return f"{verdict.remedy}, then `unirl resume`; its log: {self._trace(member)}"
        return f"full trace: {self._trace(member)}; mend its cause, then `unirl resume`"

    def _trace(self, member: Member) -> str:
        """Where the trace of a dead member is; one that could not even start wrote none."""
        path = self._log_dir / member.file_name if self._log_dir is not None else None
        return str(path) if path is not None and path.exists() else "on standard error, above"


def _cause_of_death(member: Member, report: dict[str, list[str]]) -> str:
    assert member.process is not None
    exit_code = member.process.exitcode
    if "type" in report:
        return f"{member.name} died: {report['type']} in {report['where']}: {report['message']}"
    if (verdict := _verdict_on(member)) is not None:
        return f"{member.name} was killed: {verdict.why}"
    if exit_code is not None and exit_code < 0:
        return f"{member.name} died: killed by signal {-exit_code}"
    return f"{member.name} died: exit code {exit_code}"


def _verdict_on(member: Member) -> Verdict | None:
    """Why we killed it; None when it died of something else, if only a moment before."""
    assert member.process is not None
    return member.verdict if member.process.exitcode == -signal.SIGKILL else None
