"""On-policy distillation: the policy imitates a teacher on what the policy itself writes.

Each token's advantage gets coef (log teacher - log policy), without gradient through it: the
gradient of -coef KL(policy || teacher) at the state the token was drawn in. As a reward and not as
a loss: the gradient of the same difference taken as a loss does not contain the teacher at all.
Source: Lu and Thinking Machines Lab, On-Policy Distillation, 2025; arXiv 2306.13649.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch

from unirl.core.errors import UniRLError
from unirl.llm.models.model import ModelConfig, ModelDtype, load_model, load_tokenizer
from unirl.llm.training.language_policy import LanguagePolicy


@dataclass(frozen=True)
class TeacherConfig:
    """Which model is imitated, and how strongly."""

    path: str = ""
    """A folder or hub id, as model.path; it must read the same tokens. "": no teacher."""
    dtype: ModelDtype = "auto"
    """What it computes in. auto: what its folder says."""
    coef: float = 1.0
    """How much a nat of difference counts beside an advantage. More: closer to the teacher."""
    alone: bool = False
    """Rewards are reported, but the teacher alone teaches."""

    def __post_init__(self) -> None:
        if not (math.isfinite(self.coef) and self.coef > 0):
            raise UniRLError(
                f"teacher.coef is {self.coef}",
                "it must be above 0 and finite",
                "leave teacher.path out for no teacher",
            )
        if self.alone and not self.path:
            raise UniRLError(
                "teacher.alone is set without a teacher",
                'teacher.path is ""',
                "name a folder or hub id in teacher.path",
            )


@dataclass(frozen=True)
class Teacher:
    """A frozen model that the learner asks."""

    policy: LanguagePolicy
    coef: float = 1.0
    alone: bool = False


def make_teacher(
    config: TeacherConfig, student: ModelConfig, device: torch.device, *, temperature: float
) -> Teacher | None:
    """The teacher on the learner's device; None where there is none.

    temperature: the one the student draws at; the teacher's distribution is taken at the same.
    Raises UniRLError when it cannot be loaded or its tokens are others than the student's.
    """
    if not config.path:
        return None
    settings = replace(
        student,
        path=config.path,
        dtype=config.dtype,
        revision="",
        lora_rank=0,
        gradient_checkpointing=False,
    )
    own, other = (load_tokenizer(each).get_vocab() for each in (student, settings))
    if own != other:
        word = next(iter(sorted(own.items() ^ other.items())))[0]
        raise UniRLError(
            f"the teacher {config.path} does not read the tokens of {student.path}",
            f"their tokenizers must agree, and they differ in {word!r} among others",
            "take a teacher of the same family",
        )
    frozen = load_model(settings, device).requires_grad_(False)
    return Teacher(LanguagePolicy(frozen, temperature=temperature), config.coef, config.alone)
