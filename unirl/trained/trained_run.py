"""A trained run from Python: its config and numbers, evaluations, and the policy or model that it
learned.

    run = unirl.load("runs/cartpole")  # or a name under runs/, or one of its checkpoints
    print(run.evaluate(episodes=20, seed=1).mean)
    env, policy = run.make_env(), run.policy()
    observation, info = env.reset(seed=1)
    action = policy.act(observation)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unirl import config as configs
from unirl.errors import UniRLError
from unirl.trained import folder, language

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from unirl.actors.trained_policy import TrainedPolicy
    from unirl.core.evaluator import EvalResult
    from unirl.runners.plan import Plan
    from unirl.storage.checkpoint import Checkpoint

_ONLY_TRAINING = ("env.random_burst_probability", "env.random_burst_steps", "env.episodic_life")
"""Settings that evaluations leave out (actors/evaluate.py)."""
_TRAINING_TABLES = ("queue", "runner", "ray", "run")
_ENV_TRAINING_TABLES = ("actor", "sampler", "learner")
"""With a recipe over environments; an engine of language models reads more."""


class TrainedRun:
    """A run folder, and its newest checkpoint or the one that was named.

    What takes time is done when it is asked for: the checkpoint is read for what needs weights.
    """

    def __init__(self, where: Path, changes: Mapping[str, Any] | None = None) -> None:
        self._where, self._changes = where, dict(changes or {})
        self.folder = folder.folder_of(where)
        module, table = folder.read_config(self.folder, changes=changes)
        self.config: Any = configs.from_mapping(module.Config, table)
        """The recipe's config, with what the plan had decided."""
        self.recipe = module.__name__.removeprefix("unirl.recipes.")
        """By name; one of the user's own by its dotted path."""

    def __repr__(self) -> str:
        return f"TrainedRun({str(self._where)!r}, recipe={self.recipe!r})"

    @cached_property
    def plan(self) -> Plan:
        """As `unirl resume` makes it."""
        return folder.load_plan(self._where, self._changes)

    @cached_property
    def checkpoint(self) -> Checkpoint:
        return _checkpoint(self._where)

    @property
    def step(self) -> int:
        """Of the checkpoint."""
        return self.checkpoint.step

    def metrics(self, learner: int = 0) -> dict[str, NDArray[np.float64]]:
        """The columns of metrics.jsonl by name, "step" and "seconds" too, of equal length: NaN
        where a row has no such number. learner: which of several.
        """
        import numpy as np

        from unirl.report.sinks import read_metrics

        rows = read_metrics(self._folder_of(learner))
        names = dict.fromkeys(name for row in rows for name in row)
        return {
            name: np.array(
                [np.nan if (value := row.get(name)) is None else value for row in rows], np.float64
            )
            for name in names
        }

    def events(self) -> list[dict[str, Any]]:
        """What happened to the run and its members, in order: the rows of events.jsonl."""
        from unirl.run_events import read_events

        return read_events(self.folder)

    def evaluate(
        self,
        episodes: int = 20,
        *,
        deterministic: bool | None = None,
        seed: int = 1,
        **changes: Any,
    ) -> EvalResult:
        """Whole episodes, as `unirl eval` plays them: the same seed plays the same ones.

        deterministic: the likeliest actions; None: as run.eval_deterministic says. changes:
        settings of environment or model that differ from the run's, such as
        **{"env.max_episode_steps": 99}.
        """
        if changes:
            check_changes(changes, has_env=hasattr(self.config, "env"))
            changed = TrainedRun(self._where, {**self._changes, **changes})
            return changed.evaluate(episodes, deterministic=deterministic, seed=seed)
        learner = self.plan.learner
        if learner.make_evaluator is None:
            raise no_evaluation(self.plan, "evaluated")
        if deterministic is None:
            deterministic = self.plan.run.eval_deterministic
        weights = learner.weights_in(self.checkpoint.model)
        with closing(learner.make_evaluator(seed)) as evaluator:
            return evaluator.evaluate(weights, episodes, deterministic=deterministic)

    def policy(self, learner: int = 0, *, seed: int = 1) -> TrainedPolicy:
        """The policy, to act with in a loop of one's own. learner: which of several. seed: of
        sampled actions.
        """
        from unirl.actors.trained_policy import TrainedPolicy
        from unirl.policy import PolicyConfig

        env = self._env_config()
        plan = self.plan.learners[self._index(learner)]
        checkpoint = self.checkpoint
        if learner:
            where = self._folder_of(learner)
            newest = self._where == self.folder
            checkpoint = _checkpoint(where if newest else where / "checkpoints" / self._where.name)
        # As the checkpoint must have it: a recipe may have completed what its config says.
        policy = configs.from_mapping(PolicyConfig, plan.fingerprint["policy"])
        return TrainedPolicy(env, policy, plan.weights_in(checkpoint.model), seed=seed)

    def make_env(self, render_mode: str | None = None, **changes: Any) -> Any:
        """One environment as the run's actors step it, as a gymnasium.Env: its arguments, its time
        limit, and Atari's frames; with several agents a parallel environment of PettingZoo.
        changes: of its settings, such as max_episode_steps=99.
        """
        from unirl.envs.one import make_one

        return make_one(configs.override(self._env_config(), changes), render_mode)

    def model(self) -> Any:
        """The transformers model with the weights of the checkpoint, adapters merged."""
        return self._model

    def generate(
        self,
        prompts: Sequence[str | language.Conversation],
        *,
        max_tokens: int | None = None,
        temperature: float | None = None,
        deterministic: bool = False,
        seed: int = 1,
    ) -> list[str]:
        """What the language model says to each prompt, a text or messages, asked as in training.

        deterministic: the likeliest token each time. max_tokens, temperature: None: as in training.
        """
        if isinstance(prompts, str):
            raise UniRLError(
                "run.generate was given one text",
                "it takes a list of prompts, and returns a list of answers",
                "run.generate([prompt])[0]",
            )
        if temperature is None:
            temperature = self._language.sampling.temperature
        return language.generate(
            self._language,
            self._model,
            prompts,
            max_tokens=max_tokens,
            temperature=0.0 if deterministic else temperature,
            seed=seed,
        )

    @cached_property
    def _language(self) -> Any:
        return language.language_config(self.folder)

    @cached_property
    def _model(self) -> Any:
        return language.trained_model(self._language, self.checkpoint)

    def _env_config(self) -> Any:
        from unirl.envs.config import EnvConfig
        from unirl.envs.make import settle_mask

        env = getattr(self.config, "env", None)
        if not isinstance(env, EnvConfig):
            raise UniRLError(
                f"{self.folder} trained no policy over an environment",
                f"its recipe is {self.recipe}, and its config has no env",
                "of a language model: run.model() and run.generate([...])",
            )
        return settle_mask(env)

    def _index(self, learner: int) -> int:
        number = len(self.plan.learners)
        if not 0 <= learner < number:
            raise UniRLError(
                f"learner {learner} was asked for",
                f"the run in {self.folder} has {number}, counted from 0",
                "leave it out for the first",
            )
        return learner

    def _folder_of(self, learner: int) -> Path:
        from unirl.launch.resume import learner_folder

        return learner_folder(self.folder, self._index(learner) if learner else 0)


