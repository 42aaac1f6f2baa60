"""Errors a person can act on: what happened, the rule with both values, the remedy."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UniRLError(Exception):
    """An error explained in up to three short parts; the CLI prints it without a traceback and
    exits with 2.

    what: what is wrong, naming the thing. rule: the rule that was broken with both values. remedy:
    what to do.
    """

    def __init__(self, what: str, rule: str = "", remedy: str = "") -> None:
        self.what, self.rule, self.remedy = what, rule, remedy
        super().__init__(what, rule, remedy)

    def __str__(self) -> str:
        return " ".join(
            part if part.endswith((".", "?", "!", ")")) else f"{part}." for part in self.parts
        )

    @property
    def parts(self) -> tuple[str, ...]:
        """The non-empty parts, in order."""
        return tuple(part for part in (self.what, self.rule, self.remedy) if part)


def suggestion(word: str, known: Iterable[str]) -> str:
    """'did you mean "..."?' for the nearest known word, or nothing."""
    by_lower = {name.lower(): name for name in known}
    near = difflib.get_close_matches(word.lower(), by_lower, n=1, cutoff=0.6)
    return f'did you mean "{by_lower[near[0]]}"?' if near else ""


def format_error(error: BaseException) -> str:
    """An error of foreign code in one line: type, deepest frame and message. One of ours says all
    by itself.
    """
    if isinstance(error, Restartable):
        return str(error)
    frame = error.__traceback__
    while frame is not None and frame.tb_next is not None:
        frame = frame.tb_next
    where = "" if frame is None else f" in {frame.tb_frame.f_code.co_filename}:{frame.tb_lineno}"
    return f"{type(error).__name__}{where}: {error}"


class QueueClosed(Exception):
    """The queue was closed: a process that waits on it ends quietly."""


class ActorFailed(UniRLError):
    """An actor or its environment ended the run for good; what the learner has is sound."""


class RunLost(ActorFailed):
    """What a run stands on, a cluster's head say, is gone and may be there again: the run is
    started again from its checkpoint, `run.max_run_restarts` times.
    """


class DeadlineExceeded(UniRLError):
    """A wait reached its deadline; the message says what was waited for."""


class LockHeld(DeadlineExceeded):
    """A process has held a lock for far longer than it ever works: it is stopped or hung."""

    def __init__(self, pid: int, what: str, rule: str, remedy: str) -> None:
        self.pid = pid
        super().__init__(what, rule, remedy)


class LeaseExpired(UniRLError):
    """A producer came with a lease that was revoked: what it brings is refused and counted."""


class Restartable(RuntimeError):
    """Something died or hangs. Unlike a UniRLError it is not final: a new one may do better, so
    runners start the actor again, as after any exception that an environment raises.

    what, rule, remedy: the parts of a UniRLError, given as one sentence.
    """

    def __init__(self, what: str, rule: str, remedy: str) -> None:
        self.parts = (what, rule, remedy)
        super().__init__(what, rule, remedy)

    def __str__(self) -> str:
        return str(UniRLError(*self.parts))


class EnvCrashed(Restartable):
    """A process of an environment died or hangs."""


class DiscardSlot(Exception):
    """Raised by an actor's `produce`: this sample is worth nothing, for a declared reason; the
    slot is given back.
    """

    def __init__(self, reason: str) -> None:
        self.reason = reason
        super().__init__(reason)


class ReissueSlot(Exception):
    """Raised by an actor's `produce`: this sample is not finished, and its ticket is to be issued
    again. What was done of it so far is the actor's to keep.
    """
