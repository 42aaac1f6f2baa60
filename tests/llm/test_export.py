"""What a run learned, as a folder that others load."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="language models need the extra llm")

import unirl
from unirl.cli import main
from unirl.llm.assembly import weights_of
from unirl.llm.models.tiny import make_tiny
from unirl.recipes.grpo import Config
from unirl.storage.checkpoint import load_checkpoint

SMALL: dict[str, Any] = {
    "task.name": "reverse",
    "task.options": {"digits": "1"},
    "task.max_prompt": 16,
    "rollout.group_size": 4,
    "rollout.zero_variance": "train",
    "queue.batch_size": 2,
    "sampling.max_tokens": 4,
    "algorithm.entropy_coef": 0.1,
    "learner.optimizer.lr": 1e-2,
    "runner.learner_threads": 1,
    "run.total_steps": 16,
}


@pytest.mark.parametrize("settings", [{}, {"model.lora_rank": 4}, {"model.dtype": "bfloat16"}])
def test_an_exported_run_loads_with_the_weights_of_its_checkpoint(
    tmp_path: Path, settings: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    if "model.lora_rank" in settings:
        pytest.importorskip("peft", reason="adapters need peft, of the extra llm")
    import transformers

    base = str(make_tiny(tmp_path / "base", width=64, layers=2))
    plan = unirl.make_plan("grpo", **SMALL, **settings, **{"model.path": base})
    run, folder = tmp_path / "run", tmp_path / "out"
    unirl.run(plan, run, console=False)
    assert main(["export", str(run), str(folder)]) == 0
    assert "checkpoint of step 16" in capsys.readouterr().out
    config: Any = plan.config
    assert isinstance(config, Config)
    weights = weights_of(load_checkpoint(run).model, config=config)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    learned = dict(model.named_parameters())
    assert learned.keys() == weights.keys()
    assert all(torch.equal(value, weights[name]) for name, value in learned.items())
    wanted = torch.bfloat16 if "model.dtype" in settings else torch.float32
    assert model.dtype == wanted
    assert json.loads((folder / "config.json").read_text())["dtype"] == str(wanted)[6:]
    before = transformers.AutoModelForCausalLM.from_pretrained(base).requires_grad_(False)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    ids = tokenizer("12>", return_tensors="pt")["input_ids"]
    moved = model(ids).logits.detach().float() - before(ids).logits
    assert float(moved.abs().max()) > 1e-3
    assert tokenizer.chat_template is not None


def test_a_folder_that_holds_a_model_is_left_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = make_tiny(tmp_path / "base", width=64, layers=2)
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.toml").write_text(f'recipe = "grpo"\n[model]\npath = "{base}"\n')
    assert main(["export", str(run), str(base)]) == 2
    assert "is there already" in capsys.readouterr().err


def test_a_run_without_a_language_model_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.toml").write_text('recipe = "impala"\n[env]\nid = "CartPole-v1"\n')
    assert main(["export", str(tmp_path), str(tmp_path / "out")]) == 2
    assert "trained no language model" in capsys.readouterr().err
    assert main(["export", str(tmp_path)]) == 2
    assert "the folder to write to" in capsys.readouterr().err
