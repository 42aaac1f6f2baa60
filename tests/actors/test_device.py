"""The device actor writes what a simulator says into the right rows, and never waits for it."""

from __future__ import annotations

import pickle
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.actors.clock_sim import ClockSim
from unirl.actors import device as device_module
from unirl.actors.device import CarryingActor, DeviceActor, SimConfig, SimMaker, device_spec
from unirl.core.sample import Slot
from unirl.core.tree import leaves
from unirl.envs.config import EnvConfig
from unirl.envs.device import SimStep
from unirl.errors import UniRLError
from unirl.policy import Policy, PolicyConfig
from unirl.transports.local import LocalWeightStore

HIDDEN = (8,)


def make(env: ClockSim, length: int, **policy: Any) -> tuple[DeviceActor, Slot, Policy]:
    config = PolicyConfig(hidden=HIDDEN, shared_torso=False, **policy)
    module = Policy(env.spec.observation_space, env.spec.action_space, config, seed=1)
    weights = LocalWeightStore()
    weights.publish(module.weights(), 0)
    actor = DeviceActor(
        env, module, weights, sim=SimConfig(unroll_length=length), gamma=0.9, seed=3
    )
    spec = device_spec(env.spec, length, env.counters())
    return actor, Slot(0, 0, spec.allocate()), module


def test_rows_hold_what_the_simulator_said() -> None:
    env = ClockSim(num_envs=4, length=5)
    actor, slot, _ = make(env, 7)
    actor.produce(slot)
    data = slot.data
    at = torch.tensor([0, 1, 2, 3, 4, 0, 1, 2])
    assert torch.equal(data["obs"][:, 2, 2], at.float())
    assert torch.equal(data["obs"][:, 2, 1], torch.tensor([0, 0, 0, 0, 0, 1, 1, 1]).float())
    assert torch.equal(data["obs"][0, :, 0], torch.arange(4).float())
    assert torch.equal(data["reward"], (1 + at[:7].float()).unsqueeze(1).expand(7, 4))
    ends = torch.zeros(7, 4, dtype=torch.bool)
    ends[4] = True
    odd = torch.tensor([False, True, False, True])
    assert torch.equal(data["terminated"], ends & odd)
    assert torch.equal(data["truncated"], ends & ~odd)
    assert data["mask"].all()
    assert torch.equal(data["action"], torch.stack(env.actions))
    assert (slot.first_version, slot.last_version) == (0, 0)


def test_slots_elsewhere_get_whole_unrolls_of_the_device() -> None:
    here, slot, _ = make(ClockSim(length=5), 3)
    env = ClockSim(length=5)
    spec = device_spec(env.spec, 3, env.counters())
    carrying = CarryingActor(make(env, 3)[0], spec)
    others = [Slot(index, index, spec.allocate()) for index in range(2)]
    for number in range(4):
        here.produce(slot)
        carrying.produce(other := others[number % 2])
        assert (other.first_version, other.last_version) == (0, 0)
        for (name, value), (_, carried) in zip(leaves(slot.data), leaves(other.data), strict=True):
            assert torch.equal(value, carried), name


def test_running_totals_restart_with_each_episode_and_continue_over_slots() -> None:
    actor, slot, _ = make(ClockSim(length=5), 3)
    returns, lengths, carries = [], [], []
    for _ in range(3):
        actor.produce(slot)
        returns += slot.data["episode_return"][:, 0].tolist()
        lengths += slot.data["episode_length"][:, 0].tolist()
        carries.append(float(slot.data["carry"][0]))
    assert returns == [1, 3, 6, 10, 15, 1, 3, 6, 10]
    assert lengths == [1, 2, 3, 4, 5, 1, 2, 3, 4]
    assert carries == pytest.approx([0, 1 * 0.81 + 2 * 0.9 + 3, 1])


def test_final_observations_are_those_that_episodes_were_cut_off_with() -> None:
    actor, slot, _ = make(ClockSim(num_envs=4, length=3), 8)
    actor.produce(slot)
    final = slot.data["final_obs"]
    assert final.shape == (3, 4, 3)  # at most ceil(8 / 3) limits in 8 steps
    for env in (0, 2):
        assert final[0, env].tolist() == [env, 0, 3]
        assert final[1, env].tolist() == [env, 1, 3]


