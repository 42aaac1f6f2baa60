"""Whether an engine's log-probabilities are those of the weights it was sent, whichever way they
travel and whatever computes with them: a short text, judged by the engine and by a plain model.

Readings of weights (see proof) are exact, but of what a worker could not read only its arrival is
known. What a model says covers all of it.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from unirl.core.weights import Weights
from unirl.errors import UniRLError
from unirl.llm.engine import EngineConfig, EngineFailed
from unirl.llm.models.model import ModelConfig, load_tokenizer
from unirl.llm.models.plain import PlainModel

TEXT = "The quick brown fox jumps over the lazy dog. 12 + 7 = 19, is it not?"
NUM_TOKENS = 24
"""Of it: so short that it costs less than one completion."""
TOLERANCE = {"float32": 1e-3, "bfloat16": 0.3, "quantised": 0.6}
"""Nats, in the mean over the tokens, by the coarser precision of the two. Sound engines were seen
to differ by 1e-4 at most in float32, by 0.05 in bfloat16; quantised ones have twice as much room.
"""
HALVES = (torch.bfloat16, torch.float16)

log = logging.getLogger(__name__)
Score = Callable[[tuple[int, ...]], Awaitable[Sequence[float]]]
"""Log-probabilities of all tokens but the first, each given those before it, by the engine."""


class Probe:
    """The comparisons of one engine: after its first two swaps, and each time engine.probe_versions
    more versions have passed.

    plain, tokenizer: how to make them; asked for once, when first needed.
    """

    def __init__(
        self,
        config: EngineConfig,
        plain: Callable[[], PlainModel],
        tokenizer: Callable[[], Any],
    ) -> None:
        self._config, self._make_plain, self._make_tokenizer = config, plain, tokenizer
        self._plain: PlainModel | None = None
        self._text: tuple[int, ...] = ()
        self._num_due = 0
        self._version = -1
        """The newest that was due."""
        self._wanted: Tensor | None = None
        self._is_coarse = False
        self._is_proven = False

    @classmethod
    def named(cls, config: EngineConfig, model: ModelConfig) -> Probe:
        """Of an engine that has no model of transformers at hand."""
        return cls(config, partial(PlainModel.named, model), partial(load_tokenizer, model))

    @property
    def tokens(self) -> tuple[int, ...]:
        """What the engine is to judge now; (): nothing."""
        return self._text if self._wanted is not None else ()

    def is_due(self, version: int) -> bool:
        every = self._config.probe_versions
        # The second one, too: the first weights are often those that the engine has read itself.
        return every > 0 and (self._num_due < 2 or version // every > self._version // every)

    def expect(self, whole: Callable[[], Weights], version: int) -> None:
        """Compute what the engine must say under this version, where a comparison is due. What
        stands in the way of it is logged. whole: all weights of the model.
        """
        self._wanted = None
        if not self.is_due(version):
            return
        self._num_due, self._version = self._num_due + 1, version
        try:
            weights = whole()
            # Halves on one side are as coarse as on both.
            self._is_coarse = any(value.dtype in HALVES for value in weights.values())
            if self._plain is None:
                plain = self._make_plain()
                self._text, self._plain = self._encoded(plain.vocabulary), plain
            self._wanted = self._plain.logp(weights, self._text)
        except UniRLError as error:
            _give_up(error)

    def _encoded(self, vocabulary: int) -> tuple[int, ...]:
        with contextlib.suppress(UniRLError):  # a folder may have no tokenizer
            ids = [int(one) for one in self._make_tokenizer().encode(TEXT)][:NUM_TOKENS]
            if len(ids) > 1 and max(ids) < vocabulary:
                return tuple(ids)
        return tuple(7 * i % vocabulary for i in range(1, NUM_TOKENS + 1))

    async def compare(self, score: Score, peer: str, precision: str) -> None:
        """Hold the engine to what was computed, where anything was. Raises as `require` does."""
        if not self.tokens:
            return
        try:
            found = await score(self.tokens)
        except UniRLError as error:  # it does not tell the log-probabilities of a prompt
            self._wanted = None
            _give_up(error)
            return
        self.require(torch.tensor(found), peer, precision)

    def require(self, found: Tensor, peer: str, precision: str) -> None:
        """Raise unless the engine says what the plain model does: UniRLError for one that never
        did, EngineFailed for one that did before.
        """
        wanted, self._wanted = self._wanted, None
        assert wanted is not None and len(found) == len(wanted)
        apart = float((found - wanted).abs().mean())
        if precision == "float32" and self._is_coarse:
            precision = "bfloat16"
        given = self._config.probe_tolerance
        bound, why = (
            (given, "engine.probe_tolerance") if given else (TOLERANCE[precision], precision)
        )
        if apart <= bound:  # not so for NaN
            self._is_proven = True
            return
        failure = EngineFailed if self._is_proven else UniRLError
        raise failure(
            f"{peer} does not compute with the weights it was sent",
            f"under version {self._version} its log-probabilities of {len(wanted)} tokens are "
            f"{apart:.2g} nats from those of the learner's model in the mean, and may be "
            f"{bound:.2g} ({why})",
            "take another engine.kind or engine.transfer; for one that is sound and only coarse, "
            "raise engine.probe_tolerance",
        )


def _give_up(error: UniRLError) -> None:
    log.warning("not proven that the engine computes with the weights it was sent: %s", error)


def precision_of(dtype: torch.dtype) -> str:
    return "bfloat16" if dtype in HALVES else "float32"
