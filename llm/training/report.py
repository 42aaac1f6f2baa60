"""What is reported of the completions of a batch; names as in TRL where it has one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from unirl.core.sample import Batch
from unirl.llm.group import EPISODE_COUNTS, Group
from unirl.llm.outcome import ABSENT, ENDINGS, FAILED, SCORE, TIMED_OUT
from unirl.llm.training.token_batch import TokenBatch
from unirl.metrics.metrics import Metrics

_QUEUED = EPISODE_COUNTS.index("store_queued")


def report_groups(
    tokens: TokenBatch,
    batch: Batch,
    version: int,
    reward_names: tuple[str, ...],
    metrics: Metrics,
) -> None:
    """Lengths, rewards, faults, staleness of tokens and times of a batch's groups."""
    outcomes = torch.cat([one.outcome for one in tokens.groups])
    there = ~(outcomes == ABSENT).any(1)
    length, ended = tokens.length[there].float(), ~tokens.cut_off[there]
    metrics.mean("completions/mean_length", length.mean(), len(length))
    metrics.maximum("completions/max_length", length.max())
    metrics.mean("completions/min_length", length.min())
    metrics.ratio("completions/clipped_ratio", (~ended).sum(), len(length))
    if ended.any():
        metrics.mean("completions/mean_terminated_length", length[ended].mean(), ended.sum())
    metrics.total("charts/tokens", int(tokens.length.sum()))
    _report_rewards(tokens, reward_names, metrics)
    drawn = tokens.mask
    if drawn.any():
        age = version - tokens.version[drawn]
        metrics.mean("staleness/token_mean", age.float().mean(), drawn.sum())
        metrics.maximum("staleness/token_max", age.max())
    # Tokens of tools were drawn by no version.
    versions = [one.version[one.mask] for one in tokens.groups]
    spans = [int(one.max() - one.min()) for one in versions if len(one)]
    if spans:
        metrics.maximum("staleness/version_span", max(spans))
    for name in ("generate", "reward"):
        seconds = torch.stack([slot.data[f"{name}_seconds"] for slot in batch.slots])
        metrics.mean(f"time/{name}/mean", seconds.mean(), len(seconds))
        metrics.maximum(f"time/{name}/max", seconds.max())
    _report_episodes(tokens.groups, metrics)
    compute, passed = (
        sum(float(one.data[name]) for one in batch.slots)
        for name in ("compute_seconds", "engine_seconds")
    )
    metrics.ratio("perf/engine_busy", compute, passed)
    metrics.total("faults/engine_retries", sum(float(one.data["retries"]) for one in batch.slots))


def _report_episodes(groups: Sequence[Group], metrics: Metrics) -> None:
    """How episodes ended, and what is counted of them; nothing for completions."""
    endings = [one.ending for one in groups if one.ending is not None]
    counts = [one.counts for one in groups if one.counts is not None]
    if not endings or not counts:
        return
    ending, size = torch.cat(endings), sum(one.numel() for one in endings)
    for code, name in enumerate(ENDINGS):
        metrics.ratio(f"agent/ending/{name}", (ending == code).sum(), size)
    total = dict(zip(EPISODE_COUNTS, torch.stack(counts).double().sum(0).tolist(), strict=True))
    metrics.ratio("agent/turns", total["turns"], size)
    metrics.ratio("agent/calls", total["calls"], size)
    tried = total["calls"] + total["invalid_calls"]
    metrics.ratio("agent/well_formed_calls", total["calls"], tried)
    metrics.ratio("agent/failed_calls", total["failed_calls"], total["calls"])
    for key in ("tool_seconds", "model_seconds"):
        metrics.ratio(f"time/agent/{key}", total[key], size)
    for key in ("rewritten", "forked", "dropped_segments", "cancelled"):
        metrics.total(f"agent/{key}", int(total[key]))
    metrics.total("faults/episodes_retried", int(total["retried"]))
    _report_process(total, max(float(one[_QUEUED]) for one in counts), metrics)


def _report_process(total: Mapping[str, float], queued: float, metrics: Metrics) -> None:
    """What the processes of actors count besides; nothing where they have no store, no sandbox."""
    for kind in ("store", "sandbox"):
        found = {name: value for name, value in total.items() if name.startswith(f"{kind}_")}
        if not any(found.values()):
            continue
        for name, value in found.items():
            key = name.removeprefix(f"{kind}_")
            if key == "queued":
                metrics.maximum("store/queued", queued)
            elif key == "seconds":
                metrics.interval("time/sandbox", value)
            else:
                metrics.total(f"{kind}/{key}", int(value))


def _report_rewards(tokens: TokenBatch, names: tuple[str, ...], metrics: Metrics) -> None:
    valid = tokens.valid
    if valid.any():
        metrics.mean("reward", tokens.reward[valid].mean(), valid.sum())
    num_groups = num_equal = 0
    for reward, known in zip(tokens.per_group(tokens.reward), tokens.per_group(valid), strict=True):
        if int(known.sum()) > 1:
            own = reward[known]
            # Not by the deviation, which in float32 is 1e-8 of eight rewards of 0.1.
            equal = bool((own == own[0]).all())
            metrics.mean("reward_std", 0.0 if equal else own.std())
            num_groups, num_equal = num_groups + 1, num_equal + int(equal)
    metrics.ratio("frac_reward_zero_std", num_equal, num_groups)
    rewards = torch.cat([one.reward for one in tokens.groups])
    outcomes = torch.cat([one.outcome for one in tokens.groups])
    for i, name in enumerate(names):
        scored = outcomes[:, i] == SCORE
        if scored.any():
            metrics.mean(f"rewards/{name}/mean", rewards[scored, i].mean(), scored.sum())
        metrics.total(f"rewards/{name}/failed", int((outcomes[:, i] == FAILED).sum()))
        metrics.total(f"rewards/{name}/timed_out", int((outcomes[:, i] == TIMED_OUT).sum()))
