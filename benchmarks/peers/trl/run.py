"""TRL 1.16's GRPOTrainer at its fastest on two cores, in its own .venv, on a task of UniRL's.

It is asked the very prompts that UniRL's run of the same settings is asked, update by update, and
rewarded by the same function: both come from this clone, through PYTHONPATH. So is the tiny model.
A number of updates is run, not of seconds: answers grow shorter as a model learns, so only equal
updates compare. The row has one point per update: seconds since training began, completion tokens
so far, mean reward.

    python benchmarks/peers/trl/run.py --env digits --model models/smollm2 --steps 40 --json
    python benchmarks/peers/trl/run.py --env digits --model models/smollm2 --steps 4 --try

It runs with the malloc setting of side_by_side_malloc.py, as UniRL does in the comparison.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
sys.path.insert(0, str(HERE.parents[1]))
from side_by_side_malloc import MALLOC  # noqa: E402

sys.path.insert(0, str(HERE.parent))
from peer import Settings, measure, pip  # noqa: E402  (which takes both folders off again)
from trl_presets import CANDIDATES, PRESETS, changed  # noqa: E402

NAME = "TRL 1.16.0 GRPOTrainer"


def train(settings: Settings, model_folder: str, num_steps: int, seed: int, folder: Path) -> Any:
    """Run all updates; returns the points of the row, and how long it took to get ready."""
    started = time.monotonic()
    import torch
    from transformers import TrainerCallback, logging

    if settings["generate"] != "vllm":
        hide_vllm()
    from trl import GRPOConfig, GRPOTrainer

    logging.set_verbosity_error()
    if settings["generate"] == "vllm":
        let_vllm_take_weights()
    torch.set_num_threads(settings["num_threads"])
    model, tokenizer = load(settings, model_folder)
    data, rule = questions(settings, tokenizer, num_steps)
    points: list[list[float]] = []
    newest = {"tokens": 0, "reward": 0.0}
    begun = 0.0

    def reward(completions: Any, completion_ids: Any, answer: list[str], **_: Any) -> list[float]:
        texts = [one if isinstance(one, str) else one[0]["content"] for one in completions]
        scores = [rule(text, right) for text, right in zip(texts, answer, strict=True)]
        newest["tokens"] += sum(len(ids) for ids in completion_ids)
        newest["reward"] = sum(scores) / len(scores)
        return scores

    class Points(TrainerCallback):  # type: ignore[misc]
        """The clock begins with the training, as UniRL's time/seconds does."""

        def on_train_begin(self, *_: Any, **__: Any) -> None:
            nonlocal begun
            begun = time.monotonic()

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            seconds = round(time.monotonic() - begun, 3)
            points.append(
                [state.global_step, seconds, newest["tokens"], round(newest["reward"], 4)]
            )

    size = settings["num_prompts"] * settings["group_size"]
    config = GRPOConfig(
        output_dir=str(folder),
        max_steps=num_steps,
        per_device_train_batch_size=settings["micro_batch"],
        gradient_accumulation_steps=size // settings["micro_batch"],
        num_generations=settings["group_size"],
        max_completion_length=settings["max_tokens"],
        temperature=1.0,
        beta=0.0,
        entropy_coef=settings["entropy_coef"],
        loss_type="dapo",
        learning_rate=settings["lr"],
        lr_scheduler_type="constant",
        optim="adamw_torch_fused",
        adam_beta1=0.9,
        adam_beta2=0.99,
        max_grad_norm=1.0,
        shuffle_dataset=False,
        disable_dropout=True,
        gradient_checkpointing=False,
        bf16=settings["autocast"],
        use_cpu=True,
        torch_compile=settings["compile"],
        cache_implementation=settings["cache"],
        use_transformers_continuous_batching=settings["generate"] == "continuous",
        use_vllm=settings["generate"] == "vllm",
        vllm_max_model_length=256,
        vllm_importance_sampling_correction=settings["correct"],
        dataloader_num_workers=0,
        dataloader_pin_memory=False,
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        seed=seed,
    )
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=reward,
        args=config,
        train_dataset=data,
        processing_class=tokenizer,
        callbacks=[Points()],
    )
    trainer.train()
    return points, round(begun - started, 2)


