"""Prompts: the examples of tasks as token ids, by ticket."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from unirl.errors import UniRLError
from unirl.llm.tasks.config import TaskConfig
from unirl.llm.tasks.prompt_order import PromptOrder
from unirl.llm.tasks.task import Example, Examples, Indices, Message, Task, empty_split

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Prompt:
    """What a model is asked, and what rewards must know to judge its answers."""

    tokens: tuple[int, ...]
    text: str
    """The same as text, chat template included."""
    answer: str
    messages: tuple[Message, ...]
    """The conversation before the answer; a plain text as one user turn."""
    info: Mapping[str, Any]
    task: str
    reward: str
    """Name of the task's own reward; "": it has none."""
    index: int
    """Of the example in its split."""
    epoch: int
    ticket: int
    """-1: held out."""


class PromptSource:
    """Prompt n of a run, the same at every call.

    max_context: tokens the model can look at, 0: any number; max_tokens: those of them that a
    completion may take. Every prompt is looked at once, here: raises UniRLError for one that is too
    long, unless these are to be dropped, for a tokenizer without the template that they need, and
    for an empty split.
    """

    def __init__(
        self,
        tasks: Sequence[Task],
        tokenizer: Any,  # of transformers
        config: TaskConfig,
        *,
        max_context: int = 0,
        max_tokens: int = 0,
    ) -> None:
        self._tasks, self._tokenizer, self._config = tuple(tasks), tokenizer, config
        self._max_context, self._max_tokens = max_context, max_tokens
        self.longest = 0
        """Tokens of the longest prompt that is kept."""
        self.dropped: dict[str, int] = {}
        """Prompts left out because they are too long, of each task, both splits together."""
        self._train = [self._fitting(task, task.train) for task in tasks]
        self._held_out = [self._fitting(task, task.held_out) for task in tasks]
        for task, kept in zip(tasks, self._train, strict=True):
            if not len(kept):
                raise empty_split(task.name, "train", len(kept), config)
        self._ends = np.cumsum([len(kept) for kept in self._held_out])
        shares = config.weights
        # A task may call itself otherwise than the config does: the order is what they share.
        self._order = PromptOrder(
            list(shares), [len(kept) for kept in self._train], list(shares.values()), config.seed
        )

    @property
    def num_train(self) -> int:
        return sum(len(kept) for kept in self._train)

    @property
    def num_eval(self) -> int:
        return int(self._ends[-1])

    def decode(self, tokens: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=True))

    def prompt(self, ticket: int) -> Prompt:
        which, offset, epoch = self._order.locate(ticket)
        index = int(self._train[which][offset])
        return self._make(self._tasks[which], self._tasks[which].train, index, epoch, ticket)

    def held_out(self, i: int) -> Prompt:
        """Held-out prompt i of num_eval, task after task. Raises IndexError beyond."""
        if not 0 <= i < self.num_eval:
            raise IndexError(f"held-out prompt {i} of {self.num_eval}")
        which = int(np.searchsorted(self._ends, i, side="right"))
        begin = int(self._ends[which]) - len(self._held_out[which])
        index = int(self._held_out[which][i - begin])
        return self._make(self._tasks[which], self._tasks[which].held_out, index, 0, -1)

    def _make(self, task: Task, examples: Examples, index: int, epoch: int, ticket: int) -> Prompt:
        example = examples[index]
        text, tokens = self._encode(task, example)
        return Prompt(
            tokens=tokens,
            text=text,
            answer=example.answer,
            messages=self._messages(example),
            info=example.info,
            task=task.name,
            reward=task.reward,
            index=index,
            epoch=epoch,
            ticket=ticket,
        )

    def _fitting(self, task: Task, examples: Examples) -> Indices:
        most, kept = self._config.max_prompt, []
        if self._max_context:
            most = min(most, self._max_context - self._max_tokens)
        for index in range(len(examples)):
            length = len(self._encode(task, examples[index])[1])
            if length <= most:
                kept.append(index)
                self.longest = max(self.longest, length)
            elif self._config.too_long == "error":
                raise self._too_long(task, index, length)
        num_dropped = len(examples) - len(kept)
        if num_dropped:
            log.warning("%s: %d prompts are longer than %d tokens", task.name, num_dropped, most)
            self.dropped[task.name] = self.dropped.get(task.name, 0) + num_dropped
        return np.array(kept, dtype=np.int64)

    def _too_long(self, task: Task, index: int, length: int) -> UniRLError:
        if length > self._config.max_prompt:
            rule = f"task.max_prompt is {self._config.max_prompt}, it has {length} tokens"
            remedy = f"raise task.max_prompt to {length}"
        else:
            rule = (
                f"prompt + sampling.max_tokens <= context of the model: "
                f"{length} + {self._max_tokens} > {self._max_context}"
            )
            remedy = "lower sampling.max_tokens"
        return UniRLError(
            f'prompt {index} of task "{task.name}" is too long',
            rule,
            f'{remedy}, or set task.too_long to "drop"',
        )

    def _messages(self, example: Example) -> tuple[Message, ...]:
        turns = example.messages or ({"role": "user", "content": example.text},)
        if self._config.system and turns[0].get("role") != "system":
            return ({"role": "system", "content": self._config.system}, *turns)
        return turns

    def _encode(self, task: Task, example: Example) -> tuple[str, tuple[int, ...]]:
        wanted = self._config.template
        if wanted == "on" or (wanted == "auto" and example.messages):
            text = self._through_template(task, self._messages(example))
            # The template has written the special tokens already.
            return text, tuple(self._tokenizer.encode(text, add_special_tokens=False))
        if example.text and not self._config.system:
            text = example.text
        else:
            text = "\n\n".join(str(turn["content"]) for turn in self._messages(example))
        return text, tuple(self._tokenizer.encode(text, add_special_tokens=True))

    def _through_template(self, task: Task, messages: tuple[Message, ...]) -> str:
        if not self._tokenizer.chat_template:
            raise UniRLError(
                f'the tokenizer has no chat template, and task "{task.name}" needs one',
                f'task.template is "{self._config.template}", which writes questions as messages',
                'set task.template to "off" for plain text, or take a model that can chat',
            )
        try:
            text = self._tokenizer.apply_chat_template(
                [dict(turn) for turn in messages],
                tokenize=False,
                add_generation_prompt=True,
                **self._config.template_options,
            )
        except Exception as error:  # a template is a program of the model's author
            raise UniRLError(
                f'the chat template refuses a prompt of task "{task.name}"',
                f"{type(error).__name__}: {error}",
                "leave out task.system if the model has no system turns, or set task.template to "
                '"off"',
            ) from error
        return str(text)
