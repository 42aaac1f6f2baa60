"""model.dtype auto: what its folder says, unless the devices of the run can only emulate it."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers", reason="language models need the extra llm")

import unirl
from unirl import cli
from unirl.llm.models.dtype import settle_dtype
from unirl.llm.models.model import ModelConfig
from unirl.llm.models.tiny import tiny_model, tiny_tokenizer
from unirl.policy.precision import has_bfloat16

HERE = "bfloat16" if has_bfloat16("cpu") else "float32"
META = "meta"
"""A device that multiplies nothing."""
SETTINGS = {
    "task.name": "reverse",
    "task.max_prompt": 16,
    "sampling.max_tokens": 2,
    "rollout.group_size": 2,
    "queue.batch_size": 2,
    "run.total_steps": 4,
}


@pytest.fixture(scope="module")
def half(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model whose folder says bfloat16, as those of hubs do."""
    folder = tmp_path_factory.mktemp("models") / "half"
    tiny_model(width=32, layers=1).to(torch.bfloat16).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return str(folder)


def test_auto_is_what_the_devices_multiply_and_the_run_keeps_it(
    half: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in SETTINGS.items()]
    assert cli.main(["train", "grpo", "--model", half, *flags, "--dry-run"]) == 0
    shown = capsys.readouterr().out
    assert f'\ndtype = "{HERE}"\n' in shown
    assert f"dtype       {HERE}: its folder says bfloat16" in shown
    command = ["train", "grpo", "--model", half, *flags, "--name", "run", "--no-console"]
    assert cli.main(command) == 0
    assert f'dtype = "{HERE}"' in (tmp_path / "runs/run/config.toml").read_text()


def test_a_run_continues_in_the_dtype_it_had_or_says_what_changes(
    half: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    low = {**SETTINGS, "model.path": half, "model.dtype": "bfloat16"}
    with caplog.at_level(logging.WARNING):
        unirl.run(unirl.make_plan("grpo", **low), "runs/low", console=False)
    emulated = [text for text in caplog.messages if "can only emulate" in text]
    if has_bfloat16("cpu"):
        assert not emulated
    else:  # the learner and the engine, each with the remedy
        assert len(emulated) == 2 and all("model.dtype auto decides" in each for each in emulated)
    for change, says in ((), False), (("--model.dtype", "float32"), True):
        caplog.clear()
        more = ["--run.total-steps", "16" if says else "8", "--no-console", *change]
        with caplog.at_level(logging.WARNING):
            assert cli.main(["resume", "low", *more]) == 0
        assert ("continues in float32; until now it computed in bfloat16" in caplog.text) == says
        kept = "float32" if says else "bfloat16"
        assert f'dtype = "{kept}"' in Path("runs/low/config.toml").read_text()


def test_what_is_asked_for_by_name_stays(half: str) -> None:
    for name in ("bfloat16", "float32"):
        found, why = settle_dtype(ModelConfig(path=half, dtype=name), META)  # type: ignore[arg-type]
        assert found == name
        assert ("auto decides by the device" in why) == (name == "bfloat16")


def test_one_device_that_emulates_decides(half: str) -> None:
    assert settle_dtype(ModelConfig(path=half), "cpu", META)[0] == "float32"
    assert settle_dtype(ModelConfig(path=half), "cpu")[0] == HERE
    assert settle_dtype(ModelConfig(), META)[0] == "float32"
    assert settle_dtype(ModelConfig(path="./nowhere"), META)[0] == "auto"
