"""Run folders by path or name, found and read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from unirl import config as configs
from unirl import registry
from unirl.errors import UniRLError
from unirl.storage import disk

if TYPE_CHECKING:
    from unirl.runners.plan import Plan
    from unirl.storage.checkpoint import Checkpoint


def find(word: str) -> Path:
    """A run folder by its path or by its name under runs/; also one checkpoint of a run."""
    for path in (Path(word), Path("runs") / word):
        if (folder_of(path) / "config.toml").is_file():
            return path
    for path in (Path(word), Path("runs") / word):
        if path.is_dir():
            raise UniRLError(
                f'"{path}" is not a run folder',
                f"a run folder has a config.toml; it has {disk.entries(path, 5) or 'nothing'}",
                "check the path: unirl train writes to runs/NAME",
            )
    parent = Path(word).parent if "/" in word else Path("runs")
    names = [child.name for child in parent.iterdir() if child.is_dir()] if parent.is_dir() else []
    near = configs.suggestion(Path(word).name, names)
    raise UniRLError(
        f'run "{word}" does not exist',
        f"{parent}/ has {', '.join(sorted(names)[:8]) or 'no runs'}",
        near or "check the path, or start it with unirl train",
    )


def folder_of(path: Path) -> Path:
    """The run folder of a path that may be one of its checkpoints."""
    return path.parent.parent if path.parent.name == "checkpoints" else path


def read_config(
    run_dir: Path,
    find_recipe: Callable[[str], ModuleType] = registry.recipe,
    *,
    changes: Mapping[str, Any] | None = None,
) -> tuple[ModuleType, dict[str, Any]]:
    """The recipe of a run and the tables of its config.toml, keys checked. changes: settings of the
    recipe that differ, by dotted keys.
    """
    table = configs.load_toml(run_dir / "config.toml")
    name = table.pop("recipe", None)
    if not isinstance(name, str):
        raise UniRLError(
            f'"{run_dir / "config.toml"}" does not name its recipe',
            'a run\'s config.toml begins with recipe = "..."',
            "add the line with the recipe it was trained with",
        )
    table.pop("name", None)
    module = find_recipe(name)
    configs.check_keys(module.Config, table, f"in {run_dir / 'config.toml'}")
    return module, configs.merge(table, configs.nest(module.Config, changes or {}))


def load(where: Path, changes: Mapping[str, Any] | None = None) -> tuple[Plan, Checkpoint]:
    """The plan of a run and its newest checkpoint, or the one that `where` is.

    changes: flags of the recipe, which change the run's config.
    """
    from unirl.storage.checkpoint import load_checkpoint

    return load_plan(where, changes), load_checkpoint(where)


def load_plan(where: Path, changes: Mapping[str, Any] | None = None) -> Plan:
    """The plan of a run; see `load`."""
    from unirl.envs.answers import answers_kept

    module, table = read_config(folder_of(where), changes=changes)
    with answers_kept({}):
        plan: Plan = module.plan(configs.from_mapping(module.Config, table))
    return plan