def hide_vllm() -> None:
    """TRL imports vLLM wherever it is installed: 0.3 GB that no one uses here."""
    from trl import import_utils

    import_utils.is_vllm_available = lambda *_, **__: False


def let_vllm_take_weights() -> None:
    """TRL loads weights parameter by parameter, which fails in vLLM's builds for CPUs: their linear
    layers are packed. There they go through vLLM's own reload, and the head, which is tied to the
    embedding and packed, too, is packed again. Without compilation, it starts in seconds and is
    as fast.
    """
    from functools import partial

    from trl.generation import vllm_generation
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

    def sync_weights(self: Any) -> None:
        weights = {name: value.detach() for name, value in self._iter_named_params()}
        worker = self.llm.llm_engine.model_executor.driver_worker
        worker.model_runner.reload_weights(weights_iterator=iter(weights.items()))
        dispatch_cpu_unquantized_gemm(worker.model_runner.model.lm_head, remove_weight=False)
        self.llm.reset_prefix_cache()

    vllm_generation.VLLMGeneration.sync_weights = sync_weights
    vllm_generation.LLM = partial(vllm_generation.LLM, enforce_eager=True)


def load(settings: Settings, model_folder: str) -> tuple[Any, Any]:
    """Model and tokenizer: from a folder, or UniRL's tiny ones."""
    import torch
    import transformers

    if settings["task"] == "reverse":
        from unirl.llm.models.tiny import tiny_model, tiny_tokenizer

        return tiny_model(attention=settings["attention"]), tiny_tokenizer()
    model = transformers.AutoModelForCausalLM.from_pretrained(
        model_folder,
        dtype=getattr(torch, settings["weights"]),
        attn_implementation=settings["attention"],
    )
    return model, transformers.AutoTokenizer.from_pretrained(model_folder, padding_side="left")


def questions(
    settings: Settings, tokenizer: Any, num_steps: int
) -> tuple[Any, Callable[[str, str], float]]:
    """The prompts of UniRL's tickets in their order, none of them held out, and what rewards them.

    Ends the program where TRL would make other tokens of a prompt.
    """
    from datasets import Dataset

    from unirl.llm.rewards.rules import RULES
    from unirl.llm.tasks.config import TaskConfig
    from unirl.llm.tasks.prompts import PromptSource
    from unirl.llm.tasks.make import make_tasks

    config = TaskConfig(name=settings["task"])
    tasks = make_tasks(config)
    source = PromptSource(tasks, tokenizer, config)
    rows = []
    for ticket in range(num_steps * settings["num_prompts"]):
        prompt = source.prompt(ticket)
        chat = settings["task"] != "reverse"
        messages = [dict(turn) for turn in prompt.messages]
        theirs = (
            tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, tokenize=True, return_dict=True
            )
            if chat
            else tokenizer(text=prompt.text)
        )
        if tuple(theirs["input_ids"]) != prompt.tokens:
            raise SystemExit(f"TRL reads {prompt.text!r} as other tokens than UniRL")
        rows.append({"prompt": messages if chat else prompt.text, "answer": prompt.answer})
    return Dataset.from_list(rows), RULES[tasks[0].reward]


def inside(flags: argparse.Namespace) -> None:
    """Train and print the row; runs in the peer's own environment."""
    settings = changed(flags.env, flags.set)
    points, start_up = train(settings, flags.model, flags.steps, flags.seed, flags.inside)
    shown = [f"{key} {value}" for key, value in settings.items()]
    row = {
        "system": NAME,
        "env": flags.env,
        "seed": flags.seed,
        "start_up_seconds": start_up,
        "settings": ", ".join(shown) + "; loss dapo, fused AdamW (0.9, 0.99), logging off",
        "points": points,
    }
    print(json.dumps(row), flush=True)


