"""A slot of language recipes: one prompt and the G completions or episodes of it, packed; a token
is a time step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, TypeVar

import torch
from torch import Tensor

from unirl.core.sample import Field, SampleSpec
from unirl.errors import UniRLError
from unirl.llm.engine import Completion, Finish
from unirl.llm.outcome import Score

T = TypeVar("T")

FINISHES: tuple[Finish, ...] = ("stop", "length", "aborted")
"""What a finish code means."""
EPISODE_COUNTS = (
    "turns", "rewritten", "forked", "calls", "invalid_calls", "failed_calls", "dropped_segments",
    "retried", "cancelled", "tool_seconds", "model_seconds",
    "store_episodes", "store_bytes", "store_queued", "store_dropped_bodies", "store_failed",
    "store_duplicates", "store_expired", "store_redacted",
    "sandbox_starts", "sandbox_refusals", "sandbox_seconds",
)  # fmt: skip
"""What is counted over the episodes of a group; of store and sandbox, in its process since the
group before.
"""


@dataclass(frozen=True)
class GroupShape:
    group_size: int
    max_prompt: int
    max_tokens: int
    """Per completion; of an episode, in all its segments together."""
    num_rewards: int = 1
    max_segments: int = 0
    """Of an episode; 0: these are completions, each a segment of its own."""

    @property
    def num_tokens(self) -> int:
        """Tokens of the largest group: the prompt once, then all completions."""
        return self.max_prompt + self.group_size * self.max_tokens

    def spec(self) -> SampleSpec:
        """N = num_tokens, G = group_size, R = num_rewards. Slots are read one by one, so no field
        has a batch axis.

        token, logp, mask, version [N]: the prompt (mask 0), then the completions one after the
        other. mask is 1 where the policy drew the token. starts [G+1]: where each completion
        begins, and where the last one ends. finish [G], reward and outcome [G, R]. retries: that
        the engine counted since the group before. compute_seconds: that it computed since then, of
        engine_seconds; both 0 where that is not known.

        Of episodes, S = G * max_segments: starts [S+1]; episode [S]: whose segment it is, -1:
        nobody's; shared [S]: it continues the prompt, else its own is in it. turn [N]: number in
        its episode. step_reward [N]: at a turn's last drawn token. ending [G]: code of `ENDINGS`.
        counts [C]: see
        `EPISODE_COUNTS`.
        """
        n, g = self.num_tokens, self.group_size
        s = g * (self.max_segments or 1)
        episodes = {
            "episode": Field((s,), torch.int16, None),
            "shared": Field((s,), torch.bool, None),
            "turn": Field((n,), torch.int16, None, is_variable=True),
            "step_reward": Field((n,), torch.float32, None, is_variable=True),
            "ending": Field((g,), torch.int8, None),
            "counts": Field((len(EPISODE_COUNTS),), torch.float32, None),
        }
        return SampleSpec(
            {
                "token": Field((n,), torch.int32, None, is_variable=True),
                "logp": Field((n,), torch.float32, None, is_variable=True),
                "mask": Field((n,), torch.bool, None, is_variable=True),
                "version": Field((n,), torch.int32, None, is_variable=True),
                "starts": Field((s + 1,), torch.int32, None),
                "finish": Field((g,), torch.int8, None),
                "reward": Field((g, self.num_rewards), torch.float32, None),
                "outcome": Field((g, self.num_rewards), torch.int8, None),
                "generate_seconds": Field((), torch.float32, None),
                "reward_seconds": Field((), torch.float32, None),
                "retries": Field((), torch.float32, None),
                "compute_seconds": Field((), torch.float32, None),
                "engine_seconds": Field((), torch.float32, None),
                **(episodes if self.max_segments else {}),
            }
        )


def common_shape(shapes: Sequence[GroupShape]) -> GroupShape:
    """One shape that the groups of several tasks fit, where one learner learns from all of them.
    Raises UniRLError where they have other numbers of completions or rewards.
    """
    first = shapes[0]
    for other in shapes:
        for name, key in (("group_size", "rollout.group_size"), ("num_rewards", "reward.weights")):
            if getattr(other, name) != getattr(first, name):
                raise UniRLError(
                    f"groups of one learner differ in {key}",
                    f"all must have the same {name}: {getattr(first, name)} and "
                    f"{getattr(other, name)}",
                    f"give all tasks of the run one {key}",
                )
    return replace(
        first,
        max_prompt=max(each.max_prompt for each in shapes),
        max_tokens=max(each.max_tokens for each in shapes),
    )


def with_tensors(item: T, change: Callable[[Tensor], Tensor]) -> T:
    """A dataclass with its tensors changed."""
    tensors = {name: value for name, value in vars(item).items() if isinstance(value, Tensor)}
    return replace(item, **{name: change(value) for name, value in tensors.items()})  # type: ignore[type-var]


@dataclass(frozen=True)
class Group:
    """A group as a learner reads it: tensors of what there is, without the unused rest.

    prompt [P]; token, logp, mask, version [N] of the completions alone; starts [G+1] into them,
    beginning with 0; finish [G], reward and outcome [G, R]. Of episodes: starts [S+1], and the
    fields that `GroupShape.spec` says.
    """

    prompt: Tensor
    token: Tensor
    logp: Tensor
    mask: Tensor
    version: Tensor
    starts: Tensor
    finish: Tensor
    reward: Tensor
    outcome: Tensor
    ticket: int = -1
    """Names the prompt, and the group in statistics."""
    episode: Tensor | None = None
    """[S], int64; None: segment i is completion i."""
    shared: Tensor | None = None
    turn: Tensor | None = None
    step_reward: Tensor | None = None
    ending: Tensor | None = None
    counts: Tensor | None = None

    @property
    def size(self) -> int:
        """G."""
        return self.finish.numel()

    @property
    def owner(self) -> Tensor:
        """Whose segment each is: [S], int64."""
        return torch.arange(self.size) if self.episode is None else self.episode

    def copy(self) -> Group:
        return with_tensors(self, Tensor.clone)

    @property
    def lengths(self) -> Tensor:
        """Tokens of each segment: [S], int64."""
        return self.starts.diff().long()


def write_group(
    data: Mapping[str, Any],
    prompt: Sequence[int],
    completions: Sequence[Completion],
    scores: Sequence[Sequence[Score]],
) -> int:
    """Fill a slot's tree; returns how many tokens it has. scores: G x R. Raises UniRLError when the
    group does not fit.
    """
    total = len(prompt) + sum(len(one.tokens) for one in completions)
    room = data["token"].numel()
    if total > room or len(completions) != data["finish"].numel():
        raise UniRLError(
            f"a group of {len(completions)} completions and {total} tokens does not fit",
            f"its slot holds {data['finish'].numel()} completions and {room} tokens",
            "raise task.max_prompt, or drop longer prompts",
        )
    starts = [len(prompt)]
    for one in completions:
        starts.append(starts[-1] + len(one.tokens))
    data["starts"].copy_(torch.tensor(starts, dtype=torch.int32))
    begin = len(prompt)
    data["token"][:begin] = torch.tensor(prompt, dtype=torch.int32)
    data["mask"].zero_()
    drawn = [value for one in completions for value in one.mask]
    data["mask"][begin:total] = torch.tensor(drawn, dtype=torch.bool)
    for name, dtype, fill in (("logp", torch.float32, 0.0), ("version", torch.int32, -1)):
        data[name].fill_(fill)
        flat = [value for one in completions for value in getattr(one, name)]
        data[name][begin:total] = torch.tensor(flat, dtype=dtype)
    flat_tokens = [token for one in completions for token in one.tokens]
    data["token"][begin:total] = torch.tensor(flat_tokens, dtype=torch.int32)
    data["finish"].copy_(torch.tensor([FINISHES.index(one.finish) for one in completions]))
    data["reward"].copy_(torch.tensor([[score.value for score in row] for row in scores]))
    data["outcome"].copy_(torch.tensor([[score.outcome for score in row] for row in scores]))
    return total


def read_group(data: Mapping[str, Any], ticket: int = -1) -> Group:
    """The group in a slot's tree: views, no copies, but `starts`."""
    starts: Tensor = data["starts"]
    episodes: dict[str, Tensor] = {}
    if "episode" in data:
        num = int((data["episode"] >= 0).sum())
        starts = starts[: num + 1]
        episodes = {
            "episode": data["episode"][:num].long(),
            "shared": data["shared"][:num],
            "ending": data["ending"],
            "counts": data["counts"],
        }
    begin, end = int(starts[0]), int(starts[-1])
    names = ("token", "logp", "mask", "version", *(("turn", "step_reward") if episodes else ()))
    return Group(
        prompt=data["token"][:begin],
        starts=starts - begin,
        finish=data["finish"],
        reward=data["reward"],
        outcome=data["outcome"],
        ticket=ticket,
        **{name: data[name][begin:end] for name in names},
        **episodes,
    )


def completions_of(group: Group) -> list[Completion]:
    """The completions that a group was written from."""
    starts = group.starts.tolist()
    found = []
    for i, (begin, end) in enumerate(pairwise(starts)):
        token, logp, version, mask = (
            tuple(each[begin:end].tolist())
            for each in (group.token, group.logp, group.version, group.mask)
        )
        finish = FINISHES[int(group.finish[i])]
        found.append(Completion(token, logp, version, finish, () if all(mask) else mask))
    return found
