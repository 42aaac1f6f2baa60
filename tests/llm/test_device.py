"""Which device a setting of the language recipes names."""

from __future__ import annotations

import pytest
import torch

from unirl.errors import UniRLError
from unirl.llm.device import device_of


@pytest.mark.parametrize(
    ("name", "num_devices", "rank", "expected"),
    [
        ("auto", 0, "1", "cpu"),
        ("auto", 2, "", "cuda"),
        ("auto", 2, "1", "cuda:1"),
        ("cuda", 2, "1", "cuda:1"),
        ("cuda", 1, "3", "cuda"),
        ("cuda:0", 2, "1", "cuda:0"),
        ("cpu", 2, "1", "cpu"),
    ],
)
def test_each_process_of_torchrun_has_its_own(
    monkeypatch: pytest.MonkeyPatch, name: str, num_devices: int, rank: str, expected: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: num_devices > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_devices)
    monkeypatch.setenv("LOCAL_RANK", rank)
    assert device_of(name, "engine.device") == expected


def test_a_device_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UniRLError, match="no usable CUDA device"):
        device_of("cuda", "reward.device")
