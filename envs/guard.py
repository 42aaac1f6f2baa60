"""Where an environment's own code is called: what it raises is explained, what hangs is ended, and
what it returns is looked at.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import numpy as np

from unirl.errors import EnvCrashed, UniRLError, format_error

_NUMBERS = "biuf"
"""NumPy's kinds of what counts as a number."""
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
    with explained(env_id, f"while it was {what}", "env.kwargs, or the environment"):
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        late = EnvCrashed(
            f'env "{env_id}" was not {what} within {seconds:g} s',
            f"making an environment and its first reset may take env.make_timeout, {seconds:g} s",
            "find what it waits for, or raise env.make_timeout",
        )

        def interrupt(number: int, frame: FrameType | None) -> None:
            code = frame.f_code if frame is not None else None
            raise _Late(f" in {code.co_filename}:{frame.f_lineno}" if code and frame else "")

        def end() -> None:
            for part in late.parts:
                print(part, file=sys.stderr, flush=True)
            os._exit(2)

        mute = threading.Timer(seconds + _MUTE_SECONDS, end)
        mute.daemon = True
        started, before = time.monotonic(), signal.signal(signal.SIGALRM, interrupt)
        left, again = signal.setitimer(signal.ITIMER_REAL, seconds, _AGAIN_SECONDS)
        mute.start()
        try:
            yield
        except _Late as hung:
            what_hung, rule, remedy = late.parts
            raise EnvCrashed(f"{what_hung}: it hung{hung.where}", rule, remedy) from None
        finally:
            mute.cancel()
            mute.join()
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
            if left:  # another deadline, which this one stood in for
                signal.setitimer(
                    signal.ITIMER_REAL, max(1e-3, left - time.monotonic() + started), again
                )


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
