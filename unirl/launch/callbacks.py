"""What a user wants called after every update of a run and at its end: functions and objects of
their own, in the process that learns.

    def stop_when_good(training: unirl.Training) -> None:
        training.metrics.last("mine/twice_the_steps", 2 * training.step)
        if training.row.get("charts/episodic_return", 0) > 400:
            training.stop("good enough")
"""

from __future__ import annotations

import inspect
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeAlias

from unirl.core.evaluator import EvalResult
from unirl.core.learner import Learner
from unirl.errors import UniRLError, format_error
from unirl.imports import is_own, load_own
from unirl.launch.outputs import RunOutputs
from unirl.metrics.metrics import Metrics
from unirl.runners.loop import TrainLoop

log = logging.getLogger(__name__)


class Training:
    """A run between two updates, as its callbacks see it; of several learners each has its own."""

    def __init__(self, loop: TrainLoop, outputs: RunOutputs, folder: Path) -> None:
        self._loop, self._outputs, self.folder = loop, outputs, folder

    @property
    def step(self) -> int:
        """Samples learned so far, earlier sessions included."""
        return self._loop.learner.num_steps

    @property
    def version(self) -> int:
        """Updates made so far."""
        return self._loop.learner.version

    @property
    def seconds(self) -> float:
        """Training time so far, earlier sessions included."""
        return self._loop.seconds

    @property
    def reason(self) -> str | None:
        """Why the run ends; None while it trains."""
        return self._loop.reason

    @property
    def config(self) -> Any:
        """The recipe's config."""
        return self._loop.plan.config

    @property
    def learner(self) -> Learner:
        return self._loop.learner

    @property
    def learner_name(self) -> str:
        """As the plan calls it."""
        return self._loop.learner_plan.name

    @property
    def metrics(self) -> Metrics:
        """The run's own collector: what is recorded here comes into the next row of metrics.jsonl,
        and wherever else rows go. Totals continue after a resume.
        """
        return self._loop.metrics

    @property
    def row(self) -> Mapping[str, float]:
        """The newest row of metrics.jsonl, by name; empty before the first."""
        return self._outputs.log.scalars

    @property
    def evaluation(self) -> EvalResult | None:
        """The newest one of this session."""
        return None if self._outputs.evaluate is None else self._outputs.evaluate.result

    @property
    def checkpoint(self) -> Path | None:
        """The newest one of this session."""
        return self._outputs.save.path

    def stop(self, reason: str) -> None:
        """End the run in good order after this update; the first reason counts."""
        if not reason:
            raise UniRLError(
                'training.stop was called with reason ""',
                "a run ends for a reason, which its result and its log name",
                'such as training.stop("good enough")',
            )
        self._loop.stop(reason)


class AfterUpdate(Protocol):
    """An object that is called after every update; a function is called then, too."""

    def after_update(self, training: Training) -> object:
        """When the update's weights are published, and before its row is written."""


class AtEnd(Protocol):
    """An object that is called at the end of a run; it may be an AfterUpdate as well."""

    def at_end(self, training: Training) -> object:
        """Once, when the run has ended in good order: its last row and checkpoint are written."""


Callback: TypeAlias = Callable[[Training], object] | AfterUpdate | AtEnd


