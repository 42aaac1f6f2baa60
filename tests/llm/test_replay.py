"""Agents' episodes are stored without learning, and learned from without engines: each group once,
by the store's own ledger.
"""

from __future__ import annotations

import shutil
import sqlite3
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="language models need the extra llm")

import unirl
from tests.system.test_agent_ledger import SETTINGS as AGENT
from unirl import cli
from unirl.core.tree import flatten
from unirl.errors import UniRLError
from unirl.llm.agents.episode import Episode
from unirl.llm.models.model import ModelConfig, load_tokenizer
from unirl.llm.models.tiny import make_tiny
from unirl.llm.trajectories.config import FILE, StoreConfig
from unirl.llm.trajectories.ledger import Ledger
from unirl.llm.trajectories.store import open_store
from unirl.storage.checkpoint import load_checkpoint

GROUP = 2
SETTINGS: dict[str, Any] = {
    **AGENT,
    "run.checkpoint_steps": 10**6,
    "learner.optimizer.lr": 1e-2,
    # Random weights earn nothing: entropy alone gives a gradient.
    "algorithm.entropy_coef": 0.05,
    "rollout.zero_variance": "train",
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tiny(tmp_path_factory.mktemp("model") / "tiny", width=32, layers=1))


def train(
    model: str, run_dir: Path, *, resume: Path | None = None, **settings: Any
) -> unirl.RunResult:
    plan = unirl.make_plan("agent", **{**SETTINGS, "model.path": model, **settings})
    return unirl.run(plan, run_dir, resume=resume, console=False)


