"""The actor on the device: simulator, policy and slot share one memory, and nothing comes to the
host (Makoviychuk et al., "Isaac Gym", arXiv 2108.10470).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from unirl.actors.vector import ActorConfig, unroll_spec
from unirl.config.rules import check_at_least
from unirl.core.actor import ActorContext
from unirl.core.sample import Field, SampleSpec, Slot
from unirl.core.seeding import derive_seed
from unirl.core.tree import copy_tree, tree_map
from unirl.core.weights import WeightStore
from unirl.device import check_device, device_name
from unirl.envs.config import EnvConfig
from unirl.envs.device import POLICY, DeviceEnv, Groups, SimSpec
from unirl.envs.sim.make import make_device_env
from unirl.metrics.timers import Timers
from unirl.policy import Policy, PolicyConfig


@dataclass(frozen=True)
class SimConfig:
    """How many environments a simulator steps at once, and where."""

    num_envs: int = field(default=4096, metadata={"common": True})
    """Environments side by side. More: a busier device and less noise per update, at more memory.
    """
    unroll_length: int = field(default=16, metadata={"common": True})
    """Steps per environment in one slot. More: longer credit assignment, fewer updates."""
    device: str = field(default="auto", metadata={"common": True})
    """Where simulator, policy and learner are: cpu, cuda or cuda:N; auto: cuda where there is one.
    """
    random_phases: bool = True
    """Begin as if the episodes had run for random times, so that time limits are spread evenly."""
    graph: bool = True
    """On CUDA: record an unroll once and replay it, where the simulator allows that."""
    num_simulators: int = 1
    """Runner ray only: simulators that feed one learner, each in a process of its own with
    `num_envs` environments, spread over the nodes; on CUDA each asks for a GPU.
    """

    def __post_init__(self) -> None:
        check_at_least(1, "sim", self, "num_envs", "unroll_length", "num_simulators")
        check_device("sim.device", self.device, may_be_auto=True)

    def torch_device(self) -> torch.device:
        """The device, whether it is there or not."""
        return torch.device(device_name(self.device))


def device_spec(sim: SimSpec, length: int, counters: Mapping[str, Tensor]) -> SampleSpec:
    """What an unroll of a simulator holds: that of the vector actor (docs/overview.md), on its
    device; and `final_obs` [K, N, D] where it resets within the step: the observations that the
    episodes of this unroll were cut off with, in order of time.
    """
    shape = ActorConfig(num_envs=sim.num_envs, unroll_length=length)
    fields = dict(unroll_spec(sim.observation_space, sim.action_space, shape, {}).fields)
    if sim.autoreset == "same_step" and sim.gives_final_obs:
        num_limits = length if sim.truncates_early else -(-length // sim.max_episode_length)
        for name, obs in list(fields.items()):
            if name == "obs" or name.startswith("obs/"):
                fields[f"final_{name}"] = Field((num_limits, *obs.shape[1:]), obs.dtype)
    for name in counters:
        fields[f"counter/{name}"] = Field((1,), torch.int64, batch_axis=0)
    return SampleSpec(fields, device=str(sim.device), resets_in_step=sim.autoreset == "same_step")


class DeviceActor:
    """Steps a simulator with its policy copy; one slot is one unroll of all environments.

    gamma is only used for `carry`, the running discounted return that reward scaling needs. On CUDA
    it works on a stream of its own, so that a learner with max_staleness >= 1 works beside it.
    """

    def __init__(
        self,
        env: DeviceEnv,
        policy: Policy,
        weights: WeightStore,
        *,
        sim: SimConfig,
        gamma: float,
        seed: int,
    ) -> None:
        self.sim, self.timers = env.spec, Timers()
        self._env, self._policy, self._weights = env, policy, weights
        self._length, self._gamma, self._random_phases = sim.unroll_length, gamma, sim.random_phases
        self._version = -1
        spec, device = env.spec, env.spec.device
        self._final = spec.autoreset == "same_step" and spec.gives_final_obs
        self._generator = torch.Generator(device)
        self._returns = torch.zeros(spec.num_envs, device=device)
        self._lengths = torch.zeros(spec.num_envs, dtype=torch.int32, device=device)
        self._carry = torch.zeros(spec.num_envs, device=device)
        self._counted = {name: total.clone() for name, total in env.counters().items()}
        self._rows: dict[int, _SlotRows] = {}
        self._obs: Groups = {}
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda" and spec.follows_stream:
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self._warm = False
        self._use_graph = sim.graph and spec.capturable and self._stream is not None
        self.restart(seed)

    def restart(self, seed: int) -> None:
        """Begin again, as an actor made with this seed does."""
        if self._stream is not None:  # what is reset here, an unroll may still be working with
            torch.cuda.current_stream(self._env.spec.device).wait_stream(self._stream)
        self._generator.manual_seed(derive_seed(seed, "actions"))
        obs = self._env.reset(
            derive_seed(seed, "environments") % 2**32, random_phases=self._random_phases
        )
        if not self._obs:
            self._obs = {name: value.clone() for name, value in obs.items()}
        else:  # in place: a recorded graph reads this memory
            for name, value in obs.items():
                self._obs[name].copy_(value)
        for total in (self._returns, self._lengths, self._carry):
            total.zero_()

    def produce(self, slot: Slot) -> None:
        """Fill the slot with one unroll of the newest weights."""
        rows = self._rows.get(slot.index)
        if rows is None:
            rows = self._rows[slot.index] = _SlotRows(slot.data, self._length)
        if self._stream is None:
            self._pull(slot)
            self._unroll(rows)
            return
        # The weights were published, and this buffer was read, on the learner's stream.
        learner_stream = torch.cuda.current_stream(self._env.spec.device)
        self._stream.wait_stream(learner_stream)
        with torch.cuda.stream(self._stream):
            self._pull(slot)
            pulled = self._stream.record_event()
            self._unroll_on_stream(slot.index, rows)
            slot.write_event = self._stream.record_event()
        # They may be the learner's own: before it changes them they must have been read.
        learner_stream.wait_event(pulled)

    def close(self) -> None:
        self._graphs.clear()
        self._env.close()

    def _pull(self, slot: Slot) -> None:
        self.timers.start()
        self._version = self._weights.pull(self._policy, self._version)
        self.timers.lap("weights")
        slot.first_version = slot.last_version = self._version

    def _unroll_on_stream(self, index: int, rows: _SlotRows) -> None:
        if not self._use_graph:
            self._unroll(rows)
        elif (graph := self._graphs.get(index)) is not None:
            graph.replay()
        elif not self._warm:
            self._unroll(rows)  # kernels and memory pools must be there before a graph is recorded
            self._warm = True
        else:
            graph = torch.cuda.CUDAGraph()
            for generator in (self._generator, *self._env.generators()):
                graph.register_generator_state(generator)
            with torch.cuda.graph(graph, stream=self._stream):
                self._unroll(rows)
            self._graphs[index] = graph
            graph.replay()  # recording computes nothing

    def _unroll(self, rows: _SlotRows) -> None:
        with torch.no_grad():
            rows.carry.copy_(self._carry)
            rows.write_obs(0, self._obs)
            cuts = torch.zeros_like(self._lengths) if len(rows.final_obs) > 1 else None
            for t in range(self._length):
                self._step(rows, t, cuts)
            for name, total in self._env.counters().items():
                before = self._counted[name]
                torch.sub(total, before, out=rows.counter[name])
                before.copy_(total)

    def _step(self, rows: _SlotRows, t: int, cuts: Tensor | None) -> None:
        action, logp, _ = self._policy.act(rows.acting_obs[t], {}, generator=self._generator)
        assert isinstance(action, Tensor)  # adapters refuse actions of several parts
        rows.action[t].copy_(action)
        rows.logp[t].copy_(logp)
        self.timers.lap("inference")
        step = self._env.step(action)
        rows.write_obs(t + 1, step.obs)
        if t + 1 == self._length:
            for name, value in step.obs.items():
                self._obs[name].copy_(value)
        rows.reward[t].copy_(step.reward)
        rows.terminated[t].copy_(step.terminated)
        rows.truncated[t].copy_(step.truncated)
        rows.mask[t].copy_(step.valid)
        if self._final and step.final_obs is not None:
            self._keep_final(rows, step.truncated, step.final_obs, cuts)
        self._account(rows, t)
        self.timers.lap("env")

    def _keep_final(
        self, rows: _SlotRows, truncated: Tensor, final_obs: Groups, cuts: Tensor | None
    ) -> None:
        """Write the final observations of environments that were cut off into their next row."""
        for k, row in enumerate(rows.final_obs):
            here = truncated if cuts is None else truncated & (cuts == k)
            for name, value in final_obs.items():
                torch.where(here.unsqueeze(1), value, row[name], out=row[name])
        if cuts is not None:
            cuts.add_(truncated)

    def _account(self, rows: _SlotRows, t: int) -> None:
        """Running totals of each episode; rows that are no transition count for nothing."""
        self._returns.add_(rows.reward[t])
        self._lengths.add_(1)
        self._carry.mul_(self._gamma).add_(rows.reward[t])
        rows.episode_return[t].copy_(self._returns)
        rows.episode_length[t].copy_(self._lengths)
        over = rows.terminated[t] | rows.truncated[t] | ~rows.mask[t]
        for total in (self._returns, self._lengths, self._carry):
            total.masked_fill_(over, 0)


class CarryingActor:
    """Fills slots in the memory of the CPU, which alone travels between machines, from a simulator
    whose tensors are elsewhere: the unroll stays on the device until it is whole.
    """

    def __init__(self, actor: DeviceActor, spec: SampleSpec) -> None:
        self._actor, self.timers = actor, actor.timers
        own = replace(spec, device=str(actor.sim.device)).allocate()
        self._own = Slot(index=0, ticket=0, data=own)

    def produce(self, slot: Slot) -> None:
        """Fill the slot with one unroll of the newest weights."""
        own = self._own
        self._actor.produce(own)
        slot.first_version, slot.last_version = own.first_version, own.last_version
        if own.write_event is not None:
            own.write_event.synchronize()
        copy_tree(own.data, slot.data)  # device -> host, once per unroll

    def close(self) -> None:
        self._actor.close()


class _SlotRows:
    """A slot's memory cut into rows once, so that a step writes without looking anything up."""

    def __init__(self, data: Mapping[str, Any], length: int) -> None:
        groups = data["obs"] if isinstance(data["obs"], Mapping) else {POLICY: data["obs"]}
        self._obs = [{name: leaf[t] for name, leaf in groups.items()} for t in range(length + 1)]
        self.acting_obs = [tree_map(lambda leaf, t=t: leaf[t], data["obs"]) for t in range(length)]
        final = data.get("final_obs", {})
        finals = final if isinstance(final, Mapping) else {POLICY: final}
        num_finals = len(next(iter(finals.values()))) if finals else 0
        self.final_obs = [
            {name: leaf[k] for name, leaf in finals.items()} for k in range(num_finals)
        ]
        self.action, self.logp = data["action"].unbind(0), data["logp"].unbind(0)
        self.reward, self.mask = data["reward"].unbind(0), data["mask"].unbind(0)
        self.terminated = data["terminated"].unbind(0)
        self.truncated = data["truncated"].unbind(0)
        self.episode_return = data["episode_return"].unbind(0)
        self.episode_length = data["episode_length"].unbind(0)
        self.carry = data["carry"]
        self.counter = {name: leaf[0] for name, leaf in data.get("counter", {}).items()}

    def write_obs(self, t: int, obs: Groups) -> None:
        for name, target in self._obs[t].items():
            target.copy_(obs[name])


