"""Prompts: the examples of tasks as token ids, by ticket."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np

from unirl.errors import UniRLError
from unirl.llm.engine import Completion
from unirl.llm.tasks.config import TaskConfig
from unirl.llm.tasks.prompt_order import PromptOrder
from unirl.llm.tasks.task import Example, Examples, Indices, Message, Task, empty_split

log = logging.getLogger(__name__)

_AT_ONCE = 1024
"""Prompts that are turned into tokens by one call: a loop of calls takes several times as long."""


Prepare = Callable[[Sequence[Message]], tuple[Sequence[Message], Sequence[Mapping[str, Any]]]]
"""From the messages of a prompt to those that the chat template is given, and tools with them."""


class Said(str):
    """The words of a model alone: of each of its turns, where tools or users spoke between them; of
    an episode, its last answer.
    """

    whole: str
    """With all that was said between them."""
    turns: tuple[Mapping[str, Any], ...]
    """Of an episode, values that JSON can hold: see unirl.llm.agents.judged; (): it is none."""
    outcome: float | None
    """What the agent or its world says the episode earned."""
    ending: str

    def __new__(
        cls,
        text: str,
        whole: str,
        turns: Sequence[Mapping[str, Any]] = (),
        outcome: float | None = None,
        ending: str = "",
    ) -> Said:
        said = super().__new__(cls, text)
        said.whole, said.turns, said.outcome, said.ending = whole, tuple(turns), outcome, ending
        return said


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


@dataclass(frozen=True)
class PromptIndex:
    """Which examples of each task fit: found once for a run, whose processes are handed it."""

    train: tuple[Indices, ...]
    held_out: tuple[Indices, ...]
    sizes: tuple[tuple[int, int], ...]
    """Examples of each task, fitting or not."""
    longest: int
    """Tokens of the longest prompt that is kept."""
    dropped: Mapping[str, int]
    """Prompts left out because they are too long, of each task, both splits together."""


class PromptSource:
    """Prompt n of a run, the same at every call; it becomes text and tokens when it is asked for.

    max_context: tokens the model can look at, 0: any number; max_tokens: those of them that a
    completion may take. prepare: see Prepare. index: of the same data and settings; None: every
    prompt is looked at once, here. Raises UniRLError for one that is too
    long, unless these are to be dropped, for a tokenizer without the template that they need, for
    an empty split, and where the index is of other data.
    """

    def __init__(
        self,
        tasks: Sequence[Task],
        tokenizer: Any,  # of transformers
        config: TaskConfig,
        *,
        max_context: int = 0,
        max_tokens: int = 0,
        index: PromptIndex | None = None,
        prepare: Prepare | None = None,
    ) -> None:
        self._tasks, self._tokenizer, self._config = tuple(tasks), tokenizer, config
        self._prepare = prepare
        self._texts: dict[int, str] = {}
        """Of tokens that were decoded one by one: no more than the vocabulary has."""
        self._max_context, self._max_tokens = max_context, max_tokens
        self.index = index or self._look_at_all()
        sizes = tuple((len(task.train), len(task.held_out)) for task in tasks)
        if self.index.sizes != sizes:
            raise UniRLError(
                f"the data of task {', '.join(task.name for task in tasks)} has changed",
                f"it had {self.index.sizes} examples to train on and held out when the run began, "
                f"it has {sizes}",
                "leave the data alone while a run reads it; then `unirl resume`",
            )
        self._train, self._held_out = self.index.train, self.index.held_out
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

    @property
    def longest(self) -> int:
        return self.index.longest

    @property
    def dropped(self) -> Mapping[str, int]:
        return self.index.dropped

    def said(self, completion: Completion) -> Said:
        """What rewards judge. Turns are apart by a line break, so that no words of two of them
        become one.
        """
        whole = self.decode(completion.tokens)
        if not completion.drawn:
            return Said(whole, whole)
        marked = zip(completion.tokens, completion.drawn, strict=True)
        turns = (
            self.decode([token for token, _ in turn])
            for own, turn in groupby(marked, key=lambda each: each[1])
            if own
        )
        return Said("\n".join(turns), whole)

    def decode(self, tokens: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=True))

    def decode_token(self, token: int) -> str:
        """The text of one token; "" of a special one. Characters of several tokens are lost."""
        if token not in self._texts:
            self._texts[token] = self.decode((token,))
        return self._texts[token]

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

    def _look_at_all(self) -> PromptIndex:
        kept: dict[str, list[Indices]] = {"train": [], "held_out": []}
        dropped: dict[str, int] = {}
        longest, most = 0, self._config.max_prompt
        if self._max_context:
            most = min(most, self._max_context - self._max_tokens)
        for split, found in kept.items():
            for task in self._tasks:
                length = self._lengths(task, getattr(task, split))
                fits = length <= most
                if self._config.too_long == "error" and not fits.all():
                    first = int(np.argmin(fits))
                    raise self._too_long(task, first, int(length[first]))
                found.append(np.flatnonzero(fits))
                longest = max(longest, int(length[fits].max(initial=0)))
                if num_dropped := int((~fits).sum()):
                    log.warning(
                        "%s: %d prompts are longer than %d tokens", task.name, num_dropped, most
                    )
                    dropped[task.name] = dropped.get(task.name, 0) + num_dropped
        for task, train in zip(self._tasks, kept["train"], strict=True):
            if not len(train):
                raise empty_split(task.name, "train", 0, self._config)
        sizes = tuple((len(task.train), len(task.held_out)) for task in self._tasks)
        return PromptIndex(tuple(kept["train"]), tuple(kept["held_out"]), sizes, longest, dropped)

    def _lengths(self, task: Task, examples: Examples) -> Indices:
        found = []
        for begin in range(0, len(examples), _AT_ONCE):
            end = min(begin + _AT_ONCE, len(examples))
            texts = [self._text(task, examples[i]) for i in range(begin, end)]
            # Whether a text goes through the template is the same for all but a mixed file.
            for special, some in groupby(texts, key=lambda each: each[1]):
                rows = self._tokenizer(
                    [text for text, _ in some],
                    add_special_tokens=special,
                    return_attention_mask=False,
                )
                found += [len(ids) for ids in rows["input_ids"]]
        return np.array(found, dtype=np.int64)

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
        text, special = self._text(task, example)
        return text, tuple(self._tokenizer.encode(text, add_special_tokens=special))

    def _text(self, task: Task, example: Example) -> tuple[str, bool]:
        """A prompt, and whether special tokens are still to be added to it."""
        wanted = self._config.template
        if wanted == "on" or (wanted == "auto" and example.messages):
            # The template has written the special tokens already.
            return self._through_template(task, self._messages(example)), False
        if example.text and not self._config.system:
            return example.text, True
        return "\n\n".join(str(turn["content"]) for turn in self._messages(example)), True

    def _through_template(self, task: Task, messages: tuple[Message, ...]) -> str:
        if not self._tokenizer.chat_template:
            raise UniRLError(
                f'the tokenizer has no chat template, and task "{task.name}" needs one',
                f'task.template is "{self._config.template}", which writes questions as messages',
                'set task.template to "off" for plain text, or take a model that can chat',
            )
        turns: Sequence[Message] = messages
        options: dict[str, Any] = dict(self._config.template_options)
        if self._prepare is not None:
            turns, tools = self._prepare(messages)
            options |= {"tools": list(tools)} if tools else {}
        try:
            text = self._tokenizer.apply_chat_template(
                [dict(turn) for turn in turns],
                tokenize=False,
                add_generation_prompt=True,
                **options,
            )
        except Exception as error:  # a template is a program of the model's author
            raise UniRLError(
                f'the chat template refuses a prompt of task "{task.name}"',
                f"{type(error).__name__}: {error}",
                "leave out task.system if the model has no system turns, or set task.template to "
                '"off"',
            ) from error
        return str(text)
