"""What TRL runs on each task, and what else might be faster."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from typing import Any

Settings = dict[str, Any]

# weights: what parameters are kept in; bfloat16 loses updates as small as these. autocast: compute
# in bf16. micro_batch: completions per backward pass. generate: batch (transformers' generate),
# continuous (its continuous batching) or vllm (in this process). correct: for vLLM's rounding,
# which costs one more forward pass. The rest means what it means in UniRL's config.
DIGITS: Settings = {
    "task": "digits",
    "num_prompts": 8,
    "group_size": 8,
    "max_tokens": 16,
    "lr": 2e-5,
    "entropy_coef": 0.0,
    "weights": "float32",
    "autocast": True,
    "micro_batch": 16,
    "generate": "vllm",
    "correct": False,
    "cache": None,
    "attention": "sdpa",
    "compile": False,
    "num_threads": 2,
}
PRESETS: dict[str, Settings] = {
    "digits": DIGITS,
    "digits48": {**DIGITS, "max_tokens": 48},
    "tiny": {
        **DIGITS,
        "task": "reverse",
        "num_prompts": 32,
        "max_tokens": 6,
        "lr": 5e-4,
        "entropy_coef": 0.01,
        "autocast": False,
        "micro_batch": 256,
        "generate": "batch",
    },
}
_LARGE: list[Settings] = [
    {"generate": "batch"},
    {"generate": "batch", "compile": True},
    {"generate": "continuous"},
    {"weights": "bfloat16"},
    {"micro_batch": 8},
    {"micro_batch": 32},
    {"micro_batch": 64},
]
CANDIDATES: dict[str, list[Settings]] = {
    "digits": _LARGE,
    "digits48": _LARGE,
    "tiny": [
        {"autocast": True},
        {"num_threads": 1},
        {"micro_batch": 128},
        {"attention": "eager"},
        {"cache": "static"},
        {"generate": "continuous"},
        {"compile": True},
    ],
}


def changed(env: str, changes: Sequence[str]) -> Settings:
    """The preset with KEY=VALUE changes; ends the program for a key that does not exist."""
    settings = {**PRESETS[env]}
    for text in changes:
        key, _, value = text.partition("=")
        if key not in settings:
            raise SystemExit(f"no setting {key!r}; there are {', '.join(sorted(settings))}")
        try:
            settings[key] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            settings[key] = value
    return settings
