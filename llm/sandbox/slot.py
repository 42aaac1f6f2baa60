"""A zygote from outside: started, given one job at a time, and ended.

Deadlines are kept by the zygote, and by this side a second later: a slot that does not answer is
killed. What is read of a program's output is bounded here. A slot belongs to one event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import socket
import struct
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from unirl.llm.sandbox.box import FileRefused, MiB, Ran, SandboxFailed
from unirl.llm.sandbox.cgroups import Cgroup, Cgroups, owner
from unirl.llm.sandbox.config import LevelName, SandboxConfig
from unirl.llm.sandbox.emptying import empty
from unirl.llm.sandbox.interpreter import Interpreter
from unirl.llm.sandbox.recorded import Door, Recorder, listener_of
from unirl.llm.sandbox.zygote import START

START_SECONDS = 60.0
"""How long a slot may take to start and to import what it shall."""
_GRACE_SECONDS = 1.0
"""What a slot has beyond a job's deadline to say how it ended."""
_WAIT_SECONDS = 5.0
_CHUNK = 65536
_PACKAGES = [str(Path(__file__).resolve().parents[up]) for up in (2, 1, 0)]
WORKDIR = "/workspace"
FOLDER_PREFIX = "unirl-box-"
_USERS = 1 << 28
"""How many of the host's highest user ids slots draw theirs from: all that a slot's user could
reach is its own.
"""


class SlotDied(Exception):
    """The slot ended while it had a job."""


