"""A teacher behind a server: any that speaks OpenAI's completions API and gives the log-probability
of each token of a prompt (`echo` with `logprobs`), as vLLM and SGLang do.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from unirl.errors import ActorFailed, UniRLError
from unirl.llm.group import Group
from unirl.llm.http import PAUSES, BadStatus, HttpClient, bearer
from unirl.llm.training.token_batch import TokenBatch


class TeacherServer:
    """Asks for log-probabilities at temperature 1, the model's own: servers give no others.

    name: what the server calls the model. seconds: in which it must answer each group, and for how
    long a server that went away is waited for. pauses: before each further attempt. Raises
    UniRLError when it has no such model or refuses.
    """

    def __init__(
        self,
        url: str,
        name: str,
        *,
        key_variable: str = "",
        seconds: float,
        pauses: Sequence[float] = PAUSES,
    ) -> None:
        self._name, self._seconds = name, seconds
        key = bearer(key_variable, "teacher.api_key_variable")
        self._http = HttpClient(url, key, seconds=seconds, pauses=pauses, section="teacher")

    def check(self) -> None:
        try:
            answer = asyncio.run(self._http.get_json("/models"))
        except BadStatus as error:
            raise self._refused(error) from error
        names = [
            str(each.get("id"))
            for each in (answer.get("data", ()) if isinstance(answer, dict) else ())
        ]
        if self._name not in names:
            raise UniRLError(
                f"the teacher's server has no model {self._name!r}",
                f"{self._http.url} serves {', '.join(names) or 'nothing'}",
                "set teacher.served_name to what it calls the teacher",
            )

    def logp(self, tokens: TokenBatch, train: Tensor) -> Tensor:
        """Log-probabilities [N] of the completions for which `train` [S] is true; 0 elsewhere.

        Raises ActorFailed when the server went away for good, refuses or answers too little: the
        learner is sound, and is saved.
        """
        try:
            return asyncio.run(self._logp(tokens, train))
        except BadStatus as error:
            raise ActorFailed(*self._refused(error).parts) from error
        except UniRLError as error:
            raise ActorFailed(*error.parts) from error

    async def _logp(self, tokens: TokenBatch, train: Tensor) -> Tensor:
        logp = torch.zeros(tokens.mask.numel())
        first, work = 0, []
        for group, wanted in zip(tokens.groups, tokens.per_group(train), strict=True):
            own = logp[first : first + group.token.numel()]  # a view
            if wanted.any():
                work.append(self._ask(group, wanted, own))
            first += group.token.numel()
        await asyncio.gather(*work)
        return logp

    async def _ask(self, group: Group, wanted: Tensor, logp: Tensor) -> None:
        prompt, starts = group.prompt.tolist(), group.starts.tolist()
        spans = [
            (begin, end)
            for begin, end, asked in zip(starts[:-1], starts[1:], wanted.tolist(), strict=True)
            if asked and end > begin
        ]
        body = {
            "model": self._name,
            "prompt": [prompt + group.token[begin:end].tolist() for begin, end in spans],
            "echo": True,
            "logprobs": 1,  # with 0 SGLang gives those of the drawn token alone
            "max_tokens": 1,  # some servers refuse to draw none
            "temperature": 1.0,
        }
        answer = await self._http.post_json("/completions", body, patience=self._seconds)
        choices = answer.get("choices", ()) if isinstance(answer, dict) else ()
        choices = sorted(choices, key=lambda choice: choice.get("index", 0))
        if len(choices) != len(spans):
            raise self._incomplete(f"{len(choices)} answers to {len(spans)} completions")
        for (begin, end), choice in zip(spans, choices, strict=True):
            logp[begin:end] = self._tokens_logp(choice, len(prompt), end - begin)

    def _tokens_logp(self, choice: Mapping[str, Any], num_prompt: int, num_tokens: int) -> Tensor:
        values = (choice.get("logprobs") or {}).get("token_logprobs") or ()
        values = values[num_prompt : num_prompt + num_tokens]
        if len(values) < num_tokens or any(value is None or math.isnan(value) for value in values):
            raise self._incomplete("no log-probability for each token of a prompt")
        return torch.tensor(values, dtype=torch.float32)

    def _incomplete(self, what: str) -> UniRLError:
        return UniRLError(
            f"the teacher's server at {self._http.url} gives {what}",
            "it must give all of them: echo and logprobs of OpenAI's completions API",
            "use vLLM or SGLang, or leave teacher.url out to load the teacher beside the learner",
        )

    def _refused(self, error: BadStatus) -> UniRLError:
        return UniRLError(
            f"the teacher's server at {self._http.url} refuses",
            f"status {error.status}: {error.body}",
            "look at its log; a completion must fit its context with one token to spare",
        )
