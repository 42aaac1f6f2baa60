"""A minibatch in shares, each on a thread and a core of its own.

Two cores that divide every layer of a convolutional network between them wait for each other at
each; with half of the images each they wait once. Which rows make up a share does not depend on
timing, and what shares find is added up in their order: the same seed gives the same weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
from torch import Tensor

from unirl.policy import Policy

Item = TypeVar("Item")
Result = TypeVar("Result")


class Shares:
    """num: into how many shares a minibatch is divided; 1: not at all, and no thread is started."""

    def __init__(self, num: int) -> None:
        self.num = num
        self._pool: ThreadPoolExecutor | None = None

    def map(self, function: Callable[[Item], Result], items: Sequence[Item]) -> list[Result]:
        """function of each item, side by side; the calling thread's own work if there is one."""
        if len(items) == 1:
            return [function(items[0])]
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self.num, "share", torch.set_num_threads, (1,))
        return list(self._pool.map(function, items))


def num_shares(policy: Policy, device: torch.device) -> int:
    """How many are worth it: of small networks one, and a GPU divides its work itself."""
    return torch.get_num_threads() if policy.inputs.images and device.type == "cpu" else 1


def gradients(loss: Tensor, parameters: Sequence[Tensor]) -> tuple[Tensor | None, ...]:
    """Of one share: nothing is added to what other threads find."""
    return torch.autograd.grad(loss, parameters, allow_unused=True)


def add_up(parameters: Sequence[Tensor], found: Iterable[Sequence[Tensor | None]]) -> None:
    """Give parameters the sum of what the shares found."""
    for parameter, parts in zip(parameters, zip(*found, strict=True), strict=True):
        some = [part for part in parts if part is not None]
        if some:
            # In the parameter's memory layout: the optimiser walks through both side by side.
            total = torch.empty_like(parameter)
            parameter.grad = torch.add(*some[:2], out=total) if some[1:] else total.copy_(some[0])
            for part in some[2:]:
                total.add_(part)