class Slot:
    """One zygote at a level; `start` first, `kill` last."""

    def __init__(
        self,
        mode: LevelName,
        config: SandboxConfig,
        interpreter: Interpreter,
        cgroups: Cgroups | None,
        recorder: Recorder | None = None,
    ) -> None:
        self._mode: str = mode.partition("+")[0]
        self._config, self._interpreter = config, interpreter
        self.cgroup: Cgroup | None = cgroups.make() if cgroups else None
        self._recorder = recorder
        self.door: Door | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self.is_dead = False

    @property
    def pid(self) -> int:
        return self._process.pid if self._process else 0

    def is_alive(self) -> bool:
        return not self.is_dead and self._process is not None and self._process.poll() is None

    async def start(self) -> None:
        """Returns when it is ready. Raises SandboxFailed."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control = ours
        ours.setblocking(False)
        try:
            with theirs:
                if self.cgroup:
                    self.cgroup.limit(self._config.memory_mb * MiB, self._config.pids)
                self._launch(theirs)
            answer, fds = await self._first_answer()
            if "error" in answer:
                raise SandboxFailed(
                    f"a sandbox of level {self._mode} does not start",
                    answer["error"],
                    "see `sandbox.kind` for others",
                )
            if self._recorder is not None:
                listener = listener_of(fds)
                self.door = Door(self._recorder, listener, self._config.max_requests)
                await self.door.start()
        except BaseException as error:
            said = self._errors()
            self.kill()
            if isinstance(error, OSError | SlotDied | TimeoutError):
                raise SandboxFailed(
                    f"a sandbox of level {self._mode} does not start",
                    said or str(error) or f"it did not answer in {START_SECONDS:g} s",
                    "see `sandbox.kind` for others",
                ) from error
            raise

    def _launch(self, theirs: socket.socket) -> None:
        user = _draw_user() if os.geteuid() == 0 and self._mode != "none" else None
        workdir = WORKDIR
        if self._mode in ("landlock", "none"):
            self._folder = tempfile.TemporaryDirectory(
                prefix=f"{FOLDER_PREFIX}{owner()}-", ignore_cleanup_errors=True
            )
            workdir = self._folder.name
            if user is not None:
                os.chown(workdir, user, user)
        settings = {
            "mode": self._mode,
            "owner": os.getpid(),
            "uid": user if self._mode != "bwrap" else None,
            "binds": self._interpreter.binds,
            "paths": self._interpreter.paths,
            "imports": self._config.imports,
            "cgroups": self.cgroup.files if self.cgroup and self._mode != "bwrap" else [],
            "disk": self._config.disk_mb * MiB,
            "workdir": workdir,
            "links": self._config.links,
            "has_proxy": self._recorder is not None,
        }
        fd = theirs.fileno()
        command = [self._interpreter.program, "-I", "-S", "-X", "utf8", "-c", START, str(fd)]
        command += _PACKAGES
        identity: dict[str, Any] = {}
        if self._mode == "bwrap":
            command = [*_bwrap(self._interpreter.binds, self._config), *command]
            if user is not None:
                identity = {"user": user, "group": user, "extra_groups": []}
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  closed by kill
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=self._log,
            env={},
            cwd="/",
            pass_fds=[fd],
            process_group=0,
            **identity,
        )
        assert self._control is not None
        self._control.send(json.dumps(settings).encode())

    def _errors(self) -> str:
        if self._process is None or self._log.closed:
            return ""
        self._log.seek(0)
        return self._log.read(2000).decode("utf-8", "replace").strip()

    async def request(
        self,
        seconds: float,
        fds: Sequence[int] = (),
        when_sent: Callable[[], None] = lambda: None,
        /,
        **said: Any,
    ) -> dict[str, Any]:
        """One answer. Raises SlotDied; whatever goes wrong, the slot is dead then."""
        assert self._control is not None
        try:
            socket.send_fds(self._control, [json.dumps(said).encode()], list(fds))
            when_sent()
            return await self._answer(seconds)
        except BaseException as error:
            self.kill()
            if isinstance(error, OSError | TimeoutError):
                raise SlotDied(str(error)) from error
            raise

    async def _first_answer(self) -> tuple[dict[str, Any], list[int]]:
        """With the descriptors that came with it."""
        assert self._control is not None
        loop, is_there = asyncio.get_running_loop(), asyncio.Event()
        loop.add_reader(self._control, is_there.set)
        try:
            async with asyncio.timeout(START_SECONDS):
                await is_there.wait()
        finally:
            loop.remove_reader(self._control)
        message, fds, _, _ = socket.recv_fds(self._control, 1 << 16, 1)
        if not message:
            raise SlotDied("its process ended")
        return json.loads(message), fds

    async def _answer(self, seconds: float) -> dict[str, Any]:
        assert self._control is not None
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(seconds):
            message = await loop.sock_recv(self._control, 1 << 16)
        if not message:
            raise SlotDied("its process ended")
        answer: dict[str, Any] = json.loads(message)
        return answer

    async def run(
        self,
        given: Mapping[str, Any],
        *,
        input: bytes = b"",
        seconds: float,
        max_output: int,
        limits: Mapping[str, int],
        fresh: bool = False,
        fds: Sequence[int] = (),
    ) -> Ran:
        """Run a program: its code or argv, and env. limits: memory, disk, pids. fds: more
        descriptors that it gets.
        """
        memory_only = self.cgroup is None
        if self.cgroup:
            self.cgroup.limit(limits["memory"], limits["pids"])
        before = self.cgroup.num_killed() if self.cgroup else 0
        loop = asyncio.get_running_loop()
        output = _Output(loop, max_output, self._end_job)
        with memory_file(_payload(given, input)) as payload:
            try:
                sent = [payload, output.write_end, *fds]
                said = {
                    "seconds": seconds, "fresh": fresh, "watched": memory_only,
                    "address": memory_only or "code" in given, **limits,
                }  # fmt: skip
                wait = seconds + _GRACE_SECONDS
                answer = await self.request(wait, sent, output.close_write_end, op="run", **said)
            except SlotDied as died:
                return self._post_mortem(died, before, output, seconds)
            finally:
                output.close()
        if "error" in answer:
            self.kill()
            raise SandboxFailed("a program cannot be run", answer["error"], "see its sandbox")
        if answer["dirty"]:
            self.kill()  # and another takes its place
        killed, rc = answer["killed"], answer["rc"]
        if killed and rc != -signal.SIGKILL:
            killed = ""  # it ended at that very moment
        if not killed and self.cgroup and rc < 0 and self.cgroup.num_killed() > before:
            killed = "memory"
        return Ran(rc, output.data, killed, answer["us"])

    def _post_mortem(self, died: SlotDied, before: int, output: _Output, seconds: float) -> Ran:
        """What is said of a program under which its slot died. Raises SandboxFailed where it cannot
        have done that.
        """
        output.close()
        if isinstance(died.__cause__, TimeoutError):
            # What keeps a machine so busy that the end of it is not seen has had its time.
            return Ran(-signal.SIGKILL, output.data, "time", round(seconds * 1e6))
        if self.cgroup and self.cgroup.num_killed() > before:
            return Ran(-signal.SIGKILL, output.data, "memory")
        if self._mode in ("bwrap", "none"):  # it could reach its zygote
            return Ran(-signal.SIGKILL, output.data, "crash")
        raise SandboxFailed(
            "a sandbox died while a program ran in it",
            f"its process ended: {died}",
            "see whether this machine ran out of memory",
        )

    def _end_job(self, why: str) -> None:
        if self._control is not None and not self.is_dead:
            with contextlib.suppress(OSError):
                self._control.send(json.dumps({"op": "kill", "why": why}).encode())

    async def put(self, path: str, data: bytes) -> None:
        with memory_file(data) as file:
            await self._file("put", path, len(data), file)

    async def get(self, path: str, max_bytes: int) -> bytes:
        with memory_file(b"") as file:
            await self._file("get", path, max_bytes, file)
            return os.pread(file, max_bytes, 0)

    async def _file(self, op: str, path: str, size: int, file: int) -> None:
        answer = await self.request(_WAIT_SECONDS, [file], op=op, path=path, size=size)
        if "error" in answer:
            raise FileRefused(f"{path}: {answer['error']}")

    def kill(self) -> None:
        """End it with all that is in it; idempotent."""
        if self.is_dead:
            return
        self.is_dead = True
        if self.door is not None:
            self.door.close()
        if self._control is not None:
            self._control.close()
        if self._process is not None:
            self._log.close()
            if self._mode in ("zygote", "bwrap"):
                self._process.kill()  # and by that all within its process namespace

    def reap(self) -> None:
        """After `kill`: wait for its processes and remove what they leave. Blocks, for
        milliseconds.
        """
        if self._process is not None:
            # Without a namespace it first ends what programs left: its socket is closed.
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_WAIT_SECONDS)
            self._process.kill()
            self._process.wait(_WAIT_SECONDS)
        if self.cgroup:
            self.cgroup.remove()
        if self._folder is not None:
            with contextlib.suppress(OSError):
                empty(self._folder.name)  # what is deep is more than cleanup can do
            self._folder.cleanup()


class _Output:
    """The read end of a program's output, up to a limit."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, limit: int, too_much: Callable[[str], None]
    ) -> None:
        self._loop, self._limit, self._too_much = loop, limit, too_much
        self._read_end, self.write_end = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        # The program's end blocks, as programs expect.
        os.set_blocking(self.write_end, True)
        self._chunks: list[bytes] = []
        self._size, self._is_open = 0, True
        loop.add_reader(self._read_end, self._read)

    @property
    def data(self) -> bytes:
        return b"".join(self._chunks)[: self._limit]

    def _read(self) -> bool:
        """Whether there may be more."""
        try:
            chunk = os.read(self._read_end, _CHUNK)
        except BlockingIOError:
            return False
        if not chunk:
            self._stop()
            return False
        if self._size <= self._limit:
            self._chunks.append(chunk)
            self._size += len(chunk)
            if self._size > self._limit:
                self._stop()
                self._too_much("output")
        return self._size <= self._limit

    def _stop(self) -> None:
        if self._is_open:
            self._is_open = False
            self._loop.remove_reader(self._read_end)

    def close_write_end(self) -> None:
        if self.write_end >= 0:
            os.close(self.write_end)
            self.write_end = -1

    def close(self) -> None:
        """Read what is there, and close."""
        if self._read_end < 0:
            return
        while self._is_open and self._read():
            pass
        self._stop()
        self.close_write_end()
        os.close(self._read_end)
        self._read_end = -1


