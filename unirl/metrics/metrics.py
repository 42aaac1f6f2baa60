"""Metrics gathers scalars between log lines as sums: merging and averaging stay exact."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

import torch

from unirl.errors import UniRLError

Scalar: TypeAlias = "int | float | torch.Tensor"

_OF_ROWS = ("step", "seconds")
_MEAN, _TOTAL, _INTERVAL, _LAST, _MAXIMUM = "mean", "total", "interval", "last", "maximum"


class Metrics:
    """Scalars by name, each of one kind for the whole run.

    A value is a Python number or a tensor of one element; tensors stay on their device until
    `flush` reads them. Using one name as two kinds raises UniRLError.
    """

    def __init__(self) -> None:
        self._kinds: dict[str, str] = {}
        self._values: dict[str, Scalar] = {}
        self._weights: dict[str, Scalar] = {}

    def mean(self, name: str, value: Scalar, weight: Scalar = 1.0) -> None:
        """Weighted mean since the last flush; a NaN counts even at weight 0, unlike in `ratio`."""
        value, weight = _scalar(name, value), _scalar(name, weight)
        self.ratio(name, value * weight, weight)

    def ratio(self, name: str, numerator: Scalar, denominator: Scalar) -> None:
        """Sum of numerators over sum of denominators since the last flush, as for masked losses."""
        self._claim(name, _MEAN)
        numerator, denominator = _scalar(name, numerator), _scalar(name, denominator)
        self._values[name] = self._values.get(name, 0.0) + numerator
        self._weights[name] = self._weights.get(name, 0.0) + denominator

    def total(self, name: str, value: Scalar) -> None:
        """A counter: the sum since the run began, kept over flushes and checkpoints."""
        self._claim(name, _TOTAL)
        self._values[name] = self._values.get(name, 0) + _scalar(name, value)

    def interval(self, name: str, value: Scalar) -> None:
        """The sum since the last flush, such as seconds spent waiting."""
        self._claim(name, _INTERVAL)
        self._values[name] = self._values.get(name, 0) + _scalar(name, value)

    def last(self, name: str, value: Scalar) -> None:
        """The newest value; it stays until replaced."""
        self._claim(name, _LAST)
        value = _scalar(name, value)
        # A copy: the caller may still write to this tensor.
        self._values[name] = value.clone() if isinstance(value, torch.Tensor) else value

    def maximum(self, name: str, value: Scalar) -> None:
        """The largest value since the last flush."""
        self._claim(name, _MAXIMUM)
        self._values[name] = _larger(self._values.get(name), _scalar(name, value))

    def update(self, other: Metrics) -> None:
        """Merge another collector as if its calls had been made here.

        Totals are not reset by a flush: merge a collector once, then start a new one.
        """
        for name, value in other._values.items():
            kind = other._kinds[name]
            if kind == _MEAN:
                self.ratio(name, value, other._weights[name])
            else:
                getattr(self, kind)(name, value)  # each kind has the name of its method

    def flush(self) -> dict[str, float]:
        """All scalars as floats; means, intervals and maxima begin again, totals and lasts stay.

        Waits for each device once. A mean whose weights sum to 0 is left out, never NaN.
        """
        flushed = self.values()
        self._values = {
            name: v for name, v in self._values.items() if self._kinds[name] in (_TOTAL, _LAST)
        }
        self._weights = {}
        return flushed

    def values(self) -> dict[str, float]:
        """What `flush` would return now; nothing begins again. Waits for each device once."""
        values, weights = _numbers(self._values), _numbers(self._weights)
        found = {}
        for name in sorted(values):
            if name not in weights:
                found[name] = float(values[name])
            elif weights[name] != 0:
                found[name] = values[name] / weights[name]
        return found

    def state_dict(self) -> dict[str, Any]:
        """The totals, as JSON can hold them: what a resumed run continues to count from."""
        totals = {name: v for name, v in self._values.items() if self._kinds[name] == _TOTAL}
        return {"totals": _numbers(totals)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Set the totals of a `state_dict`; counters already here under other names stay."""
        for name, value in state["totals"].items():
            self._claim(name, _TOTAL)
            self._values[name] = value

    def _claim(self, name: str, kind: str) -> None:
        if name in _OF_ROWS:
            raise UniRLError(
                f"metric {name!r} has the name of a row's own number",
                f"{' and '.join(_OF_ROWS)} say in each row of metrics.jsonl when it was written",
                f"choose another, such as mine/{name}",
            )
        known = self._kinds.setdefault(name, kind)
        if known != kind:
            raise UniRLError(
                f"metric {name!r} is recorded as {kind}",
                f"a name keeps one kind, and this one is already a {known}",
                "give one of the two another name",
            )


def _scalar(name: str, value: Scalar) -> Scalar:
    """The value without gradient and shape, in 64 bits, so that long sums stay exact."""
    if not isinstance(value, torch.Tensor):
        return value
    if value.numel() != 1:
        raise UniRLError(
            f"metric {name!r} got a tensor of shape {tuple(value.shape)}",
            "a metric is one number, this tensor holds " + str(value.numel()),
            "reduce it first, or pass numerator and denominator to Metrics.ratio",
        )
    value = value.detach().reshape(())
    # A float32 counter would stop growing at 2**24, a bfloat16 one at 256.
    return value.double() if value.is_floating_point() else value.long()


def _larger(known: Scalar | None, value: Scalar) -> Scalar:
    if known is None:
        return value.clone() if isinstance(value, torch.Tensor) else value
    if isinstance(known, torch.Tensor):
        return torch.maximum(known, torch.as_tensor(value, dtype=known.dtype, device=known.device))
    if isinstance(value, torch.Tensor):
        return torch.maximum(torch.as_tensor(known, dtype=value.dtype, device=value.device), value)
    return max(known, value)


def _numbers(values: Mapping[str, Scalar]) -> dict[str, int | float]:
    """Python numbers for all scalars, with one transfer per device and dtype, not per scalar."""
    groups: dict[tuple[torch.device, torch.dtype], list[str]] = {}
    numbers: dict[str, int | float] = {}
    for name, value in values.items():
        if isinstance(value, torch.Tensor):
            groups.setdefault((value.device, value.dtype), []).append(name)
        else:
            numbers[name] = value
    for names in groups.values():
        stacked = torch.stack([torch.as_tensor(values[name]) for name in names])
        numbers.update(zip(names, stacked.tolist(), strict=True))  # device -> host, once per flush
    return numbers
