"""Which rewards judge completions, with which weights and limits."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from unirl.config.rules import check_positive, check_setting
from unirl.device import check_device
from unirl.errors import UniRLError
from unirl.llm.http import require_url
from unirl.llm.sandbox.config import SandboxConfig

JUDGE_KEY = "reward.judge.key_variable"
_QUESTION = """\
Rate how well the answer answers the question, from 0 (useless) to {scale} (perfect).
Reply with one number and nothing else.

<question>
{prompt}
</question>
<reference>
{answer}
</reference>
<answer>
{text}
</answer>"""


@dataclass(frozen=True)
class JudgeConfig:
    """Which model judges, and what it is asked."""

    url: str = ""
    """Of an OpenAI-compatible server, such as http://127.0.0.1:8000/v1."""
    model: str = ""
    """The model's name there."""
    key_variable: str = ""
    """Name of the environment variable that holds the key. "": none is sent."""
    question: str = _QUESTION
    """What the judge is asked; {prompt}, {answer} (the right one), {text} and {scale} are filled
    in.
    """
    scale: float = 10.0
    """The best rating: the value is rating / scale. A rating outside 0 to scale is a failure."""
    max_tokens: int = 16
    """Tokens a reply may have, its end token included: a reply that is cut off is a failure. More:
    for judges that think first.
    """
    retries: int = 3
    """How often a call is repeated after a broken connection, status 429 or 5xx, with growing
    pauses. More: sits out longer outages.
    """

    def __post_init__(self) -> None:
        for name, least in (("scale", 0), ("max_tokens", 0), ("retries", -1)):
            value, rule = getattr(self, name), f"must be > {least}"
            remedy = "leave it out for the default"
            check_setting(value > least, f"reward.judge.{name}", value, rule, remedy)
        if self.url:
            require_url(self.url, "reward.judge.url", JUDGE_KEY)
        if "{text}" not in self.question:
            raise UniRLError(
                "reward.judge.question does not show the completion",
                "{text} must occur in it",
                "write {text} where the completion belongs",
            )


@dataclass(frozen=True)
class RewardConfig:
    """What completions are rewarded for; the reward is the weighted sum."""

    weights: Mapping[str, float] = field(default_factory=dict, metadata={"common": True})
    """Rewards by name: auto (the task's own), exact, last_number, characters, regex, math
    (math-verify), gym (reasoning-gym), code_tests (the tests of an example, in
    sandboxes), model, judge, or module:function of your own. A larger weight: counts more. 0: only
    reported. None at all: auto alone.
    """
    timeout_seconds: float = 10.0
    """How long judging one completion may take, repetitions included, before it counts as timed
    out. More: fewer good answers lost, slower groups where code hangs.
    """
    workers: int = 2
    """Processes for code that may hang or crash: math, gym, regex and functions of your own that
    are not async. More: more of it at a time, more memory.
    """
    concurrency: int = 64
    """Completions that a judge or an async function of your own may have in hand at a time. More:
    faster, more load there.
    """
    rate_per_second: float = 0.0
    """Calls of a judge or an own function that may start per second. 0: any number."""
    give_up_after: int = 200
    """Completions in a row to which a reward gives no score, as it fails or is too slow, before the
    run ends. More: sits out longer outages. 0: never ends.
    """
    pattern: str = ""
    """regex: what must occur in a completion, as Python's re spells it; a dot matches line ends."""
    model: str = ""
    """model: folder or hub id of a classifier with one label, the value."""
    model_batch: int = 16
    """model: completions judged at a time. More: faster, more memory."""
    device: str = "auto"
    """model: where it runs. auto: cuda where there is one, else cpu."""
    judge: JudgeConfig = field(default_factory=JudgeConfig)
    """judge: which server is asked, and how."""
    sandbox: SandboxConfig = field(default_factory=SandboxConfig)
    """code_tests: what programs run in."""

    def __post_init__(self) -> None:
        for name in ("timeout_seconds", "workers", "concurrency", "model_batch"):
            check_positive(f"reward.{name}", getattr(self, name), "leave it out")
        num = self.workers
        check_setting(num <= 64, "reward.workers", num, "must be <= 64", "each is a process")
        for name in ("rate_per_second", "give_up_after"):
            value = getattr(self, name)
            check_setting(value >= 0, f"reward.{name}", value, "must be >= 0", "0 sets no limit")
        check_device("reward.device", self.device, may_be_auto=True)
        for name, weight in self.weights.items():
            key = f"reward.weights.{name}"
            check_setting(math.isfinite(weight), key, weight, "must be finite", "1 is usual")
        if self.weights and not any(self.weights.values()):
            raise UniRLError(
                "no reward counts",
                f"one weight must differ from 0, all {len(self.weights)} are 0",
                "raise one of reward.weights",
            )
        for name, key in (("regex", "pattern"), ("model", "model")):
            if name in self.weights and not getattr(self, key):
                raise UniRLError(
                    f'reward "{name}" lacks its {key}', f'reward.{key} is ""', f"set reward.{key}"
                )
        if "judge" in self.weights and not (self.judge.url and self.judge.model):
            raise UniRLError(
                'reward "judge" has no one to ask',
                f'reward.judge.url is "{self.judge.url}", reward.judge.model "{self.judge.model}"',
                "set both, such as http://127.0.0.1:8000/v1 and the model's name there",
            )

    @property
    def weight_of(self) -> dict[str, float]:
        # Not a default of the field: what a file or a flag names is added to a field's default.
        return dict(self.weights) or {"auto": 1.0}
