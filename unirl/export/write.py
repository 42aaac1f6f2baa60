"""What a run learned, written to a folder in formats that others read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from unirl.errors import UniRLError, format_error
from unirl.export.description import write_description
from unirl.export.formats import Format
from unirl.export.onnx import write_onnx
from unirl.export.policy import ExportedPolicy, exported_policy
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
    trained = exported_policy(plan.learners[learner_index], model, plan.recipe)
    function = trained.function()
    write_description(trained, function, folder)
    if "safetensors" in formats:
        write_safetensors(trained, folder)
    if "onnx" in formats:
        with _own_network(trained, "onnx"):
            write_onnx(function, folder)
    if "torchscript" in formats:
        with _own_network(trained, "torchscript"):
            write_torchscript(function, folder)
    return usage(trained, function, plan.config.env, formats)


@contextmanager
def _own_network(trained: ExportedPolicy, name: Format) -> Iterator[None]:
    """In this block a network of the user's own may turn out to be what a format cannot hold."""
    module = trained.policy.config.module
    try:
        yield
    except UniRLError:
        raise
    except Exception as error:
        if not module:
            raise
        raise UniRLError(
            f"policy.module {module} cannot be written as {name}: {format_error(error)[:300]}",
            "torch follows a forward pass through it, with any number of rows: what it does must "
            "not depend on the values of tensors, nor on how many rows there are",
            "leave this format out: --format safetensors",
        ) from error


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
