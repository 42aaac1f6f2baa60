"""One container of a daemon that speaks Docker's interface, by Docker's own package.

Its first process reads a stream that this process holds open and ends with it, so a container does
not outlive what made it. Programs are started beside that one, as another user, and are ended, with
all that they started, when their time is over: the kernel kills all processes of their user there,
which no other container has. Everything here blocks, and belongs to one thread at a time.

Sources: Docker Engine API v1.41, "Exec" and "Attach"; kill(2) on a process id of -1.
"""

from __future__ import annotations

import contextlib
import math
import re
import selectors
import socket
import struct
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from unirl.errors import UniRLError
from unirl.llm.packages import needs
from unirl.llm.sandbox.box import FileRefused, Killed, MiB, Ran, SandboxFailed
from unirl.llm.sandbox.config import SandboxConfig

WORKDIR = "/workspace"
_CALL_SECONDS = 60.0
"""What the daemon may take to answer."""
_ENDING_SECONDS = 10.0
"""What the end of a program's processes may take, before the whole container is ended."""
_CHUNK = 65536
_ROOTS = ("CHOWN", "DAC_OVERRIDE", "FOWNER", "KILL", "SETGID", "SETUID")
"""Capabilities of root in an image of its own: over its files and processes. Docker's are more."""
_SHELL_FAILED = 100
"""Exit codes of the scripts below, from here on."""
# `cat` ends with the stream, or is killed with the programs of a box, and started again.
_FIRST = "exec 3<&0; while :; do cat <&3 >/dev/null & wait $! && exit 0; done"
# Podman may lose what a program said that ends at once, or before it has read all of its input: the
# shell that started it reads the rest, and says by standard error that this was all.
_WHOLE = "that was all"
_MERGED = f'"$@" 2>&1; code=$?; cat >/dev/null; echo "{_WHOLE}" >&2; exit $code'
_END = (
    "cat /sys/fs/cgroup/memory.events /sys/fs/cgroup/memory/memory.oom_control 2>/dev/null\n"
    "kill -9 -1 2>/dev/null\nexit 0"
)
_NO_LINKS = r"""
path= rest=$1
while :; do
    part=${rest%%/*}; path=$path${path:+/}$part
    [ -L "./$path" ] && exit 101
    [ "$rest" = "$part" ] && break
    rest=${rest#*/}
done
"""
_GET = _NO_LINKS + '[ -e "./$1" ] || exit 102; [ -f "./$1" ] || exit 103; exec cat "./$1"'
_PUT = (
    _NO_LINKS + '[ -e "./$1" ] && ! [ -f "./$1" ] && exit 103\n'
    'case $1 in */*) mkdir -p "./${1%/*}" || exit 104;; esac; cat >"./$1" || exit 104'
)
_REFUSED = {
    101: "a link is on its way",
    102: "there is no such file",
    103: "it is no file",
    104: "it cannot be written",
}


# Its own text comes first on standard input: no file of the box has to hold it.
PYTHON = r"""
import builtins, linecache, os, sys, traceback, types
source, left = [], int(sys.argv[1])
while left and (data := os.read(0, left)):
    source.append(data)
    left -= len(data)
source = b"".join(source).decode()
module = types.ModuleType("__main__")
module.__dict__.update(__file__="main.py", __builtins__=builtins)
sys.argv, sys.modules["__main__"] = ["main.py"], module
linecache.cache["main.py"] = (len(source), None, source.splitlines(True), "main.py")
sys.excepthook = lambda kind, error, trace: traceback.print_exception(kind, error, trace.tb_next)
exec(compile(source, "main.py", "exec"), module.__dict__)
"""


class _Said(NamedTuple):
    out: bytes
    killed: Killed
    is_whole: bool


