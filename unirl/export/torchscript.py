"""An act function as TorchScript, for LibTorch and `torch.jit.load`; source:
https://docs.pytorch.org/docs/stable/jit.html. Torch calls it deprecated and keeps it working.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch

from unirl.export.act import ActFunction

FILE = "policy.pt"


def write_torchscript(function: ActFunction, folder: Path) -> Path:
    """policy.pt: called with the inputs in order, it returns the outputs in order."""
    path = folder / FILE
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")  # constants in the trace, and that it is deprecated
        jit: Any = torch.jit
        traced = jit.trace(function, function.example(2), check_inputs=[function.example(3)])
        jit.save(traced, str(path))
    return path
