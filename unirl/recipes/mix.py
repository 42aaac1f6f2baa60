"""Several sources of one learner: environments or tasks that are learned from in fixed shares, each
by a pool of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from unirl.envs.config import EnvConfig
from unirl.envs.guard import final
from unirl.envs.make import spaces
from unirl.errors import UniRLError


def check_mix(mix: Mapping[str, float], name: str, key: str) -> dict[str, float]:
    """The shares by name; just `name` where there is no mix. key: the setting that says `name`.

    Raises UniRLError unless all shares are above 0 and `name` is among them.
    """
    if not mix:
        return {name: 1.0}
    for source, share in mix.items():
        if not share > 0:
            raise UniRLError(
                f"mix.{source} is {share}", "a share must be > 0", "leave it out, or set it to 1"
            )
    if name not in mix:
        raise UniRLError(
            f'mix has {", ".join(mix)}, and {key} is "{name}"',
            f"{key} is the one that is evaluated: it must be in the mix",
            f"set {key} to {next(iter(mix))}",
        )
    return dict(mix)


def pool_name(source: str, num_sources: int) -> str:
    """What messages, logs and metrics call a source's pool."""
    if num_sources == 1:
        return "actor"
    return "".join(c if c.isalnum() or c in "-._" else "-" for c in source) + "-actor"


def env_mix(env: EnvConfig, mix: Mapping[str, float]) -> list[tuple[EnvConfig, float]]:
    """Each environment with its share. UniRLError unless all have the same spaces."""
    shares = check_mix(mix, env.id, "env.id")
    found = [(replace(env, id=name), share) for name, share in shares.items()]
    with final():
        own_spaces = [spaces(other) for other, _ in found]
    wanted = own_spaces[[other.id for other, _ in found].index(env.id)]
    for (other, _), own in zip(found, own_spaces, strict=True):
        if own != wanted:
            raise UniRLError(
                f'env "{other.id}" has spaces {own[0]} and {own[1]}',
                f'one policy plays all of the mix, and "{env.id}" has {wanted[0]} and {wanted[1]}',
                "mix environments with equal spaces",
            )
    return found