@contextlib.contextmanager
def memory_file(data: bytes) -> Iterator[int]:
    """A descriptor of a file that is nowhere."""
    fd = os.memfd_create("job", os.MFD_CLOEXEC)
    try:
        view = memoryview(data)
        while view:
            view = view[os.write(fd, view) :]
        os.lseek(fd, 0, os.SEEK_SET)
        yield fd
    finally:
        os.close(fd)


def _payload(given: Mapping[str, Any], input: bytes) -> bytes:
    head = json.dumps(given).encode()
    return struct.pack("=I", len(head)) + head + input


def _draw_user() -> int:
    """A user id of this host's that nothing else has, from the upper end of those there are."""
    ranges = [line.split() for line in Path("/proc/self/uid_map").read_text().splitlines()]
    first, count = max(((int(row[0]), int(row[2])) for row in ranges), key=lambda each: each[1])
    # The last ones are taken, by nobody (65534) say, and not all programs read large ones.
    last = min(first + count - 3, 2**31 - 3)
    return last - random.SystemRandom().randrange(max(1, min(_USERS, (last - first) // 2)))


def _bwrap(binds: Sequence[str], config: SandboxConfig) -> list[str]:
    """The command of bubblewrap, up to the program."""
    options = ["bwrap", "--unshare-all", "--die-with-parent", "--new-session", "--cap-drop", "ALL"]
    options += ["--hostname", "sandbox", "--uid", "1000", "--gid", "1000", "--clearenv"]
    # First: an interpreter or a checkout may itself be below /tmp.
    for path in (WORKDIR, "/tmp"):
        options += ["--size", str(config.disk_mb * MiB), "--perms", "0700", "--tmpfs", path]
    for path in (*binds, _PACKAGES[-1]):
        if os.path.islink(path):
            options += ["--symlink", os.readlink(path), path]
        else:
            options += ["--ro-bind", path, path]
    for link in config.links:
        options += ["--symlink", f"{WORKDIR}{link}", link]
    options += ["--dev", "/dev", "--proc", "/proc"]
    return [*options, "--remount-ro", "/dev", "--remount-ro", "/", "--chdir", WORKDIR]