class SimMaker:
    """Makes the simulators of a plan. Of a kind that a process can have only one of, the one that
    was asked what it is becomes the one that is used; a copy of the maker in another process makes
    its own.
    """

    def __init__(self, config: EnvConfig, device: torch.device) -> None:
        self._config, self._device = config, device
        self._asked: DeviceEnv | None = None

    def ask(self, num_envs: int, length: int) -> tuple[SimSpec, SampleSpec]:
        """What it is, and what an unroll of it holds."""
        env = make_device_env(self._config, num_envs, self._device)
        try:
            answer = env.spec, device_spec(env.spec, length, env.counters())
        except BaseException:
            env.close()
            raise
        if env.spec.single:
            self._asked = env
        else:
            env.close()
        return answer

    def __call__(self, num_envs: int) -> DeviceEnv:
        """The simulator; of a single kind as many environments as were asked about."""
        env, self._asked = self._asked, None
        return env or make_device_env(self._config, num_envs, self._device)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_asked": None}


def make_device_actor(
    context: ActorContext,
    *,
    make_env: Callable[[int], DeviceEnv],
    policy: PolicyConfig,
    sim: SimConfig,
    gamma: float,
    spec: SampleSpec,
) -> DeviceActor | CarryingActor:
    """The factory of a plan: bind all but `context` with functools.partial. make_env: from the
    number of environments. spec: of the slots.
    """
    device_env = make_env(sim.num_envs)
    device = device_env.spec.device
    try:
        spaces = (device_env.spec.observation_space, device_env.spec.action_space)
        module = Policy(*spaces, policy, seed=context.seed % 2**31).to(device).eval()
        actor = DeviceActor(
            device_env, module, context.weights, sim=sim, gamma=gamma, seed=context.seed
        )
        return actor if spec.device == str(device) else CarryingActor(actor, spec)
    except BaseException:
        device_env.close()
        raise
