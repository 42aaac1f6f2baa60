"""One program in a sandbox: what the zygote's child does from its first moment to its end.

It is confined step by step, and only then reads what it shall run, from a descriptor that the
zygote has never read: what one job was given does not stay in the memory that the next is a copy
of. Standard library alone.
"""

from __future__ import annotations

import atexit
import builtins
import json
import linecache
import os
import resource
import struct
import sys
import threading
import traceback
import types
from collections.abc import Mapping
from typing import Any, NamedTuple

from unirl.llm.sandbox import kernel

NAME = "main.py"
_MiB = 1 << 20
_DESCRIPTORS = 256
_NOT_RUN = 127
_FAILURES, _RULES, _KEPT = 98, 99, 100
"""Descriptors, above those of a program."""


class Confinement(NamedTuple):
    """What holds for every job of a zygote."""

    mode: str
    workdir: str
    disk: int
    """Bytes of files, 0: not limited here."""
    filter: bytes
    rules: int
    """Descriptor of Landlock's rules; -1: there are none."""
    others: int
    """Processes that count against this user's limit already."""


def run(
    held: Confinement,
    job: Mapping[str, Any],
    payload: int,
    output: int,
    failures: int,
    more: list[int],
) -> None:
    """Run a job in this process, which ends with it.

    payload: descriptor of what to run and, behind it, of its standard input; failures: where it is
    written why it cannot be confined; more: descriptors that it gets as 3, 4, ...
    """
    code = _NOT_RUN
    try:
        try:
            os.dup2(failures, _FAILURES)
            if held.rules >= 0:  # away from where what it is given goes
                held = held._replace(rules=os.dup2(held.rules, _RULES))
            given = _arrange(payload, output, more)
            _confine(held, job)
        except BaseException as error:
            os.write(_FAILURES, f"{error or type(error).__name__}".encode()[:1000])
            return
        os.close(_FAILURES)
        if "code" in given:
            code = _run_code(given["code"], given.get("env", {}))
        else:
            code = _run_program(given["argv"], given.get("env", {}))
    except BaseException as error:
        os.write(2, f"cannot be run: {error}\n".encode())
    finally:
        os._exit(code)


def _arrange(payload: int, output: int, more: list[int]) -> dict[str, Any]:
    os.setsid()
    keep = [os.dup2(each, _KEPT + number) for number, each in enumerate((payload, output, *more))]
    os.dup2(keep[0], 0)
    os.dup2(keep[1], 1)
    os.dup2(keep[1], 2)
    for number, each in enumerate(keep[2:]):
        os.dup2(each, 3 + number)
    size = struct.unpack("=I", os.pread(0, 4, 0))[0]
    given: dict[str, Any] = json.loads(os.pread(0, size, 4))
    os.lseek(0, 4 + size, os.SEEK_SET)
    if not given.get("has_errors", True):
        os.dup2(os.open("/dev/null", os.O_WRONLY), 2)
    return given


def _confine(held: Confinement, job: Mapping[str, Any]) -> None:
    with _tolerated(), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")
    if held.mode == "zygote":
        kernel.unshare(kernel.CLONE_NEWNS | kernel.CLONE_NEWIPC)
        if job["fresh"]:
            mount_files(held.workdir, job["disk"])
        with _tolerated():  # where parts of the machine's own are hidden, it may not be mounted
            flags = kernel.MS_NOSUID | kernel.MS_NODEV | kernel.MS_NOEXEC | kernel.MS_RDONLY
            kernel.mount("proc", "/proc", "proc", flags, "subset=pid")
    os.chdir(held.workdir)
    # From here on only what the program itself was given is open, and what ends with this.
    os.closerange(3 + job["descriptors"], _FAILURES)
    os.closerange(_KEPT, max(resource.getrlimit(resource.RLIMIT_NOFILE)[0], 4096))
    if held.mode == "none":
        return
    _limit(held, job)
    kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)
    if held.mode == "zygote":
        kernel.drop_capabilities()
    if held.rules >= 0:
        kernel.landlock_restrict(held.rules)
        os.close(held.rules)
    kernel.prctl(kernel.PR_SET_DUMPABLE, 1)
    kernel.load_filter(held.filter)


def mount_files(workdir: str, disk: int) -> None:
    for path in (workdir, "/tmp"):
        options = f"size={disk},nr_inodes=16384,mode=700"
        kernel.mount("tmpfs", path, "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, options)


def _limit(held: Confinement, job: Mapping[str, Any]) -> None:
    seconds = int(job["seconds"]) + 2
    limits = {
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_CPU: seconds,
        resource.RLIMIT_FSIZE: job["disk"],
        resource.RLIMIT_NOFILE: _DESCRIPTORS,
        resource.RLIMIT_NPROC: held.others + job["pids"],
        resource.RLIMIT_MEMLOCK: 0,
        resource.RLIMIT_MSGQUEUE: 0,
    }
    if job["address"]:
        with open("/proc/self/statm") as file:
            mapped = int(file.read().split()[0]) * resource.getpagesize()
        limits[resource.RLIMIT_AS] = mapped + job["memory"]
    for kind, value in limits.items():
        most = resource.getrlimit(kind)[1]
        value = value if most == resource.RLIM_INFINITY else min(value, most)
        resource.setrlimit(kind, (value, value))


def _run_program(argv: list[str], env: Mapping[str, str]) -> int:
    os.environ.update(env)
    try:
        os.execvp(argv[0], argv)
    except OSError as error:
        os.write(2, f"{argv[0]}: {error.strerror}\n".encode())
    return _NOT_RUN


def _run_code(source: str, env: Mapping[str, str]) -> int:
    """As `python main.py` would, in this interpreter."""
    os.environ.update(env)
    sys.argv = [NAME]
    sys.path.insert(0, os.getcwd())
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    module = types.ModuleType("__main__")
    module.__dict__.update(__file__=NAME, __builtins__=builtins)
    sys.modules["__main__"] = module
    linecache.cache[NAME] = (len(source), None, source.splitlines(keepends=True), NAME)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()  # imported ahead: each job would draw the same
    code = 0
    try:
        exec(compile(source, NAME, "exec"), module.__dict__)
    except SystemExit as error:
        code = _exit_code(error.code)
    except BaseException as error:
        code = 1
        hidden = error.__traceback__
        traceback.print_exception(type(error), error, hidden.tb_next if hidden else None)
    for end in (threading._shutdown, atexit._run_exitfuncs, sys.stdout.flush, sys.stderr.flush):  # type: ignore[attr-defined]
        with _tolerated():
            end()
    return code


def _exit_code(value: object) -> int:
    if value is None or isinstance(value, int):
        return (value or 0) & 0xFF
    print(value, file=sys.stderr)
    return 1


class _tolerated:
    """What fails in its block is left as it was."""

    def __enter__(self) -> None: ...

    def __exit__(self, kind: Any, error: Any, trace: Any) -> bool:
        return kind is not None and issubclass(kind, Exception)
