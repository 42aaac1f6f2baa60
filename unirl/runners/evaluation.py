"""Evaluations while a run trains, and the files that they are written to."""

from __future__ import annotations

import json
import time
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path

from unirl.core.evaluator import EvalResult, Evaluator
from unirl.errors import ActorFailed, UniRLError, format_error
from unirl.runners import state
from unirl.runners.loop import TrainLoop, next_multiple
from unirl.storage.checkpoint import JSON


class EvalHook:
    """Every `every_steps` steps: whole episodes with the newest weights, on environments of their
    own.
    """

    def __init__(
        self,
        make_evaluator: Callable[[], Evaluator],
        run_dir: Path,
        *,
        every_steps: int,
        num_episodes: int,
        deterministic: bool,
        start_step: int = 0,
    ) -> None:
        self._make_evaluator, self._run_dir = make_evaluator, run_dir
        self._every_steps, self._num_episodes, self._deterministic = (
            every_steps,
            num_episodes,
            deterministic,
        )
        self._next = next_multiple(start_step, every_steps)
        self.result: EvalResult | None = None
        """The newest result."""

    def after_update(self, loop: TrainLoop) -> None:
        steps = loop.learner.num_steps
        if steps >= self._next:
            self._evaluate(loop)
            self._next = next_multiple(steps, self._every_steps)

    def at_end(self, loop: TrainLoop) -> None:
        pass

    def _evaluate(self, loop: TrainLoop) -> None:
        weights = loop.learner.weights()
        # The log looks at losses only after this, and such weights would make environments fail.
        state.require_finite(weights, loop.learner.version)
        evaluator = self._make_evaluator()
        try:
            started = time.monotonic()
            result = evaluator.evaluate(
                weights, self._num_episodes, deterministic=self._deterministic
            )
        except UniRLError as error:
            raise ActorFailed(*error.parts) from error  # the learner is sound, and is saved
        except Exception as error:
            raise ActorFailed(
                f"the evaluation after {loop.learner.num_steps} steps failed: "
                f"{format_error(error)}",
                "it plays whole episodes, and nobody starts it again",
                "fix the environment or the evaluator, then `unirl resume`",
            ) from error
        finally:
            evaluator.close()
        self.result = result
        loop.metrics.last("eval/return_mean", result.mean)
        loop.metrics.last("eval/return_std", result.std)
        loop.metrics.interval("time/eval", time.monotonic() - started)
        write_evaluation(self._run_dir, loop.learner.num_steps, result, self._deterministic)


def write_evaluation(
    run_dir: Path,
    step: int,
    result: EvalResult,
    deterministic: bool,
    *,
    seed: int | None = None,
    changes: Mapping[str, JSON] | None = None,
) -> Path:
    """Every episode's return and length: in eval/step_N.json for training's own evaluation, which
    has no seed here, as it follows from the run's; in eval/by_hand for others, under a name for
    each. changes: settings that were others than the run's.
    """
    folder, name = run_dir / "eval", f"step_{step:08d}"
    if seed is not None:
        actions = "greedy" if deterministic else "sampled"
        name += f"_seed_{seed}_{actions}_{len(result.returns)}"
        folder /= "by_hand"
    if changes:
        # Too long for a name, which must be another one all the same.
        name += f"_changed_{zlib.crc32(json.dumps(changes, sort_keys=True).encode()):08x}"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    document = {
        "step": step,
        **({"seed": seed} if seed is not None else {}),
        "deterministic": deterministic,
        **({"changes": dict(changes)} if changes else {}),
        "num_episodes": len(result.returns),
        "return_mean": result.mean,
        "return_std": result.std,
        "returns": result.returns,
        "lengths": result.lengths,
    }
    path.write_text(json.dumps(document, indent=1) + "\n")
    return path
