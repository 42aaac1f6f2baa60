"""Did you mean: the nearest known key, for error messages."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from types import MappingProxyType

from unirl.config.field_help import fields_help, flag_of
from unirl.errors import UniRLError

RENAMED: Mapping[str, str] = MappingProxyType(
    {f"env.push_{name}": f"env.random_burst_{name}" for name in ("probability", "steps")}
)
"""Keys that had another name once, each with the one it has now."""
ELSEWHERE: Mapping[str, str] = MappingProxyType(
    {
        "clip_range": "policy_clip",
        "ent_coef": "entropy_coef",
        "gae_lambda": "lambda_",
        "learning_rate": "lr",
        "n_envs": "num_envs",
        "n_epochs": "epochs",
        "n_steps": "unroll_length",
        "num_steps": "unroll_length",
        "total_timesteps": "total_steps",
        "vf_coef": "value_coef",
    }
)
"""What Stable-Baselines3 and CleanRL call a setting, and the last part of its key here."""


def unknown_key(cls: type, key: str, source: str = "", flag: bool = False) -> UniRLError:
    """The error for a key that a config has not, with the keys it has there and the nearest one."""
    known = [item.key for item in fields_help(cls)]
    show = flag_of if flag else str
    what = f"flag {flag_of(key)} is unknown" if flag else f'config key "{key}" is unknown'
    what += f" ({source})" if source else ""
    new = RENAMED.get(key.replace("-", "_"))
    if new in known:
        return UniRLError(what, f"it was renamed to {show(new)}", f"write {show(new)} in its place")
    near = _nearest_keys(key, known)
    table = key.rpartition(".")[0]
    here = [name for name in known if name.rpartition(".")[0] == table]
    if here:
        rule = "there are " + ", ".join(show(name) for name in here)
    else:
        tables = dict.fromkeys(name.partition(".")[0] for name in known)
        rule = "the tables are " + ", ".join(tables)
    remedy = "--help explains them" if flag else "correct its name, or remove it"
    return UniRLError(
        what,
        rule,
        f"did you mean {' or '.join(show(name) for name in near[:2])}?" if near else remedy,
    )


def _nearest_keys(key: str, known: list[str]) -> list[str]:
    """The same name in any table, else a similar key, else a similar name in any table."""
    leaf = key.rpartition(".")[2].replace("-", "_")
    leaf = ELSEWHERE.get(leaf, leaf)
    near = [name for name in known if name.rpartition(".")[2] == leaf]
    near = near or difflib.get_close_matches(key.replace("-", "_"), known, n=1, cutoff=0.6)
    if near:
        return near
    leaves = {name.rpartition(".")[2]: name for name in reversed(known)}
    return [leaves[name] for name in difflib.get_close_matches(leaf, leaves, n=1, cutoff=0.6)]
