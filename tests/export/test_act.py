"""An exported policy is the policy: the same actions for raw observations, any number of rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import Space
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Tuple
from gymnasium.vector.utils import batch_space

from unirl.action_space import ActionMask
from unirl.core.tree import tree_map
from unirl.envs.spaces import action_writer, obs_reader
from unirl.export.act import ActFunction, Port
from unirl.export.description import write_description
from unirl.export.onnx import write_onnx
from unirl.export.policy import ExportedPolicy
from unirl.export.safetensors import write_safetensors
from unirl.export.torchscript import write_torchscript
from unirl.policy import Policy, PolicyConfig

pytest.importorskip("onnxruntime", reason="pip install 'unirl[export]'")
pytest.importorskip("onnxscript", reason="pip install 'unirl[export]'")

NUMBERS = Box(-5, 5, (6,), np.float32)
PLANES = Box(0, 255, (4, 40, 40), np.uint8)
HYBRID = Dict(
    {
        "tools": Tuple((MultiBinary(2), Dict({"cards": MultiDiscrete([2, 3])}))),
        "move": Discrete(3, start=-1),
        "aim": Box(np.float32([-2, -1]), np.float32([2, 1]), dtype=np.float32),
    }
)
NESTED = Dict(
    {
        "a": Box(-1, 1, (3,), np.float64),
        "t": Tuple((Discrete(4, start=2), MultiBinary(3), MultiDiscrete([2, 3]))),
    }
)
CASES: dict[str, tuple[Space[Any], Space[Any], PolicyConfig]] = {
    "box": (
        NUMBERS,
        Box(-0.1, 0.1, (3,), np.float64),
        PolicyConfig(normalize_obs=True, activation="elu", hidden=(1024, 1024)),
    ),
    "dict": (NESTED, MultiDiscrete([3, 4]), PolicyConfig(normalize_obs=True)),
    "image": (PLANES, Discrete(6), PolicyConfig(normalize_images=True, feature_size=32)),
    "recurrent, hybrid and masked": (
        Dict(
            {
                "numbers": Box(-5, 5, (6,), np.float64),
                "image": Box(0, 255, (16, 16, 3), np.uint8),
                "action_mask": ActionMask(12),
            }
        ),
        HYBRID,
        PolicyConfig(
            torso="impala", core="lstm", core_size=16, feature_size=16, normalize_obs=True
        ),
    ),
    "masked": (
        Dict({"obs": NUMBERS, "action_mask": ActionMask(5)}),
        Discrete(5, start=2),
        PolicyConfig(),
    ),
    "own": (NESTED, HYBRID, PolicyConfig(module="tests.networks:Whole", normalize_obs=True)),
    "own, with memory": (
        NUMBERS,
        Box(-0.1, 0.1, (3,), np.float64),
        PolicyConfig(module="tests.networks:WholeMemory", core="own"),
    ),
    "critic": (
        Dict({"obs": NUMBERS, "secret": NUMBERS, "action_mask": ActionMask(12)}),
        HYBRID,
        PolicyConfig(core="none", critic_group="secret", shared_torso=False),
    ),
}


def trained(name: str) -> ExportedPolicy:
    """A policy with statistics, whose actions differ from row to row."""
    observation_space, action_space, config = CASES[name]
    policy = Policy(observation_space, action_space, config, seed=1)
    generator = torch.Generator().manual_seed(0)
    for parameter in policy.parameters():
        parameter.data += 0.05 * torch.randn(parameter.shape, generator=generator)
    obs = tree_map(lambda leaf: leaf[None], observed(observation_space, 16)[1])
    policy.update_normalizer(obs, torch.ones(1, 16, dtype=torch.bool))
    return ExportedPolicy(policy, observation_space, action_space)


def observed(space: Space[Any], num_rows: int) -> tuple[Any, Any]:
    """A batch as environments give it, and as policies read it."""
    batch = batch_space(space, num_rows)
    batch.seed(num_rows)
    raw = batch.sample()
    if isinstance(raw, dict) and "action_mask" in raw:
        raw["action_mask"][:, 1::3] = 1  # something is allowed in each choice
    return raw, tree_map(torch.from_numpy, obs_reader(space)(raw, num_rows))


def at(tree: Any, port: Port) -> Any:
    for key in port.path:
        tree = tree[int(key)] if isinstance(tree, tuple) else tree[key]
    return tree


def of_onnx(function: ActFunction, folder: Path) -> Any:
    import onnxruntime

    session = onnxruntime.InferenceSession(write_onnx(function, folder))
    assert [port.name for port in session.get_inputs()] == [p.name for p in function.inputs]
    assert [port.name for port in session.get_outputs()] == [p.name for p in function.outputs]
    return lambda feed: session.run(None, feed)


def of_torchscript(function: ActFunction, folder: Path) -> Any:
    script = torch.jit.load(write_torchscript(function, folder))  # type: ignore[no-untyped-call]
    return lambda feed: [out.numpy() for out in script(*map(torch.from_numpy, feed.values()))]


FEW = ("box", "image", "recurrent, hybrid and masked")
"""Between them they have everything; torch takes seconds to write ONNX."""


@pytest.mark.parametrize(
    ("name", "read"),
    [(name, of_torchscript) for name in CASES]
    + [
        pytest.param(name, of_onnx, marks=() if name in FEW else pytest.mark.slow) for name in CASES
    ],
)
def test_an_exported_policy_acts_as_the_policy(name: str, read: Any, tmp_path: Path) -> None:
    one = trained(name)
    function = one.function()
    act = read(function, tmp_path)
    for num_rows in (1, 7):
        raw, obs = observed(one.observation_space, num_rows)
        state = {
            name: torch.randn(value.shape)
            for name, value in one.policy.initial_state(num_rows).items()
        }
        feed = {
            port.name: at(state, port).numpy() if port.kind == "state" else at(raw, port)
            for port in function.inputs
        }
        assert {
            port.name: value.dtype
            for port, value in zip(function.inputs, feed.values(), strict=True)
        } == {port.name: np.dtype(port.dtype) for port in function.inputs}
        acted = one.policy.act(obs, state, deterministic=True)
        write = action_writer(one.action_space, num_rows)
        action = write(tree_map(lambda leaf: leaf.numpy(), acted.action))
        with torch.no_grad():
            chosen = one.policy.decide(obs, state)[0]
        for port, value in zip(function.outputs, act(feed), strict=True):
            assert value.shape == (num_rows, *port.shape) and value.dtype == port.dtype
            if port.kind == "logits":
                wanted = logits(part(chosen, port))
            elif port.kind == "mean":
                wanted = part(chosen, port).mean
            else:
                wanted = at(action if port.kind == "action" else acted.state, port)
            np.testing.assert_allclose(value, np.asarray(wanted), rtol=1e-5, atol=1e-5)


def part(distribution: Any, port: Port) -> Any:
    for key in port.path:
        distribution = distribution.parts[key]
    return distribution


def logits(distribution: Any) -> torch.Tensor:
    value: torch.Tensor = getattr(distribution, "choices", distribution).all_logp
    return value


def test_weights_and_their_description_rebuild_the_policy(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    one = trained("dict")
    write_safetensors(one, tmp_path)
    write_description(one, one.function(), tmp_path)
    about = json.loads((tmp_path / "policy.json").read_text())
    weights = load_file(tmp_path / "policy.safetensors")
    networks = {key: tuple(v) if isinstance(v, list) else v for key, v in about["networks"].items()}
    again = Policy(one.observation_space, one.action_space, PolicyConfig(**networks), seed=9)
    again.load_weights(weights)
    obs = observed(one.observation_space, 5)[1]
    assert torch.equal(again.decide(obs, {})[0].mode(), one.policy.decide(obs, {})[0].mode())
    norm = about["processing"]["normalizer"]
    assert weights[norm["mean"]].shape == weights[norm["variance"]].shape == (3,)
    assert [entry["input"] for entry in about["processing"]["vector"]] == ["a", "t/1", "t/0", "t/2"]
    assert about["actions"] == [
        {"path": [], "space": "MultiDiscrete", "n": [3, 4], "start": [0, 0]}
    ]


def test_what_only_the_critic_sees_is_no_input() -> None:
    one = trained("critic")
    assert [port.name for port in one.function().inputs] == ["action_mask", "obs"]
    assert isinstance(one.function(), ActFunction)
