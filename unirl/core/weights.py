"""Versioned weights that flow back from the learner to the actors."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Protocol

import torch

Weights = Mapping[str, torch.Tensor]
"""Flat: parameter and buffer names to tensors, as a module's state_dict."""


class Loadable(Protocol):
    """Something that takes weights over, copying them (a policy, an engine)."""

    def load_weights(self, weights: Weights) -> None:
        """Copy these weights in place; they may change after the call returns."""


class WeightStore(Protocol):
    """Where the learner publishes and actors pull. A reader never sees half of a version."""

    @property
    def version(self) -> int:
        """The newest published version; -1 before the first."""

    def publish(self, weights: Weights, version: int) -> None:
        """Copy the weights; from now on `pull` returns this version."""

    def pull(self, into: Loadable, have: int) -> int:
        """Load the newest version unless it is `have`; returns the version `into` now holds."""


class LocalWeightStore:
    """The weight store for one process: one copy of the weights behind a lock."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held: dict[str, torch.Tensor] = {}
        self._version = -1

    @property
    def version(self) -> int:
        """See WeightStore."""
        return self._version

    def publish(self, weights: Weights, version: int) -> None:
        """See WeightStore."""
        with self._lock, torch.no_grad():
            if not self._held:
                self._held = {name: value.detach().clone() for name, value in weights.items()}
            else:
                torch._foreach_copy_(
                    list(self._held.values()), [weights[name] for name in self._held]
                )
            self._version = version

    def pull(self, into: Loadable, have: int) -> int:
        """See WeightStore."""
        with self._lock:
            if self._version != have:
                into.load_weights(self._held)
            return self._version
