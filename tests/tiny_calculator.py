"""The calculator's task as a tiny model is given it in several tests."""

from __future__ import annotations

from typing import Any

PLAYED: dict[str, Any] = {
    "task.name": "products",
    "task.max_prompt": 16,
    "agent.tools": ("calculator",),
    "agent.calls": "brief",
    "agent.max_turns": 2,
    "agent.max_episode_tokens": 64,
    "runner.learner_threads": 1,
    "run.eval_steps": 0,
}
"""Episodes as they are, without a reward."""
PAID: dict[str, Any] = {
    **PLAYED,
    "agent.process_reward": "unirl.llm.agents.process:call_and_answer",
    "agent.credit": "turn",
    "agent.turn_groups": "token",
    "agent.turn_discount": 0.0,
    "reward.weights": {"steps": 1.0},
    "sampling.max_tokens": 6,
    "algorithm.scale": "std",
    "learner.optimizer.lr": 1e-3,
    "rollout.group_size": 8,
}
"""With what the form of a call is learned from."""
