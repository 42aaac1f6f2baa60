"""PPO on the device: simulator, policy, slots and learner share one memory, and the host only says
what comes next.

    device actor -> slots of T x N in device memory -> queue -> PPO learner -> weights -> actor

With max_staleness 1 the actor simulates the next unroll while the learner learns from this one, and
V-trace corrects for the lag. Rudin et al., "Learning to walk in minutes" (arXiv 2109.11978).

With runner ray there are simulators on several nodes, and unrolls travel in the memory of the CPU.
Under torchrun each process does all this on a device of its own, with environments of its own, and
the learners' sums are those of all (learners/parallel.py).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial

from unirl.actors.device import SimConfig, SimMaker, make_device_actor
from unirl.actors.evaluate_device import DeviceEvaluator
from unirl.core.pool import Pool, Resources
from unirl.core.queue import QueueConfig
from unirl.envs.config import EnvConfig
from unirl.envs.device import CRITIC, SimSpec
from unirl.errors import UniRLError
from unirl.learners.config import check_minibatches
from unirl.learners.optimizer import OptimizerConfig
from unirl.learners.parallel import Ranks
from unirl.learners.ppo import PpoLearnerConfig, PpoObjective
from unirl.policy import Policy, PolicyConfig
from unirl.policy.own.network import check_own_networks
from unirl.policy.precision import settle_dtype
from unirl.population.config import PopulationConfig
from unirl.recipes.defaults import Choices
from unirl.recipes.env_defaults import for_simulator
from unirl.recipes.population import with_population
from unirl.recipes.probe import EnvFacts, bind_learner, fingerprint_of
from unirl.runners.config import RayConfig, RunConfig, RunnerConfig
from unirl.runners.plan import LearnerPlan, Plan


@dataclass(frozen=True)
class Config:
    """Everything that can be set for a run on a device."""

    env: EnvConfig = field(default_factory=lambda: EnvConfig(id="torch/Cartpole"))
    sim: SimConfig = field(default_factory=SimConfig)
    policy: PolicyConfig = field(
        default_factory=lambda: PolicyConfig(
            hidden=(256, 128, 64), activation="elu", shared_torso=False
        )
    )
    learner: PpoLearnerConfig = field(
        default_factory=lambda: PpoLearnerConfig(
            optimizer=OptimizerConfig(lr=3e-4, lr_schedule="adaptive", max_grad_norm=1.0),
            entropy_coef=0.0,
            value_coef=1.0,
            normalize_reward=False,
            normalize_value=True,
            shuffle="batch",
            epochs=5,
            minibatches=4,
        )
    )
    queue: QueueConfig = field(default_factory=lambda: QueueConfig(max_staleness=0))
    runner: RunnerConfig = field(default_factory=RunnerConfig)
    ray: RayConfig = field(default_factory=RayConfig)
    population: PopulationConfig = field(default_factory=PopulationConfig)
    run: RunConfig = field(
        default_factory=lambda: RunConfig(total_steps=50_000_000, checkpoint_steps=50_000_000)
    )


def defaults(choices: Choices) -> None:
    """What is set where nobody says anything, by the device and the simulator."""
    for_simulator(choices, on_cpu=choices["sim"].torch_device().type == "cpu")


def plan(config: Config) -> Plan:
    """Of one policy, or of a population; nothing is started."""
    in_population = config.population.size > 1
    return with_population(config, partial(_plan_one, in_population=in_population))


def _plan_one(config: Config, *, in_population: bool) -> Plan:
    """Make the simulator once to ask it, let it go, and bind the pieces."""
    is_ray = config.runner.kind == "ray"
    if not config.runner.is_inline and not is_ray:
        raise UniRLError(
            f"recipe ondevice runs in the {config.runner.kind} runner",
            "tensors that never leave their device need one process: runner.kind must be inline; "
            "or ray, where unrolls leave it for other machines",
            "leave runner.kind out, or use recipe ppo or appo",
        )
    if config.sim.num_simulators > 1 and not is_ray:
        raise UniRLError(
            f"sim.num_simulators is {config.sim.num_simulators} in the inline runner",
            "it has one simulator, in its own process",
            "use more sim.num_envs, or runner.kind ray; torchrun starts a learner for each",
        )
    check_minibatches(
        config.learner.minibatches,
        config.sim.num_envs * config.queue.batch_size,
        config.sim.unroll_length if config.policy.core == "none" else None,
        what="sim.num_envs * queue.batch_size",
        length="sim.unroll_length",
    )
    placed = _placed(config.sim, Ranks.from_environment())
    device = placed.torch_device()
    if config.learner.device not in ("cpu", str(device)):
        raise UniRLError(
            f"learner.device is {config.learner.device} and sim.device {device}",
            "simulator and learner share one device",
            "set sim.device, and leave learner.device out",
        )
    config = replace(config, policy=settle_dtype(config.policy, device))
    maker = SimMaker(config.env, device)
    sim, spec = maker.ask(placed.num_envs, placed.unroll_length)
    if is_ray:
        spec = replace(spec, device="cpu")
    policy = _policy_for(config.policy, sim)
    if config.learner.truncation == "final" and _hides_final_obs(sim):
        raise UniRLError(
            f'env "{config.env.id}" does not tell the observation that an episode ended with',
            "learner.truncation is final, which needs it",
            "set learner.truncation to previous",
        )
    if sim.single and in_population:
        raise UniRLError(
            f'env "{config.env.id}" cannot train a population',
            "a process can have one simulator of its kind, and each learner needs one",
            "leave population out: unirl sweep trains a process at a time",
        )
    if sim.single and config.run.eval_steps:
        raise UniRLError(
            f'env "{config.env.id}" cannot be evaluated while it trains',
            "a process can have one simulator of its kind; run.eval_steps must be 0, "
            f"it is {config.run.eval_steps}",
            "evaluate afterwards: unirl eval RUN",
        )
    spaces = (sim.observation_space, sim.action_space)
    if policy.module:
        check_own_networks(Policy(*spaces, policy, seed=0))
    found = EnvFacts(spaces, spec, fingerprint_of(config.env.id, spaces, policy))
    learner = replace(config.learner, device=str(sim.device))
    on_policy = config.queue.max_staleness == 0
    make_actor = partial(
        make_device_actor,
        make_env=maker,
        policy=policy,
        sim=placed,
        gamma=config.learner.gamma,
        spec=spec,
    )
    gpus = 1.0 if sim.device.type == "cuda" else 0.0
    return Plan(
        "ondevice",
        pools=(Pool(make_actor, count=placed.num_simulators, resources=Resources(gpus=gpus)),),
        learners=(
            LearnerPlan(
                bind_learner(
                    replace(config, policy=policy, learner=learner),
                    found,
                    partial(PpoObjective, on_policy=on_policy),
                ),
                spec,
                config.queue,
                ranks=config.learner.ranks,
                make_evaluator=partial(DeviceEvaluator, maker, policy),
                fingerprint=found.fingerprint,
            ),
        ),
        config=config,
        runner=config.runner,
        ray=config.ray,
        run=config.run,
    )


def _placed(sim: SimConfig, ranks: Ranks) -> SimConfig:
    """On this process's own device, where several train together."""
    if ranks.world_size == 1:
        return sim
    return replace(sim, device=ranks.own_device(str(sim.torch_device())))


def _policy_for(policy: PolicyConfig, sim: SimSpec) -> PolicyConfig:
    """With the critic's own observations, where the simulator has them."""
    if policy.core != "none":
        raise UniRLError(
            f"policy.core is {policy.core!r}",
            "recipe ondevice trains policies without memory",
            "set policy.core to none, or use recipe ppo or appo",
        )
    if CRITIC in sim.observation and not policy.critic_group:
        policy = replace(policy, critic_group=CRITIC)
    if policy.critic_group and policy.critic_group not in sim.observation:
        raise UniRLError(
            f"policy.critic_group is {policy.critic_group!r}",
            f"the observation groups of {sim.id} are {', '.join(sim.observation)}",
            "leave policy.critic_group out: a group named critic is used by itself",
        )
    return policy


def _hides_final_obs(sim: SimSpec) -> bool:
    return sim.autoreset == "same_step" and not sim.gives_final_obs
