"""Metrics: sums stay sums until they are read, whatever the order of merging and flushing."""

from __future__ import annotations

import json
import math

import pytest
import torch

from unirl.errors import UniRLError
from unirl.metrics.metrics import Metrics


def test_a_mean_weighs_every_sample_alike_however_it_was_split() -> None:
    whole, parts = Metrics(), Metrics()
    samples = torch.arange(10.0)
    whole.mean("loss", samples.mean(), 10)
    for part in samples.split([1, 2, 7]):
        other = Metrics()
        other.mean("loss", part.mean(), len(part))
        parts.update(other)
    assert whole.flush()["loss"] == pytest.approx(parts.flush()["loss"]) == 4.5


def test_a_flush_resets_means_intervals_and_maxima_but_not_totals_and_lasts() -> None:
    metrics = Metrics()
    metrics.mean("mean", 2.0)
    metrics.maximum("maximum", 5)
    metrics.interval("interval", 0.5)
    metrics.interval("interval", 0.25)
    metrics.total("total", 3)
    metrics.last("last", 7.0)
    assert metrics.flush() == {
        "interval": 0.75,
        "last": 7.0,
        "maximum": 5.0,
        "mean": 2.0,
        "total": 3.0,
    }
    assert metrics.flush() == {"last": 7.0, "total": 3.0}
    metrics.maximum("maximum", 1)
    metrics.total("total", 1)
    assert metrics.flush() == {"last": 7.0, "maximum": 1.0, "total": 4.0}


@pytest.mark.parametrize("zero", [0.0, torch.tensor(0.0)])
def test_an_empty_mean_is_left_out_and_never_nan(zero: float) -> None:
    metrics = Metrics()
    metrics.mean("weightless", 3.0, zero)
    metrics.ratio("masked", torch.tensor(0.0), zero)
    assert metrics.flush() == {}
    metrics.ratio("masked", torch.tensor(0.0), zero)
    metrics.ratio("masked", torch.tensor(6.0), torch.tensor(3))
    assert metrics.flush() == {"masked": 2.0}


def test_numbers_and_tensors_of_any_precision_mix_without_loss() -> None:
    metrics = Metrics()
    for _ in range(1000):
        metrics.total("steps", torch.tensor(1.0, dtype=torch.bfloat16))  # bfloat16 stops at 256
    metrics.total("steps", 2**24)
    metrics.total("steps", torch.tensor(1.0))  # float32 stops at 2**24
    metrics.mean("flag", torch.tensor(True))
    metrics.mean("flag", 0)
    metrics.maximum("age", 1)
    metrics.maximum("age", torch.tensor([4]))
    metrics.maximum("age", 2.0)
    assert metrics.flush() == {"age": 4.0, "flag": 0.5, "steps": 2.0**24 + 1001}


def test_a_recorded_tensor_may_be_overwritten_and_holds_no_graph() -> None:
    metrics = Metrics()
    weight = torch.tensor(3.0, requires_grad=True)
    buffer = torch.tensor(1.0)
    for record in (metrics.total, metrics.interval, metrics.last, metrics.maximum, metrics.mean):
        record(record.__name__, buffer)
        metrics.mean("loss", weight * 2)
    buffer.fill_(100.0)
    flushed = metrics.flush()
    assert flushed.pop("loss") == 6.0
    assert set(flushed.values()) == {1.0}


def test_recording_a_tensor_waits_for_nothing() -> None:
    # A meta tensor has no value: to read it before the flush raises.
    metrics = Metrics()
    value = torch.zeros((), device="meta")
    for _ in range(2):
        metrics.mean("mean", value, value)
        metrics.total("total", value)
        metrics.last("last", value)
        metrics.maximum("maximum", value)
        metrics.update(Metrics())
    with pytest.raises((NotImplementedError, RuntimeError)):
        metrics.flush()


def test_totals_survive_json_and_continue_to_count() -> None:
    metrics = Metrics()
    metrics.total("steps", 2**60 + 1)
    metrics.total("discarded", torch.tensor(5))
    metrics.mean("loss", 1.0)
    metrics.last("lr", 0.1)
    resumed = Metrics()
    resumed.load_state_dict(json.loads(json.dumps(metrics.state_dict())))
    resumed.total("steps", 1)
    assert resumed.state_dict() == {"totals": {"discarded": 5, "steps": 2**60 + 2}}


def test_a_nan_is_reported_and_not_hidden() -> None:
    metrics = Metrics()
    metrics.mean("loss", torch.tensor(math.nan))
    assert math.isnan(metrics.flush()["loss"])


def test_a_name_keeps_one_kind() -> None:
    metrics = Metrics()
    metrics.mean("loss", 1.0)
    metrics.flush()
    with pytest.raises(UniRLError, match="already a mean"):
        metrics.total("loss", 1)


def test_a_tensor_of_several_numbers_is_refused() -> None:
    with pytest.raises(UniRLError, match=r"shape \(3,\).*ratio"):
        Metrics().mean("loss", torch.zeros(3))


@pytest.mark.gpu
def test_tensors_of_two_devices_are_summed() -> None:
    metrics = Metrics()
    for device in ("cpu", "cuda", "cpu"):
        metrics.mean("loss", torch.tensor(3.0, device=device), torch.tensor(2, device=device))
        metrics.maximum("age", torch.tensor(2, device=device))
        metrics.total("steps", torch.tensor(1, device=device))
    assert metrics.flush() == {"age": 2.0, "loss": 3.0, "steps": 3.0}
