"""What only a GPU can tell: whole runs there do what they do on a CPU. `make gpu` runs them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import unirl
from tests.system.grpo_settings import SMALL
from tests.system.test_ondevice import CARTPOLE
from unirl.core.tree import flatten
from unirl.envs.config import EnvConfig
from unirl.envs.sim.make import make_device_env
from unirl.storage.checkpoint import load_checkpoint

DEVICE = "cuda"
pytestmark = pytest.mark.gpu


def train(recipe: str, run_dir: Path, settings: dict[str, Any]) -> unirl.RunResult:
    return unirl.run(unirl.make_plan(recipe, **settings), run_dir, console=False)


@pytest.mark.parametrize("graph", [True, False], ids=["recorded", "launched"])
@pytest.mark.parametrize("max_staleness", [0, 1])
def test_cartpole_learns(tmp_path: Path, graph: bool, max_staleness: int) -> None:
    """Also where an unroll is simulated on a stream of its own while the learner learns."""
    settings = {**CARTPOLE, "sim.device": DEVICE, "sim.graph": graph}
    settings |= {"queue.max_staleness": max_staleness, "run.target_return": 300.0}
    result = train("ondevice", tmp_path / "run", settings)
    assert result.reason == "target_return" and result.scalars["staleness/max"] == max_staleness


def test_a_run_resumed_on_the_gpu_continues(tmp_path: Path) -> None:
    settings = {**CARTPOLE, "sim.device": DEVICE, "sim.num_envs": 64, "run.total_steps": 8192}
    first = train("ondevice", tmp_path / "run", settings)
    plan = unirl.make_plan("ondevice", **{**settings, "run.total_steps": 16384})
    second = unirl.run(plan, tmp_path / "run", resume=tmp_path / "run", console=False)
    assert (first.num_steps, second.num_steps) == (8192, 16384)
    assert second.checkpoint is not None
    model = flatten(load_checkpoint(second.checkpoint).model)
    assert all(bool(value.isfinite().all()) for value in model.values())


@pytest.mark.parametrize("stream", ["default", "own"])
def test_warp_steps_on_any_stream(stream: str) -> None:
    pytest.importorskip("mujoco_warp", reason="the extra warp is not installed")
    outcomes = []
    for device in (DEVICE, "cpu"):
        env = make_device_env(EnvConfig(id="warp/Cartpole"), 32, torch.device(device))
        env.reset(1)
        # Both simulate the same: draws of the two devices differ, so the state is given.
        positions = torch.linspace(-0.1, 0.1, 32)[:, None].expand(32, env.worlds.qpos.shape[1])  # type: ignore[attr-defined]
        env.worlds.qpos.copy_(positions)  # type: ignore[attr-defined]
        env.worlds.qvel.zero_()  # type: ignore[attr-defined]
        action = torch.full((32, 1), 0.1, device=env.spec.device)
        own = torch.cuda.Stream() if stream == "own" and device == "cuda" else None  # type: ignore[no-untyped-call]
        if own is not None:
            own.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(own):
            for _ in range(5):
                step = env.step(action)
            found = step.obs["policy"].clone()
        if own is not None:
            own.synchronize()
        outcomes.append(found.cpu())
        env.close()
    torch.testing.assert_close(*outcomes, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("kind", ["inline", "processes"])
def test_a_learner_on_the_gpu_learns_from_actors_on_the_host(tmp_path: Path, kind: str) -> None:
    settings = {
        "env.id": "CartPole-v1",
        "actor.num_envs": 32,
        "learner.device": DEVICE,
        "runner.kind": kind,
        "run.total_steps": 300_000,
        "run.target_return": 60.0,
        "run.max_seconds": 60.0,
    }
    result = train("impala", tmp_path / "run", settings)
    assert result.reason == "target_return"


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_tiny_language_model_learns(tmp_path: Path, mode: str) -> None:
    pytest.importorskip("transformers", reason="language models need the extra llm")
    settings = {
        **SMALL,
        "mode": mode,
        "learner.device": DEVICE,
        "engine.device": DEVICE,
        "rollout.group_size": 8,
        "queue.batch_size": 16,
        "run.total_steps": 20_000,
        "run.target_return": 0.6,
        "run.target_window": 256,
        "run.max_seconds": 40.0,
    }
    result = train("grpo", tmp_path / "run", settings)
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert result.reason == "target_return", json.loads(lines[-1])
