"""Which stage limits a run, and which settings to change: read off the figures of its stages."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from unirl.actors.device import SimConfig
from unirl.actors.sampler import SamplerConfig
from unirl.actors.vector import ActorConfig
from unirl.bench.parts import section
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
"""Shares of waiting that differ by no more than this do not tell who waits for whom."""
_MOST_SETTINGS = 3
_NAMES: Mapping[StageName, str] = MappingProxyType(
    {
        "sampling": "Sampling",
        "inference": "Inference",
        "simulation": "Simulation",
        "simulation_with_policy": "The policy",
        "learning": "Learning",
    }
)


@dataclass(frozen=True)
class Limit:
    """What limits a run."""

    stage: StageName | None
    """None: the figures do not tell."""
    because: str
    """One sentence on how that shows."""
    settings: tuple[str, ...]
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
    stage, because = _limiting_stage(plan, figures, num_cores)
    if stage is None:
        return Limit(None, because, ())
    idle = num_cores - figures["end_to_end"]["cores_used"]
    # What other processes use is not free either.
    idle -= figures["end_to_end"].get("cores_used_by_others", 0.0)
    advisor = _Advisor(plan, num_cores, idle > (1 - _FULL) * num_cores)
    settings = {
        "sampling": advisor.sampling,
        "inference": advisor.inference,
        "simulation": advisor.simulation,
        "simulation_with_policy": advisor.inference,
        "learning": advisor.learning,
    }[stage]()
    return Limit(stage, because, tuple(settings[:_MOST_SETTINGS]))


def _limiting_stage(
    plan: Plan, figures: Mapping[StageName, Figures], num_cores: int
) -> tuple[StageName | None, str]:
    whole = figures["end_to_end"]
    # Taking turns, whatever takes longest limits; sharing busy cores, whatever costs most.
    seconds = {name: 1 / max(one["env_steps_per_second"], 1e-9) for name, one in figures.items()}
    cost = {name: one["core_us_per_env_step"] for name, one in figures.items()}
    if plan.runner.kind == "inline" and len(figures) > 1:
        stage, share = _largest(_apart(seconds))
        is_simulated = "simulation" in figures
        how = "all share one device" if is_simulated else "all take turns in one process"
        return stage, (
            f"{_NAMES[stage]} limits: {how}, and it takes {share:.0%} of the time that the stages"
            " take."
        )
    learner, actor = (whole.get(f"{side}_wait_share") or 0.0 for side in ("learner", "actor"))
    waits = (
        f"the learner waits {learner:.0%} of its time for a batch, actors {actor:.0%} for a free"
        " slot"
    )
    others = whole.get("cores_used_by_others", 0.0)
    is_full = whole["cores_used"] + others >= _FULL * num_cores
    if len(figures) > 1 and (is_full or abs(learner - actor) <= _EVEN):
        stage, share = _largest(cost if is_full else seconds)
        why = f"all {num_cores} cores are busy" if is_full else waits
        which = "core time" if is_full else "time"
        return stage, (
            f"{_NAMES[stage]} limits: {why}, and it takes {share:.0%} of the {which} that the"
            " stages take."
        )
    if whole.get("limiting_rate") == "consumption":
        return "learning", f"Learning limits: {waits}."
    producers = _producers(whole, seconds)
    if not producers:
        return None, f"Production limits: {waits}."
    stage = max(producers, key=lambda name: producers[name])
    return stage, f"{_NAMES[stage]} limits: {waits}{_busy(whole)}."


def _producers(whole: Figures, seconds: Mapping[StageName, float]) -> dict[StageName, float]:
    """How much of production each of its stages is: how busy its processes are, else its time."""
    if "env_worker_busy_share" in whole:
        return {
            "sampling": whole["env_worker_busy_share"],
            "inference": whole["policy_worker_busy_share"],
        }
    return {name: seconds[name] for name in ("sampling", "inference") if name in seconds}


def _busy(whole: Figures) -> str:
    if "env_worker_busy_share" not in whole:
        return ""
    return (
        f"; environment workers step {whole['env_worker_busy_share']:.0%} and policy workers"
        f" compute {whole['policy_worker_busy_share']:.0%} of the time"
    )


def _apart(amounts: Mapping[StageName, float]) -> dict[StageName, float]:
    """Without the simulation in what simulation and policy take together."""
    apart = dict(amounts)
    if "simulation" in apart and "simulation_with_policy" in apart:
        both = apart["simulation_with_policy"]
        apart["simulation_with_policy"] = max(0.0, both - apart["simulation"])
    return apart


def _largest(amounts: Mapping[StageName, float]) -> tuple[StageName, float]:
    """The stage, of those measured alone, with the largest amount, and its share of their sum."""
    alone = {name: amount for name, amount in amounts.items() if name != "end_to_end"}
    stage = max(alone, key=lambda name: alone[name])
    return stage, alone[stage] / sum(alone.values())


class _Advisor:
    """Settings that relieve a stage of this plan; only such as its config has.

    has_idle_cores: more processes or threads would find a place.
    """

    def __init__(self, plan: Plan, num_cores: int, has_idle_cores: bool) -> None:
        self._plan, self._num_cores, self._has_idle_cores = plan, num_cores, has_idle_cores
        config = plan.config
        self._env, self._policy = section(config, EnvConfig), section(config, PolicyConfig)
        self._sampler, self._actor = section(config, SamplerConfig), section(config, ActorConfig)
        self._learner = section(config, UnrollLearnerConfig)
        self._sim = section(config, SimConfig)

    def sampling(self) -> list[str]:
        """For faster environments."""
        found = [*self._more_processes(), *self._engine()]
        # C++ engines step few environments as cheaply as many.
        if self._env is None or not (self._env[1].is_atari or self._env[1].engine == "envpool"):
            found += self._more_envs()
        return found or ["more cores: this engine is the fastest there is"]

    def simulation(self) -> list[str]:
        """For a faster simulator."""
        found = []
        if self._sim is not None and self._sim[1].torch_device().type == "cpu":
            name = self._sim[0]
            found.append(f"a GPU ({_flag(name, 'device', 'cuda')})")
        return [*found, *self._more_envs()]

    def inference(self) -> list[str]:
        """For faster forward passes."""
        found = self._half_precision()
        if self._sampler is not None and self._has_idle_cores:
            name, sampler = self._sampler
            more = sampler.num_policy_workers + 1
            if more <= sampler.num_workers:
                found.append(_flag(name, "num_policy_workers", more))
        elif self._sampler is None:
            found += self._more_processes()
        return found + self._more_envs()

    def learning(self) -> list[str]:
        """For faster updates."""
        found, runner = self._half_precision(), self._plan.runner
        if self._has_idle_cores and runner.kind == "processes":
            more = min(max(runner.learner_threads, 1) + 1, self._num_cores)
            if more > runner.learner_threads:
                found.append(_flag("runner", "learner_threads", more))
        elif runner.kind == "inline" and self._has_idle_cores:
            found += self._more_processes()
        if self._learner is not None:
            name, learner = self._learner
            if learner.epochs > 1:
                found.append(
                    f"{_flag(name, 'epochs', learner.epochs - 1)} (learns less per sample)"
                )
            if learner.minibatches > 1:
                fewer = learner.minibatches // 2 if learner.minibatches % 2 == 0 else 1
                found.append(_flag(name, "minibatches", fewer))
        more = 2 * self._plan.queue.batch_size
        return [*found, f"{_flag('queue', 'batch_size', more)} (fewer updates per sample)"]

    def _more_processes(self) -> list[str]:
        """More processes that step environments, where cores are idle."""
        # A simulator on a device lives in one process.
        if not self._has_idle_cores or self._sim is not None:
            return []
        if self._plan.runner.kind == "inline":
            return [self._processes()]
        if self._sampler is not None:
            return [_flag(self._sampler[0], "num_workers", self._sampler[1].num_workers + 1)]
        if self._actor is not None:
            return [_flag(self._actor[0], "num_actors", self._actor[1].num_actors + 1)]
        return []

    def _processes(self) -> str:
        """Out of one process, with the same samples per update and the same staleness."""
        queue, flags = self._plan.queue, ["--runner.kind processes"]
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
            for path, item in self._plan.spec.fields.items()
            if path.split("/")[0] == "obs"
        )
        # On small networks over vectors it gains nothing, and emulated it is slower.
        if policy.compute_dtype == "float32" and reads_images and self._multiplies_bfloat16():
            return [_flag(name, "compute_dtype", "bfloat16")]
        return []

    def _multiplies_bfloat16(self) -> bool:
        sampler = self._sampler[1].device if self._sampler else "cpu"
        learner = self._learner[1].device if self._learner else "cpu"
        return has_bfloat16(sampler) and has_bfloat16(learner)


def _flag(table: str, key: str, value: Any) -> str:
    return f"{flag_of(f'{table}.{key}')} {value}"
