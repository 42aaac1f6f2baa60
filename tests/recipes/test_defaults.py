"""Defaults by the environment's kind: who wins, what they depend on, what they never break."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import gymnasium
import pytest
from gymnasium.envs.classic_control import CartPoleEnv
from gymnasium.envs.registration import EnvSpec

import unirl
from tests.toy_envs import FAULT, toy_env
from unirl import config as configs
from unirl import registry
from unirl.commands.arguments import choose
from unirl.commands.train import TrainOptions
from unirl.config.writing import to_mapping, value_to_toml
from unirl.envs.config import EnvConfig
from unirl.recipes.defaults import Settled, settle
from unirl.recipes.env_kind import classify, kind_of

ROOT = Path(__file__).resolve().parents[2]


def settled(recipe: str, num_cores: int = 2, **overrides: Any) -> Settled:
    module = registry.recipe(recipe)
    config = configs.override(module.Config(), overrides)
    return settle(module, config, configs.nest(module.Config, overrides), num_cores)


def shipped(name: str) -> tuple[Any, Mapping[str, Any]]:
    table = configs.load_toml(ROOT / "configs" / f"{name}.toml")
    del table["name"]
    return registry.recipe(table.pop("recipe")), table


@pytest.mark.parametrize("num_cores", [1, 2, 64])
@pytest.mark.parametrize(
    "name",
    sorted(
        path.stem
        for path in (ROOT / "configs").glob("*.toml")
        if path.stem not in ("digits", "reverse")
    ),
)
def test_a_shipped_config_says_itself_whatever_its_kind_would_change(
    name: str, num_cores: int
) -> None:
    module, table = shipped(name)
    config = configs.from_mapping(module.Config, table)
    found = settle(module, config, table, num_cores)
    assert found.config == config, found.lines


def test_a_command_asks_an_environment_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []

    class Counted(gymnasium.Wrapper[Any, Any, Any, Any]):
        def __init__(self) -> None:
            made.append(self)
            super().__init__(CartPoleEnv())

    env_id = "unirl-test/Counted-v0"
    spec = EnvSpec(env_id, entry_point=Counted)
    monkeypatch.setitem(gymnasium.registry, env_id, spec)
    chosen, _ = choose(["impala", "--env.id", env_id], TrainOptions, "train")
    assert len(made) == 3, "for its mask, its spaces, and the time of its steps"
    chosen.plan()
    assert len(made) == 3, "and what it said is kept"
    chosen.module.plan(chosen.config)
    assert len(made) == 6, "for this command alone"


def test_flags_win_over_the_kind_and_the_kind_over_the_class() -> None:
    plain = registry.recipe("impala").Config()
    found = settled("impala", **{"env.id": "CartPole-v1", "actor.unroll_length": 7})
    assert found.config.actor.unroll_length == 7
    assert found.config.actor.num_envs != plain.actor.num_envs
    assert found.config.learner.gamma == plain.learner.gamma
    said = "\n".join(found.lines)
    assert "actor.num_envs 512" in said and "actor.unroll_length" not in said
    # What is resolved is complete: read again, it changes nothing.
    table = to_mapping(found.config)
    again = settle(registry.recipe("impala"), found.config, table, 2)
    assert again.config == found.config and not again.lines


def test_in_python_the_kind_counts_where_it_is_asked_for() -> None:
    overrides = {"env.id": "CartPole-v1", "run.total_steps": "2e5"}
    by_class = unirl.make_plan("ppo", **overrides)
    by_kind = unirl.make_plan("ppo", by_kind=True, **overrides)
    assert by_class.config.actor.num_envs == 8 and not by_class.notes
    assert by_kind.config.actor.num_envs == 512 and "vectorised" in by_kind.notes[0]
    assert by_kind.run.total_steps == 200_000


@pytest.mark.parametrize("recipe", ["impala", "ppo", "appo"])
@pytest.mark.parametrize("env_id", ["CartPole-v1", "LunarLander-v3", "ALE/Pong-v5"])
def test_what_is_printed_is_what_differs_from_the_classes(recipe: str, env_id: str) -> None:
    found, plain = settled(recipe, **{"env.id": env_id}), registry.recipe(recipe).Config()
    said = dict(re.findall(r"([a-z_.]+\.[a-z_]+) (\[.*?\]|[^,:]+)", "\n".join(found.lines[1:])))
    before, after = (dict(leaves(to_mapping(one))) for one in (plain, found.config))
    changed = {key for key in before.keys() | after.keys() if before.get(key) != after.get(key)}
    assert said == {key: value_to_toml(after[key]) for key in changed - {"env.id"}}


def leaves(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


SHAPES: Mapping[str, Mapping[str, Any]] = {
    "impala": {
        "actor.num_envs": 3,
        "actor.unroll_length": 5,
        "actor.num_actors": 7,
        "runner.kind": "processes",
        "policy.core": "lstm",
        "queue.max_staleness": 2,
        "queue.batch_size": 1,
        "learner.epochs": 3,
        "env.engine": "sync",
    },
    "ppo": {
        "actor.num_envs": 1,
        "actor.unroll_length": 17,
        "actor.num_actors": 5,
        "runner.kind": "processes",
        "policy.core": "gru",
        "learner.minibatches": 1,
        "queue.max_staleness": 1,
        "queue.batch_size": 1,
    },
    "appo": {
        "sampler.num_envs": 3,
        "sampler.num_workers": 5,
        "sampler.num_groups": 3,
        "sampler.unroll_length": 3,
        "sampler.num_policy_workers": 2,
        "sampler.batch_rows": 20,
        "queue.max_staleness": 0,
        "queue.batch_size": 1,
        "policy.core": "lstm",
        "learner.epochs": 1,
    },
}


@pytest.mark.parametrize("recipe", SHAPES)
@pytest.mark.parametrize("env_id", ["CartPole-v1", "Acrobot-v1", "Pendulum-v1", "torch/Cartpole"])
def test_no_setting_by_hand_fails_for_a_default_that_does_not_fit_it(
    recipe: str, env_id: str
) -> None:
    for index, (key, value) in enumerate(SHAPES[recipe].items()):
        if not (env_id.startswith("torch/") and key in ("policy.core", "env.engine")):
            cores = (1, 2, 64)[index % 3]
            found = settled(recipe, cores, **{"env.id": env_id, key: value})
            registry.recipe(recipe).plan(found.config)


@pytest.mark.parametrize(
    ("env_id", "stepping", "images", "continuous", "unscaled"),
    [
        ("CartPole-v1", "vectorised", False, False, True),
        ("Acrobot-v1", "quick", False, False, True),
        ("Taxi-v4", "quick", False, False, False),
        ("Pendulum-v1", "quick", False, True, False),
        ("ALE/Pong-v5", "atari", True, False, False),
        ("torch/Cartpole", "simulator", False, False, False),
    ],
)
def test_what_is_known_needs_no_step(
    env_id: str, stepping: str, images: bool, continuous: bool, unscaled: bool
) -> None:
    kind = kind_of(EnvConfig(env_id), may_time=False)
    assert (kind.stepping, kind.images) == (stepping, images)
    assert (kind.continuous, kind.unscaled) == (continuous, unscaled)


@pytest.mark.parametrize(
    ("kwargs", "stepping"),
    [
        ({}, "quick"),
        ({"step_seconds": 0.005}, "waiting"),
        ({"step_seconds": 0.005, "computes": True}, "slow"),
    ],
)
def test_a_step_of_an_unknown_environment_is_timed(kwargs: dict[str, Any], stepping: str) -> None:
    kind = kind_of(toy_env("Paced", kwargs=kwargs))
    assert kind.stepping == stepping, kind.why
    found = settled("impala", **{**PACED, "env.kwargs": kwargs}).config
    assert found.runner.kind == ("inline" if stepping == "quick" else "processes")
    assert found.env.engine == ("async" if stepping == "waiting" else "auto")


def test_classes_are_coarse_and_a_busy_machine_changes_none() -> None:
    for wall, cpu, sleeps, stepping in [
        (50e-6, 50e-6, 0.0, "quick"),
        (500e-6, 50e-6, 0.01, "quick"),  # others had the core
        (5e-3, 60e-6, 1.0, "waiting"),
        (9e-3, 5e-3, 0.1, "slow"),
        (5e-3, 5e-3, 0.0, "slow"),
    ]:
        assert classify(wall, cpu, sleeps)[0] == stepping, (wall, cpu, sleeps)


@pytest.mark.parametrize(
    ("kwargs", "stepping", "words"),
    [
        ({"raise_at": 3}, "quick", "fault at step 3"),
        ({"sleep_at": 3, "sleep_seconds": 30.0}, "slow", "more than 0.2 s"),
    ],
)
def test_a_fault_while_steps_are_timed_ends_nothing(
    kwargs: dict[str, Any], stepping: str, words: str
) -> None:
    kind = kind_of(toy_env("Fault", kwargs=kwargs), deadline_seconds=0.2)
    assert kind.stepping == stepping and words in kind.why


def test_a_simulator_of_tensors_names_its_recipe() -> None:
    assert "unirl train ondevice" in "\n".join(
        settled("impala", **{"env.id": "torch/Cartpole"}).lines
    )
    found = settled("ondevice", **{"env.id": "torch/Cartpole", "sim.device": "cpu"}).config
    assert found.sim.num_envs == 2048 and found.runner.learner_threads == 1
    found = settled("ondevice", **{"env.id": "torch/Cartpole", "sim.device": "cuda"}).config
    assert found.sim.num_envs == 4096


def test_robots_are_learned_with_the_same_objective_by_either_recipe() -> None:
    both = [settled(recipe, **{"env.id": "HalfCheetah-v5"}).config for recipe in ("impala", "ppo")]
    assert both[0].policy == both[1].policy and both[0].policy.initial_std == 0.4
    impala, ppo = (vars(config.learner) for config in both)
    assert impala.items() <= ppo.items()


def test_more_cores_start_processes_for_quick_environments() -> None:
    few, many = (settled("impala", cores, **{"env.id": "Acrobot-v1"}).config for cores in (2, 8))
    assert few.runner.is_inline and not many.runner.is_inline
    assert many.actor.num_actors == 8 and many.queue.num_slots >= 8


def test_each_environment_of_a_mix_has_actors_with_slots() -> None:
    mix = {"ALE/Pong-v5": 1.0, "ALE/Breakout-v5": 1.0, "ALE/Freeway-v5": 1.0}
    found = settled("ppo", **{"env.id": "ALE/Pong-v5", "mix": mix}).config
    assert found.queue.num_slots >= 3 * found.actor.num_actors


PACED = {"env.id": "toy/Paced-v0", "env.import_module": FAULT["env.import_module"]}
