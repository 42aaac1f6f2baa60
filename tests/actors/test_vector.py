"""What the vector actor writes into a slot, row by row, against episodes computed by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tests.toy_envs import toy_env
from unirl.actors.vector import ActorConfig, VectorActor, make_vector_actor, unroll_spec
from unirl.core.actor import ActorContext
from unirl.core.sample import Slot
from unirl.core.tree import flatten
from unirl.envs.config import EnvConfig
from unirl.envs.make import make_vec, spaces
from unirl.errors import UniRLError
from unirl.policy import Policy, PolicyConfig
from unirl.transports.local import LocalWeightStore

GAMMA = 0.5


def make(
    env: EnvConfig,
    *,
    length: int = 12,
    num_envs: int = 2,
    policy: PolicyConfig | None = None,
    seed: int = 0,
    judged: bool = False,
) -> tuple[VectorActor, Slot, Policy]:
    config = policy or PolicyConfig(hidden=(8,))
    actor = ActorConfig(1, num_envs, length)
    learner_policy = Policy(*spaces(env), config, seed=1)
    store = LocalWeightStore()
    store.publish(learner_policy.weights(), 3)
    made = make_vector_actor(
        ActorContext(0, seed, store), env=env, policy=config, actor=actor, gamma=GAMMA
    )
    state = learner_policy.initial_state(1)
    spec = unroll_spec(*spaces(env), actor, state, judged=judged)
    return made, Slot(0, 0, spec.allocate()), learner_policy


def counting() -> EnvConfig:
    """Episodes of 3 steps that terminate and of 2 that are truncated, in turn; reward = step."""
    return toy_env("Counting", "sync")


def test_episodes_lie_in_the_slot_as_computed_by_hand() -> None:
    actor, slot, _ = make(counting(), length=9)
    actor.produce(slot)
    data = {name: value[:, 0] for name, value in slot.data.items() if name not in ("carry",)}
    t, f = True, False
    # obs is [episode, step]: 3 steps, the filler, 2 steps, the filler, and the next episode.
    assert data["obs"].tolist() == [
        [0, 0], [0, 1], [0, 2], [0, 3], [1, 0], [1, 1], [1, 2], [2, 0], [2, 1], [2, 2],
    ]  # fmt: skip
    assert data["mask"].tolist() == [t, t, t, f, t, t, f, t, t]
    assert data["terminated"].tolist() == [f, f, t, f, f, f, f, f, f]
    assert data["truncated"].tolist() == [f, f, f, f, f, t, f, f, f]
    assert data["reward"].tolist() == [1, 2, 3, 0, 1, 2, 0, 1, 2]
    assert data["episode_length"].tolist() == [1, 2, 3, 0, 1, 2, 0, 1, 2]
    assert data["episode_return"].tolist() == [1, 3, 6, 0, 1, 3, 0, 1, 3]


def test_the_next_unroll_begins_where_the_last_one_ended() -> None:
    actor, slot, _ = make(counting(), length=2)
    actor.produce(slot)
    assert slot.data["carry"].tolist() == [0, 0]
    actor.produce(slot)
    assert slot.data["obs"][0].tolist() == [[0, 2], [0, 2]]
    # The discounted sum of the episode so far, for reward scaling.
    assert slot.data["carry"].tolist() == [1 * GAMMA + 2] * 2
    assert slot.data["episode_length"][:, 0].tolist() == [3, 0]


def test_versions_are_those_of_the_weights_that_acted() -> None:
    actor, slot, _ = make(counting())
    actor.produce(slot)
    assert (slot.first_version, slot.last_version) == (3, 3)


POLICIES = {
    "mlp": PolicyConfig(hidden=(8,)),
    "lstm": PolicyConfig(hidden=(8,), core="lstm", core_size=4),
    "gru": PolicyConfig(hidden=(8,), core="gru", core_size=4),
}


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("env_id", ["CartPole-v1", "Pendulum-v1"])
def test_the_learner_finds_the_actors_log_probabilities_again(name: str, env_id: str) -> None:
    env = EnvConfig(id=env_id, max_episode_steps=5)
    actor, slot, policy = make(env, length=23, policy=POLICIES[name])
    for _ in range(2):  # the second unroll begins in the middle of an episode, with its state
        actor.produce(slot)
        data = slot.data
        assert not data["mask"].all()
        reset = torch.cat((torch.zeros_like(data["mask"][:1]), ~data["mask"]))
        unroll = policy.unroll(data["obs"], data.get("state", {}), reset)
        new_logp = unroll.distribution[:-1].log_prob(data["action"])
        kept = data["mask"]
        torch.testing.assert_close(new_logp[kept], data["logp"][kept], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("length", [3, 4], ids=["ends at the end", "ends at the filler"])
def test_no_reward_is_carried_into_the_next_episode(length: int) -> None:
    actor, slot, _ = make(counting(), length=length)
    actor.produce(slot)
    actor.produce(slot)
    assert slot.data["carry"].tolist() == [0, 0]


class Overflown(Policy):
    """A policy whose state begins infinite."""

    def initial_state(self, num_envs: int) -> Any:
        return {
            k: torch.full_like(v, torch.inf) for k, v in super().initial_state(num_envs).items()
        }


def test_an_infinite_state_ends_with_its_episode() -> None:
    env = make_vec(counting(), 2)
    policy = Overflown(env.observation_space, env.action_space, POLICIES["gru"], seed=0)
    store = LocalWeightStore()
    store.publish(policy.weights(), 0)
    actor = VectorActor(env, policy, store, unroll_length=4, gamma=GAMMA, seed=0)
    actor_config = ActorConfig(1, 2, 4)
    spec = unroll_spec(
        env.observation_space, env.action_space, actor_config, policy.initial_state(1)
    )
    slot = Slot(0, 0, spec.allocate())
    actor.produce(slot)
    assert slot.data["state"]["h"].isinf().all()
    actor.produce(slot)  # its first row follows the filler
    assert (slot.data["state"]["h"] == 0).all()


def test_memory_is_refused_where_first_observations_are_hidden() -> None:
    env = toy_env("Counting", kwargs={"autoreset_mode": "SameStep"})
    with pytest.raises(UniRLError, match=r"policy\.core 'lstm' .*toy/Counting-v0") as error:
        make(env, policy=POLICIES["lstm"])
    assert len(error.value.parts) == 3
    actor, slot, _ = make(env, policy=POLICIES["mlp"])
    actor.produce(slot)
    assert not slot.data["mask"].all()


def test_in_a_same_step_engine_the_policy_acts_on_first_observations_not_on_final_ones() -> None:
    env = toy_env("Counting", kwargs={"autoreset_mode": "SameStep"})
    actor, slot, policy = make(env, length=3, num_envs=1)
    # [episode, step]: 3 steps and 2 in turn. [0, 3], [1, 2] and [2, 3] are final, and the first of
    # them ends an unroll.
    seen = torch.tensor(
        [
            [[0, 0], [0, 1], [0, 2]],
            [[1, 0], [1, 1], [2, 0]],
            [[2, 1], [2, 2], [3, 0]],
        ]
    ).float()  # fmt: skip
    for obs in seen.unsqueeze(2):
        actor.produce(slot)
        logp = policy.unroll(obs, {}).distribution.log_prob(slot.data["action"])
        torch.testing.assert_close(slot.data["logp"], logp, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("engine", ["NextStep", "SameStep"])
@pytest.mark.parametrize("shared", [True, False])
def test_values_are_those_of_what_the_slot_shows_and_change_no_action(
    engine: str, shared: bool
) -> None:
    env = toy_env("Counting", kwargs={"autoreset_mode": engine})
    config = PolicyConfig(hidden=(8,), shared_torso=shared)
    plain, without, _ = make(env, policy=config, length=7)
    actor, slot, policy = make(env, policy=config, length=7, judged=True)
    for _ in range(2):
        plain.produce(without)
        actor.produce(slot)
        assert torch.equal(slot.data["action"], without.data["action"])
        assert torch.equal(slot.data["logp"], without.data["logp"])
        with torch.no_grad():
            values = policy.value(slot.data["obs"])
        assert slot.data["value"].unique().numel() > 3
        torch.testing.assert_close(slot.data["value"], values, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["mlp", "lstm"])
def test_a_seed_decides_everything_and_restart_returns_to_it(name: str) -> None:
    env = EnvConfig(id="CartPole-v1")
    unrolls = []
    for seed in (5, 5, 6):
        actor, slot, _ = make(env, policy=POLICIES[name], seed=seed)
        actor.produce(slot)
        unrolls.append({k: v.clone() for k, v in flatten(slot.data).items()})
    actor.produce(slot)
    actor.restart(5)
    actor.produce(slot)
    again = flatten(slot.data)
    assert all(torch.equal(unrolls[0][k], unrolls[1][k]) for k in unrolls[0])
    assert all(torch.equal(unrolls[0][k], again[k]) for k in unrolls[0])
    assert not torch.equal(unrolls[0]["obs"], unrolls[2]["obs"])


def test_unbounded_actions_are_stored_and_bounded_ones_are_taken() -> None:
    env = EnvConfig(id="Pendulum-v1")
    actor, slot, _ = make(env, length=40, policy=PolicyConfig(hidden=(8,), initial_std=5.0))
    actor.produce(slot)  # Pendulum's bounds are +-2
    assert slot.data["action"].abs().max() > 2
    assert np.isfinite(slot.data["logp"].numpy()).all()


@pytest.mark.parametrize("fault", ["nan_at", "shape_at"])
def test_broken_observations_stop_the_actor_with_the_environments_name(fault: str) -> None:
    env = toy_env("Fault", "sync", kwargs={fault: 4})
    actor, slot, _ = make(env, length=8)
    with pytest.raises(UniRLError, match="toy/Fault-v0") as error:
        actor.produce(slot)
    assert len(error.value.parts) == 3


@pytest.mark.parametrize("wrong", [{"num_envs": 0}, {"unroll_length": 0}, {"num_actors": -1}])
def test_settings_that_break_a_rule_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(UniRLError):
        ActorConfig(**wrong)


def test_environments_are_closed_with_the_actor() -> None:
    vector_env = make_vec(EnvConfig(id="CartPole-v1", engine="sync"), 2)
    vector_env.reset(0)
    vector_env.close()
    vector_env.close()  # a second call does nothing
