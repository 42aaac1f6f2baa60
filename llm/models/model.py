"""Which language model is trained, and how it and its tokenizer are loaded by transformers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from unirl.config.rules import check_setting
from unirl.device import copy_weights
from unirl.errors import UniRLError
from unirl.imports import large_imports
from unirl.llm.models.tiny import tiny_model, tiny_tokenizer
from unirl.llm.models.transformers import brief, import_transformers

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

TINY = "tiny"
"""The path that names no folder: a small Llama, made in memory."""
ModelDtype = Literal["auto", "float32", "bfloat16"]
_DTYPES: Mapping[str, torch.dtype] = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class ModelConfig:
    """The model, what it computes in, and which of its weights learn."""

    path: str = field(default=TINY, metadata={"common": True})
    """A folder in Hugging Face's layout, an id of its hub, or "tiny": a Llama of about a million
    weights, made on the spot.
    """
    dtype: ModelDtype = "auto"
    """What it computes in. bfloat16: half the memory, several times as fast where the devices
    multiply it and many times slower where they do not; coarser log-probabilities. auto: what its
    folder says, but float32 where bfloat16 would be emulated; decided once, and kept by the run.
    """
    gradient_checkpointing: bool = False
    """Keep only the borders of layers and compute the rest again: less memory, a third slower."""
    shard: bool = False
    """With learner.ranks or torchrun: divide weights, gradients and optimiser among the processes
    (FSDP2). Less memory in each, more communication between them.
    """
    lora_rank: int = field(default=0, metadata={"common": True})
    """0: all weights learn. More: only adapters of this rank do; larger ones can say more."""
    lora_alpha: float = 32.0
    """Adapters are scaled by alpha / rank. More: larger steps at the same learning rate."""
    lora_targets: tuple[str, ...] = ()
    """Names of the linear layers that get adapters, such as q_proj. (): all but the last one."""
    lora_dropout: float = 0.0
    """More than 0 makes the learner's log-probabilities differ from the engine's: leave it."""
    revision: str = ""
    """Branch, tag or commit on the hub. "": the newest."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model. Only for models whose code you have read."""
    seed: int = 0
    """tiny: the seed of its weights."""

    def __post_init__(self) -> None:
        rank, alpha, dropout = self.lora_rank, self.lora_alpha, self.lora_dropout
        for name, holds, rule, remedy in (
            ("path", self.path, "name a folder, an id of the hub, or tiny",
             "--model.path tiny needs no download"),
            ("lora_rank", rank >= 0, "be >= 0", "0 trains all weights, 16 is usual for adapters"),
            ("lora_alpha", alpha > 0, "be > 0", "twice the rank is usual"),
            ("lora_dropout", 0 <= dropout < 1, "lie in [0, 1)",
             "0 is right for reinforcement learning"),
        ):  # fmt: skip
            shown = repr(getattr(self, name))
            check_setting(bool(holds), f"model.{name}", shown, f"must {rule}", remedy)


def check_effect(config: ModelConfig) -> None:
    """Raise UniRLError where a user's setting changes nothing: something was meant by it. (Code
    that needs the model without its adapters says so by the rank alone.)
    """
    unused: dict[str, tuple[str, str]] = {}
    if config.lora_rank == 0:
        remedy = "set model.lora_rank, 16 is usual; or leave it out: all weights learn"
        for name in ("lora_alpha", "lora_targets", "lora_dropout"):
            unused[name] = ("model.lora_rank is 0: no adapters", remedy)
    if config.path == TINY:
        unused["revision"] = ("tiny is on no hub", "leave it out")
    else:
        rule = f"only the weights of tiny are drawn, model.path is {config.path}"
        unused["seed"] = (rule, "leave it out; run.seed seeds the run")
    for name, reason in unused.items():
        value = getattr(config, name)
        if value != getattr(ModelConfig(), name):
            raise UniRLError(f"model.{name} is {value!r} and has no effect", *reason)


@large_imports()
def load_tokenizer(config: ModelConfig) -> PreTrainedTokenizerBase:
    if config.path == TINY:
        return tiny_tokenizer()
    check_folder(config.path)
    transformers = import_transformers()
    try:
        return transformers.AutoTokenizer.from_pretrained(config.path, **source_of(config))  # type: ignore[no-any-return]
    except (OSError, ValueError, KeyError, ImportError, TypeError) as error:
        raise UniRLError(
            f"the tokenizer of {config.path} cannot be loaded: {brief(error)}",
            "a model needs tokenizer.json, or what its own tokenizer is made of",
            "copy the tokenizer's files beside config.json",
        ) from error


