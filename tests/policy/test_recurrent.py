"""The recurrent cores against torch.nn.LSTM and torch.nn.GRU, and resets inside an unroll."""

from __future__ import annotations

import pytest
import torch

from unirl.policy.recurrent import Core, State, zero_state

KINDS = ("lstm", "gru")


def core_and_reference(kind: str) -> tuple[Core, torch.nn.LSTM | torch.nn.GRU]:
    generator = torch.Generator().manual_seed(0)
    core = Core(kind, 5, 4, generator)
    reference = (torch.nn.LSTM if kind == "lstm" else torch.nn.GRU)(5, 4)
    with torch.no_grad():
        core.state_bias.normal_(generator=generator)
        reference.weight_ih_l0.copy_(core.input_weight)
        reference.weight_hh_l0.copy_(core.state_weight)
        reference.bias_ih_l0.copy_(core.input_bias)
        reference.bias_hh_l0.copy_(core.state_bias)
    return core, reference


@pytest.mark.parametrize("kind", KINDS)
def test_an_unroll_is_that_of_torch_nn(kind: str) -> None:
    core, reference = core_and_reference(kind)
    x = torch.randn(6, 3, 5, generator=torch.Generator().manual_seed(1))
    expected, _ = reference(x)
    torch.testing.assert_close(core.unroll(x, core.initial_state(3), None), expected)


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_those_of_torch_nn(kind: str) -> None:
    core, reference = core_and_reference(kind)
    x = torch.randn(6, 3, 5, generator=torch.Generator().manual_seed(1))
    core.unroll(x, core.initial_state(3), None).square().sum().backward()
    reference(x)[0].square().sum().backward()
    torch.testing.assert_close(core.input_weight.grad, reference.weight_ih_l0.grad)
    torch.testing.assert_close(core.state_weight.grad, reference.weight_hh_l0.grad)
    torch.testing.assert_close(core.state_bias.grad, reference.bias_hh_l0.grad)


def test_an_lstm_remembers_at_first() -> None:
    core = Core("lstm", 5, 4, torch.Generator().manual_seed(0))
    state = {"h": torch.zeros(2, 4), "c": torch.full((2, 4), 0.5)}
    _, after = core.step(torch.zeros(2, 5), state)
    # The forget gate's bias is 1, all others are 0.
    kept = torch.full((2, 4), 0.5) * torch.tensor(1.0).sigmoid()
    torch.testing.assert_close(after["c"].detach(), kept)


@pytest.mark.parametrize("kind", KINDS)
def test_a_reset_row_starts_as_if_it_were_the_first(kind: str) -> None:
    core, _ = core_and_reference(kind)
    x = torch.randn(6, 3, 5, generator=torch.Generator().manual_seed(1))
    state: State = {name: torch.randn_like(v) for name, v in core.initial_state(3).items()}
    reset = torch.zeros(6, 3, dtype=torch.bool)
    reset[4] = True
    output = core.unroll(x, state, reset)
    torch.testing.assert_close(output[4:], core.unroll(x[4:], core.initial_state(3), None))
    torch.testing.assert_close(output[:4], core.unroll(x[:4], state, None))


@pytest.mark.parametrize("kind", KINDS)
def test_no_gradient_crosses_a_reset(kind: str) -> None:
    core, _ = core_and_reference(kind)
    x = torch.randn(4, 2, 5, generator=torch.Generator().manual_seed(1)).requires_grad_()
    reset = torch.zeros(4, 2, dtype=torch.bool)
    reset[2, 0] = True
    (grad,) = torch.autograd.grad(core.unroll(x, core.initial_state(2), reset)[3].sum(), x)
    assert (grad[:2, 0] == 0).all()
    assert (grad[:2, 1] != 0).any()


@pytest.mark.parametrize("kind", KINDS)
def test_a_nan_state_ends_with_its_episode(kind: str) -> None:
    core, _ = core_and_reference(kind)
    x = torch.zeros(2, 1, 5)
    state = {name: torch.full_like(v, torch.nan) for name, v in core.initial_state(1).items()}
    reset = torch.tensor([[False], [True]])
    output = core.unroll(x, state, reset)
    assert output[0].isnan().all()
    assert output[1].isfinite().all()


@pytest.mark.parametrize("kind", KINDS)
def test_bfloat16_cores_keep_a_float32_state(kind: str) -> None:
    core = Core(kind, 5, 4, torch.Generator().manual_seed(0)).bfloat16()
    output, state = core.step(torch.ones(2, 5, dtype=torch.bfloat16), core.initial_state(2))
    assert output.dtype == torch.float32
    assert {value.dtype for value in state.values()} == {torch.float32}


@pytest.mark.parametrize("value", [2.0, torch.inf, torch.nan])
def test_zeroed_rows_are_zero_whatever_they_held_and_others_are_untouched(value: float) -> None:
    state = {"h": torch.full((3, 4), value)}
    rows = torch.tensor([True, False, True])
    zeroed = zero_state(state, rows)["h"]
    assert (zeroed[rows] == 0).all()
    torch.testing.assert_close(zeroed[~rows], state["h"][~rows], equal_nan=True)
    assert state["h"][0, 0] != 0, "the state passed in is not changed"
