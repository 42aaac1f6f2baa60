"""The process that every program in a sandbox is a copy of: a warm interpreter within namespaces of
its own, that forks once per job.

It makes its own confinement (namespaces, a small read-only root, another user), imports what jobs
will want, says that it is ready, and serves one job at a time from a socket. It never runs what a
job brings, and never reads it: code, input and output pass it by as descriptors. It ends when its
socket closes, and all that jobs left ends with it.

Messages are JSON of a few hundred bytes, one per packet. Standard library alone: it is started as
`python -I -S`, and the packages above are empty modules there (`START`).

Sources: namespaces(7), user_namespaces(7), pivot_root(2).
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Mapping
from typing import Any

from unirl.llm.sandbox import job as jobs
from unirl.llm.sandbox import kernel, namespaces, seccomp
from unirl.llm.sandbox.emptying import empty

START = """\
import sys, types
for name, path in zip(("unirl", "unirl.llm", "unirl.llm.sandbox"), sys.argv[2:5]):
    sys.modules[name] = module = types.ModuleType(name)
    module.__path__ = [path]
from unirl.llm.sandbox.zygote import main
main(int(sys.argv[1]))
"""
"""Imports this file without what the packages above it would import."""
_TICK_SECONDS = 0.02
"""How often the memory of all its processes is added up, where no cgroup bounds it."""
_SWEEPS = 200


def main(fd: int) -> None:
    control = socket.socket(fileno=fd)
    try:
        settings = json.loads(control.recv(1 << 16))
        if settings["mode"] == "zygote":
            kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != settings["owner"]:
                os._exit(1)
        confinement, proxy = _enter(settings, control)
        sys.path.extend(settings["paths"])
        for name in settings["imports"]:
            importlib.import_module(name)
    except BaseException as error:
        control.send(json.dumps({"error": f"{type(error).__name__}: {error}"[:2000]}).encode())
        os._exit(1)
    gc.collect()
    gc.freeze()
    socket.send_fds(control, [b'{"ready": true}'], [proxy.fileno()] if proxy else [])
    if proxy:
        proxy.close()
    is_alone = settings["mode"] == "bwrap" or settings["uid"] is not None
    _Zygote(control, confinement, is_alone=is_alone).serve()


def _enter(
    settings: Mapping[str, Any], control: socket.socket
) -> tuple[jobs.Confinement, socket.socket | None]:
    """Confine this process; in mode zygote it is a child that returns. With the socket of its
    proxy, where it has one.
    """
    proxy: socket.socket | None = None
    mode, workdir, others, rules = settings["mode"], settings["workdir"], 0, -1
    for path in settings["cgroups"]:
        with open(path, "w") as file:
            file.write("0")
    if mode == "zygote":
        proxy = namespaces.enter(settings, control)
    else:
        if settings["uid"] is not None:
            _become(settings["uid"])
        elif mode == "landlock":
            others = _threads_of_user()
        kernel.prctl(kernel.PR_SET_DUMPABLE, 0)
        kernel.prctl(kernel.PR_SET_CHILD_SUBREAPER, 1)
    if mode == "landlock" and not kernel.landlock_version():
        raise OSError("this kernel has no Landlock")
    if mode in ("landlock", "bwrap") and kernel.landlock_version():
        devices = [f"/dev/{name}" for name in namespaces.DEVICES[1:]]
        temporary = "/tmp" if mode == "bwrap" else workdir
        proc = ["/proc"] if mode == "bwrap" else []
        rules = kernel.landlock_rules(
            [*settings["binds"], *devices, *proc], [workdir, temporary, "/dev/null"]
        )
    home = workdir
    os.environ.clear()
    os.environ.update(
        PATH=f"{os.path.dirname(sys.executable)}:/usr/local/bin:/usr/bin:/bin",
        HOME=home,
        TMPDIR="/tmp" if mode in ("zygote", "bwrap") else home,
        LANG="C.UTF-8",
        PYTHONDONTWRITEBYTECODE="1",
        OMP_NUM_THREADS="1",
        OPENBLAS_NUM_THREADS="1",
    )
    if proxy:
        address = "http://{}:{}".format(*namespaces.PROXY)
        os.environ.update(http_proxy=address, HTTP_PROXY=address, https_proxy=address)
        os.environ.update(HTTPS_PROXY=address)
    program = b""
    if mode != "none":
        program = seccomp.program(has_namespaces=mode == "zygote", has_proxy=proxy is not None)
    return jobs.Confinement(mode, workdir, settings["disk"], program, rules, others), proxy


def _become(user: int) -> None:
    os.setgroups([])
    os.setresgid(user, user, user)
    os.setresuid(user, user, user)


def _threads_of_user() -> int:
    count, user = 0, os.getuid()
    for name in os.listdir("/proc"):
        try:
            if name.isdigit() and os.stat(f"/proc/{name}").st_uid == user:
                count += len(os.listdir(f"/proc/{name}/task"))
        except OSError:
            pass
    return count


class _Zygote:
    """Serves jobs, one at a time, until its socket closes."""

    def __init__(self, control: socket.socket, held: jobs.Confinement, *, is_alone: bool) -> None:
        self._control, self._held, self._is_alone = control, held, is_alone
        self._nested = held.mode == "zygote"
        self._own = os.open("/proc/self/ns/pid", os.O_RDONLY) if self._nested else -1
        self._page = os.sysconf("SC_PAGE_SIZE")

    def serve(self) -> None:
        while True:
            message, fds, _, _ = socket.recv_fds(self._control, 1 << 16, 8)
            if not message:
                self._leave()
            request = json.loads(message)
            try:
                answer = getattr(self, f"_do_{request['op']}")(request, fds)
            except OSError as error:
                answer = {"error": f"{error.strerror or error}", "number": error.errno}
            finally:
                for fd in fds:
                    os.close(fd)
            if answer is not None:
                self._control.send(json.dumps(answer).encode())

    def _leave(self) -> None:
        self._end_others()
        os._exit(0)

    def _do_open(self, request: Mapping[str, Any], fds: list[int]) -> dict[str, Any]:
        if self._nested:
            jobs.mount_files(self._held.workdir, request["disk"])
        return {}

    def _do_close(self, request: Mapping[str, Any], fds: list[int]) -> dict[str, Any]:
        if self._nested:
            for path in (self._held.workdir, "/tmp"):
                kernel.unmount(path)
        else:
            self._empty()
        return {}

    def _empty(self) -> None:
        """Remove what is in the workspace; through no link."""
        folders = (self._held.workdir, "/tmp")[: 1 + (self._held.mode == "bwrap")]
        for folder in folders:
            empty(folder)

    def _do_kill(self, request: Mapping[str, Any], fds: list[int]) -> None:
        """It came too late: the job has ended."""

    def _do_put(self, request: Mapping[str, Any], fds: list[int]) -> dict[str, Any]:
        """Write a descriptor's content to a file of the workspace; folders are made."""
        *folders, name = [part for part in request["path"].split("/") if part]
        at = os.open(self._held.workdir, os.O_RDONLY | os.O_DIRECTORY)
        try:
            for folder in folders:
                with contextlib.suppress(FileExistsError):
                    os.mkdir(folder, 0o700, dir_fd=at)
                below = kernel.open_beneath(at, folder, os.O_RDONLY | os.O_DIRECTORY)
                os.close(at)
                at = below
            flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NONBLOCK
            file = kernel.open_beneath(at, name, flags, 0o700)
        finally:
            os.close(at)
        try:
            _copy(fds[0], file, request["size"])
        finally:
            os.close(file)
        return {}

    def _do_get(self, request: Mapping[str, Any], fds: list[int]) -> dict[str, Any]:
        """Copy a file of the workspace to a descriptor: an ordinary one, and not too large."""
        at = os.open(self._held.workdir, os.O_RDONLY | os.O_DIRECTORY)
        try:
            file = kernel.open_beneath(at, request["path"], os.O_RDONLY | os.O_NONBLOCK)
        finally:
            os.close(at)
        try:
            found = os.fstat(file)
            if found.st_mode & 0o170000 != 0o100000:
                return {"error": "it is no ordinary file", "number": 0}
            if found.st_size > request["size"]:
                size = f"it has {found.st_size} bytes, at most {request['size']} are wanted"
                return {"error": size, "number": 0}
            _copy(file, fds[0], found.st_size)
        finally:
            os.close(file)
        return {}

    def _do_run(self, request: dict[str, Any], fds: list[int]) -> dict[str, Any]:
        started = time.monotonic()
        request["descriptors"] = len(fds) - 2
        failures, said = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        fds += (failures, said)
        if self._nested:
            kernel.unshare(kernel.CLONE_NEWPID)
        try:
            child = os.fork()
            if child == 0:
                jobs.run(self._held, request, fds[0], fds[1], said, fds[2:-2])
        finally:
            if self._nested:
                kernel.setns(self._own, kernel.CLONE_NEWPID)
        fds.remove(failures)
        while fds:
            os.close(fds.pop())
        fds.append(failures)
        killed = self._watch(child, request, started + request["seconds"])
        if killed:
            os.kill(child, signal.SIGKILL)
        _, status, used = os.wait4(child, 0)
        self._end_others()
        with contextlib.suppress(BlockingIOError):
            if said_of_it := os.read(failures, 2000):
                return {"error": said_of_it.decode("utf-8", "replace")}
        is_dirty = False
        if request["fresh"] and not self._nested:
            try:
                self._empty()
            except OSError:
                is_dirty = True  # by what the program did: its result is one all the same
        return {
            "dirty": is_dirty,
            "rc": os.waitstatus_to_exitcode(status),
            "killed": killed,
            "us": round((time.monotonic() - started) * 1e6),
            "resident": used.ru_maxrss << 10,
        }

    def _watch(self, child: int, request: Mapping[str, Any], deadline: float) -> str:
        """Why the child must be killed; "": it has ended."""
        ended = os.pidfd_open(child)
        polled = select.poll()
        polled.register(ended, select.POLLIN)
        polled.register(self._control, select.POLLIN)
        try:
            while True:
                left = deadline - time.monotonic()
                wait = min(left, _TICK_SECONDS) if request["watched"] else left
                events = dict(polled.poll(max(0.0, wait) * 1000))
                if ended in events:
                    return ""
                if events:
                    message = self._control.recv(1 << 12)
                    if not message:
                        self._leave()
                    return str(json.loads(message)["why"])
                if time.monotonic() >= deadline:
                    return "time"
                if request["watched"] and self._resident() > request["memory"]:
                    return "memory"
        finally:
            os.close(ended)

    def _resident(self) -> int:
        total = 0
        for pid in self._others():
            try:
                with open(f"/proc/{pid}/statm") as file:
                    _, resident, shared, *_ = file.read().split()
                total += int(resident) - int(shared)
            except (OSError, ValueError):
                pass
        return total * self._page

    def _others(self) -> list[int]:
        """All processes of the job."""
        own = os.getpid()
        try:
            pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]
        except OSError:
            return []
        if self._held.mode in ("zygote", "bwrap"):
            return [pid for pid in pids if pid not in (1, own)]
        parents = {}
        for pid in pids:
            try:
                with open(f"/proc/{pid}/stat") as file:
                    parents[pid] = int(file.read().rpartition(")")[2].split()[1])
            except (OSError, IndexError):
                pass
        found, new = set[int](), {own}
        while new:
            new = {pid for pid, parent in parents.items() if parent in new} - found
            found |= new
        return list(found)

    def _end_others(self) -> None:
        """In a process namespace of its own a job is gone with its first process; elsewhere what it
        left is this process's child now.
        """
        if self._nested:
            return
        for _ in range(_SWEEPS):
            # At once all that this user may signal, where those are the job's alone.
            for pid in [-1] if self._is_alone else self._others():
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
            try:
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
            except ChildProcessError:
                return
            time.sleep(0.002)


def _copy(source: int, target: int, size: int) -> None:
    """By the kernel: nothing of it comes into this process's memory."""
    offset = 0
    while offset < size:
        count = os.sendfile(target, source, offset, size - offset)
        if not count:
            break
        offset += count