@large_imports()
def load_model(config: ModelConfig, device: torch.device | str = "cpu") -> PreTrainedModel:
    """The model without dropout, in eval mode: adapters and gradients are the learner's affair.

    Raises UniRLError when it is missing, incomplete, or needs code that is not trusted.
    """
    if config.path == TINY:
        tiny: Any = tiny_model(config.seed)
        return tiny.to(device, _DTYPES.get(config.dtype, torch.float32))  # type: ignore[no-any-return]
    check_folder(config.path)
    transformers = import_transformers()
    dtype: Any = _DTYPES.get(config.dtype, "auto")
    try:
        settings = transformers.AutoConfig.from_pretrained(config.path, **source_of(config))
        drop_dropout(settings)
        model = transformers.AutoModelForCausalLM.from_pretrained(
            config.path,
            config=settings,
            dtype=dtype,
            **source_of(config),
        )
    except (OSError, ValueError, KeyError, ImportError, RuntimeError) as error:
        raise UniRLError(
            f"model {config.path} cannot be loaded: {brief(error)}",
            "model.path must be a folder or hub id of a causal language model that transformers "
            "can read",
            "unirl model tiny DIR makes one that works",
        ) from error
    return model.to(device).eval()  # type: ignore[no-any-return]


def require_same_tokens(what: str, other: ModelConfig, student: ModelConfig) -> None:
    """Raise UniRLError unless both have one vocabulary. what: whose the other is."""
    own, theirs = (load_tokenizer(each).get_vocab() for each in (student, other))
    if own != theirs:
        word = next(iter(sorted(own.items() ^ theirs.items())))[0]
        raise UniRLError(
            f"the {what} {other.path} does not read the tokens of {student.path}",
            f"their tokenizers must agree, and they differ in {word!r} among others",
            f"take a {what} of the same family",
        )


def end_token_ids(tokenizer: Any, model: Any) -> tuple[int, ...]:
    """Tokens that end a completion: the tokenizer's and all those of the model's generation
    settings (chat models often have several). Ascending.
    """
    found: set[int] = set()
    settings = getattr(model, "generation_config", None)
    for ids in (
        getattr(tokenizer, "eos_token_id", None),
        getattr(settings, "eos_token_id", None),
        getattr(model.config, "eos_token_id", None),
    ):
        if ids is not None:
            found.update(ids if isinstance(ids, (list, tuple)) else [ids])
    return tuple(sorted(found))


def context_length(model: Any) -> int:
    """Most tokens of prompt and completion together. Raises UniRLError where the model has no such
    bound.
    """
    settings = model.config.get_text_config()
    for name in ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length"):
        length = getattr(settings, name, None)
        if isinstance(length, int) and length > 0:
            return length
    raise UniRLError(
        f"{type(model).__name__} does not say how long its context is",
        "config.json has no max_position_embeddings",
        "set engine.max_context",
    )


def flat_weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Parameters by name, each shared one once (a tied lm_head under the embedding's name): what
    learners publish and engines take. The tensors are the model's own.
    """
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


@torch.no_grad()
def load_flat_weights(model: torch.nn.Module, weights: Mapping[str, torch.Tensor]) -> None:
    """Copy into the model, in place, in its own dtype. All or nothing.

    Raises UniRLError when names are missing or unknown, or shapes differ; then nothing was copied.
    """
    own = flat_weights(model)
    missing = [name for name in own if name not in weights]
    unknown = [name for name in weights if name not in own]
    if missing or unknown:
        differences = [
            f"{len(names)} {kind} ({', '.join(names[:3])}{', ...' if names[3:] else ''})"
            for kind, names in (("missing", missing), ("unknown", unknown))
            if names
        ]
        raise UniRLError(
            f"weights do not fit {type(model).__name__}: {' and '.join(differences)}",
            f"it has {len(own)} parameters by name, tied ones once; {len(weights)} came",
            "learner and engine must load the same model.path",
        )
    for name, value in own.items():
        if value.shape != weights[name].shape:
            raise UniRLError(
                f"weight {name} does not fit {type(model).__name__}",
                f"its shape must be {list(value.shape)}, it is {list(weights[name].shape)}",
                "learner and engine must load the same model.path",
            )
    copy_weights(own, weights)


def drop_dropout(settings: Any) -> None:
    """Set every dropout of a model's settings to 0: with it no two log-probabilities agree."""
    for section in (settings, settings.get_text_config()):
        for name, value in vars(section).items():
            if isinstance(value, float) and ("dropout" in name or name.endswith("_pdrop")):
                setattr(section, name, 0.0)


def source_of(config: ModelConfig) -> dict[str, Any]:
    """What transformers gets besides the path: revision, and whether its code is trusted."""
    found: dict[str, Any] = {"trust_remote_code": config.trust_remote_code}
    if config.revision:
        found["revision"] = config.revision
    return found


def check_folder(path: str) -> None:
    """Raise UniRLError for a folder that is not there, or no model; ids of the hub pass."""
    folder = Path(path).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise UniRLError(
                f"folder {path} holds no model",
                "there must be a config.json in it, as save_pretrained writes",
                "name the folder with config.json, or make one: unirl model tiny DIR",
            )
    elif path.startswith(("/", "./", "../", "~")) or path.count("/") > 1 or "\\" in path:
        raise UniRLError(
            f"model folder {path} does not exist",
            "model.path must be a folder, an id of the hub (owner/name), or tiny",
            "unirl model smollm2 DIR makes one without a download from the hub",
        )
