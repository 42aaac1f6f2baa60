"""An act function as ONNX, which onnxruntime and many others run; source: https://onnx.ai."""

from __future__ import annotations

import logging
import warnings
from pathlib import Path

import torch

from unirl.errors import UniRLError
from unirl.export.act import ActFunction

FILE = "policy.onnx"


def write_onnx(function: ActFunction, folder: Path) -> Path:
    """policy.onnx, of one file; its first axis, the rows, may have any length."""
    try:
        import onnx  # noqa: F401
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise UniRLError(
            f"the policy cannot be written as ONNX: {error}",
            "torch does so with packages onnx and onnxscript",
            "pip install 'unirl[export]', or --format torchscript",
        ) from error
    path = folder / FILE
    rows = torch.export.Dim("batch", min=1)
    quiet = logging.getLogger("torch.onnx")
    before = quiet.level
    quiet.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")
            # Two rows: one would be taken for a constant.
            torch.onnx.export(
                function,
                function.example(2),
                path,
                input_names=[port.name for port in function.inputs],
                output_names=[port.name for port in function.outputs],
                dynamic_shapes=(tuple({0: rows} for _ in function.inputs),),
                dynamo=True,
                external_data=False,
                verbose=False,
            )
    finally:
        quiet.setLevel(before)
    return path
