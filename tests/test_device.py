"""Devices as settings name them."""

from __future__ import annotations

import pytest
import torch

from unirl.device import check_device, device_of_rank, usable_device, with_index
from unirl.errors import UniRLError


@pytest.mark.parametrize("name", ["cpu", "cuda", "cuda:3"])
def test_names_of_devices_are_taken_whether_they_are_there_or_not(name: str) -> None:
    check_device("learner.device", name)


@pytest.mark.parametrize("name", ["gpu", "cuda:", "cuda:-1", "auto", "", "cpu:0"])
def test_other_names_are_refused(name: str) -> None:
    with pytest.raises(UniRLError, match=r"learner.device .* is unknown"):
        check_device("learner.device", name)


def test_auto_is_a_name_where_it_means_something() -> None:
    check_device("engine.device", "auto", may_be_auto=True)
    with pytest.raises(UniRLError, match="known: auto, cpu"):
        check_device("engine.device", "automatic", may_be_auto=True)


def test_a_device_beyond_those_there_are_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert usable_device("learner.device", "cuda:1") == torch.device("cuda:1")
    with pytest.raises(UniRLError, match=r"there are 2.*set learner.device to cuda:1 or less"):
        usable_device("learner.device", "cuda:2")


def test_a_device_has_the_number_that_tensors_give_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Warp looks devices up by number, and "cuda" is unequal to the "cuda:0" of every tensor."""
    assert with_index(torch.device("cpu")) == torch.device("cpu")
    assert with_index(torch.device("cuda:3")) == torch.device("cuda:3")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 2)
    assert with_index(torch.device("cuda")) == torch.device("cuda:2")


def test_processes_share_out_the_gpus_they_see(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    names = [device_of_rank("cuda", rank) for rank in (None, 0, 1)]
    assert names == ["cuda", "cuda:0", "cuda:1"]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert device_of_rank("cuda", 1) == "cuda", "it sees a single one, as number 0"
    assert device_of_rank("cpu", 1) == "cpu"
