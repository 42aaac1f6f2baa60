"""Versioned weights that flow back from the learner to the actors."""

from __future__ import annotations

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

    @property
    def lends(self) -> bool:
        """Whether what `pull` hands out is read only while it does not change: no copy is due."""

    def publish(self, weights: Weights, version: int) -> None:
        """From now on `pull` returns this version. They are copied, unless the store lends."""

    def pull(self, into: Loadable, have: int) -> int:
        """Load the newest version unless it is `have`; returns the version `into` now holds."""
