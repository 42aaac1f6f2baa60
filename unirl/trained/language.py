"""The language model of a trained run: whole, with the weights of a checkpoint, and its answers."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from unirl import config as configs
from unirl.errors import UniRLError
from unirl.trained.folder import read_config

if TYPE_CHECKING:
    from unirl.storage.checkpoint import Checkpoint

T = TypeVar("T")
Conversation = Sequence[Mapping[str, Any]]
"""Messages with role and content."""


def find_language_config(run_dir: Path) -> Any:
    """The config of a run that trained a language model; None for any other."""
    module, table = read_config(run_dir)
    if "model" not in getattr(module.Config, "__dataclass_fields__", {}):
        return None
    config = configs.from_mapping(module.Config, table)
    from unirl.llm.models.model import ModelConfig

    return config if isinstance(config.model, ModelConfig) else None


def language_config(run_dir: Path) -> Any:
    """As above; UniRLError for any other."""
    config = find_language_config(run_dir)
    if config is None:
        raise UniRLError(
            f"{run_dir} trained no language model",
            f"its recipe is {read_config(run_dir)[0].__name__.rpartition('.')[2]}",
            "its checkpoints are safetensors that any reader opens: see checkpoints/latest",
        )
    return config


def trained_model(config: Any, checkpoint: Checkpoint) -> Any:
    """A transformers model as an engine had it: adapters added, in the same dtype."""
    from unirl.llm.assembly import weights_of
    from unirl.llm.models.model import load_flat_weights, load_model

    model = load_model(config.model)
    load_flat_weights(model, weights_of(checkpoint.model, config=config))
    return model


def generate(
    config: Any,
    model: Any,
    asked: Sequence[str | Conversation],
    *,
    max_tokens: int | None,
    temperature: float,
    seed: int,
) -> list[str]:
    """What the model says to each, asked as the run asked: a text is a user's message where the
    run's questions were messages, else it is continued.
    """
    from unirl.core.seeding import derive_seed
    from unirl.llm.engine import Request
    from unirl.llm.engines.hf.engine import HfEngine
    from unirl.llm.models.model import context_length, load_tokenizer
    from unirl.llm.tasks.make import make_tasks
    from unirl.llm.tasks.prompts import PromptSource
    from unirl.llm.tasks.task import Example, Task

    if not asked:
        return []
    chats = config.agent_config is not None
    chats = chats or bool(make_tasks(config.task)[0].train[0].messages)
    examples = [_example(Example, one, chats) for one in asked]
    sampling = replace(
        config.sampling,
        temperature=temperature,
        max_tokens=config.sampling.max_tokens if max_tokens is None else max_tokens,
    )
    tokenizer = load_tokenizer(config.model)
    prompts = PromptSource(
        [Task("given", examples, examples)],
        tokenizer,
        replace(config.task, name="given", mix={}, too_long="error"),
        max_context=context_length(model),
        max_tokens=sampling.max_tokens,
    )

    async def answer() -> list[str]:
        settings = replace(config.engine, kind="hf", url="", urls_file="")
        engine = HfEngine(config.model, settings, loaded=(model, tokenizer))
        try:
            found = await asyncio.gather(
                *(
                    engine.generate(
                        Request(
                            f"given.{i}",
                            prompts.held_out(i).tokens,
                            sampling,
                            derive_seed(seed, "given", i),
                        )
                    )
                    for i in range(len(examples))
                )
            )
        finally:
            await engine.close()
        return [str(prompts.said(one)) for one in found]

    return _run(answer())


def _example(make: Any, asked: str | Conversation, chats: bool) -> Any:
    if not isinstance(asked, str):
        return make(messages=tuple(asked))
    return make(messages=({"role": "user", "content": asked},)) if chats else make(text=asked)


def _run(work: Coroutine[Any, Any, T]) -> T:
    """Also where an event loop runs already, as in a notebook."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(work)
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(asyncio.run, work).result()