class Container:
    """Of one box. What a daemon refuses is SandboxFailed."""

    def __init__(self, config: SandboxConfig, labels: Mapping[str, str], image: str = "") -> None:
        """image: one whose files may be changed, by its user root; else that of the config."""
        self._config, self._labels = config, labels
        self._is_own, self._image = bool(image), image or config.image
        self._user = "0:0" if image else config.user
        self._workdir = "/" if image else WORKDIR
        self._api = connect(config)
        self._id = ""
        self.is_dead = False
        self._first: Any = None
        self._num_oom = 0

    def start(self, limits: Mapping[str, int], env: Mapping[str, str]) -> None:
        """Create it and let it run. limits: bytes of memory and disk, number of processes."""
        from docker.types import Ulimit

        config, api = self._config, self._api
        disk = f"size={limits['disk']},mode=1777"
        ulimits = [
            Ulimit(name="nofile", soft=1024, hard=1024),
            Ulimit(name="core", soft=0, hard=0),
            # Of its user on the whole machine: the cgroup is what bounds a box. Podman's default
            # is more than a virtual machine may have.
            Ulimit(name="nproc", soft=4096, hard=4096),
        ]
        host = api.create_host_config(
            network_mode="none",
            cap_drop=["ALL"],
            cap_add=list(_ROOTS) if self._is_own else None,
            security_opt=["no-new-privileges"],
            read_only=not self._is_own,
            mem_limit=limits["memory"],
            memswap_limit=limits["memory"],
            pids_limit=limits["pids"] + 4,  # its first process and what ends the others
            tmpfs={} if self._is_own else {WORKDIR: disk, "/tmp": disk},
            ulimits=ulimits,
            auto_remove=True,
            runtime=config.runtime or None,
        )
        with self._asking("a container cannot be started"):
            self._id = api.create_container(
                self._image,
                command=["-c", _FIRST],
                entrypoint=["sh"],
                stdin_open=True,
                detach=False,  # the stream ends with the one that holds it
                host_config=host,
                user=self._user,
                working_dir=self._workdir,
                environment={**({} if self._is_own else {"HOME": WORKDIR}), **env},
                labels=dict(self._labels),
            )["Id"]
            self._require_runtime()
            self._first = api.attach_socket(self._id, params={"stdin": 1, "stream": 1})
            api.start(self._id)
        if not self._is_own:
            self._require_workspace()

    def _require_workspace(self) -> None:
        # Podman gives what it mounts the mode of what the image has there.
        command = ["sh", "-c", "[ -w . ] && [ -w /tmp ] || exit 104"]
        if self._exec(command, b"", {}, _CALL_SECONDS, _CHUNK)[1]:
            command = ["sh", "-c", f"chmod 1777 {WORKDIR} /tmp 2>&1"]
            said, code = self._exec(command, b"", {}, _CALL_SECONDS, _CHUNK, user="0:0")
            if code:
                raise SandboxFailed(
                    f'programs of the image "{self._image}" cannot write to their workspace',
                    said.out.decode("utf-8", "replace")[:200] or f"sh ended with {code}",
                    "name an image with sh and chmod in sandbox.image",
                )

    def _require_runtime(self) -> None:
        wanted = self._config.runtime
        if wanted and self._api.inspect_container(self._id)["HostConfig"]["Runtime"] != wanted:
            raise SandboxFailed(
                f'the daemon did not take sandbox.runtime "{wanted}"',
                "Podman chooses a runtime for all of its containers",
                "leave it out, and give the daemon's default in containers.conf",
            )

    def run(
        self,
        argv: Sequence[str],
        input: bytes,
        env: Mapping[str, str],
        seconds: float,
        max_output: int,
    ) -> Ran:
        """Run a program; all that it started is gone when this returns."""
        started = time.monotonic()
        said, code = self._exec(argv, input, env, seconds, max_output)
        us = round((time.monotonic() - started) * 1e6)
        killed = said.killed
        num_oom = self._end_programs()
        if killed:
            code = -9
        elif code > 128:
            code = 128 - code
            if code == -9 and num_oom > self._num_oom:
                killed = "memory"
        self._num_oom = num_oom
        return Ran(code, said.out, killed, us)

    def put(self, path: str, data: bytes) -> None:
        """Raises FileRefused."""
        self._script(_PUT, path, data)

    def get(self, path: str, max_bytes: int) -> bytes:
        """Raises FileRefused."""
        return self._script(_GET, path, b"", max_bytes)

    def _script(self, script: str, path: str, input: bytes, max_output: int = MiB) -> bytes:
        """Nothing else runs in the container meanwhile, so what it has looked at stays so."""
        command = ["sh", "-c", script, "sh", path]
        said, code = self._exec(command, input, {}, _CALL_SECONDS, max_output)
        if said.killed == "output":
            self._end_programs()
            raise FileRefused(f"{path}: it is larger than at most {max_output} bytes")
        if said.killed:
            self.end()
            raise SandboxFailed("a container does not answer", path, "open another box")
        if code:
            raise FileRefused(f"{path}: {_REFUSED.get(code, 'it cannot be read or written')}")
        return said.out

    def _end_programs(self) -> int:
        """End all of them; how many were killed for memory since it was started, if that is known.
        Where that cannot be done the container is ended.
        """
        try:
            said, code = self._start_and_talk(["sh", "-c", _END], b"", {}, _ENDING_SECONDS, _CHUNK)
        except SandboxFailed:
            code = _SHELL_FAILED
        if code:
            self.end()
            return self._num_oom
        return sum(int(each) for each in re.findall(rb"oom_kill (\d+)", said.out))

    def _exec(
        self,
        command: Sequence[str],
        input: bytes,
        env: Mapping[str, str],
        seconds: float,
        max_output: int,
        user: str = "",
    ) -> tuple[_Said, int]:
        """Nothing of what it said is missing. Standard error is a part of it."""
        merged = ["sh", "-c", _MERGED, "sh", *command]
        said, code = self._start_and_talk(merged, input, env, seconds, max_output, user)
        if not (said.is_whole or said.killed or code > 128):  # above: the program killed the shell
            raise SandboxFailed(
                "what a program said was lost", f"it ended with {code}", "try again"
            )
        return said, code

    def _start_and_talk(
        self,
        command: Sequence[str],
        input: bytes,
        env: Mapping[str, str],
        seconds: float,
        max_output: int,
        user: str = "",
    ) -> tuple[_Said, int]:
        api = self._api
        with self._asking("a program cannot be started in a container"):
            number = api.exec_create(
                self._id,
                list(command),
                stdin=True,
                environment=dict(env),
                workdir=self._workdir,
                user=user or self._user,
            )["Id"]
            stream = api.exec_start(number, socket=True)
            try:
                said = _talk(getattr(stream, "_sock", stream), input, seconds, max_output)
            finally:
                stream.close()
            if said.killed:
                return said, -9
            code = api.exec_inspect(number)["ExitCode"]
        if code is None:
            raise SandboxFailed("a container has ended", "with the program in it", "open another")
        return said, int(code)

    def end(self) -> None:
        """End it with all that is in it, and remove it; idempotent."""
        self.is_dead = True
        if self._id:
            with contextlib.suppress(Exception):  # it is gone, or the daemon is
                self._api.remove_container(self._id, force=True, v=True)
        if self._first is not None:
            with contextlib.suppress(OSError):
                self._first.close()
        with contextlib.suppress(Exception):
            self._api.close()

    @contextlib.contextmanager
    def _asking(self, what: str) -> Iterator[None]:
        with asking(what, self._config, self._image):
            yield


