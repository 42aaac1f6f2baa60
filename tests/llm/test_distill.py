"""A policy that imitates a teacher follows the gradient of the reverse KL, and arrives."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers", reason="language models need the extra llm")

from tests.llm.packed_groups import VOCAB, make_groups, make_model
from tests.llm.test_learner import batch_of, close, groups_with_rewards, make_learner, moved
from unirl.errors import UniRLError
from unirl.learners.optimizer import OptimizerConfig
from unirl.llm.algorithms.config import AlgorithmConfig
from unirl.llm.group import Group
from unirl.llm.models.model import ModelConfig
from unirl.llm.models.tiny import make_tiny, tiny_model
from unirl.llm.training.distill import Teacher, TeacherConfig, make_teacher
from unirl.llm.training.language_policy import LanguagePolicy

TEMPERATURE = 0.7  # as make_learner has it
EXACT = AlgorithmConfig(
    objective="reinforce", correction="tis", correction_low=0.0, correction_high=1e9
)


def other_model(dtype: torch.dtype = torch.float64) -> Any:
    model = make_model(dtype=dtype).requires_grad_(False)
    generator = torch.Generator().manual_seed(9)
    for parameter in model.parameters():
        parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator, dtype=dtype))
    return model


def teacher_of(model: Any, **settings: Any) -> Teacher:
    return Teacher(LanguagePolicy(model, temperature=TEMPERATURE), **settings)


def answers(tokens: Tensor, logp: Tensor) -> Group:
    """Completions of one token each, with the log-probability they were drawn with."""
    (group,) = make_groups((3, [1] * tokens.numel()), seed=5)
    return replace(group, token=tokens.int(), logp=logp.float())


def next_token(model: Any) -> Tensor:
    """Log-probabilities behind the prompt of `answers`, [V]."""
    (group,) = make_groups((3, [1]), seed=5)
    logits: Tensor = model(input_ids=group.prompt.long()[None], use_cache=False).logits[0, -1]
    return (logits / TEMPERATURE).log_softmax(0)


def reverse_kl(student: Any, teacher: Any) -> Tensor:
    mine, theirs = next_token(student), next_token(teacher)
    return (mine.exp() * (mine - theirs)).sum()


@pytest.mark.parametrize("coef", [1.0, 0.3])
def test_the_expected_gradient_is_that_of_the_reverse_kl(coef: float) -> None:
    """Every token once, as if drawn uniformly: the weights of TIS make the expectation exact."""
    everything = answers(torch.arange(VOCAB), torch.full((VOCAB,), -math.log(VOCAB)))
    teacher = other_model()
    learner = make_learner(EXACT, teacher=teacher_of(teacher, coef=coef, alone=True))
    found = moved(learner, [everything])
    student = make_model().requires_grad_(True)
    (coef * reverse_kl(student, teacher)).backward()
    wanted = {f"model.{name}": -value.grad for name, value in student.named_parameters()}
    close(found, wanted, 1e-6)


def test_a_teacher_adds_to_what_rewards_teach() -> None:
    groups, teacher = groups_with_rewards(), other_model()
    plain = AlgorithmConfig(objective="reinforce", correction="none")
    both = moved(make_learner(plain, teacher=teacher_of(teacher)), groups)
    rewards = moved(make_learner(plain), groups)
    imitation = moved(make_learner(plain, teacher=teacher_of(teacher, alone=True)), groups)
    close(both, {name: rewards[name] + imitation[name] for name in both}, 1e-6)


def test_groups_without_spread_are_learned_from_where_there_is_a_teacher() -> None:
    groups = groups_with_rewards()[2:3]
    assert float(groups[0].reward.std()) == 0
    metrics = make_learner(teacher=teacher_of(other_model())).step(batch_of(groups)).flush()
    assert metrics["losses/grad_norm"] > 0
    assert "losses/empty_steps" not in metrics


def test_the_difference_that_is_reported_is_that_of_the_tokens_drawn() -> None:
    tokens, teacher = torch.arange(8), other_model()
    learner = make_learner(teacher=teacher_of(teacher))
    metrics = learner.step(batch_of([answers(tokens, torch.zeros(8))])).flush()
    apart = (next_token(make_model()) - next_token(teacher)).detach()[:8]
    assert metrics["kl_to_teacher"] == pytest.approx(float(apart.mean()), abs=1e-6)


def test_a_student_comes_to_its_teachers_distribution() -> None:
    torch.manual_seed(4)
    teacher = other_model(torch.float32)
    student = make_model(dtype=torch.float32).requires_grad_(True)
    learner = make_learner(
        AlgorithmConfig(correction="none"),
        model=student,
        dtype=torch.float32,
        optimizer=OptimizerConfig(lr=0.003, max_grad_norm=1.0),
        teacher=teacher_of(teacher, alone=True),
    )
    before = float(reverse_kl(student, teacher).detach())
    for version in range(120):
        logp = next_token(student).detach()
        drawn = torch.multinomial(logp.exp(), 64, replacement=True)
        learner.step(batch_of([answers(drawn, logp[drawn])], version))
    after = float(reverse_kl(student, teacher).detach())
    assert before > 0.5
    assert after < 0.02


def test_a_teacher_is_loaded_frozen_and_reads_the_same_tokens(tmp_path: Path) -> None:
    folder = make_tiny(tmp_path / "teacher", seed=7)
    teacher = make_teacher(
        TeacherConfig(path=str(folder), coef=0.5),
        ModelConfig(lora_rank=8),
        torch.device("cpu"),
        temperature=0.5,
    )
    assert teacher is not None and teacher.coef == 0.5 and teacher.policy.temperature == 0.5
    own = dict(tiny_model(7).named_parameters())
    for name, parameter in teacher.policy.model.named_parameters():
        assert torch.equal(parameter, own[name]) and not parameter.requires_grad
    nobody = make_teacher(TeacherConfig(), ModelConfig(), torch.device("cpu"), temperature=1.0)
    assert nobody is None


def test_a_teacher_that_reads_other_tokens_is_refused(tmp_path: Path) -> None:
    import transformers

    folder = make_tiny(tmp_path / "teacher")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens(["<other>"])
    tokenizer.save_pretrained(folder)
    with pytest.raises(UniRLError, match="does not read the tokens of tiny"):
        make_teacher(
            TeacherConfig(path=str(folder)), ModelConfig(), torch.device("cpu"), temperature=1.0
        )


@pytest.mark.parametrize(
    ("settings", "what"),
    [
        ({"path": "x", "coef": 0.0}, "teacher.coef is 0.0"),
        ({"alone": True}, "without a teacher"),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings: dict[str, Any], what: str) -> None:
    with pytest.raises(UniRLError, match=what):
        TeacherConfig(**settings)
