"""Credit for turns: the step rewards of episodes become advantages of what each turn drew.

Turns are compared with turns of the same group that began in the same state, as in GiGPO (Feng et
al., arXiv 2505.10978, eq. 6 to 9): an advantage of each turn's discounted return within its step
group, added to that of the episode. Where tokens are compared, each is a turn of its own; those
that earn the same in all of their group are compared with those of all groups instead, as outcomes
are in REINFORCE++ (Hu, arXiv 2501.03262): a group that draws the same wrong token each time learns
that others earn more there.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor

from unirl.llm.algorithms.terms import Algorithm
from unirl.llm.group import Group
from unirl.vtrace import Reduce, group_advantages

Compare = Literal["state", "number", "token"]
"""Which turns are compared: see AgentConfig.turn_groups."""


@dataclass(frozen=True)
class TurnCredit:
    """What step rewards are worth; see AgentConfig."""

    kind: Literal["turn", "both"]
    discount: float = 1.0
    compare: Compare = "state"
    weight: float = 1.0


@dataclass(frozen=True)
class Turns:
    """The U turns of a batch that are learned from, or their tokens, in the order of tokens."""

    number: Tensor
    """[N]: which of them drew the token; -1: none, or it is not learned from."""
    reward: Tensor
    """[U]: step reward."""
    episode: Tensor
    """[U]: number of its episode in the batch."""
    step_group: Tensor
    """[U]: equal where turns are compared, within a group."""
    everywhere: Tensor
    """[U]: the same without regard to groups."""
    paid: Tensor
    """[N]: step rewards, each at its turn's last token."""

    @classmethod
    def of(cls, groups: Sequence[Group], compare: Compare) -> Turns:
        """Raises ValueError for groups without turns."""
        number: list[int] = []
        reward: list[float] = []
        episode: list[int] = []
        step_group: list[int] = []
        everywhere: list[int] = []
        known: dict[Hashable, int] = {}
        places: dict[Hashable, int] = {}
        first_episode = 0
        for g, group in enumerate(groups):
            if group.turn is None or group.step_reward is None:
                raise ValueError(f"group {group.ticket} has no turns: its slots are of completions")
            turns, masks = group.turn.tolist(), group.mask.tolist()
            tokens, paid = group.token.tolist(), group.step_reward.tolist()
            owners, starts = group.owner.tolist(), group.starts.tolist()
            order, first_token = [0] * group.size, len(number)
            number += [-1] * len(tokens)
            for owner, (begin, end) in zip(owners, pairwise(starts), strict=True):
                given: dict[int, list[int]] = {}
                drawn: dict[int, list[int]] = {}
                for i in range(begin, end):
                    (drawn if masks[i] else given).setdefault(turns[i], []).append(i)
                for each in sorted(drawn):
                    own = drawn[each]
                    units = [[i] for i in own] if compare == "token" else [own]
                    for place, unit in enumerate(units):
                        for i in unit:
                            number[first_token + i] = len(reward)
                        reward.append(math.fsum(paid[i] for i in unit))
                        episode.append(first_episode + owner)
                        state = tuple(tokens[i] for i in given.get(each, ()))
                        where: Hashable = state if compare == "state" else (order[owner], place)
                        step_group.append(known.setdefault((g, where), len(known)))
                        everywhere.append(places.setdefault(where, len(places)))
                    order[owner] += 1
            first_episode += group.size
        return cls(
            torch.tensor(number, dtype=torch.int64),
            torch.tensor(reward, dtype=torch.float64),
            torch.tensor(episode, dtype=torch.int64),
            torch.tensor(step_group, dtype=torch.int64),
            torch.tensor(everywhere, dtype=torch.int64),
            torch.cat([one.step_reward for one in groups if one.step_reward is not None]),
        )

    def returns(self, discount: float) -> Tensor:
        """[U]: sum of discount^(k - t) * reward_k over the episode's turns k from t on."""
        total, episode = self.reward.tolist(), self.episode.tolist()
        for t in range(len(total) - 2, -1, -1):
            if episode[t] == episode[t + 1]:
                total[t] += discount * total[t + 1]
        return torch.tensor(total, dtype=torch.float64)


def turn_advantages(
    algorithm: Algorithm,
    credit: TurnCredit,
    turns: Turns,
    valid: Tensor,
    *,
    reduce: Reduce | None = None,
) -> Tensor:
    """[N]: of each token the advantage of its turn, 0 where there is none. valid: [S], 0 where an
    episode has no rewards. Baseline and scale are the algorithm's for groups.
    """
    compared = partial(
        group_advantages,
        turns.returns(credit.discount),
        valid=valid[turns.episode],
        baseline=algorithm.baseline,
        scale=algorithm.scale,
        epsilon=algorithm.epsilon,
        singleton=algorithm.singleton,
        reduce=reduce,
    )
    found = compared(turns.step_group)
    if credit.compare == "token":
        found = torch.where(found == 0, compared(turns.everywhere), found)
    # One more, so that -1 finds a 0.
    return torch.cat([found, found.new_zeros(1)])[turns.number]