@pytest.fixture(scope="module")
def rolled_out(model: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that only rolled out: eight groups."""
    run_dir = tmp_path_factory.mktemp("rollout") / "collected"
    train(model, run_dir, only="rollout", **{"run.total_steps": 8 * GROUP})
    return run_dir


@pytest.fixture
def collected(rolled_out: Path, tmp_path: Path) -> Path:
    """A copy, which a test may learn from."""
    return Path(shutil.copytree(rolled_out, tmp_path / "collected"))


def ledger_of(run_dir: Path) -> dict[int, int]:
    with closing(sqlite3.connect(run_dir / FILE)) as file:
        return dict(file.execute("SELECT ticket, update_number FROM lease").fetchall())


def model_of(run_dir: Path) -> dict[str, torch.Tensor]:
    return flatten(load_checkpoint(run_dir).model)


def test_a_run_that_only_rolls_out_stores_whole_groups_and_learns_nothing(rolled_out: Path) -> None:
    with closing(open_store(StoreConfig(), rolled_out, create=False)) as store:
        groups = list(Ledger(store).groups())
        assert [each.ticket for each in groups] == list(range(8))
        assert {row["state"] for row in store.find()} == {"done"}
        assert all(len(each.records) == GROUP for each in groups)
    assert ledger_of(rolled_out) == {} and load_checkpoint(rolled_out).model == {}
    assert not (rolled_out / "samples" / "groups").exists()


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_each_stored_group_is_learned_from_once_and_weights_move(
    model: str, collected: Path, tmp_path: Path, mode: str
) -> None:
    settings = {"only": "train", "samples": str(collected), "mode": mode}
    result = train(model, tmp_path / "run", **settings, **{"run.total_steps": 10**6})
    assert (result.reason, result.version, result.num_steps) == ("samples", 4, 8 * GROUP)
    assert sorted(ledger_of(collected)) == list(range(8))
    assert sorted(ledger_of(collected).values()) == [1, 1, 2, 2, 3, 3, 4, 4]
    with closing(open_store(StoreConfig(), collected, create=False)) as store:
        assert {row["state"] for row in store.find()} == {"trained"}
    train(model, tmp_path / "none", **{"run.total_steps": GROUP * 2, "learner.optimizer.lr": 1e-12})
    before, after = model_of(tmp_path / "none"), model_of(tmp_path / "run")
    assert any(float((before[name] - after[name]).abs().max()) > 1e-3 for name in before)
    if mode == "async":
        return
    # What is used up is refused, and may be learned from again where that is asked for.
    with pytest.raises(UniRLError, match="0 groups that nobody has learned from"):
        train(model, tmp_path / "next", **settings)
    again = train(
        model, tmp_path / "again", reuse_samples=True, **settings, **{"run.total_steps": 24 * GROUP}
    )
    assert again.version == 12 and sorted(ledger_of(collected).values()) == [1, 1, 2, 2, 3, 3, 4, 4]


def test_the_first_update_is_that_of_a_run_that_generates(
    model: str, collected: Path, tmp_path: Path
) -> None:
    one = {"run.total_steps": 2 * GROUP}
    train(model, tmp_path / "whole", **one)
    train(model, tmp_path / "train", only="train", samples=str(collected), **one)
    whole, replayed = model_of(tmp_path / "whole"), model_of(tmp_path / "train")
    for name, value in whole.items():
        assert float((value - replayed[name]).abs().max()) < 1e-4, name


def test_a_run_that_is_resumed_learns_again_from_what_its_checkpoint_has_not(
    model: str, collected: Path, tmp_path: Path
) -> None:
    """As after a kill: marks of updates after the checkpoint are in the store."""
    settings = {"only": "train", "samples": str(collected), "run.checkpoint_steps": 2 * 2 * GROUP}
    train(model, tmp_path / "whole", **{**settings, "samples": str(copied(collected, "other"))})
    run = tmp_path / "run"
    train(model, run, **settings, **{"run.total_steps": 3 * 2 * GROUP})
    assert sorted(ledger_of(collected).values()) == [1, 1, 2, 2, 3, 3]
    newest = sorted((run / "checkpoints").glob("step_*"))[-1]
    shutil.rmtree(newest)
    (run / "checkpoints" / "latest").unlink()
    (run / "checkpoints" / "latest").symlink_to("step_00000008")
    train(model, run, resume=run, **settings)
    assert sorted(ledger_of(collected).values()) == [1, 1, 2, 2, 3, 3, 4, 4]
    whole, parts = model_of(tmp_path / "whole"), model_of(run)
    assert all(torch.equal(value, parts[name]) for name, value in whole.items())


def copied(folder: Path, name: str) -> Path:
    return Path(shutil.copytree(folder, folder.parent / name))


def test_what_does_not_fit_is_refused_in_three_parts(
    model: str, collected: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    empty, foreign = copied(collected, "empty"), copied(collected, "foreign")
    with closing(sqlite3.connect(empty / FILE)) as file:
        for table in ("episode", "step", "body"):
            file.execute(f"DELETE FROM {table}")
        file.commit()
    with closing(sqlite3.connect(foreign / FILE)) as file:
        file.execute("UPDATE episode SET tokenizer_digest = '0123456789abcdef'")
        file.commit()
    plan = unirl.make_plan("agent", **{**SETTINGS, "model.path": model})
    Path("c.toml").write_text(unirl.config.to_toml(plan.config, recipe="agent"))
    for samples, flags, said in (
        ("nowhere", [], "nowhere has no stored episodes"),
        ("empty", [], "the store of empty has no groups"),
        ("foreign", [], "the episodes of foreign are of another model"),
        ("collected", ["--rollout.group-size", "4"], "do not fit rollout.group_size"),
        ("collected", ["--sampling.temperature", "0.5"], "do not fit sampling.temperature"),
        ("collected", ["--queue.batch-size", "9"], "the store has 8 groups that nobody"),
    ):
        words = ["train", "agent", "@c.toml", "--only", "train", "--samples", samples, *flags]
        assert cli.main([*words, "--no-console"]) == 2
        lines = capsys.readouterr().err.splitlines()
        assert len(lines) == 3 and said in lines[0], lines
    for flags, said in (
        (
            ["--only", "rollout", "--no-store.enabled"],
            "only is rollout, and store.enabled is false",
        ),
        (["--reuse-samples"], "reuse_samples is true"),
    ):
        assert cli.main(["train", "agent", "@c.toml", *flags, "--no-console"]) == 2
        assert said in capsys.readouterr().err
    assert ledger_of(collected) == {}


def test_a_token_that_the_model_does_not_know_ends_the_run(
    model: str, collected: Path, tmp_path: Path
) -> None:
    """Of a store that does not say of which tokenizer its tokens are."""
    with closing(open_store(StoreConfig(), collected)) as store:
        first = next(Ledger(store).groups()).records[0]
        turn = first.episode.turns[0]
        unknown = replace(turn, given=(*turn.given, len(load_tokenizer(ModelConfig(path=model)))))
        with store.transaction():
            store.drop([int(row["id"]) for row in store.find()], whole=True)
        store.put_many(
            [
                replace(first, episode=Episode([unknown]), place=place, tokenizer_digest="")
                for place in range(GROUP)
            ]
        )
    settings = {"queue.batch_size": 1, "only": "train", "samples": str(collected)}
    with pytest.raises(UniRLError, match="a token of another model"):
        train(model, tmp_path / "run", **settings)
