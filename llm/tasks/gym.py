"""Tasks of reasoning-gym, a package that makes puzzles of many kinds and judges their answers
(arXiv 2505.24760).
"""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from unirl.errors import UniRLError, suggestion
from unirl.llm.packages import needs
from unirl.llm.tasks.config import TaskConfig
from unirl.llm.tasks.task import MOST_HELD_OUT, Example, Subset, Task, checked_options

log = logging.getLogger(__name__)

_NUM_TRAIN = 1000
_SEED = 0


@dataclass(frozen=True)
class Puzzles:
    """Puzzles of one kind, each made when it is asked for."""

    name: str
    settings: Mapping[str, Any]
    size: int

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int, /) -> Example:
        entry = dataset(self.name, json.dumps(self.settings), self.size)[index]
        # What is needed to make the puzzle again: what it holds besides may not fit into JSON.
        origin = {"name": self.name, "settings": dict(self.settings), "size": self.size}
        return Example(
            answer=str(entry["answer"]),
            messages=({"role": "user", "content": entry["question"]},),
            info={"gym": origin | {"index": index}},
        )


def gym_task(name: str, config: TaskConfig) -> Task:
    """The task `gym:NAME`. No held-out question occurs among those to train on: few settings make
    a thousand different ones, so there may be fewer of those than asked for.
    """
    task = f"gym:{name}"
    settings = _settings(name, task, config)
    num_train = _NUM_TRAIN if config.num_train is None else config.num_train
    num_eval = min(MOST_HELD_OUT, num_train // 10) if config.num_eval is None else config.num_eval
    puzzles = Puzzles(name, settings, num_train + num_eval)
    texts = [puzzles[i].messages[0]["content"] for i in range(len(puzzles))]
    held_out = np.arange(num_train, num_train + num_eval)
    kept_back = {texts[i] for i in held_out}
    train = np.array([i for i in range(num_train) if texts[i] not in kept_back], dtype=np.int64)
    if len(train) < num_train:
        log.info("%s: %d of %d puzzles are held out", task, num_train - len(train), num_train)
    return Task(task, Subset(puzzles, train), Subset(puzzles, held_out), "gym")


@lru_cache(maxsize=64)
def dataset(name: str, settings: str, size: int) -> Any:
    """A reasoning-gym dataset; settings as JSON. Every process makes the same puzzles of it."""
    reasoning_gym = _reasoning_gym(f"gym:{name}")
    return reasoning_gym.create_dataset(name, seed=_SEED, size=size, **json.loads(settings))


def _settings(name: str, task: str, config: TaskConfig) -> dict[str, Any]:
    """The options as the dataset's own config wants them, checked by it."""
    gym_datasets = _reasoning_gym(task).factory.DATASETS
    if name not in gym_datasets:
        raise UniRLError(
            f'task "{task}" is unknown',
            f"reasoning-gym has {len(gym_datasets)} kinds of puzzles, none of this name",
            suggestion(name, gym_datasets).replace('"', '"gym:', 1)
            or "python -c 'import reasoning_gym as r; print(*r.factory.DATASETS)' names them",
        )
    known = [
        field.name
        for field in dataclasses.fields(gym_datasets[name][1])
        if field.name not in ("seed", "size")
    ]
    typed = checked_options(task, config, known)
    settings = {key: _value(text) for key, text in typed.items()}
    try:
        dataset(name, json.dumps(settings), 1)[0]
    except Exception as error:  # its own checks raise what they like, mostly AssertionError
        raise UniRLError(
            f'task "{task}" refuses its options',
            f"{settings or 'none are set'}: {type(error).__name__} {error}".rstrip(),
            "change task.options",
        ) from error
    return settings


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return {"True": True, "False": False}.get(text, text)


def _reasoning_gym(task: str) -> Any:
    with needs("reasoning-gym", f'task "{task}" cannot be made'):
        import reasoning_gym
        import reasoning_gym.factory
    return reasoning_gym
