"""One optimiser step: masters in full precision, schedules, and a state that comes back whole."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from unirl.core.training_budget import ScheduleProgress, TrainingBudget
from unirl.errors import UniRLError
from unirl.learners.optimizer import Optimizer, OptimizerConfig
from unirl.storage.checkpoint import load_checkpoint, save_checkpoint


def make(dtype: torch.dtype, **settings: Any) -> tuple[nn.Linear, Optimizer]:
    torch.manual_seed(0)
    module = nn.Linear(4, 3).to(dtype)
    config = OptimizerConfig(**{"lr": 1e-4, "max_grad_norm": 1e9, **settings})
    return module, Optimizer(module, config, schedule=ScheduleProgress(TrainingBudget(100)))


def put_gradient(module: nn.Linear, value: float = 1.0) -> None:
    for parameter in module.parameters():
        parameter.grad = torch.full_like(parameter, value)


def test_bfloat16_weights_follow_their_float32_masters_through_steps_too_small_for_them() -> None:
    module, update = make(torch.bfloat16)
    start = module.weight.detach().float().clone()
    for _ in range(100):
        put_gradient(module)
        update.apply(0)
    moved = (update.model_state()["weight"] - start).abs()
    # Adam moves by lr each time: 100 steps of 1e-4. Alone, each would round to nothing next to
    # weights of 0.5.
    torch.testing.assert_close(moved, torch.full_like(moved, 1e-2), rtol=0.05, atol=0)
    assert torch.equal(module.weight, update.model_state()["weight"].bfloat16())


def linear() -> nn.Module:
    return nn.Linear(4, 3)


def convolution() -> nn.Module:
    """As policies hold theirs: channels_last, which files know nothing of."""
    return nn.Conv2d(3, 5, 4).to(memory_format=torch.channels_last)


@pytest.mark.parametrize("name", ["adam", "rmsprop"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layer", [linear, convolution])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_saved_state_continues_exactly(
    name: str, dtype: torch.dtype, layer: Callable[[], nn.Module], device: str, tmp_path: Path
) -> None:
    def make_one() -> tuple[nn.Module, Optimizer]:
        torch.manual_seed(0)
        module = layer().to(device, dtype)
        config = OptimizerConfig(name=name, lr=1e-2, momentum=0.5 * (name == "rmsprop"))  # type: ignore[arg-type]
        return module, Optimizer(module, config, schedule=ScheduleProgress(TrainingBudget(100)))

    def advance(module: nn.Module, update: Optimizer, step: int) -> None:
        generator = torch.Generator().manual_seed(step)
        for parameter in module.parameters():
            gradient = torch.randn(parameter.shape, generator=generator)
            parameter.grad = torch.empty_like(parameter).copy_(gradient)
        update.apply(step)

    module, update = make_one()
    for step in range(3):
        advance(module, update, step)
    save_checkpoint(
        tmp_path, 3, model=update.model_state(), optimizer=update.optimizer_state(), state={}
    )
    resumed, other = make_one()
    saved = load_checkpoint(tmp_path)
    other.load(saved.model, saved.optimizer)
    for step in range(3, 6):
        advance(module, update, step)
        advance(resumed, other, step)
    for a, b in zip(update.model_state().values(), other.model_state().values(), strict=True):
        assert torch.equal(a, b)
    for a, b in zip(module.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(a, b)


def test_a_loaded_state_is_in_low_precision_weights_before_the_first_step() -> None:
    module, update = make(torch.bfloat16, lr=0.1)
    put_gradient(module)
    update.apply(0)
    resumed, other = make(torch.bfloat16)
    assert not torch.equal(resumed.weight, module.weight)
    other.load(update.model_state(), update.optimizer_state())
    assert torch.equal(resumed.weight, module.weight)  # actors act on them at once


def test_the_linear_schedule_ends_at_zero() -> None:
    _, update = make(torch.float32, lr=1.0, lr_schedule="linear")
    assert [update.lr(steps) for steps in (0, 50, 100, 200)] == [1.0, 0.5, 0.0, 0.0]


@pytest.mark.parametrize(
    ("schedule", "want"),
    [("constant", [0.1, 0.5, 1.0, 1.0]), ("linear", [0.1, 0.5 * 0.96, 0.91, 0.5])],
)
def test_the_step_size_rises_over_the_warm_up(schedule: str, want: list[float]) -> None:
    _, update = make(torch.float32, lr=1.0, lr_schedule=schedule, warmup_steps=9)
    assert [update.lr(steps) for steps in (0, 4, 9, 50)] == pytest.approx(want)


@pytest.mark.parametrize(("num_steps", "share"), [(0, 1.0), (50, 0.5), (100, 0.0)])
def test_a_step_is_as_long_as_the_schedule_says(num_steps: int, share: float) -> None:
    module, update = make(torch.float32, lr=1e-2, lr_schedule="linear")
    before = module.weight.detach().clone()
    put_gradient(module)
    update.apply(num_steps)  # Adam's first step is lr long
    moved = (before - module.weight).detach()
    torch.testing.assert_close(moved, torch.full_like(moved, 1e-2 * share), rtol=1e-3, atol=1e-7)


def test_the_adaptive_schedule_moves_by_steps_of_a_half_and_keeps_still_near_its_target() -> None:
    _, update = make(torch.float32, lr=1e-3, lr_schedule="adaptive")  # target_kl 0.01
    for kl, want in ((0.019, 1e-3), (0.006, 1e-3), (0.021, 1e-3 / 1.5), (0.004, 1e-3)):
        update.adapt(torch.tensor(kl))
        assert update.lr(50) == pytest.approx(want)
    update.adapt(torch.tensor(float("nan")))
    assert update.lr(50) == pytest.approx(1e-3)
    # A policy that has not moved at all tells nothing.
    for kl, bound in ((1.0, 1e-5), (0.0, 1e-5), (1e-4, 1e-2), (0.0, 1e-2)):
        for _ in range(30):
            update.adapt(torch.tensor(kl))
        assert update.lr(50) == bound


@pytest.mark.parametrize(
    ("gradient", "moved"), [(1.0, 0.5), (0.1, 0.1 * 12**0.5)], ids=["beyond", "within"]
)
def test_gradients_are_clipped_to_their_norm(gradient: float, moved: float) -> None:
    module = nn.Linear(4, 3, bias=False)
    # The root of epsilon is lr: weights move by minus the gradient.
    config = OptimizerConfig(name="rmsprop", lr=1e6, epsilon=1e12, max_grad_norm=0.5)
    update = Optimizer(module, config, schedule=ScheduleProgress(TrainingBudget(1)))
    before = module.weight.detach().clone()
    module.weight.grad = torch.full((3, 4), gradient)
    assert float(update.apply(0)) == pytest.approx(gradient * 12**0.5)  # before clipping
    assert (module.weight - before).norm().item() == pytest.approx(moved, rel=1e-3)


def test_weights_of_another_model_are_refused() -> None:
    _, update = make(torch.float32)
    with pytest.raises(UniRLError, match="weight"):
        update.load({"weight": torch.zeros(3, 5), "bias": torch.zeros(3)}, {})


@pytest.mark.parametrize("weight_decay", [0.0, 0.3])
def test_adam_is_torchs_adam_and_with_decay_its_adamw(weight_decay: float) -> None:
    module, update = make(torch.float32, lr=1e-2, weight_decay=weight_decay)
    twin = nn.Linear(4, 3)
    twin.load_state_dict(module.state_dict())
    # Without decay AdamW is Adam.
    theirs = torch.optim.AdamW(twin.parameters(), lr=1e-2, eps=1e-5, weight_decay=weight_decay)
    for step in range(5):
        for own, other in zip(module.parameters(), twin.parameters(), strict=True):
            own.grad = torch.randn_like(own)
            other.grad = own.grad.clone()
        update.apply(step)
        theirs.step()
    torch.testing.assert_close(module.weight, twin.weight, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(module.bias, twin.bias, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_rmsprop_is_tensorflows_with_epsilon_under_the_root(momentum: float) -> None:
    module = nn.Linear(1, 1, bias=False)
    config = OptimizerConfig(
        name="rmsprop", lr=0.1, epsilon=0.01, decay=0.9, momentum=momentum, max_grad_norm=1e9
    )
    update = Optimizer(module, config, schedule=ScheduleProgress(TrainingBudget(1)))
    weight, square, speed = module.weight.item(), 0.0, 0.0
    for gradient in (1.0, -0.5, 2.0):
        module.weight.grad = torch.full((1, 1), gradient)
        update.apply(0)
        square = 0.9 * square + 0.1 * gradient**2
        speed = momentum * speed + gradient / (square + 0.01) ** 0.5
        weight -= 0.1 * speed
        assert module.weight.item() == pytest.approx(weight, abs=1e-6)


def test_a_target_kl_of_nothing_is_refused_in_three_parts() -> None:
    with pytest.raises(UniRLError, match="target_kl is 0") as error:
        OptimizerConfig(lr_schedule="adaptive", target_kl=0.0)
    assert len(error.value.parts) == 3


def test_a_parameter_without_a_gradient_stays() -> None:
    module, update = make(torch.float32)
    bias = module.bias.detach().clone()
    module.weight.grad = torch.ones_like(module.weight)
    update.apply(0)
    assert torch.equal(module.bias, bias)
    assert set(update.optimizer_state()) == {"weight"}
