"""Recurrent cores, LSTM and GRU: one implementation for acting and learning, with resets in time.

The gate equations are those of torch.nn.LSTM and torch.nn.GRU. The input projection of all rows is
one matrix product; only the recurrent one goes step by step. State is float32 whatever the weights'
dtype.
"""

from __future__ import annotations

from typing import TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from unirl.policy.activation import tanh

State: TypeAlias = dict[str, Tensor]


def zero_state(state: State, rows: Tensor) -> State:
    """The state [B, size] with zeros where `rows` [B] is true: there a new episode begins."""
    # Filled, not multiplied by 0: NaN and infinity must not outlive their episode.
    where = rows.unsqueeze(-1)
    return {name: value.masked_fill(where, 0.0) for name, value in state.items()}


class Core(nn.Module):
    """The weights of all gates and the loop over time; only `cell` tells LSTM and GRU apart."""

    def __init__(self, kind: str, num_in: int, size: int, generator: torch.Generator) -> None:
        super().__init__()
        self.num_out = size
        self.cell = LSTMCell() if kind == "lstm" else GRUCell()
        num_gates = self.cell.num_gates
        self.input_weight = _orthogonal_gates(num_gates, size, num_in, generator)
        self.state_weight = _orthogonal_gates(num_gates, size, size, generator)
        self.input_bias = nn.Parameter(torch.zeros(num_gates * size))
        self.state_bias = nn.Parameter(torch.zeros(num_gates * size))
        if kind == "lstm":
            # Remember at first (Jozefowicz et al. 2015); gates are input, forget, cell, output.
            with torch.no_grad():
                self.input_bias[size : 2 * size].fill_(1.0)

    def initial_state(self, num_envs: int) -> State:
        """Zeros: {"h": [B, size]} and for the LSTM "c" too, float32."""
        like = self.input_bias
        return {
            name: torch.zeros(num_envs, self.num_out, device=like.device, dtype=torch.float32)
            for name in self.cell.state_names
        }

    def step(self, features: Tensor, state: State) -> tuple[Tensor, State]:
        """One row: features [B, F] -> output [B, size] and the next state."""
        projected = F.linear(features, self.input_weight, self.input_bias)
        state = self.cell(projected, state, self.state_weight, self.state_bias)
        return state["h"], state

    def unroll(self, features: Tensor, state: State, reset: Tensor | None) -> Tensor:
        """Rows [T, B, F] -> outputs [T, B, size]; reset [T, B] zeroes the state before its row."""
        projected = F.linear(features, self.input_weight, self.input_bias)
        restarts = None if reset is None else reset.unbind(0)
        outputs = []
        # unbind: its gradient is one stack, that of projected[t] a full-size tensor for each t.
        for t, row in enumerate(projected.unbind(0)):
            if restarts is not None:
                state = zero_state(state, restarts[t])
            state = self.cell(row, state, self.state_weight, self.state_bias)
            outputs.append(state["h"])
        return torch.stack(outputs)


class LSTMCell:
    """One step of Hochreiter & Schmidhuber's memory with forget gates, as in torch.nn.LSTM."""

    num_gates = 4
    state_names = ("h", "c")

    def __call__(self, projected: Tensor, state: State, weight: Tensor, bias: Tensor) -> State:
        """projected [B, 4 * size] -> next {"h", "c"}."""
        gates = (projected + F.linear(state["h"].to(weight.dtype), weight, bias)).float()
        size = gates.shape[-1] // 4
        write, keep, _, read = torch.sigmoid(gates).chunk(4, -1)
        new = tanh(gates[..., 2 * size : 3 * size])
        c = torch.addcmul(keep * state["c"], write, new)
        return {"h": read * tanh(c), "c": c}


class GRUCell:
    """One step of Cho et al.'s gated unit (arXiv 1406.1078), in torch.nn.GRU's form."""

    num_gates = 3
    state_names = ("h",)

    def __call__(self, projected: Tensor, state: State, weight: Tensor, bias: Tensor) -> State:
        """projected [B, 3 * size] -> next {"h"}."""
        h = state["h"]
        size = h.shape[-1]
        x, y = projected.float(), F.linear(h.to(weight.dtype), weight, bias).float()
        gates = torch.sigmoid(x[..., : 2 * size] + y[..., : 2 * size])
        new = tanh(x[..., 2 * size :] + gates[..., :size] * y[..., 2 * size :])
        return {"h": torch.lerp(new, h, gates[..., size:])}


def _orthogonal_gates(
    num_gates: int, size: int, num_in: int, generator: torch.Generator
) -> nn.Parameter:
    gates = [
        nn.init.orthogonal_(torch.empty(size, num_in), generator=generator)
        for _ in range(num_gates)
    ]
    return nn.Parameter(torch.cat(gates))
