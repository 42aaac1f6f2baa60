"""Several policies in one run: each agent's rows go to the queue and the learner of its policy."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

import unirl
from unirl.core.tree import leaves
from unirl.envs.config import EnvConfig
from unirl.envs.make import spaces
from unirl.errors import UniRLError
from unirl.policy import Policy, PolicyConfig
from unirl.runners.processes import ProcessesRunner
from unirl.storage.checkpoint import load_checkpoint

pytest.importorskip("pettingzoo", reason="the extra multiagent is not installed")

DUEL: dict[str, Any] = {
    "env.id": "pettingzoo/unirl/Duel",
    "policy.hidden": (32,),
    "sampler.num_workers": 2,
    "sampler.num_groups": 1,
    "sampler.num_envs": 32,
    "sampler.unroll_length": 16,
    "sampler.agent_policies": (0, 1),
    "queue.batch_size": 2,
    "queue.max_staleness": 1,
    "learner.optimizer.lr": 5e-3,
    "learner.gamma": 0.95,
    "learner.minibatches": 2,
    "run.total_steps": 60_000,
}


def best_play(model: Any) -> float:
    """Share of Duel's observations in which the policy walks to the coin."""
    cells = range(7)
    seen = [(c, a, b) for c in cells for a in cells for b in cells if c not in (a, b)]
    obs = torch.tensor([[(c - a) / 7, (c - b) / 7] for c, a, b in seen])
    best = torch.tensor([2 if c > a else 0 for c, a, _ in seen])
    policy = Policy(*spaces(EnvConfig(DUEL["env.id"])), PolicyConfig(hidden=(32,)), seed=0)
    policy.load_weights({"/".join(path): leaf for path, leaf in leaves(model)})
    found = policy.act(obs, policy.initial_state(len(obs)), deterministic=True).action
    return float((found == best).float().mean())


@pytest.mark.parametrize("kind", ["processes", "inline"])
def test_two_policies_learn_a_zero_sum_game_against_each_other(tmp_path: Path, kind: str) -> None:
    plan = unirl.make_plan("appo", **{**DUEL, "runner.kind": kind})
    unirl.run(plan, tmp_path, console=False)
    models = [load_checkpoint(folder).model for folder in (tmp_path, tmp_path / "policies" / "1")]
    assert min(best_play(model) for model in models) > 0.9
    flat = [dict(leaves(model)) for model in models]
    assert any(not torch.equal(flat[0][path], flat[1][path]) for path in flat[0])


def test_a_run_of_two_policies_is_resumed(tmp_path: Path) -> None:
    short = {**DUEL, "run.total_steps": 4_000}
    unirl.run(unirl.make_plan("appo", **short), tmp_path, console=False)
    before = [load_checkpoint(f).state["num_steps"] for f in (tmp_path, tmp_path / "policies/1")]
    longer = {**DUEL, "run.total_steps": 8_000}
    result = unirl.run(unirl.make_plan("appo", **longer), tmp_path, resume=tmp_path, console=False)
    after = [load_checkpoint(f).state["num_steps"] for f in (tmp_path, tmp_path / "policies/1")]
    assert result.num_steps >= 8_000
    assert all(new > old >= 2_000 for new, old in zip(after, before, strict=True))


def test_the_death_of_one_policys_worker_loses_no_sample_of_the_others() -> None:
    settings = {**DUEL, "run.total_steps": 10**9, "sampler.num_policy_workers": 2}
    runner = ProcessesRunner(unirl.make_plan("appo", **settings))

    class Kill:
        def after_update(self, loop: Any) -> None:
            if loop.learner.version == 20:
                pid = runner.actor_pids()[3]  # the second worker of the second policy
                assert pid is not None
                os.kill(pid, signal.SIGKILL)
            if loop.learner.version > 20 and runner.num_restarts and len(learning()) == 2:
                loop.stop("test")

        def at_end(self, loop: Any) -> None:
            pass

    learned: dict[int, int] = {}

    def learning() -> set[int]:
        """Policies that have learned something since the restart."""
        for i, loop in enumerate(runner.loops):
            learned.setdefault(i, loop.learner.version)
        return {i for i, loop in enumerate(runner.loops) if loop.learner.version > learned[i] + 10}

    runner.run([Kill()])
    assert runner.num_restarts == 1
    for loop in runner.loops:
        stats = loop.queue.stats()
        assert stats.started == stats.learned + sum(stats.discarded.values()) + stats.out


def test_several_policies_need_whole_environments() -> None:
    with pytest.raises(UniRLError, match="do not split into environments of 2 agents"):
        unirl.make_plan("appo", **{**DUEL, "sampler.num_envs": 33})
    with pytest.raises(UniRLError, match="has 2: left, right"):
        unirl.make_plan("appo", **{**DUEL, "sampler.agent_policies": (0, 1, 2, 0)})
    with pytest.raises(UniRLError, match="rows do not split into environments of 2 agents"):
        unirl.make_plan("impala", **{"env.id": DUEL["env.id"], "actor.num_envs": 3})
    with pytest.raises(UniRLError, match="without a gap"):
        unirl.make_plan("appo", **{**DUEL, "sampler.agent_policies": (0, 2)})
