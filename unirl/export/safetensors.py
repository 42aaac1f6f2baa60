"""A policy's weights and statistics in one flat file; source:
https://github.com/huggingface/safetensors.
"""

from __future__ import annotations

from pathlib import Path

from unirl.export.policy import ExportedPolicy
from unirl.storage.tensor_file import write_tensors

FILE = "policy.safetensors"


def write_safetensors(trained: ExportedPolicy, folder: Path) -> Path:
    """policy.safetensors: each tensor by the name that policy.json calls it."""
    write_tensors(folder / FILE, trained.policy.weights())
    return folder / FILE
