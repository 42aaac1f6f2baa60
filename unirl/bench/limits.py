"""Which stage limits a run, and which settings to change: read off the figures of its stages."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from unirl.actors.device import SimConfig
from unirl.actors.sampler import SamplerConfig
from unirl.actors.vector import ActorConfig
from unirl.bench.section import section
from unirl.bench.stages import Figures, StageName
from unirl.config import flag_of
from unirl.envs.config import EnvConfig
from unirl.learners.config import UnrollLearnerConfig
from unirl.policy import PolicyConfig
from unirl.policy.precision import has_bfloat16
from unirl.runners.plan import Plan

_FULL = 0.9
"""A share of all cores from which on they count as busy."""
_EVEN = 0.05
"""Shares of waiting that differ by no more than this do not show who waits for whom."""
_MOST_SETTINGS = 3


@dataclass(frozen=True)
class Limit:
    """What limits a run."""

    stage: StageName | None
    """None: the figures do not show it."""
    because: str
    """One sentence on how that shows."""
    settings: tuple[str, ...] = ()
    """What to change, most promising first: flags with values, or a few words."""

    @property
    def text(self) -> str:
        """Both in one or two sentences."""
        if not self.settings:
            return self.because
        *first, last = self.settings
        return f"{self.because} Try {', '.join(first) + ' or ' if first else ''}{last}."


def find_limit(plan: Plan, figures: Mapping[StageName, Figures], num_cores: int) -> Limit:
    """What limits the plan, from the figures of its stages; those of end_to_end must be there."""
    whole = figures["end_to_end"]
    # What other processes use is not free either.
    busy_cores = whole["cores_used"] + whole.get("cores_used_by_others", 0.0)
    is_full = busy_cores >= _FULL * num_cores
    stage, because = _limiting_stage(plan, figures, num_cores, is_full)
    if stage is None:
        return Limit(None, because)
    settings = _Advisor(plan, num_cores, not is_full).settings(stage)
    return Limit(stage, because, tuple(settings[:_MOST_SETTINGS]))


def _limiting_stage(
    plan: Plan, figures: Mapping[StageName, Figures], num_cores: int, is_full: bool
) -> tuple[StageName | None, str]:
    whole = figures["end_to_end"]
    apart = {name: one for name, one in figures.items() if name not in ("end_to_end", "weights")}
    # Taking turns, whatever takes longest limits; sharing busy cores, whatever costs most.
    seconds = {
        name: 1 / max(one["env_steps_per_second"], 1e-9) / _num_processes(plan, name)
        for name, one in apart.items()
    }
    if plan.runner.kind == "inline" and apart:
        how = "all share one device" if section(plan.config, SimConfig) else "all take turns"
        return _largest(seconds, how, "time")
    learner, actor = (whole.get(f"{side}_wait_share") or 0.0 for side in ("learner", "actor"))
    waits = (
        f"the learner waits {learner:.0%} of its time for a batch, actors {actor:.0%} for a free"
        " slot"
    )
    if apart and is_full:
        cost = {name: one["core_us_per_env_step"] for name, one in apart.items()}
        return _largest(cost, f"all {num_cores} cores are busy", "core time")
    if apart and abs(learner - actor) <= _EVEN:
        return _largest(seconds, waits, "time")
    if whole.get("limiting_rate") == "consumption":
        return "learning", f"Learning limits: {waits}."
    producers = {name: spent for name, spent in seconds.items() if name != "learning"}
    if "env_worker_busy_share" in whole:
        env, policy = whole["env_worker_busy_share"], whole["policy_worker_busy_share"]
        producers = {"stepping": env, "inference": policy}
        waits += (
            f"; environment workers step {env:.0%} and policy workers compute {policy:.0%} of the"
            " time"
        )
    if not producers:
        return None, f"Production limits: {waits}."
    stage = max(producers, key=lambda name: producers[name])
    return stage, f"{stage.capitalize()} limits: {waits}."


def _num_processes(plan: Plan, stage: StageName) -> int:
    if plan.runner.is_inline or stage == "learning":
        return 1
    pool = plan.pools[0]
    if stage == "stepping" and pool.helpers is not None:
        return pool.helpers.count
    return pool.bounds[0]


def _largest(amounts: Mapping[StageName, float], why: str, what: str) -> tuple[StageName, str]:
    """The stage with the largest amount, and a sentence with its share of their sum."""
    stage = max(amounts, key=lambda name: amounts[name])
    share = amounts[stage] / sum(amounts.values())
    return stage, (
        f"{stage.capitalize()} limits: {why}, and it takes {share:.0%} of the {what} that the"
        " stages take."
    )


class _Advisor:
    """Settings that relieve a stage of this plan; only such as its config has.

    has_idle_cores: there are cores for more processes or threads.
    """

    def __init__(self, plan: Plan, num_cores: int, has_idle_cores: bool) -> None:
        self._plan, self._num_cores, self._has_idle_cores = plan, num_cores, has_idle_cores
        config = plan.config
        self._env, self._policy = section(config, EnvConfig), section(config, PolicyConfig)
        self._sampler, self._actor = section(config, SamplerConfig), section(config, ActorConfig)
        self._learner, self._sim = section(config, UnrollLearnerConfig), section(config, SimConfig)

    def settings(self, stage: StageName) -> list[str]:
        """For a faster stage, most promising first."""
        if stage == "learning":
            return self._learning()
        return self._stepping() if stage == "stepping" else self._inference()

    def _stepping(self) -> list[str]:
        if self._sim is not None:
            name, sim = self._sim
            on_cpu = sim.torch_device().type == "cpu"
            gpu = [f"a GPU ({_flag(name, 'device', 'cuda')})"] if on_cpu else []
            return [*gpu, *self._more_envs()]
        found = [*self._more_processes(), *self._engine()]
        # C++ engines step few environments as cheaply as many.
        if self._env is None or not (self._env[1].is_atari or self._env[1].engine == "envpool"):
            found += self._more_envs()
        return found or ["more cores: this engine is the fastest there is"]

    def _inference(self) -> list[str]:
        found = self._half_precision()
        if self._sampler is None:
            found += self._more_processes()
        elif self._has_idle_cores:
            name, sampler = self._sampler
            more = sampler.num_policy_workers + 1
            if more <= sampler.num_workers:
                found.append(_flag(name, "num_policy_workers", more))
        return found + self._more_envs()

    def _learning(self) -> list[str]:
        found, runner = self._half_precision(), self._plan.runner
        if runner.kind == "inline":
            found += self._more_processes()
        elif self._has_idle_cores:
            more = min(max(runner.learner_threads, 1) + 1, self._num_cores)
            if more > runner.learner_threads:
                found.append(_flag("runner", "learner_threads", more))
        if self._learner is not None:
            name, learner = self._learner
            if learner.epochs > 1:
                found.append(
                    f"{_flag(name, 'epochs', learner.epochs - 1)} (learns less per sample)"
                )
            if learner.minibatches > 1:
                fewer = learner.minibatches // 2 if learner.minibatches % 2 == 0 else 1
                found.append(_flag(name, "minibatches", fewer))
        more = 2 * self._plan.learner.queue.batch_size
        return [*found, f"{_flag('queue', 'batch_size', more)} (fewer updates per sample)"]

    def _more_processes(self) -> list[str]:
        """More processes that step environments, where cores are idle."""
        # A simulator on a device has one process.
        if not self._has_idle_cores or self._sim is not None:
            return []
        if self._plan.runner.kind == "inline":
            return [self._several_processes()]
        if self._sampler is not None:
            return [_flag(self._sampler[0], "num_workers", self._sampler[1].num_workers + 1)]
        if self._actor is not None:
            return [_flag(self._actor[0], "num_actors", self._actor[1].num_actors + 1)]
        return []

    def _several_processes(self) -> str:
        """Out of one process, with the same samples per update and the same staleness."""
        queue, flags = self._plan.learner.queue, ["--runner.kind processes"]
        if self._actor is not None and self._sampler is None:
            name, actor = self._actor
            wanted = self._num_cores
            if wanted <= queue.num_slots:
                flags.append(_flag(name, "num_actors", wanted))
            elif actor.num_envs * queue.batch_size % wanted == 0:
                flags += [
                    _flag(name, "num_actors", wanted),
                    _flag(name, "num_envs", actor.num_envs * queue.batch_size // wanted),
                    _flag("queue", "batch_size", wanted),
                ]
        return " ".join(flags)

    def _more_envs(self) -> list[str]:
        """Larger vectors: a call costs much the same for twice the environments."""
        for found in (self._sampler, self._actor, self._sim):
            if found is not None:
                return [_flag(found[0], "num_envs", 2 * found[1].num_envs)]
        return []

    def _engine(self) -> list[str]:
        if self._env is None or self._env[1].is_multi_agent:
            return []
        name, env = self._env
        if env.is_atari and env.engine not in ("auto", "ale", "envpool"):
            return [_flag(name, "engine", "ale")]
        if env.engine in ("async", "sync"):
            return [
                f"a faster {name}.engine ({flag_of(f'{name}.engine')} envpool, where it knows it)"
            ]
        return []

    def _half_precision(self) -> list[str]:
        if self._policy is None:
            return []
        name, policy = self._policy
        reads_images = any(
            item.dtype.itemsize == 1 and len(item.shape) > 4
            for path, item in self._plan.learner.spec.fields.items()
            if path.split("/")[0] == "obs"
        )
        devices = [
            "cpu" if found is None else found[1].device for found in (self._sampler, self._learner)
        ]
        # On small networks over vectors it gains nothing, and emulated it is slower.
        if policy.compute_dtype == "float32" and reads_images and all(map(has_bfloat16, devices)):
            return [_flag(name, "compute_dtype", "bfloat16")]
        return []


def _flag(table: str, key: str, value: Any) -> str:
    return f"{flag_of(f'{table}.{key}')} {value}"
