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
from typing import NamedTuple, Protocol

from unirl.descendants import Marks
from unirl.errors import ActorFailed, UniRLError
from unirl.run_events import event
from unirl.supervision import memory_watch
from unirl.supervision.fork_server import (
    end_server,
    interrupts_blocked,
    parent_pid,
    process_context,
    wake_server,
)
from unirl.supervision.log_files import BoundedLogs
from unirl.supervision.memory_watch import MemoryWatch
from unirl.supervision.pauses import Pauses
from unirl.supervision.restarts import Restarts
from unirl.supervision.worker import EXIT_USER_ERROR, Job, ParentWatch, process_main

log = logging.getLogger(__name__)

END_SECONDS = 5.0
_WATCH_SECONDS = 0.2


class KillReason(NamedTuple):
    """Why we kill a process ourselves: its signal alone would tell nobody what to do."""

    why: str
    """The setting that it broke, with the value: "it held a slot for longer than ..."."""
    remedy: str


@dataclass(eq=False)
class WorkerProcess:
    """One process that a supervisor keeps alive."""

    role: str
    """What messages call it: "actor", "environment worker"."""
    index: int
    make_work: Callable[[], Callable[[], None]]
    """What the process does, made for each start; picklable."""
    restarts: Restarts
    """How often it had to be started again."""
    num_threads: int = 1
    niceness: int = 0
    process: BaseProcess | None = field(default=None, repr=False)
    report: Connection | None = field(default=None, repr=False)
    kill_reason: KillReason | None = None
    """Why its process was killed, if we did it and said why."""
    mark: int = 0
    """Of what its process starts, which ends with it."""
    retired_at: float | None = None
    """Since when it is to end by itself, with none started after it."""

    @property
    def name(self) -> str:
        """For messages: "actor 3"."""
        return f"{self.role} {self.index}"

    @property
    def file_name(self) -> str:
        """For its log: "actor-003.txt"."""
        role = "".join(letter if letter.isalnum() else "-" for letter in self.role)
        return f"{role}-{self.index:03d}.txt"

    @property
    def alive(self) -> bool:
        """Whether its process runs."""
        return self.process is not None and self.process.is_alive()

    @property
    def pid(self) -> int | None:
        """The id of its process."""
        return self.process.pid if self.process is not None else None

    def kill(self, reason: KillReason | None = None) -> None:
        """Kill its process; the supervisor starts another. reason: why, for the message."""
        if self.process is not None:
            self.kill_reason = reason or self.kill_reason  # first: the watcher reads it at once
            self.process.kill()


class ProcessOwner(Protocol):
    """What a supervisor asks about its processes."""

    def dependants(self, process: WorkerProcess) -> Sequence[WorkerProcess]:
        """Those that cannot continue without a dead process; they are killed with it."""

    def on_exit(self, process: WorkerProcess, dependants: Sequence[WorkerProcess]) -> str:
        """Called when a process and its dependants are gone for good, and before others are started
        instead. Returns a few words on what was lost.
        """

    def check(self) -> None:
        """Called several times a second, to kill what hangs."""

    def progress(self) -> int:
        """A number that grows as long as the run gets on."""

    def close_all(self) -> None:
        """Make every process end by itself."""

    def is_closed(self) -> bool:
        """Whether that was done, by this supervisor or by another."""


