"""The comparison of language trainings compares like with like, and counts what it says."""

from __future__ import annotations

import importlib
import shlex
import sys
from dataclasses import fields, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from unirl import config as configs
from unirl.llm.algorithms.resolve import resolve
from unirl.recipes import grpo

ROOT = Path(__file__).resolve().parents[2]
BENCHMARKS = ROOT / "benchmarks"


def load(folder: Path, name: str) -> ModuleType:
    """A script of benchmarks/, which is no package; the path is left as it was."""
    before = list(sys.path)
    sys.path[:0] = [str(folder), str(BENCHMARKS)]
    try:
        return importlib.import_module(name)
    finally:
        sys.path[:] = before


@pytest.fixture(scope="module")
def language() -> ModuleType:
    return load(BENCHMARKS, "side_by_side_language")


@pytest.fixture(scope="module")
def trl() -> ModuleType:
    return load(BENCHMARKS / "peers" / "trl", "run")


@pytest.mark.parametrize("name", ["digits-trl", "digits48-trl", "tiny-trl"])
def test_both_sides_train_with_the_same_settings(
    language: ModuleType, trl: ModuleType, name: str
) -> None:
    pairing = language.LANGUAGE_PAIRINGS[name]
    theirs = trl.PRESETS[pairing.env]
    ours = read(pairing.unirl.format(model="somewhere"))
    assert ours.task.name == theirs["task"]
    assert ours.queue.batch_size == theirs["num_prompts"]
    assert ours.rollout.group_size == theirs["group_size"]
    assert pairing.completions == theirs["num_prompts"] * theirs["group_size"]
    assert ours.sampling.max_tokens == theirs["max_tokens"]
    assert (ours.sampling.temperature, ours.sampling.top_p, ours.sampling.top_k) == (1, 1, 0)
    assert ours.learner.optimizer.lr == theirs["lr"]
    assert ours.learner.optimizer.lr_schedule == "constant"
    assert ours.learner.optimizer.beta2 == 0.99
    assert ours.learner.optimizer.max_grad_norm == 1.0
    assert ours.learner.optimizer.epsilon == 1e-8
    assert ours.learner.optimizer.weight_decay == 0.0
    assert (ours.learner.epochs, ours.learner.minibatches) == (1, 1)
    assert ours.mode == "sync"
    terms = resolve(ours.algorithm)
    assert terms.entropy_coef == theirs["entropy_coef"]
    # What does not count while the ratio is 1, as in the only update of a batch.
    moot = ("preset", "changed", "singleton", "dual_clip", "log_ratio_clamp", "kl_clamp")
    moot += ("correction", "correction_level", "correction_high", "kl_gradient")
    assert terms.correction == "none" and terms.kl_coef == 0.0
    named = resolve(replace(ours.algorithm, preset="trl:dapo"))
    differing = [
        item.name
        for item in fields(terms)
        if getattr(terms, item.name) != getattr(named, item.name) and item.name not in moot
    ]
    assert differing == []


def read(line: str) -> Any:
    """The config of a command line of `unirl train`."""
    words = shlex.split(line)
    tables = [configs.load_toml(ROOT / word[1:]) for word in words if word.startswith("@")]
    for table in tables:
        table.pop("recipe")
        table.pop("name")
    _, flags = configs.parse_flags(
        [word for word in words if not word.startswith("@")], grpo.Config
    )
    return configs.from_mapping(
        grpo.Config, configs.merge(*tables, configs.nest(grpo.Config, dict(flags)))
    )


def test_rates_begin_after_the_warm_up(language: ModuleType) -> None:
    pairing = language.LANGUAGE_PAIRINGS["digits48-trl"]
    pairing = language.changed(pairing, steps=6, unirl="", settings=())
    points = [
        language.Point(2, 100.0, 2_000, 0.1),  # slow: compiles, fills caches
        language.Point(4, 104.0, 3_000, 0.85),
        language.Point(6, 108.0, 3_800, 0.9),
    ]
    row = language._figures(pairing, {"system": "x"}, points)
    assert row["tokens_per_second"] == pytest.approx(1_800 / 8)
    assert row["seconds_per_step"] == pytest.approx(2.0)
    assert row["seconds_to_target"] == 104.0


def test_a_training_that_stopped_early_is_refused(language: ModuleType) -> None:
    pairing = language.LANGUAGE_PAIRINGS["digits48-trl"]
    with pytest.raises(SystemExit, match="made 4 of 10 updates"):
        language._figures(pairing, {"system": "x"}, [language.Point(4, 1.0, 10, 0.1)])


def test_a_curve_does_not_depend_on_how_often_it_was_logged(language: ModuleType) -> None:
    each = [language.Point(step, float(step), step, step / 32) for step in range(1, 33)]
    rare = [
        language.Point(step, float(step), step, (step - 0.5) / 32)  # the mean of two updates
        for step in range(2, 33, 2)
    ]
    assert language.curve(each, 32) == pytest.approx(language.curve(rare, 32), abs=1e-4)
    assert len(language.curve(each, 32)) == language.NUM_BLOCKS
