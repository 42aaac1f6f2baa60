"""What vLLM may take of a GPU that the learner is on."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from unirl.llm.engine import EngineConfig
from unirl.llm.engines.vllm import memory
from unirl.llm.engines.vllm.memory import OPTION, beside_learner

GIB = 2**30


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """A machine with so many GPUs; 60 of 80 GiB are free on each."""
    monkeypatch.delenv("LOCAL_RANK", raising=False)

    def have(number: int) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: number > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: number)

    monkeypatch.setattr(memory, "free_memory", lambda index: (60 * GIB, 80 * GIB))
    return have


def option(engine: EngineConfig, learner: str = "auto") -> str | None:
    return beside_learner(engine, learner).options.get(OPTION)


def test_beside_a_learner_it_takes_half_of_what_is_free(gpus: Callable[[int], None]) -> None:
    gpus(1)
    assert option(EngineConfig(kind="vllm")) == "0.375"
    assert option(EngineConfig(kind="vllm", device="cuda:0"), "cuda") == "0.375"


def test_what_the_user_says_holds(gpus: Callable[[int], None]) -> None:
    gpus(1)
    for name in ("gpu-memory-utilization", OPTION):
        engine = EngineConfig(kind="vllm", options={name: "0.8"})
        assert beside_learner(engine, "auto") == engine


def test_a_gpu_of_its_own_is_left_to_vllm(gpus: Callable[[int], None]) -> None:
    gpus(2)
    assert option(EngineConfig(kind="vllm", device="cuda:1")) is None
    assert option(EngineConfig(kind="vllm"), "cuda:1") is None
    several = {"tensor_parallel_size": "2"}
    assert option(EngineConfig(kind="vllm", options=several), "cuda:1") == "0.375"
    assert option(EngineConfig(kind="vllm"), "cpu") is None
    assert option(EngineConfig(kind="vllm", url="http://127.0.0.1:8000")) is None
    assert option(EngineConfig(kind="hf")) is None


def test_without_a_gpu_nothing_is_asked(gpus: Callable[[int], None]) -> None:
    gpus(0)
    assert option(EngineConfig(kind="vllm")) is None


def test_under_torchrun_each_engine_is_beside_its_own_learner(
    gpus: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    gpus(2)
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert option(EngineConfig(kind="vllm")) == "0.375"


@pytest.mark.gpu
def test_a_gpu_says_what_is_free() -> None:
    free, total = memory.free_memory(0)
    assert 0 < free <= total
    assert total == torch.cuda.get_device_properties(0).total_memory
