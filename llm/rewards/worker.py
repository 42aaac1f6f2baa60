"""What runs in a process that judges completions with code which may hang or crash: one JSON line
in, one JSON line out.
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
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from unirl.errors import format_error
from unirl.imports import load_own
from unirl.supervision.process_settings import die_with_parent, leave_signals_to_learner

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
    # Its parent: a fork server, or the process of the rewards itself. Should that one be gone
    # already, the other end of the line is closed, and this process ends by that.
    die_with_parent(os.getppid())
    # A group of its own, so that processes which the functions start are killed with this one.
    os.setpgid(0, 0)
    os.environ.clear()
    os.environ.update(environ)
    leave_signals_to_learner()
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
    """Queue jobs. When the other end is gone, this process group ends, even in a hung function."""
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


def _send(line: socket.socket, answer: Mapping[str, Any]) -> None:
    try:
        line.sendall(json.dumps(answer).encode() + b"\n")
    except OSError:  # nothing listens any more
        os._exit(1)
