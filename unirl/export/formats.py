"""The formats, by the names that people give."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypeAlias

from unirl.errors import UniRLError

Format: TypeAlias = Literal["hf", "safetensors", "onnx", "torchscript"]

OF_POLICIES: tuple[Format, ...] = ("onnx", "torchscript", "safetensors")
OF_LANGUAGE: tuple[Format, ...] = ("hf",)


def check_formats(formats: Sequence[Format], *, is_language: bool) -> None:
    """Raise UniRLError where one of these is not for what the run trained."""
    fitting = OF_LANGUAGE if is_language else OF_POLICIES
    other = next((name for name in formats if name not in fitting), None)
    if other is None:
        return
    if not is_language:
        raise UniRLError(
            f"format {other} is for language models",
            f"the run trained a policy: {', '.join(OF_POLICIES)}",
            "leave --format out for all of them",
        )
    raise UniRLError(
        f"format {other} is for policies",
        "the run trained a language model, which is exported as hf; others convert that",
        "leave --format out, then: optimum-cli export onnx --model DIR OUT"
        if other == "onnx"
        else "leave --format out: hf has its weights as safetensors",
    )