def load(run: str | Path) -> TrainedRun:
    """A run by its folder or its name under runs/, with its newest checkpoint; or one of its
    checkpoints. Raises UniRLError where there is none.
    """
    return TrainedRun(folder.find(str(run)))


def check_changes(changes: Mapping[str, Any], *, has_env: bool, as_flags: bool = False) -> None:
    """Raise UniRLError for settings that no evaluation reads."""
    tables = (*_TRAINING_TABLES, *(_ENV_TRAINING_TABLES if has_env else ()))
    for key in changes:
        in_training = key in _ONLY_TRAINING or key.partition(".")[0] in tables
        if in_training and key != "run.eval_deterministic":
            own = {"run.seed": "seed", "run.eval_episodes": "episodes"}.get(key)
            raise UniRLError(
                f"{configs.flag_of(key) if as_flags else key} has no effect on an evaluation",
                "unirl eval plays whole episodes without random-action bursts; how many and from"
                " which seed is its own to say",
                f"use {'--' * as_flags}{own}" if own else "leave it out",
            )


def no_evaluation(plan: Plan, how: str) -> UniRLError:
    return UniRLError(
        f'recipe "{plan.recipe}" cannot be {how}',
        "its plan has no evaluator that could",
        "set make_evaluator in the recipe's plan",
    )


def _checkpoint(where: Path) -> Checkpoint:
    from unirl.storage.checkpoint import load_checkpoint

    return load_checkpoint(where)