def weighed(flags: argparse.Namespace, changes: Sequence[str]) -> dict[str, Any]:
    """The row of one training, and the largest memory of its process tree."""
    folder = Path(tempfile.mkdtemp(prefix="peer-"))
    command = [str(flags.venv / "bin" / "python"), str(Path(__file__).resolve())]
    command += ["--env", flags.env, "--steps", str(flags.steps), "--seed", str(flags.seed)]
    # It runs elsewhere, so that its files stay in that folder.
    command += ["--model", str(Path(flags.model).resolve())]
    for change in changes:
        command += ["--set", change]
    environment = {
        **MALLOC,
        "PYTHONPATH": str(ROOT),
        "PYTHONWARNINGS": "ignore",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    }
    try:
        result = measure.run(
            [*command, "--inside", str(folder)],
            timeout_seconds=flags.timeout_seconds,
            environment=environment,
            cwd=folder,
        )
        return {**result.row, "peak_memory_mb": round(result.peak_memory_mb, 1)}
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def try_all(flags: argparse.Namespace) -> None:
    """Preset and candidates in turn; the first update is not counted."""
    seconds: dict[str, float] = {}
    for candidate in ({}, *CANDIDATES[flags.env]):
        changes = [f"{key}={value}" for key, value in candidate.items()]
        name = " ".join(changes) or "preset"
        try:
            row = weighed(flags, [*flags.set, *changes])
        except RuntimeError as error:  # a setting that does not work here is an outcome, too
            print(f"{name}: failed: {str(error).strip().splitlines()[-1]}", flush=True)
            continue
        first, last = row["points"][0], row["points"][-1]
        per_step = (last[1] - first[1]) / max(last[0] - first[0], 1)
        rate = (last[2] - first[2]) / (last[1] - first[1])
        seconds[name] = per_step
        memory = row["peak_memory_mb"]
        print(
            f"{name}: {per_step:.2f} s/update, {rate:,.0f} tokens/s, {memory:,.0f} MB", flush=True
        )
    if seconds:
        print(f"fastest: {min(seconds, key=lambda name: seconds[name])}")


def install(venv: Path) -> None:
    """Make the environment once; a mark written last says that it is whole."""
    files = [HERE / "requirements.txt", ROOT / "requirements" / "vllm-cpu.txt"]
    last = HERE / "requirements-vllm.txt"
    wanted = "".join(file.read_text() for file in (*files, last))
    mark = venv / "requirements.installed"
    if mark.exists() and mark.read_text() == wanted:
        return
    print(f"installing {NAME} into {venv} (some minutes, 5 GB, once)", file=sys.stderr)
    subprocess.run([sys.executable, "-m", "venv", "--clear", str(venv)], check=True)
    pip(venv, [word for file in files for word in ("-r", str(file))])
    pip(venv, ["--no-deps", "-r", str(last)])
    mark.write_text(wanted)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--env", choices=PRESETS, default="digits")
    parser.add_argument("--steps", type=int, default=40, help="updates")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--model",
        default=os.environ.get("UNIRL_SMOLLM2", str(ROOT / "models" / "smollm2")),
        help="folder that `unirl model smollm2` made; default: $UNIRL_SMOLLM2, models/smollm2",
    )
    parser.add_argument("--json", action="store_true", help="print one line of JSON, nothing else")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--venv", type=Path, default=HERE / ".venv", help="its own environment")
    parser.add_argument("--install", action="store_true", help="make that and stop")
    parser.add_argument("--try", action="store_true", dest="try_all", help="all candidates in turn")
    parser.add_argument("--timeout-seconds", type=float, default=3600.0)
    parser.add_argument("--inside", type=Path, help=argparse.SUPPRESS)
    flags = parser.parse_args()
    if flags.inside:
        inside(flags)
        return
    flags.venv = flags.venv.absolute()  # not resolved: its python is a link to the system's
    changed(flags.env, flags.set)
    install(flags.venv)
    if flags.install:
        return
    if PRESETS[flags.env]["task"] != "reverse" and not Path(flags.model, "config.json").exists():
        parser.error(f"{flags.model} has no model; make it: unirl model smollm2 {flags.model}")
    measure.exit_on_terminate()
    if flags.try_all:
        try_all(flags)
        return
    row = weighed(flags, flags.set)
    if flags.json:
        print(json.dumps(row))
        return
    for key, value in row.items():
        if key != "points":
            print(f"{key}: {value}")
    for step, seconds, tokens, reward in row["points"]:
        print(f"update {step:4d}  {seconds:8.2f} s  {tokens:8d} tokens  reward {reward:.3f}")


if __name__ == "__main__":
    main()
