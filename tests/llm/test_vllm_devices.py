"""Which devices a vLLM of one's own may see. In its place is a package that only says whether it
was built for the CPU: nothing is started.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from types import ModuleType

import pytest

from unirl.errors import UniRLError
from unirl.llm.engine import EngineConfig
from unirl.llm.engines.vllm.arguments import environment

VARIABLE = "CUDA_VISIBLE_DEVICES"


@dataclass
class AsyncEngineArgs:
    tensor_parallel_size: int = 1


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A vLLM for GPUs, in a process that torchrun did not start and that sees all devices."""
    package, platforms = ModuleType("vllm"), ModuleType("vllm.platforms")
    package.AsyncEngineArgs = AsyncEngineArgs  # type: ignore[attr-defined]
    platforms.current_platform = ModuleType("cuda")  # type: ignore[attr-defined]
    platforms.current_platform.is_cpu = lambda: False
    monkeypatch.setitem(sys.modules, "vllm", package)
    monkeypatch.setitem(sys.modules, "vllm.platforms", platforms)
    for name in ("LOCAL_RANK", VARIABLE):
        monkeypatch.delenv(name, raising=False)
    return platforms


def seen(config: EngineConfig) -> str | None:
    with environment(config):
        return os.environ.get(VARIABLE)


@pytest.mark.parametrize(
    ("device", "rank", "visible", "parallel", "expected"),
    [
        ("auto", "", "", "1", None),
        ("auto", "1", "", "1", "1"),
        ("auto", "1", "", "2", "2,3"),
        ("auto", "1", "4,5,6,7", "2", "6,7"),
        ("auto", "3", "6", "1", "6"),
        ("cuda:2", "", "", "1", "2"),
        ("cuda:1", "0", "GPU-a,GPU-b", "1", "GPU-b"),
    ],
)
def test_each_engine_sees_its_own_devices(
    vllm: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    device: str,
    rank: str,
    visible: str,
    parallel: str,
    expected: str | None,
) -> None:
    for name, value in (("LOCAL_RANK", rank), (VARIABLE, visible)):
        if value:
            monkeypatch.setenv(name, value)
    before = dict(os.environ)
    config = EngineConfig(kind="vllm", device=device, options={"tensor_parallel_size": parallel})
    assert seen(config) == expected
    assert dict(os.environ) == before


def test_devices_that_no_process_may_see_are_refused(
    vllm: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_RANK", "2")
    monkeypatch.setenv(VARIABLE, "0,1")
    before = dict(os.environ)
    with pytest.raises(UniRLError, match=r"1 devices from number 2 on.*names 2"):
        seen(EngineConfig(kind="vllm"))
    assert dict(os.environ) == before


def test_a_vllm_for_gpus_is_not_asked_for_the_cpu(vllm: ModuleType) -> None:
    with pytest.raises(UniRLError, match=r"engine.device is cpu"):
        seen(EngineConfig(kind="vllm", device="cpu"))


def test_on_the_cpu_there_is_nothing_to_choose(
    vllm: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm.current_platform, "is_cpu", lambda: True)
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert seen(EngineConfig(kind="vllm")) is None
