"""What a rollout asks of any inference engine: token ids in, token ids out, with the
log-probability and the version of every token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol

from unirl.config.rules import check_positive, check_setting
from unirl.errors import Restartable, UniRLError
from unirl.llm.http import require_url

if TYPE_CHECKING:
    from unirl.core.weights import Weights

Finish = Literal["stop", "length", "aborted"]
"""Why a completion ended: an end token or stop text, max_tokens, or `abort`."""
NOBODY = -1
"""Version of a token that the policy did not draw."""
PauseMode = Literal["wait", "keep", "abort"]
"""What becomes of running requests: finished first, frozen where they are, or ended as they are."""


@dataclass(frozen=True)
class SamplingConfig:
    """How tokens are drawn. Log-probabilities are always those of this very distribution."""

    temperature: float = 1.0
    """Logits are divided by it. Less: safer answers, less to learn from. 0: always the likeliest
    token, for evaluations only.
    """
    top_p: float = 1.0
    """Draw only from the likeliest tokens that together have this probability. Less than 1 makes
    importance ratios biased.
    """
    top_k: int = 0
    """Draw only from so many likeliest tokens. 0: from all. More than 0 biases ratios as top_p
    does.
    """
    max_tokens: int = field(default=64, metadata={"common": True})
    """Tokens a completion may have, its end token included. More: longer thoughts, more memory."""
    stop: tuple[str, ...] = ()
    """Texts that end a completion besides the model's own end tokens; they stay part of it. Looked
    for in what is drawn in one turn, interruptions or not.
    """

    def __post_init__(self) -> None:
        for name, holds, rule, remedy in (
            ("temperature", self.temperature >= 0, ">= 0", "1 is usual"),
            ("top_p", 0 < self.top_p <= 1, "in (0, 1]", "1 draws from all tokens"),
            ("top_k", self.top_k >= 0, ">= 0", "0 draws from all tokens"),
            ("max_tokens", self.max_tokens >= 1, ">= 1", "set it to 64, say"),
        ):
            value = getattr(self, name)
            check_setting(holds, f"sampling.{name}", value, f"must be {rule}", remedy)


@dataclass(frozen=True)
class Request:
    """One completion to generate. Requests with equal prompts may share work in the engine."""

    id: str
    """Unique among the requests in flight: what `abort` names."""
    prompt: tuple[int, ...]
    """Token ids, special tokens included."""
    sampling: SamplingConfig
    seed: int
    """Of this completion alone: what it says does not depend on what else is generated."""
    partial: Completion | None = None
    """An aborted completion to continue. Its tokens count towards max_tokens."""
    may_continue: bool = False
    """A later prompt may begin with what this one ends with, as the next turn of an episode does:
    the engine may keep keys and values for it.
    """

    @property
    def document(self) -> tuple[int, ...]:
        """What is in the model's context before the first token that is still to be drawn."""
        return self.prompt + (self.partial.tokens if self.partial else ())

    @property
    def num_left(self) -> int:
        return self.sampling.max_tokens - (len(self.partial.tokens) if self.partial else 0)


@dataclass(frozen=True)
class Completion:
    """What an engine generated; the lists have one entry per token."""

    tokens: tuple[int, ...]
    logp: tuple[float, ...]
    """Log-probability of each token under the distribution it was drawn from."""
    version: tuple[int, ...]
    """Version of the weights that drew it: several where weights changed meanwhile."""
    finish: Finish
    drawn: tuple[bool, ...] = ()
    """Whether the policy drew each token; (): all of them. Others are read, not learned."""

    def __post_init__(self) -> None:
        if not len(self.tokens) == len(self.logp) == len(self.version):
            raise ValueError(
                f"{len(self.tokens)} tokens, {len(self.logp)} log-probabilities and "
                f"{len(self.version)} versions: they must be equally many"
            )
        if self.drawn and len(self.drawn) != len(self.tokens):
            raise ValueError(
                f"{len(self.tokens)} tokens and {len(self.drawn)} marks of being drawn: "
                "they must be equally many"
            )

    def with_observation(self, tokens: Sequence[int]) -> Completion:
        """With a tool's or a user's answer behind it: to be continued, as `Request.partial`."""
        count = len(tokens)
        return Completion(
            self.tokens + tuple(tokens),
            self.logp + (0.0,) * count,
            self.version + (NOBODY,) * count,
            "aborted",
            self.mask + (False,) * count,
        )

    @property
    def mask(self) -> tuple[bool, ...]:
        """Whether the policy drew each token, of all of them."""
        return self.drawn or (True,) * len(self.tokens)

    @property
    def drawn_versions(self) -> tuple[int, ...]:
        return tuple(v for v, drawn in zip(self.version, self.mask, strict=True) if drawn)


@dataclass(frozen=True)
class Capabilities:
    """What an engine can do besides generating; modes that need more are refused."""

    load_weights: bool = True
    """Takes new weights while it lives."""
    sleep: bool = False
    """Gives its memory back between `sleep` and `wake`."""


