"""A reward model: a small real one, made here."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.llm.test_rewards import DONE, TASK, prompt
from unirl.errors import UniRLError
from unirl.llm.outcome import FAILED, SCORE, TIMED_OUT, Score
from unirl.llm.rewards.config import RewardConfig
from unirl.llm.rewards.rewards import Rewarder

transformers = pytest.importorskip("transformers", reason="makes and loads the classifier")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("reward") / "model", 1)


def make(folder: Path, num_labels: int) -> Path:
    from unirl.llm.models.tiny import tiny_tokenizer

    tokenizer: Any = tiny_tokenizer()
    config = transformers.LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=64,
        num_labels=num_labels,
        pad_token_id=None,
    )
    torch.manual_seed(0)
    transformers.LlamaForSequenceClassification(config).save_pretrained(folder)
    # As many do: padding is the token that texts end with.
    tokenizer.pad_token = tokenizer.eos_token
    tokenizer.save_pretrained(folder)
    return folder


def judged(folder: Path, texts: list[str], **config: Any) -> list[Score]:
    settings = RewardConfig(weights={"model": 1.0}, model=str(folder), **config)
    rewarder = Rewarder(settings, [TASK])
    rows = asyncio.run(rewarder.score_group(prompt(), texts, [DONE] * len(texts)))
    rewarder.close()
    return [row[0] for row in rows]


def test_values_are_those_of_the_model_whatever_the_batch(folder: Path) -> None:
    texts = ["7", "it is seven, I think", "8", "no idea at all"]
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    wanted = []
    for text in texts:
        turns = [{"role": "user", "content": "3 + 4?"}, {"role": "assistant", "content": text}]
        written = tokenizer.apply_chat_template(turns, tokenize=False)
        assert written.endswith(tokenizer.eos_token)
        token = torch.tensor([tokenizer.encode(written, add_special_tokens=False)])
        with torch.no_grad():
            hidden = model.model(token).last_hidden_state
            wanted.append(float(model.score(hidden)[0, -1, 0]))
    assert len(set(wanted)) == 4
    for batch in (1, 2, 16):
        scores = judged(folder, texts, model_batch=batch)
        assert [score.value for score in scores] == pytest.approx(wanted, abs=1e-5)


def test_a_text_that_is_too_long_for_it_fails_alone(folder: Path) -> None:
    scores = judged(folder, ["7", "7" * 80])
    assert [score.outcome for score in scores] == [SCORE, FAILED]
    assert "takes 64" in scores[1].why


@contextlib.contextmanager
def slow(folder: Path, *seconds: float, deadline: float) -> Iterator[Rewarder]:
    """Rewards whose model takes so long for each batch in turn, and then for all others."""
    config = RewardConfig(weights={"model": 1.0}, model=str(folder), timeout_seconds=deadline)
    rewarder = Rewarder(config, [TASK])
    left = list(seconds)
    model = rewarder.rewards["model"].model  # type: ignore[attr-defined]
    model.register_forward_pre_hook(
        lambda *_: time.sleep(left.pop(0) if len(left) > 1 else left[0])
    )
    try:
        yield rewarder
    finally:
        rewarder.close()


async def one(rewarder: Rewarder, text: str) -> Score:
    return (await rewarder.score_group(prompt(), [text], [DONE]))[0][0]


def test_waiting_for_other_groups_counts_towards_no_deadline(folder: Path) -> None:
    async def together(rewarder: Rewarder) -> list[Score]:
        return list(await asyncio.gather(*(one(rewarder, str(i)) for i in range(4))))

    with slow(folder, 0.5, deadline=1.0) as rewarder:
        scores = asyncio.run(together(rewarder))
    assert [score.outcome for score in scores] == [SCORE] * 4


def test_what_a_late_group_left_running_costs_the_next_one_nothing(folder: Path) -> None:
    async def in_turn(rewarder: Rewarder) -> list[Score]:
        return [await one(rewarder, text) for text in ("a", "b", "c")]

    with slow(folder, 2.0, 0.7, deadline=1.2) as rewarder:
        scores = asyncio.run(in_turn(rewarder))
    assert [score.outcome for score in scores] == [TIMED_OUT, SCORE, SCORE]


def test_a_model_that_hangs_is_waited_for_no_longer_than_a_deadline(folder: Path) -> None:
    async def in_turn(rewarder: Rewarder) -> list[Score]:
        return [await one(rewarder, text) for text in ("a", "b")]

    with slow(folder, 4.0, deadline=0.4) as rewarder:
        began = time.monotonic()
        scores = asyncio.run(in_turn(rewarder))
        took = time.monotonic() - began
    assert [score.outcome for score in scores] == [TIMED_OUT] * 2
    assert took < 3


def test_closing_lets_go_of_the_model(folder: Path) -> None:
    rewarder = Rewarder(RewardConfig(weights={"model": 1.0}, model=str(folder)), [TASK])
    asyncio.run(one(rewarder, "7"))
    model = weakref.ref(rewarder.rewards["model"].model)  # type: ignore[attr-defined]
    rewarder.close()
    rewarder.close()
    # The thread that computed says so a moment before it lets go of what it was given.
    end = time.monotonic() + 10.0
    while model() is not None and time.monotonic() < end:
        time.sleep(0.01)
        gc.collect()
    assert model() is None


def test_what_is_no_reward_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UniRLError, match="cannot be loaded"):
        judged(tmp_path / "nowhere", ["7"])
    with pytest.raises(UniRLError, match="must have 1 label, it has 3"):
        judged(make(tmp_path / "three", 3), ["7"])
