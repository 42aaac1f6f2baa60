"""The smallest language run that learns: one digit, a few tokens."""

from __future__ import annotations

from typing import Any

SMALL: dict[str, Any] = {
    "task.name": "reverse",
    "task.options": {"digits": "1"},
    "task.max_prompt": 16,
    "queue.timeout_seconds": 60.0,
    "sampling.max_tokens": 4,
    "algorithm.entropy_coef": 0.01,
    "learner.optimizer.lr": 2e-3,
    "runner.learner_threads": 1,
    "run.log_seconds": 0.0,
}
