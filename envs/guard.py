"""Where an environment's own code is called: what it raises is explained, what hangs is ended, and
what it returns is looked at.
"""

from __future__ import annotations

import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import numpy as np

from unirl.errors import EnvCrashed, UniRLError, format_error

_NUMBERS = "biuf"
"""NumPy's kinds of what counts as a number."""
_TICKS = 10
"""Of a timer, in which a deadline is counted."""
_AGAIN_SECONDS = 5.0
"""After which a deadline is raised again, where the environment caught it."""
_MUTE_SECONDS = 15.0
"""How long code that is not Python's may still run past a deadline that it does not notice."""


class _Late(BaseException):
    """No Exception: an environment that tries again for ever must not catch it."""

    def __init__(self, where: str) -> None:
        self.where = where


@contextmanager
def making(env_id: str, seconds: float, what: str = "made") -> Iterator[None]:
    """In this block an environment is made, or started by its first reset: EnvCrashed where that
    fails, or takes longer than so many seconds.

    In the main thread only; others cannot be interrupted. Code outside of Python that does not
    come back ends the process with the same words.
    """
    late = EnvCrashed(
        f'env "{env_id}" was not {what} within {seconds:g} s',
        f"making an environment and its first reset may take env.make_timeout, {seconds:g} s",
        "find what it waits for, or raise env.make_timeout",
    )
    culprit = "env.kwargs, or the environment"
    with explained(env_id, f"while it was {what}", culprit), _deadline(seconds, late):
        yield


@contextmanager
def stepping(env_id: str, seconds: float) -> Iterator[Callable[[], None]]:
    """In this block an environment is stepped that nobody else watches: EnvCrashed where a step, or
    a reset, takes longer than so many seconds. Call what this yields before each of them.

    In the main thread only, see `making`.
    """
    late = EnvCrashed(
        f'env "{env_id}" did not answer within {seconds:g} s',
        f"a step or reset may take env.step_timeout, {seconds:g} s",
        "find what it waits for, or raise env.step_timeout",
    )
    with _deadline(seconds, late) as begin:
        yield begin


@contextmanager
def _deadline(seconds: float, late: EnvCrashed) -> Iterator[Callable[[], None]]:
    """Raises `late`, with where that was, in this block, so long after it was entered or what it
    yields was called.

    Ticks of a timer are counted: where this process was stopped (Ctrl-Z), all of that time is one.
    """
    if threading.current_thread() is not threading.main_thread():
        yield lambda: None
        return
    tick, ticks, looks = seconds / _TICKS, 0, 0
    num_again, num_mute = (math.ceil(s / tick) for s in (_AGAIN_SECONDS, _MUTE_SECONDS))
    done = threading.Event()

    def begin() -> None:
        nonlocal ticks, looks
        ticks = looks = -1  # one is over in part

    def interrupt(number: int, frame: FrameType | None) -> None:
        nonlocal ticks
        ticks += 1
        if ticks >= _TICKS and (ticks - _TICKS) % num_again == 0:
            code = frame.f_code if frame is not None else None
            raise _Late(f" in {code.co_filename}:{frame.f_lineno}" if code and frame else "")

    def end_if_mute() -> None:
        nonlocal looks
        while not done.wait(tick):
            looks += 1
            if looks >= _TICKS + num_mute:
                for part in late.parts:
                    print(part, file=sys.stderr, flush=True)
                os._exit(2)

    mute = threading.Thread(target=end_if_mute, name="deadline", daemon=True)
    started, before = time.monotonic(), signal.signal(signal.SIGALRM, interrupt)
    left, again = signal.setitimer(signal.ITIMER_REAL, tick, tick)
    mute.start()
    try:
        yield begin
    except _Late as hung:
        what, rule, remedy = late.parts
        raise EnvCrashed(f"{what}: it hung{hung.where}", rule, remedy) from None
    finally:
        done.set()
        mute.join()
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        if left:  # another deadline, which this one stood in for
            left = max(1e-3, left - time.monotonic() + started)
            signal.setitimer(signal.ITIMER_REAL, left, again)


@contextmanager
def explained(env_id: str, when: str, culprit: str = "the environment") -> Iterator[None]:
    """What its own code raises in this block becomes an EnvCrashed that names it; sys.exit too."""
    try:
        yield
    except (UniRLError, EnvCrashed):
        raise
    except (Exception, SystemExit) as error:
        raise failed(env_id, error, when, culprit) from error


def failed(
    env_id: str, error: BaseException, when: str, culprit: str = "the environment"
) -> EnvCrashed:
    """The error for what an environment raised."""
    if isinstance(error, SystemExit):
        return EnvCrashed(
            f'env "{env_id}" called sys.exit {when}: {format_error(error)}',
            "an environment must not end the process that steps it",
            f"correct {culprit}: raise an error instead",
        )
    return EnvCrashed(
        f'env "{env_id}" failed {when}: {format_error(error)}',
        "it must not raise",
        f"correct {culprit}",
    )


@contextmanager
def final() -> Iterator[None]:
    """In this block nobody starts an environment again: what it dies of is a UniRLError."""
    try:
        yield
    except EnvCrashed as error:
        raise UniRLError(*error.parts) from error


def check_flags(env_id: str, reward: Any, terminated: Any, truncated: Any) -> None:
    """UniRLError unless one environment returned a number and two truth values.

    Call it where a quick look (`type(reward) is float`) did not clear them.
    """
    for name, value, kinds in (
        ("reward", reward, _NUMBERS),
        ("terminated", terminated, "biu"),
        ("truncated", truncated, "biu"),
    ):
        # Libraries return what is like a number: arrays and tensors without a shape.
        try:
            array = np.asarray(value)
        except Exception:
            raise wrong_value(env_id, name, value) from None
        if array.shape != () or array.dtype.kind not in kinds:
            raise wrong_value(env_id, name, value)


def check_arrays(env_id: str, num_envs: int, **values: Any) -> None:
    """UniRLError unless a vector of environments returned arrays of numbers, one for each."""
    for name, value in values.items():
        kinds = _NUMBERS if name == "reward" else "biu"
        array = np.asarray(value)
        if array.shape != (num_envs,) or array.dtype.kind not in kinds:
            raise wrong_value(env_id, name, value, f" for each of {num_envs} environments")


def wrong_value(env_id: str, name: str, value: Any, number: str = "") -> UniRLError:
    """The error for a reward or a flag that is none."""
    shown = repr(value)
    if len(shown) > 60:
        shown = f"{shown[:57]}..."
    kind = "a number" if name == "reward" else "True or False"
    return UniRLError(
        f'env "{env_id}" returned {shown} ({type(value).__name__}) as {name}',
        f"step must return {kind} as {name}{number}",
        "correct the environment's step",
    )


def wrong_number(env_id: str, method: str, expected: str, result: Any) -> UniRLError:
    """The error for a step or reset that did not return what Gymnasium's interface asks for."""
    number = f"{len(result)} values" if isinstance(result, tuple) else type(result).__name__
    return UniRLError(
        f'env "{env_id}" returned {number} from {method}',
        f"{method} must return {expected}, as in Gymnasium 0.26 and later",
        f"correct the environment's {method}, or wrap it (shimmy converts older ones)",
    )
