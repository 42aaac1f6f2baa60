"""Small checkpoints to save."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from unirl.storage.checkpoint import save_checkpoint


def save(root: Path, step: int, **changes: Any) -> Path:
    arguments: dict[str, Any] = {
        "model": {"weight": torch.full((4, 3), float(step))},
        "optimizer": {"exp_avg": {"weight": torch.full((4, 3), -float(step))}},
        "state": {"step": step},
    }
    return save_checkpoint(root, step, **(arguments | changes))
