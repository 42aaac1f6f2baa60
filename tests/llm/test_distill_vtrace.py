"""What a teacher adds to V-trace is corrected for who drew the tokens, as V-trace's own part is."""

from __future__ import annotations

import math

import pytest
import torch

pytest.importorskip("transformers", reason="language models need the extra llm")

from tests.llm.packed_groups import VOCAB, make_model
from tests.llm.test_distill import answers, next_token, other_model, reverse_kl, teacher_of
from tests.llm.test_learner import close, make_learner, moved
from unirl.llm.algorithms.config import AlgorithmConfig


def test_the_expected_gradient_is_that_of_the_reverse_kl() -> None:
    """Every token once, as if drawn uniformly, and no bound: the expectation is exact."""
    everything = answers(torch.arange(VOCAB), torch.full((VOCAB,), -math.log(VOCAB)))
    teacher = other_model()
    terms = AlgorithmConfig(preset="unirl:vtrace", rho_clip=1e9)
    learner = make_learner(terms, teacher=teacher_of(teacher, alone=True))
    found = moved(learner, [everything])
    student = make_model().requires_grad_(True)
    reverse_kl(student, teacher).backward()
    wanted = {f"model.{name}": -value.grad for name, value in student.named_parameters()}
    close(found, wanted, 1e-6)


def test_the_weight_of_a_token_is_bounded_by_rho_clip() -> None:
    everything = answers(torch.arange(VOCAB), torch.full((VOCAB,), -math.log(VOCAB)))
    teacher = other_model()
    learner = make_learner(
        AlgorithmConfig(preset="unirl:vtrace"), teacher=teacher_of(teacher, alone=True)
    )
    found = moved(learner, [everything])
    student = make_model().requires_grad_(True)
    logp = next_token(student)
    with torch.no_grad():
        weight = (logp.exp() * VOCAB).clamp(max=1.0)
        assert (weight == 1).any() and (weight < 1).any()
        gain = -weight * (logp - next_token(teacher))
    (-(gain * logp).mean()).backward()
    wanted = {f"model.{name}": -value.grad for name, value in student.named_parameters()}
    close(found, wanted, 1e-6)
