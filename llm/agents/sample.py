"""The episodes of a ticket, written into its slot."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from unirl.llm.agents.episode import Episode, Segment
from unirl.llm.group import EPISODE_COUNTS, FINISHES, GroupShape
from unirl.llm.outcome import CUT_OFF, ENDINGS, Score

_COLUMNS = (
    ("token", torch.int32),
    ("logp", torch.float32),
    ("mask", torch.bool),
    ("version", torch.int32),
    ("turn", torch.int16),
    ("step_reward", torch.float32),
)


def chosen_segments(
    episode: Episode, prompt: Sequence[int], max_segments: int, max_tokens: int
) -> tuple[list[Segment], int]:
    """The segments of an episode that fit its share of a slot, and how many do not."""
    num_found = num_tokens = num_left_out = 0

    def fits(segment: Segment) -> bool:
        nonlocal num_found, num_tokens, num_left_out
        if num_found == max_segments or num_tokens + len(segment.token) > max_tokens:
            num_left_out += 1
            return False
        num_found, num_tokens = num_found + 1, num_tokens + len(segment.token)
        return True

    return episode.segments(prompt, fits), num_left_out


def write_episodes(
    data: Mapping[str, Any],
    prompt: Sequence[int],
    episodes: Sequence[Episode],
    scores: Sequence[Sequence[Score]],
    shape: GroupShape,
    counts: Mapping[str, float],
) -> int:
    """Fill a slot's tree; returns how many tokens it has. scores: G x R. counts: of
    `EPISODE_COUNTS`, for the whole group; dropped_segments is found here.
    """
    segments: list[tuple[int, Segment]] = []
    dropped = 0
    for i, episode in enumerate(episodes):
        own, lost = chosen_segments(episode, prompt, shape.max_segments, shape.max_tokens)
        segments += [(i, segment) for segment in own]
        dropped += lost
    begin = len(prompt)
    starts = [begin]
    for _, segment in segments:
        starts.append(starts[-1] + len(segment.token))
    total = starts[-1]
    starts += [total] * (data["starts"].numel() - len(starts))
    data["starts"].copy_(torch.tensor(starts, dtype=torch.int32))
    data["token"][:begin] = torch.tensor(prompt, dtype=torch.int32)
    for name, dtype in _COLUMNS:
        if name != "token":
            data[name].fill_(-1 if name in ("version", "turn") else 0)
        flat = [value for _, segment in segments for value in getattr(segment, name)]
        data[name][begin:total] = torch.tensor(flat, dtype=dtype)
    data["episode"].fill_(-1)
    data["shared"].fill_(False)
    owners = torch.tensor([i for i, _ in segments], dtype=torch.int16)
    data["episode"][: len(segments)] = owners
    data["shared"][: len(segments)] = torch.tensor([one.is_shared for _, one in segments])
    finishes = ["length" if one.ending in CUT_OFF else "stop" for one in episodes]
    data["finish"].copy_(torch.tensor([FINISHES.index(each) for each in finishes]))
    data["ending"].copy_(torch.tensor([ENDINGS.index(one.ending) for one in episodes]))
    data["reward"].copy_(torch.tensor([[score.value for score in row] for row in scores]))
    data["outcome"].copy_(torch.tensor([[score.outcome for score in row] for row in scores]))
    own_counts = {**counts, "dropped_segments": dropped}
    data["counts"].copy_(torch.tensor([float(own_counts.get(name, 0)) for name in EPISODE_COUNTS]))
    return total