class Callbacks:
    """Those of one run; the first that raises ends it in good order, and is reported at its end.

    given: functions and objects. names: `module:function` or `module:Class`, made without
    arguments. Raises UniRLError for what cannot be called.
    """

    def __init__(self, given: Sequence[Callback], names: Sequence[str] = ()) -> None:
        found = [(_name(one), one) for one in given] + [(name, _load(name)) for name in names]
        self._after = [(name, _method(name, one, "after_update")) for name, one in found]
        self._at_end = [(name, _method(name, one, "at_end")) for name, one in found]
        self._one_at_a_time = threading.Lock()
        """Several learners may train in a thread each."""
        self._failure: UniRLError | None = None
        self._cause: Exception | None = None

    def hook(self, training: Training) -> CallbackHook:
        """What calls them for one learner."""
        return CallbackHook(self, training)

    def after_update(self, training: Training) -> None:
        """Call all of them; none any more where one has raised."""
        self._call(self._after, training, f"after update {training.version}")
        if self._failure is not None:
            # In good order: all ranks and learners end with a checkpoint.
            training.stop("callback_failed")

    def at_end(self, trainings: Sequence[Training]) -> None:
        """Call all of them for each learner of a run that has ended. UniRLError where one raised,
        now or before.
        """
        for training in trainings:
            self._call(self._at_end, training, "at the end")
        if self._failure is not None:
            raise self._failure from self._cause

    def _call(
        self,
        methods: Sequence[tuple[str, Callable[[Training], object] | None]],
        training: Training,
        when: str,
    ) -> None:
        for name, method in methods:
            if method is None or self._failure is not None:
                continue
            try:
                with self._one_at_a_time:
                    method(training)
            except Exception as error:
                log.exception("callback %s failed %s", name, when)
                self._cause = error
                self._failure = UniRLError(
                    f"callback {name} failed {when}: {format_error(error)}",
                    "a run ends where a callback raises; its checkpoint is written, and its trace"
                    f" is in {training.folder / 'log.txt'}",
                    f"correct it, then: unirl resume {training.folder}",
                )


class CallbackHook:
    """Of one learner; the end comes after that of all others, by `Callbacks.at_end`."""

    def __init__(self, callbacks: Callbacks, training: Training) -> None:
        self._callbacks, self._training = callbacks, training

    def after_update(self, loop: TrainLoop) -> None:
        self._callbacks.after_update(self._training)

    def at_end(self, loop: TrainLoop) -> None:
        """Hook: nothing to do."""


def check_callbacks(names: Sequence[str]) -> None:
    """Raise UniRLError for names that cannot be loaded, before anything is written or deleted."""
    Callbacks((), names)


def _load(name: str) -> Callback:
    what = f"run.callbacks {name}"
    if not is_own(name):
        raise UniRLError(
            f"run.callbacks has {name!r}",
            "each is module:function, or module:Class that is made without arguments",
            "such as --run.callbacks '[\"my_callbacks:stop_when_good\"]'",
        )
    found = load_own(name, what)
    if not isinstance(found, type):
        return found  # type: ignore[no-any-return]
    try:
        return found()  # type: ignore[no-any-return]
    except Exception as error:
        raise UniRLError(
            f"{what} could not be made: {format_error(error)}",
            "a class is made without arguments",
            "give its arguments defaults, or pass an object: unirl.run(..., callbacks=[...])",
        ) from error


def _name(callback: Any) -> str:
    """What messages call it."""
    named = callback if hasattr(callback, "__qualname__") else type(callback)
    return f"{getattr(callback, '__module__', '')}:{named.__qualname__}"


def _method(name: str, callback: Any, which: str) -> Callable[[Training], object] | None:
    is_object = any(hasattr(callback, method) for method in ("after_update", "at_end"))
    method = getattr(callback, which, None)
    if not is_object and not isinstance(callback, type):
        method = callback if which == "after_update" else None
    usable = callable(callback) or is_object
    if isinstance(callback, type) or not usable or not (method is None or _takes_one(method)):
        raise UniRLError(
            f"callback {name} cannot be called",
            "a callback is a function of one argument, or an object with after_update(training) or"
            f" at_end(training); this is a {type(callback).__name__}",
            f"pass an object: {callback.__name__}()"
            if isinstance(callback, type)
            else "give it one parameter, training",
        )
    return method


def _takes_one(method: Any) -> bool:
    if not callable(method):
        return False
    try:
        inspect.signature(method).bind(None)
    except TypeError:
        return False
    except ValueError:  # of a builtin: nothing says what it takes
        return True
    return True
