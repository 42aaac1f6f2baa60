"""What a run learned, as a folder that others load."""

from __future__ import annotations

import asyncio
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
    if "model.dtype" not in settings:  # whose ties another order of additions may break
        assert_answers_alike(config.model, weights, model, tokenizer)
    assert "AutoModelForCausalLM" in (folder / "README.md").read_text()


def assert_answers_alike(config: Any, weights: Any, model: Any, tokenizer: Any) -> None:
    """The engine that serves the run and plain transformers say the same, always the likeliest."""
    from unirl.llm.engine import EngineConfig, Request, SamplingConfig
    from unirl.llm.engines.hf.engine import HfEngine

    prompts = [tuple(tokenizer(text)["input_ids"]) for text in ("12>", "7>", "3+4=")]
    sampling = SamplingConfig(temperature=0.0, max_tokens=12)

    async def served() -> list[tuple[int, ...]]:
        engine = HfEngine(config, EngineConfig(device="cpu"))
        await engine.start()
        await engine.load_weights(weights, 1)
        requests = [Request(str(i), prompt, sampling, i) for i, prompt in enumerate(prompts)]
        answers = await asyncio.gather(*map(engine.generate, requests))
        await engine.close()
        return [answer.tokens for answer in answers]

    for prompt, answer in zip(prompts, asyncio.run(served()), strict=True):
        whole = model.generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False)
        assert tuple(whole[0, len(prompt) :].tolist()) == answer


def test_a_folder_that_holds_a_model_is_left_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = make_tiny(tmp_path / "base", width=64, layers=2)
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.toml").write_text(f'recipe = "grpo"\n[model]\npath = "{base}"\n')
    assert main(["export", str(run), str(base)]) == 2
    assert "is there already" in capsys.readouterr().err


def test_a_language_model_has_one_format(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.toml").write_text('recipe = "grpo"\n[model]\npath = "tiny"\n')
    for name, remedy in (("onnx", "optimum-cli"), ("torchscript", "leave --format out")):
        assert main(["export", str(tmp_path), str(tmp_path / "out"), "--format", name]) == 2
        error = capsys.readouterr().err
        assert f"format {name} is for policies" in error and remedy in error
    assert not (tmp_path / "out").exists()
