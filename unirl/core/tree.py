"""A Tree is a tensor, or a dictionary of Trees: how nested observations, weights and optimiser
state travel.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeAlias

import torch

Tree: TypeAlias = "torch.Tensor | Mapping[str, Tree]"
Path: TypeAlias = tuple[str, ...]


def leaves(tree: Tree, prefix: Path = ()) -> Iterator[tuple[Path, torch.Tensor]]:
    """Every tensor of a tree with its path of keys, in the dictionaries' own order."""
    if isinstance(tree, torch.Tensor):
        yield prefix, tree
        return
    for key, child in tree.items():
        yield from leaves(child, (*prefix, key))


def leaf_at(tree: Any, path: Path) -> torch.Tensor:
    """The tensor at the end of a path of keys."""
    for key in path:
        tree = tree[key]
    leaf: torch.Tensor = tree
    return leaf


def tree_map(function: Callable[..., Any], tree: Any, *others: Any) -> Any:
    """Apply `function` leaf by leaf to trees of one structure; a KeyError names a branch that is
    missing.
    """
    if isinstance(tree, Mapping):
        return {
            key: tree_map(function, child, *(o[key] for o in others)) for key, child in tree.items()
        }
    return function(tree, *others)


def copy_tree(source: Any, into: Any) -> None:
    """Copy a tree of tensors into one of the same structure and shapes."""
    if isinstance(source, Mapping):
        for key, child in source.items():
            copy_tree(child, into[key])
    else:
        into.copy_(source)


def flatten(tree: Tree, separator: str = "/") -> dict[str, torch.Tensor]:
    """The tree as a flat dictionary; keys are the paths joined with `separator`."""
    return {separator.join(path): leaf for path, leaf in leaves(tree)}


def unflatten(flat: Mapping[str, torch.Tensor], separator: str = "/") -> dict[str, Any]:
    """The inverse of `flatten`; a single leaf at the root (empty key) is not representable here."""
    root: dict[str, Any] = {}
    for name, leaf in flat.items():
        *parents, last = name.split(separator)
        node = root
        for key in parents:
            node = node.setdefault(key, {})
        node[last] = leaf
    return root
