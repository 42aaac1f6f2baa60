"""Finds environments of several agents by id: PettingZoo's (Terry et al. 2021, arXiv 2009.14471),
UniRL's own, and any that a module makes."""

from __future__ import annotations

import importlib
import re
from importlib import util
from pathlib import Path

from unirl.envs import catalog
from unirl.envs.config import MULTI_AGENT, EnvConfig
from unirl.envs.multi_agent.parallel import Factory
from unirl.errors import UniRLError

GAMES = {"unirl/Duel": "unirl.envs.games.duel:Duel"}
"""UniRL's own games, by what follows "pettingzoo/" in the id."""


def known_ids() -> list[str]:
    """Ids of UniRL's own games and of PettingZoo's that have a parallel API, sorted.

    The package's files are read and not imported: many of its games need packages of their own.
    """
    names = list(GAMES)
    spec = util.find_spec("pettingzoo")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        for path in Path(folder).glob("*/*.py"):
            if re.search(r"_v\d+$", path.stem) and "parallel_env" in path.read_text("utf-8"):
                names.append(f"{path.parent.name}/{path.stem}")
    return sorted(MULTI_AGENT + name for name in names)


def find_factory(config: EnvConfig) -> Factory:
    """What makes one environment of config.id (see EnvConfig.id)."""
    catalog.import_registering_module(config)
    name = config.id.removeprefix(MULTI_AGENT)
    if name.startswith("unirl/") and name not in GAMES:
        raise catalog.unknown_id(config.id, known_ids())
    module_name, colon, attribute = GAMES.get(name, name).partition(":")
    if not colon:
        module_name, attribute = "pettingzoo." + name.replace("/", "."), "parallel_env"
    elif not module_name or not attribute or module_name.startswith("."):
        raise UniRLError(
            f'env "{config.id}" names no factory',
            "it must read pettingzoo/<module>:<factory>, with the module's full name",
            'for example "pettingzoo/my_package.games:parallel_env"',
        )
    try:
        if not colon:
            importlib.import_module("pettingzoo")  # else the game would seem to be what is missing
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name == "pettingzoo" or not f"{module_name}.".startswith(f"{error.name}."):
            raise  # a package is missing that it needs
        if not colon:
            raise catalog.unknown_id(config.id, known_ids()) from error
        raise UniRLError(
            f'module "{module_name}" that should make env "{config.id}" was not found',
            "the module before the colon must be importable where the actors run",
            "install it, or set PYTHONPATH to its folder",
        ) from error
    factory: Factory | None = getattr(module, attribute, None)
    if not callable(factory):
        found = "its agents act in turns" if not colon else f'"{attribute}" is not there'
        raise UniRLError(
            f'env "{config.id}" cannot be made: {found}',
            f"module {module_name} must have a function {attribute}() that returns a ParallelEnv",
            "choose another (unirl list envs pettingzoo)" if not colon else "correct env.id",
        )
    return factory