class Supervisor:
    """Starts processes, watches them, starts them again when they die, ends them.

    modules, preload: what the processes import, see process_context.
    """

    def __init__(
        self,
        processes: Sequence[WorkerProcess],
        owner: ProcessOwner,
        *,
        log_dir: Path | None,
        modules: Iterable[str] = (),
        preload: Iterable[str] = (),
    ) -> None:
        self.processes, self._owner = list(processes), owner
        self._log_dir = log_dir
        self._context = process_context(len(processes), modules, preload)
        self._parent_watch, self._marks = ParentWatch(), Marks()
        self._memory, self._progress = MemoryWatch(), 0
        self.pauses = Pauses()
        """When nothing of the run could run, and nobody hung."""
        self._logs = BoundedLogs(self._log_paths)
        self._error: UniRLError | None = None
        self._lock = threading.Lock()
        """Of the list of processes, which grows and shrinks."""
        self._closing = threading.Event()
        self._idle, self._ended = threading.Event(), threading.Event()
        self._watcher: threading.Thread | None = None
        self.num_restarts = 0
        """How often processes died and were replaced."""

    def start(self) -> None:
        """Start all processes and watch them."""
        self._marks.start_keeper()
        for process in self.processes:
            self._start(process)
        self._watcher = threading.Thread(target=self._watch, name="supervisor", daemon=True)
        self._watcher.start()
        if self._log_dir is not None:
            self._logs.start()

    def add(self, process: WorkerProcess) -> None:
        """One more process, started at once."""
        with self._lock:
            self.processes.append(process)
        self._start(process)

    def raise_error(self) -> None:
        """Raise what made a process stop for good, if anything did."""
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        """End every process: first let it end by itself, then kill it."""
        if self._closing.is_set():
            return
        self._closing.set()
        self._owner.close_all()
        wake_server()
        if self._watcher is not None:
            self._idle.wait(END_SECONDS)
        self._join_all()
        for each in self.processes:
            if each.alive:
                each.kill()
        if not self._join_all():
            end_server()  # it does not say who has ended
            self._join_all()
        self._marks.end()
        self._ended.set()
        if self._watcher is not None:
            self._watcher.join(END_SECONDS)
        self._logs.close()
        for each in self.processes:
            if each.report is not None:
                each.report.close()
        self._parent_watch.close()
        self._marks.close()

    def _join_all(self) -> bool:
        """Wait for all processes, for END_SECONDS together; whether all have ended."""
        deadline = time.monotonic() + END_SECONDS
        for each in self.processes:
            while each.process is not None and each.alive and time.monotonic() < deadline:
                wake_server()
                each.process.join(min(0.5, max(0.0, deadline - time.monotonic())))
        return not any(each.alive for each in self.processes)

    def _log_path(self, worker: WorkerProcess) -> Path | None:
        return self._log_dir / worker.file_name if self._log_dir is not None else None

    def _log_paths(self) -> list[Path]:
        with self._lock:
            return [path for each in self.processes if (path := self._log_path(each))]

    def _start(self, worker: WorkerProcess, cause: str = "") -> None:
        """cause: why it is started again."""
        receiver, sender = self._context.Pipe(duplex=False)
        worker.mark = self._marks.new()
        job = Job(
            name=worker.name,
            work=worker.make_work(),
            num_threads=worker.num_threads,
            niceness=worker.niceness,
            log_path=self._log_path(worker),
            parent_watch=self._parent_watch,
            report=sender,
            parent_pid=parent_pid(self._context),
            mark=worker.mark,
            environ=dict(os.environ),
        )
        process = self._context.Process(
            target=process_main, args=(job,), name=f"unirl-{worker.name.replace(' ', '-')}"
        )
        with interrupts_blocked():  # until the child ignores it, Ctrl-C would kill it
            process.start()
        sender.close()
        if worker.report is not None:
            worker.report.close()
        worker.process, worker.report, worker.kill_reason = process, receiver, None
        again = " again" if cause else ""
        kind = "restarted" if cause else "started"
        about = event(kind, member=worker.name, pid=process.pid, cause=cause)
        log.info("%s was started%s: process %d", worker.name, again, process.pid, extra=about)

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
            with self._lock:
                watched = list(self.processes)
            wake_server()
            if self._marks.keep_keeper():
                log.warning("the keeper was ended from outside: another one is started")
            self._memory.sample((one.name, one.pid) for one in watched)
            # Only to be prompt: a child that a dead process left behind may hold its sentinel open.
            wait([w.process.sentinel for w in watched if w.process], timeout=_WATCH_SECONDS)
            if (seconds := self.pauses.look()) > 0.0:
                log.info("this process did not run for %.1f s; nobody is judged for that", seconds)
            try:
                self._owner.check()
                for worker in watched:
                    if self._closing.is_set() or self._owner.is_closed():
                        return
                    if worker.process is not None and not worker.alive:
                        self._reap(worker)
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
        self._owner.close_all()

    def _reap(self, worker: WorkerProcess) -> None:
        """Clean up after a dead process and start its successor; raises UniRLError when there shall
        be none.
        """
        assert worker.process is not None
        report = self._read_report(worker)
        worker.process.join()
        dependants = self._owner.dependants(worker)
        for other in dependants:
            other.kill()
        for other in dependants:
            if other.process is not None:
                other.process.join(END_SECONDS)
        left = self._marks.end(worker.mark, *(other.mark for other in dependants))
        if left:
            log.warning("%s left %d process(es) behind: killed", worker.name, left)
        lost = self._owner.on_exit(worker, dependants)
        if worker.retired_at is not None:
            log.info("%s left; %s", worker.name, lost, extra=event("left", member=worker.name))
            with self._lock:
                self.processes.remove(worker)
            return
        what, out_of_memory = self._cause_of_death(worker, report)
        about = event("died", member=worker.name, cause=what)
        log.warning("%s; %s", what, lost, extra=about)
        if worker.process.exitcode == EXIT_USER_ERROR and "parts" in report:
            raise ActorFailed(*report["parts"])
        if out_of_memory:
            progress = self._owner.progress()
            if progress == self._progress:  # another one would fare no better
                raise memory_watch.ran_out(what)
            self._progress = progress
        worker.restarts.count(what, self._remedy(worker))
        self.num_restarts += 1
        for one in (worker, *dependants):
            self._start(one, cause=what)

    def _read_report(self, worker: WorkerProcess) -> dict[str, list[str]]:
        # A process that the dead one started may hold the pipe open: no end of file ever comes.
        assert worker.report is not None
        try:
            if not worker.report.poll(1.0):
                return {}
            report: dict[str, list[str]] = json.loads(worker.report.recv_bytes())
            return report
        except (EOFError, OSError):
            return {}

    def _cause_of_death(
        self, worker: WorkerProcess, report: dict[str, list[str]]
    ) -> tuple[str, bool]:
        """In words, and whether it was for want of memory."""
        assert worker.process is not None
        exit_code = worker.process.exitcode
        if "said" in report:
            return f"{worker.name} died: {report['said']}", False
        if "type" in report:
            what = f"{report['type']} in {report['where']}: {report['message']}"
            return f"{worker.name} died: {what}", False
        if (reason := _reason_for(worker)) is not None:
            return f"{worker.name} was killed: {reason.why}", False
        if exit_code == -signal.SIGKILL and self._memory.ran_out():
            what = "the kernel killed it because memory ran out"
            return f"{worker.name} died: {what}: {self._memory.needed()}", True
        if exit_code is not None and exit_code < 0:
            return f"{worker.name} died: killed by signal {-exit_code}", False
        return f"{worker.name} died: exit code {exit_code}", False

    def _remedy(self, worker: WorkerProcess) -> str:
        reason = _reason_for(worker)
        if reason is not None:
            return f"{reason.remedy}, then `unirl resume`; its log: {self._trace(worker)}"
        return f"full trace: {self._trace(worker)}; fix its cause, then `unirl resume`"

    def _trace(self, worker: WorkerProcess) -> str:
        """Where the trace of a dead worker is; one that could not even start wrote none."""
        path = self._log_path(worker)
        return str(path) if path is not None and path.exists() else "on standard error, above"


def _reason_for(worker: WorkerProcess) -> KillReason | None:
    """Why we killed it; None when it died of something else, if only a moment before."""
    assert worker.process is not None
    return worker.kill_reason if worker.process.exitcode == -signal.SIGKILL else None
