"""A reward model: a transformers classifier with one label, its value; in this process."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch

from unirl.errors import UniRLError
from unirl.llm.device import device_of
from unirl.llm.engine import Completion
from unirl.llm.outcome import Score
from unirl.llm.packages import needs
from unirl.llm.rewards.config import RewardConfig
from unirl.llm.rewards.limits import within
from unirl.llm.rewards.reward import as_score, failed, timed_out
from unirl.llm.tasks.prompts import Prompt
from unirl.policy.precision import has_bfloat16


class ModelReward:
    """Judges prompt and completion together, in batches, in a thread of its own, one group after
    the other; waiting for a turn counts towards no deadline.

    The model is loaded now. Raises UniRLError when it cannot be, or has more labels than one.
    """

    def __init__(self, config: RewardConfig) -> None:
        self._seconds, self._batch = config.timeout_seconds, config.model_batch
        device = device_of(config.device, "reward.device")
        self._tokenizer, self.model = _load(config.model, device)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="reward-model")
        self._turn = asyncio.Lock()
        self._job: Future[list[float]] | None = None
        """The newest one, which may have missed its deadline and still run."""

    async def score(
        self, prompt: Prompt, texts: Sequence[str], completions: Sequence[Completion]
    ) -> list[Score]:
        """One logit for each text. A text that is too long for the model fails, uncut."""
        whole = [self._written(prompt, text) for text in texts]
        rows = [self._tokenizer.encode(one, add_special_tokens=not self._chats) for one in whole]
        most = getattr(
            self.model.config.get_text_config(), "max_position_embeddings", None
        ) or float("inf")
        fitting = [i for i, row in enumerate(rows) if len(row) <= most]
        scores = [failed(f"{len(row)} tokens, the reward model takes {most}") for row in rows]

        try:
            async with self._turn:
                values = await self._values([rows[i] for i in fitting])
        except TimeoutError as error:
            for i in fitting:
                scores[i] = timed_out(f"{error}")
            return scores
        for i, value in zip(fitting, values, strict=True):
            scores[i] = as_score(value)
        return scores

    def close(self) -> None:
        """Release the model; a job in flight is finished first."""
        self._thread.shutdown(wait=False, cancel_futures=True)
        self.model = None

    async def _values(self, rows: Sequence[Sequence[int]]) -> list[float]:
        """`_compute` in the thread, within its deadline. Raises TimeoutError, also where what an
        earlier group has left running takes longer than this deadline.
        """
        seconds = self._seconds * max(1, len(rows))
        if self._job is not None:
            await within(_over(self._job), seconds)
        self._job = self._thread.submit(self._compute, self.model, rows)
        return await within(_result(self._job), seconds)

    @property
    def _chats(self) -> bool:
        return bool(self._tokenizer.chat_template)

    def _written(self, prompt: Prompt, text: str) -> str:
        """The whole conversation as the reward model knows conversations; else prompt and text."""
        if not self._chats:
            return prompt.text + text
        turns = [dict(turn) for turn in prompt.messages]
        turns.append({"role": "assistant", "content": text})
        return str(self._tokenizer.apply_chat_template(turns, tokenize=False))

    def _padding(self, model: Any, rows: Sequence[Sequence[int]]) -> int:
        """A token that occurs in no row: models find the last token of a row as the last one that
        is not padding, and many pad with the very token that texts end with.
        """
        config = model.config.get_text_config()
        used, own = set().union(*rows), self._tokenizer.pad_token_id
        token = own if own is not None else 0
        while token in used:
            token = (token + 1) % int(config.vocab_size)
        config.pad_token_id = token
        return token

    @torch.no_grad()
    def _compute(self, model: Any, rows: Sequence[Sequence[int]]) -> list[float]:
        # By length: a batch is as wide as its longest row.
        order = sorted(range(len(rows)), key=lambda i: len(rows[i]))
        values = [0.0] * len(rows)
        for begin in range(0, len(order), self._batch):
            chosen = order[begin : begin + self._batch]
            width = max(len(rows[i]) for i in chosen)
            token = torch.full(
                (len(chosen), width), self._padding(model, [rows[i] for i in chosen])
            )
            mask = torch.zeros((len(chosen), width), dtype=torch.long)
            for row, i in enumerate(chosen):
                token[row, : len(rows[i])] = torch.tensor(rows[i])
                mask[row, : len(rows[i])] = 1
            # host -> device, once per batch. The model's own: in this thread "cuda" may name
            # another device than in the one that loaded it.
            device = next(model.parameters()).device
            logits = model(input_ids=token.to(device), attention_mask=mask.to(device)).logits
            for i, value in zip(chosen, logits[:, 0].float().tolist(), strict=True):
                values[i] = value
        return values


async def _result(job: Future[list[float]]) -> list[float]:
    return await asyncio.wrap_future(job)


async def _over(job: Future[list[float]]) -> None:
    with contextlib.suppress(Exception):
        await asyncio.wrap_future(job)


def _load(path: str, device: str) -> tuple[Any, Any]:
    with needs("transformers", 'reward "model" cannot be given'):
        from transformers import AutoModelForSequenceClassification, AutoTokenizer
    try:
        tokenizer = AutoTokenizer.from_pretrained(path)
        model = AutoModelForSequenceClassification.from_pretrained(path, dtype="auto")
    except (OSError, ValueError) as error:
        raise UniRLError(
            f'reward model "{path}" cannot be loaded',
            (str(error).strip().splitlines() or [type(error).__name__])[0],
            "set reward.model to a folder, or to the id of a model on the hub",
        ) from error
    if model.config.num_labels != 1:
        raise UniRLError(
            f'reward model "{path}" gives no single value',
            f"it must have 1 label, it has {model.config.num_labels}",
            "take a model that was trained as a reward model",
        )
    model = model.eval().to(device)
    # As models that learn: nobody waits for a format that the device can only emulate.
    emulated = model.dtype == torch.bfloat16 and not has_bfloat16(device)
    return tokenizer, model.float() if emulated else model