class Falls(ClockSim):
    """The first episode of every environment ends by the rules."""

    def step(self, action: Tensor) -> SimStep:
        step = super().step(action)
        fell = step.truncated & (self._episode == 1)
        return step._replace(terminated=step.terminated | fell, truncated=step.truncated & ~fell)


def test_final_observations_of_terminated_episodes_take_no_row() -> None:
    actor, slot, _ = make(Falls(num_envs=4, length=3), 8)
    actor.produce(slot)
    assert slot.data["terminated"][2, 0] and slot.data["truncated"][5, 0]
    assert slot.data["final_obs"][0, 0].tolist() == [0, 1, 3]  # of the first cut, not of the fall


def test_a_critic_group_reaches_the_slot_and_not_the_actor() -> None:
    actor, slot, module = make(ClockSim(critic=True), 4, critic_group="critic")
    actor.produce(slot)
    obs = slot.data["obs"]
    assert torch.equal(obs["critic"], obs["policy"] * 10)
    seen = {"policy": obs["policy"][:1], "critic": obs["critic"][:1]}
    blind = {**seen, "critic": torch.zeros_like(seen["critic"])}
    logits = [module.unroll(x, {}).distribution.mode() for x in (seen, blind)]
    values = [module.unroll(x, {}).value for x in (seen, blind)]
    assert torch.equal(*logits)
    assert not torch.equal(*values)


def test_a_lost_state_is_no_transition_and_is_counted() -> None:
    actor, slot, _ = make(ClockSim(broken=(2, 1)), 4)
    actor.produce(slot)
    assert slot.data["mask"].tolist()[2] == [True, False, True, True]
    assert slot.data["counter"]["nan_states"].tolist() == [1]
    assert slot.data["episode_return"][3, 1] == 1.0
    actor.produce(slot)
    assert slot.data["counter"]["nan_states"].tolist() == [0]


def test_the_same_seed_gives_the_same_unroll_and_a_restart_is_a_new_actor() -> None:
    slots = []
    for _ in range(2):
        actor, slot, _ = make(ClockSim(), 6)
        actor.produce(slot)
        slots.append(slot)
    assert torch.equal(slots[0].data["action"], slots[1].data["action"])
    actor.produce(slots[1])
    assert not torch.equal(slots[0].data["action"], slots[1].data["action"])
    actor.restart(3)
    actor.produce(slots[1])
    assert torch.equal(slots[0].data["action"], slots[1].data["action"])


@pytest.mark.parametrize("setting", [{"num_envs": 0}, {"unroll_length": 0}])
def test_sizes_below_one_are_refused(setting: dict[str, int]) -> None:
    with pytest.raises(UniRLError, match=next(iter(setting))):
        SimConfig(**setting)


@pytest.mark.parametrize("device", ["gpu", "meta", "cpu:1", "cuda:x"])
def test_an_unknown_device_is_refused(device: str) -> None:
    with pytest.raises(UniRLError, match=rf"sim.device '{device}' is unknown"):
        SimConfig(device=device)


def test_a_simulator_that_a_process_has_only_once_is_made_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = []

    def make(config: EnvConfig, num_envs: int, device: torch.device) -> ClockSim:
        env = ClockSim(num_envs=num_envs)
        env.spec = replace(env.spec, single=config.kwargs["single"])
        made.append(env)
        return env

    monkeypatch.setattr(device_module, "make_device_env", make)
    for single, number in ((True, 1), (False, 2)):
        made.clear()
        maker = SimMaker(EnvConfig("torch/Clock", kwargs={"single": single}), torch.device("cpu"))
        spec, _ = maker.ask(3, 4)
        assert (spec.num_envs, maker(3).spec.num_envs, len(made)) == (3, 3, number)
        assert pickle.loads(pickle.dumps(maker))(3) is made[-1] and len(made) == number + 1