class Engine(Protocol):
    """Generates completions; many at a time, all on one event loop.

    Raises UniRLError (three parts) for what no repetition fixes, EngineFailed when it died or a
    deadline passed.
    """

    @property
    def capabilities(self) -> Capabilities:
        """What it can do besides generating."""

    @property
    def version(self) -> int:
        """Version of the weights it generates with; -1 before the first `load_weights`."""

    async def start(self) -> None:
        """Load what it needs to generate: what takes time. Idempotent."""

    async def generate(self, request: Request) -> Completion:
        """One completion; the event loop runs on meanwhile."""

    def so_far(self, id: str) -> Completion | None:
        """What a request in flight has drawn, as if aborted now; None: that is not known."""

    async def abort(self, ids: list[str] | None = None) -> None:
        """End these requests (None: all) now: their `generate` returns what there is, finish
        "aborted". Unknown ids are ignored: they have just ended.
        """

    async def pause(self, mode: PauseMode = "keep") -> None:
        """No token is drawn any more when this returns, until `resume`."""

    async def resume(self) -> None:
        """Continue: frozen requests first."""

    async def load_weights(self, weights: Weights, version: int) -> None:
        """Take these weights over (names of the transformers model), while paused or idle, and
        prove it: the version and a checksum are read back from the processes that compute, and now
        and then log-probabilities are compared, if need be in `resume`. Cached keys and values of
        the old weights are not used for new requests.
        """

    async def sleep(self) -> None:
        """Give memory back until `wake`; a no-op without the capability."""

    async def wake(self) -> None:
        """The inverse of `sleep`."""

    def stats(self) -> Mapping[str, float]:
        """Counters since the start, by name: generated_tokens, prompt_tokens; retries, where there
        is a server.
        """

    async def close(self) -> None:
        """Release model, processes and memory; idempotent."""


class EngineFailed(Restartable):
    """An engine died, hangs, or answers nonsense."""

    partial: Completion | None = None
    """What had come of the request that it failed at."""


@dataclass(frozen=True)
class EngineConfig:
    """Which engine generates, and what it may use."""

    kind: Literal["hf", "vllm", "openai"] = field(default="hf", metadata={"common": True})
    """hf: transformers in this process. vllm: vLLM in processes of its own. openai: a server that
    speaks OpenAI's API and returns token ids and log-probabilities: vLLM, SGLang, or engine hf as
    `unirl serve MODEL --tokens` has it.
    """
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """What it computes in. auto: as the learner does."""
    device: str = "auto"
    """auto: cuda where there is one, else cpu. vllm: auto, where it finds its devices by itself
    (under torchrun each process' engine takes those of its own rank), or cuda:N, the first of them.
    """
    max_sequences: int = 256
    """Completions generated at a time. More: faster overall, more memory."""
    max_context: int = 0
    """Tokens of prompt and completion together. 0: as long as the model allows."""
    prefix_cache_gib: float = 1.0
    """hf: memory for keys and values of turns that have ended, so that the next turn of an episode
    computes only what is new. More: more episodes that wait for tools find theirs. 0: none is kept.
    vLLM has a prefix cache of its own.
    """
    timeout_seconds: float = 120.0
    """How long a start, a swap of weights or a silent server may take."""
    memory_gib: float = 2.0
    """vllm without a GPU: for keys and values. On one it takes most of it, and half of what is free
    where the learner is on it, too; `options` gpu_memory_utilization says otherwise.
    """
    transfer: Literal["auto", "shared", "collective", "file", "lora"] = "auto"
    """vllm: how weights get there. shared: shared memory of this machine; collective: NCCL or
    gloo; file: a checkpoint that both can read; lora: only the adapter. auto: shared.
    """
    folder: str = ""
    """vllm, openai: where transfer file and lora write; its workers must be able to read it.
    "": a temporary folder of this machine.
    """
    url: str = ""
    """vllm, openai: a server that runs already; or several, separated by commas. "": vllm starts an
    engine of its own.
    """
    urls_file: str = ""
    """vllm, openai: a file that names such servers instead, one URL a line. It is read again every
    second: servers join, and leave when they have finished, while the run continues.
    """
    api_key_variable: str = ""
    """openai: name of the environment variable that holds the key. "": none is sent."""
    eager: bool = True
    """vllm: False compiles the model first (a minute or more), and runs faster then."""
    probe_versions: int = 50
    """After the first two swaps and then every so many versions, its log-probabilities of a short
    text must be those of the learner's model. More: found out later. 0: never compared.
    """
    probe_tolerance: float = 0.0
    """Nats by which they may differ in the mean. 0: 0.001 in float32, 0.3 in bfloat16, 0.6 where it
    is quantised.
    """
    options: Mapping[str, str] = field(default_factory=dict)
    """vllm: further engine arguments by their names, as vLLM spells them."""

    def __post_init__(self) -> None:
        for name in ("max_sequences", "timeout_seconds", "memory_gib"):
            check_positive(f"engine.{name}", getattr(self, name), "leave it out for the default")
        for name, remedy in (
            ("max_context", "0 takes what the model allows"),
            ("prefix_cache_gib", "0 keeps nothing"),
            ("probe_versions", "0 compares never"),
            ("probe_tolerance", "0 chooses it by the precision"),
        ):
            value = getattr(self, name)
            check_setting(value >= 0, f"engine.{name}", value, "must be >= 0", remedy)
        from unirl.device import check_device  # imports torch, which completions do without

        check_device("engine.device", self.device, may_be_auto=True)
        for url in self.urls:
            require_url(url, "engine.url", "engine.api_key_variable")
        check_setting(
            not (self.url and self.urls_file), "engine.urls_file", self.urls_file,
            "must not be set where engine.url is", "set one of them",
        )  # fmt: skip
        if self.kind == "openai" and not self.is_server:
            raise UniRLError(
                "engine openai has no server",
                'engine.url is "", it must name one',
                "set engine.url to http://127.0.0.1:8000/v1, say",
            )

    @property
    def urls(self) -> tuple[str, ...]:
        """The servers that `url` names."""
        return tuple(filter(None, (url.strip() for url in self.url.split(","))))

    @property
    def is_server(self) -> bool:
        """Whether it is behind a server that runs already."""
        return bool(self.url or self.urls_file)
