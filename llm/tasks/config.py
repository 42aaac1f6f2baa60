"""Which questions a language model is asked, and how they become prompts."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from unirl.config.rules import check_setting
from unirl.errors import UniRLError


@dataclass(frozen=True)
class TaskConfig:
    """Where prompts come from, in which order, and how long they may be."""

    name: str = field(default="arithmetic", metadata={"common": True})
    """arithmetic, digits, reverse, copy, count; jsonl:PATH, parquet:PATH, hf:NAME (a dataset);
    gym:NAME (reasoning-gym); or module:function of your own, which takes this config.
    """
    mix: Mapping[str, float] = field(default_factory=dict)
    """Several tasks with their weights, instead of `name`. A larger weight: asked more often.
    Changed weights hold from the next prompt on; within its epoch a task may then repeat some.
    """
    num_train: int | None = None
    """Examples to train on, of each task. none: all there are (gym: 1000). More: less is learnt by
    heart.
    """
    num_eval: int | None = None
    """Examples held out, of each task. none: what the task proposes, else a tenth, at most 200.
    More: steadier and slower evaluations. 0: none.
    """
    prompt_field: str = "prompt"
    """jsonl, parquet, hf: the field that holds the question, as text or as a list of messages."""
    answer_field: str = "answer"
    """jsonl, parquet, hf: the field that holds the right answer; "" when there is none."""
    template: Literal["auto", "on", "off"] = "auto"
    """Whether prompts go through the tokenizer's chat template. auto: questions do, the plain texts
    of reverse, copy and count do not.
    """
    template_options: Mapping[str, bool | int | str] = field(default_factory=dict)
    """What else the chat template is given, such as enable_thinking = false."""
    system: str = ""
    """A system message before every question. Longer: longer prompts."""
    max_prompt: int = 512
    """Tokens a prompt may have. More: longer questions, more memory."""
    too_long: Literal["error", "drop"] = "error"
    """What becomes of longer prompts: the run does not start, or they are left out and counted."""
    seed: int = 0
    """Of the order in which examples come. What is held out does not depend on it."""
    options: Mapping[str, str] = field(default_factory=dict)
    """Settings of the task: digits (reverse, copy, count, products), shots (products: how many
    stand before the question, worked out), eval (jsonl, parquet: a file to hold out), subset, split
    and eval_split (hf), and all of reasoning-gym's. "TASK/KEY" sets one task of a mix.
    """

    def __post_init__(self) -> None:
        for name, least, remedy in (
            ("max_prompt", 1, "512 is the default"),
            ("num_train", 1, '"none" takes all there are'),
            ("num_eval", 0, "0 holds nothing out"),
        ):
            value = getattr(self, name)
            holds = value is None or value >= least
            check_setting(holds, f"task.{name}", value, f"must be >= {least}", remedy)
        for name, weight in self.mix.items():
            holds, remedy = weight >= 0 and math.isfinite(weight), "0 leaves the task out"
            check_setting(holds, f"task.mix.{name}", weight, "must be >= 0", remedy)
        if self.mix and not any(self.mix.values()):
            raise UniRLError(
                "task.mix asks for nothing",
                f"one weight must be > 0, all {len(self.mix)} are 0",
                "raise the weight of a task",
            )

    @property
    def weights(self) -> dict[str, float]:
        """The tasks by name with their share; they sum to 1, and none is 0."""
        total = sum(self.mix.values())
        if not self.mix:
            return {self.name: 1.0}
        return {name: weight / total for name, weight in self.mix.items() if weight > 0}

    @property
    def names(self) -> str | list[str]:
        """What notes and checkpoints call it: the name of the one task, or those of a mix."""
        return sorted(self.mix) if self.mix else self.name

    def options_of(self, task: str) -> dict[str, str]:
        """The options that concern one task: those for all, then those given for it alone."""
        general = {key: value for key, value in self.options.items() if "/" not in key}
        own = {
            key.removeprefix(task + "/"): value
            for key, value in self.options.items()
            if key.startswith(task + "/")
        }
        return general | own
