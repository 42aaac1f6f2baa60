"""A batch of packed tokens as the losses see it, in one safetensors file.

For comparing algorithms on the very same numbers (`unirl algorithms diff`), and for reproducing a
step that went wrong.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path

import torch
from torch import Tensor

from unirl.errors import UniRLError
from unirl.llm.packages import needs
from unirl.llm.weights.transfer import save_tensors

_KIND = "unirl token batch"


@dataclass(frozen=True)
class SavedBatch:
    """N packed tokens of S completions."""

    new_logp: Tensor
    """[N]: the learner's log-probabilities, of which losses have a gradient."""
    old_logp: Tensor
    """[N]: the learner's before the update."""
    logp: Tensor
    """[N]: the engine's."""
    reference: Tensor
    """[N]: the reference model's."""
    value: Tensor
    """[N]: a critic's; 0 where there is none."""
    mask: Tensor
    """[N] bool: drawn by the policy."""
    sequence: Tensor
    """[N] int64: index of the completion."""
    reward: Tensor
    """[S]."""
    group: Tensor
    """[S] int64: id of the group."""
    valid: Tensor
    """[S] bool: it has a reward."""
    max_tokens: int
    """The most a completion may have."""

    @property
    def num_sequences(self) -> int:
        return self.reward.numel()


_TENSORS = tuple(item.name for item in fields(SavedBatch) if item.name != "max_tokens")


def save_batch(batch: SavedBatch, path: Path) -> None:
    tensors = {name: getattr(batch, name).detach().cpu() for name in _TENSORS}
    save_tensors(tensors, path, kind=_KIND, max_tokens=str(batch.max_tokens))


def load_batch(path: Path) -> SavedBatch:
    """Read what `save_batch` wrote. Raises UniRLError when it is not such a file."""
    with needs("safetensors", f"batch {path} cannot be read"):
        from safetensors import safe_open
    if not path.is_file():
        raise UniRLError(
            f"batch {path} is missing", "it must be a file", "leave it out for the built-in one"
        )
    try:
        with safe_open(path, "pt") as file:
            about = file.metadata() or {}
            found = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except Exception as error:  # the library's own type for a file that is none of its kind
        raise _not_a_batch(path, str(error)) from error
    missing = [name for name in _TENSORS if name not in found]
    if about.get("kind") != _KIND or missing:
        raise _not_a_batch(path, f"it lacks {', '.join(missing) or 'its mark'}")
    return SavedBatch(
        **{name: found[name] for name in _TENSORS}, max_tokens=int(about["max_tokens"])
    )


def example_batch() -> SavedBatch:
    """A small deterministic batch: 6 groups of 8 completions of 2 to 24 tokens, some by a tool.

    The engine is off by a little everywhere and by much for a few tokens, and the policy has moved
    since: every term of every algorithm has something to do.
    """
    generator = torch.Generator().manual_seed(20)

    def normal(num: int) -> Tensor:
        return torch.randn(num, generator=generator, dtype=torch.float64)

    num_groups, group_size, max_tokens = 6, 8, 24
    num = num_groups * group_size
    length = torch.randint(2, max_tokens + 1, (num,), generator=generator)
    sequence = torch.arange(num).repeat_interleave(length)
    tokens = sequence.numel()
    first = torch.cat([torch.tensor([True]), sequence.diff() != 0])
    mask = (torch.rand(tokens, generator=generator) > 0.1) | first
    difficulty = torch.linspace(0.05, 0.95, num_groups).repeat_interleave(group_size)
    reward = (torch.rand(num, generator=generator) > difficulty).double()
    old = -normal(tokens).abs()
    far = torch.rand(tokens, generator=generator) > 0.97
    logp = (old + 0.03 * normal(tokens) + far * 1.5 * normal(tokens)).clamp(max=-1e-3)
    valid = torch.ones(num, dtype=torch.bool)
    valid[5] = False
    return SavedBatch(
        new_logp=(old + 0.15 * normal(tokens)).clamp(max=-1e-3),
        old_logp=old,
        logp=logp,
        reference=(old + 0.3 * normal(tokens)).clamp(max=-1e-3),
        value=0.5 + 0.2 * normal(tokens),
        mask=mask,
        sequence=sequence,
        reward=reward,
        group=torch.arange(num_groups).repeat_interleave(group_size),
        valid=valid,
        max_tokens=max_tokens,
    )


def _not_a_batch(path: Path, why: str) -> UniRLError:
    return UniRLError(
        f"{path} is no batch of tokens", why, "give a file that save_batch of unirl.llm wrote"
    )
