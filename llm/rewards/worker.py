"""What runs in a process that judges completions with code which may hang or crash: one JSON line
in, one JSON line out; source: none.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import json
import os
import queue
import signal
import socket
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from unirl.llm.own_code import load_own
from unirl.supervision.process_settings import die_with_parent

_ERROR_CHARACTERS = 2000


def worker_main(
    line: socket.socket,
    functions: Sequence[str],
    modules: Sequence[str],
    environ: Mapping[str, str],
) -> None:
    """Import the functions and the modules that they will import, say so, then answer until the
    other end closes.
    """
    # Whoever forked this: a fork server, or the judge's process itself. Should that one be gone
    # already, the other end of the line is closed, and this process ends by that.
    die_with_parent(os.getppid())
    # A group of its own, so that processes which the functions start are killed with this one.
    os.setpgid(0, 0)
    os.environ.clear()
    os.environ.update(environ)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    jobs: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(line, jobs), name="jobs", daemon=True).start()
    loaded: dict[str, Callable[..., Any]] = {}
    try:
        for name in functions:
            loaded[name] = load_own(name, f'reward "{name}"')
        for module in modules:
            importlib.import_module(module)
    except BaseException as error:
        _send(line, {"error": f"{type(error).__name__}: {error}"[:_ERROR_CHARACTERS]})
        os._exit(1)
    _send(line, {"ready": True})
    while True:
        job = json.loads(jobs.get())
        _send(line, _answer(loaded[job["function"]], job["arguments"]))


def wanted(function: Callable[..., Any], offered: Mapping[str, Any]) -> dict[str, Any]:
    """Those of the offered arguments that a function names; all of them for **arguments.

    Raises TypeError when it needs one that is not offered.
    """
    chosen = {}
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind is parameter.VAR_KEYWORD:
            return dict(offered)
        if parameter.kind is parameter.VAR_POSITIONAL:
            continue
        if parameter.name in offered and parameter.kind is not parameter.POSITIONAL_ONLY:
            chosen[parameter.name] = offered[parameter.name]
        elif parameter.default is parameter.empty:
            raise TypeError(parameter.name)
    return chosen


def _read(line: socket.socket, jobs: queue.SimpleQueue[bytes]) -> None:
    """Hand jobs on. When the other end is gone, so is everybody here, even from a hung function."""
    with contextlib.suppress(OSError), line.makefile("rb") as lines:
        for job in lines:
            jobs.put(job)
    os.killpg(0, signal.SIGKILL)


def _answer(function: Callable[..., Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
    try:
        value = function(**wanted(function, arguments))
        # As numbers only: what a library returns for them (numpy, sympy) JSON does not know.
        return {"value": value if value is None or isinstance(value, str) else float(value)}
    except Exception as error:
        return {"error": format_error(error)[:_ERROR_CHARACTERS]}


def format_error(error: Exception) -> str:
    """What a function raised, and in which line: its author looks for it there."""
    calls = traceback.extract_tb(error.__traceback__)
    where = f" ({os.path.basename(calls[-1].filename)}:{calls[-1].lineno})" if calls else ""
    return f"{type(error).__name__}: {error}{where}"


def _send(line: socket.socket, answer: Mapping[str, Any]) -> None:
    try:
        line.sendall(json.dumps(answer).encode() + b"\n")
    except OSError:  # nobody is there to hear it
        os._exit(1)
