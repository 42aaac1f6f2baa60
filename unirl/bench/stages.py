"""The stages of a plan and their figures: those of its one process that acts and learns in turns,
which timers tell apart, and those of the whole.
"""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

StageName: TypeAlias = Literal[
    "stepping", "inference", "acting", "weights", "learning", "end_to_end"
]
"""Of a plan whose actors keep no timers, `acting` stands for stepping (or an engine) and inference.
"""
Figures: TypeAlias = dict[str, Any]


def rates(num_steps: int, seconds: float, cpu_seconds: float) -> Figures:
    """What follows from what was done, how long it took and what CPU time."""
    return {
        "env_steps": num_steps,
        "seconds": seconds,
        "env_steps_per_second": num_steps / max(seconds, 1e-9),
        "core_us_per_env_step": 1e6 * cpu_seconds / max(num_steps, 1),
        "cores_used": cpu_seconds / max(seconds, 1e-9),
    }
