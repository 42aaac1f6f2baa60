"""What a run learned, written to a folder in formats that others read."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from unirl.export.description import write_description
from unirl.export.formats import Format
from unirl.export.onnx import write_onnx
from unirl.export.policy import trained_policy
from unirl.export.readme import usage
from unirl.export.safetensors import write_safetensors
from unirl.export.torchscript import write_torchscript
from unirl.runners.plan import Plan


def write_policy(
    plan: Plan, model: Any, folder: Path, formats: Sequence[Format], learner_index: int = 0
) -> str:
    """Write a policy into a folder that exists; returns how to use it, in Markdown. model: of the
    checkpoint of this learner of the plan.
    """
    trained = trained_policy(plan.learners[learner_index], model, plan.recipe)
    function = trained.function()
    write_description(trained, function, folder)
    if "safetensors" in formats:
        write_safetensors(trained, folder)
    if "onnx" in formats:
        write_onnx(function, folder)
    if "torchscript" in formats:
        write_torchscript(function, folder)
    return usage(trained, function, plan.config.env, formats)  # type: ignore[attr-defined]


def write_language(config: Any, model: Any, folder: Path) -> str:
    """Model and tokenizer in Hugging Face's layout, into a folder that exists; returns how to use
    them, in Markdown. config: of a recipe with a language model. model: of transformers.
    """
    from unirl.llm.models.model import load_tokenizer

    model.save_pretrained(folder)
    load_tokenizer(config.model).save_pretrained(folder)
    return _LANGUAGE_USAGE


_LANGUAGE_USAGE = """```python
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained(".")
model = AutoModelForCausalLM.from_pretrained(".", dtype="auto")
inputs = tokenizer("1 + 1 =", return_tensors="pt")
print(tokenizer.decode(model.generate(**inputs, max_new_tokens=32)[0]))
```"""