def _talk(stream: socket.socket, input: bytes, seconds: float, max_output: int) -> _Said:
    """Give a program its input, and read what it says, until it ends or is to be ended."""
    deadline = time.monotonic() + seconds
    stream.setblocking(False)
    left, said, unread = memoryview(input), {1: bytearray(), 2: bytearray()}, bytearray()
    out = said[1]
    with selectors.DefaultSelector() as selector:
        selector.register(stream, selectors.EVENT_READ | selectors.EVENT_WRITE)
        while (seconds := deadline - time.monotonic()) > 0:
            for _, ready in selector.select(seconds):
                if ready & selectors.EVENT_WRITE:
                    with contextlib.suppress(BlockingIOError, BrokenPipeError):
                        left = left[stream.send(left[:_CHUNK]) :] if left else left
                    if not left:
                        stream.shutdown(socket.SHUT_WR)
                        selector.modify(stream, selectors.EVENT_READ)
                if ready & selectors.EVENT_READ:
                    with contextlib.suppress(BlockingIOError):
                        if not (data := stream.recv(_CHUNK)):
                            is_whole = _WHOLE.encode() in said[2]
                            return _Said(bytes(out[:max_output]), "", is_whole)
                        unread += data
                        _take_frames(unread, said)
            if len(out) > max_output:
                return _Said(bytes(out[:max_output]), "output", True)
    return _Said(bytes(out[:max_output]), "time", True)


def _take_frames(unread: bytearray, said: Mapping[int, bytearray]) -> None:
    """Move what standard output and error said from frames to where it belongs. A frame: which of
    them it is of, three bytes of nothing, its length, big-endian, and what was said.
    """
    while len(unread) >= 8:
        kind, length = struct.unpack_from(">BxxxL", unread)
        if len(unread) < 8 + length:
            return
        if kind in said:
            said[kind] += unread[8 : 8 + length]
        del unread[: 8 + length]


def connect(config: SandboxConfig) -> Any:
    """A client of the daemon. Raises UniRLError without its package, and SandboxFailed."""
    with needs("docker", f'sandbox.kind "{config.kind}" needs Docker\'s package', "containers"):
        import docker
    with asking("no daemon for containers can be reached", config):
        address = config.daemon or docker.utils.kwargs_from_env().get("base_url")
        return docker.APIClient(
            base_url=address, version="auto", timeout=math.ceil(_CALL_SECONDS), num_pools=2
        )


@contextlib.contextmanager
def asking(what: str, config: SandboxConfig, image: str = "") -> Iterator[None]:
    """Raise SandboxFailed for what the daemon refuses, and when it does not answer."""
    import docker
    import requests

    try:
        yield
    except docker.errors.ImageNotFound as error:
        raise SandboxFailed(
            f'the image "{image}" is not there',
            str(error.explanation or error),
            f"docker pull {image}, or name another one in sandbox.image",
        ) from error
    except (docker.errors.DockerException, requests.RequestException, OSError) as error:
        if isinstance(error, UniRLError):
            raise
        raise SandboxFailed(
            what,
            str(getattr(error, "explanation", "") or error)[:500],
            "see whether the daemon lives (`docker info`), and sandbox.daemon and sandbox.runtime",
        ) from error
