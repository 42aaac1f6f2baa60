"""The tasks that a config names: built in, read from files, of reasoning-gym, or of your own."""

from __future__ import annotations

from unirl.errors import UniRLError, suggestion
from unirl.imports import is_own, load_own
from unirl.llm.tasks.builtin import BUILT_IN, built_in_task
from unirl.llm.tasks.config import TaskConfig
from unirl.llm.tasks.files import READERS, file_task
from unirl.llm.tasks.gym import gym_task
from unirl.llm.tasks.task import Task, empty_split


def make_tasks(config: TaskConfig) -> list[Task]:
    """The tasks that a config names, in its order. Raises UniRLError for one that is unknown,
    unreadable or empty.
    """
    tasks = [make_task(name, config) for name in config.weights]
    for key in config.options:
        if "/" in key and key.rpartition("/")[0] not in config.weights:
            raise UniRLError(
                f'task.options sets "{key}"',
                f'there is no task "{key.rpartition("/")[0]}", there are '
                + ", ".join(config.weights),
                "name one of them before the last slash, or leave it out to set all",
            )
    return tasks


def make_task(name: str, config: TaskConfig) -> Task:
    kind, colon, rest = name.partition(":")
    if name in BUILT_IN:
        task = built_in_task(name, config)
    elif colon and kind in READERS:
        task = file_task(name, config)
    elif colon and kind == "gym":
        task = gym_task(rest, config)
    elif is_own(name):
        task = _own_task(name, config)
    else:
        known = [*BUILT_IN, *(f"{k}:" for k in (*READERS, "gym"))]
        raise UniRLError(
            f'task "{name}" is unknown',
            f"there are {', '.join(known)} and module:function of your own",
            suggestion(name, known) or "name one of them",
        )
    if not len(task.train):
        raise empty_split(task.name, "train", 0, config)
    return task


def _own_task(name: str, config: TaskConfig) -> Task:
    what = f'task "{name}"'
    make = load_own(name, what)
    task = make(config) if callable(make) else make
    if not isinstance(task, Task):
        raise UniRLError(
            f"{what} is not a task",
            f"expected a function of TaskConfig that returns a Task, found {type(task).__name__}",
            "return unirl.llm.tasks.task.Task(name, train, held_out, reward)",
        )
    return task
