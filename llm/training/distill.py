"""On-policy distillation: the policy imitates a teacher on what the policy itself writes.

Each token's advantage gets coef (log teacher - log policy), without gradient through it: the
gradient of -coef KL(policy || teacher) at the state the token was drawn in. As a reward and not as
a loss: the gradient of the same difference taken as a loss does not contain the teacher at all.
Source: Lu and Thinking Machines Lab, On-Policy Distillation, 2025; arXiv 2306.13649.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from unirl.config.rules import check_positive
from unirl.errors import UniRLError
from unirl.llm.http import require_url
from unirl.llm.models.dtype import warn_if_emulated
from unirl.llm.models.model import ModelConfig, ModelDtype, load_model, require_same_tokens
from unirl.llm.training.language_policy import LanguagePolicy
from unirl.llm.training.packing import Pack
from unirl.llm.training.teacher_server import TeacherServer
from unirl.llm.training.token_batch import TokenBatch


@dataclass(frozen=True)
class TeacherConfig:
    """Which model is imitated, and how strongly."""

    path: str = ""
    """A folder or hub id, as model.path; it must read the same tokens. "": no teacher."""
    url: str = ""
    """Where a server has the teacher, such as http://127.0.0.1:8000/v1; then only the tokenizer is
    read of `path`, and sampling.temperature must be 1. "": it is loaded beside the learner.
    """
    served_name: str = ""
    """What the server calls it. "": as `path`."""
    api_key_variable: str = ""
    """The environment variable that holds the server's key. "": it needs none."""
    timeout_seconds: float = 120.0
    """In which the server must answer. More: sits out longer queues there."""
    dtype: ModelDtype = "auto"
    """What it computes in. auto: as model.dtype."""
    coef: float = 1.0
    """How much a nat of difference counts beside an advantage. More: closer to the teacher."""
    alone: bool = False
    """Rewards are reported, but the teacher alone teaches."""

    def __post_init__(self) -> None:
        check_positive("teacher.coef", self.coef, "leave teacher.path out for no teacher")
        check_positive("teacher.timeout_seconds", self.timeout_seconds, "leave it out")
        if self.url:
            require_url(self.url, "teacher.url", "teacher.api_key_variable")
        if (self.alone or self.url) and not self.path:
            raise UniRLError(
                f"teacher.{'alone' if self.alone else 'url'} is set without a teacher",
                'teacher.path is ""',
                "name a folder or hub id in teacher.path",
            )
        if (self.served_name or self.api_key_variable) and not self.url:
            raise UniRLError(
                f"teacher.{'served_name' if self.served_name else 'api_key_variable'} is set "
                "without a server",
                'teacher.url is ""',
                "set teacher.url, or leave it out",
            )


@dataclass(frozen=True)
class Teacher:
    """A frozen model that the learner asks."""

    policy: LanguagePolicy | TeacherServer
    coef: float = 1.0
    alone: bool = False

    def logp(
        self, tokens: TokenBatch, train: Tensor, packs: Callable[[TokenBatch, Tensor], list[Pack]]
    ) -> Tensor:
        """Log-probabilities [N] where `train` [S] is true, 0 elsewhere; packs: what makes them."""
        if isinstance(self.policy, TeacherServer):
            return self.policy.logp(tokens, train)
        return self.policy.look(packs(tokens, train), tokens.mask.numel())[0]


def make_teacher(
    config: TeacherConfig, student: ModelConfig, device: torch.device, *, temperature: float
) -> Teacher | None:
    """The teacher on the learner's device; None where there is none.

    temperature: the one the student draws at; the teacher's distribution is taken at the same.
    Raises UniRLError when it cannot be loaded or reached, or its tokens are others than the
    student's.
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
    require_same_tokens("teacher", settings, student)
    if config.url:
        return Teacher(_served(config, temperature), config.coef, config.alone)
    frozen = load_model(settings, device).requires_grad_(False)
    warn_if_emulated(frozen, "the teacher", "teacher.dtype")
    return Teacher(LanguagePolicy(frozen, temperature=temperature), config.coef, config.alone)


def _served(config: TeacherConfig, temperature: float) -> TeacherServer:
    if temperature != 1:
        raise UniRLError(
            f"sampling.temperature is {temperature:g} and the teacher is behind a server",
            "servers give log-probabilities at temperature 1 only, and both must have the same",
            "set sampling.temperature to 1, or leave teacher.url out",
        )
    server = TeacherServer(
        config.url,
        config.served_name or config.path,
        key_variable=config.api_key_variable,
        seconds=config.timeout_seconds,
    )
    server.check()
    return server
