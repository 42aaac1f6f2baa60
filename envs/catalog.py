"""Finds environments by id: registration, suggestions for a mistyped id, and which extra installs a
missing package."""

from __future__ import annotations

import contextlib
import difflib
from collections.abc import Iterable

import gymnasium
from gymnasium.envs.registration import EnvSpec

from unirl.envs import ale
from unirl.envs.config import MULTI_AGENT, EnvConfig
from unirl.envs.sim import families
from unirl.errors import UniRLError
from unirl.imports import import_named

RECALL_CUE = "unirl/RecallCue-v0"
# Module names as they stand in entry points and import errors -> the extra of this package that
# installs them.
EXTRAS = {
    "ale_py": "atari",
    "opencv": "atari",
    "mujoco": "mujoco",
    "envpool": "envpool",
    "box2d": "box2d",
    "pettingzoo": "multiagent",
}
# What brings a simulator: only one of their packages can be had through an extra.
SIM_REMEDIES = {
    "warp/": "pip install 'unirl[warp]'",
    "isaacgym/": "install Isaac Gym Preview 4 from NVIDIA's page, then IsaacGymEnvs",
    "isaaclab/": "install Isaac Lab (isaac-sim.github.io/IsaacLab)",
}


def find_spec(config: EnvConfig) -> EnvSpec:
    """The registered specification of config.id; UniRLError with suggestions, or with the extra to
    install."""
    import_registering_module(config)
    _register_games()
    if config.is_multi_agent:
        raise UniRLError(
            f'env "{config.id}" has several agents',
            "an environment of Gymnasium, with one agent, is needed here",
            "choose another env.id",
        )
    if config.is_sim:
        raise UniRLError(
            f'env "{config.id}" is a simulator on a device',
            "an environment registered with Gymnasium is needed here",
            "choose another env.id",
        )
    if config.is_atari:
        try:
            ale.register()
        except ImportError as error:
            raise missing_package(config, error) from error
    spec = gymnasium.registry.get(config.id)
    if spec is None:
        raise unknown_id(config.id, known_env_ids())
    return spec


def known_env_ids() -> list[str]:
    """All ids of environments with one agent that `make_vec` finds in this process, sorted:
    Gymnasium's, UniRL's games, Atari's where installed, and simulators whether installed or not."""
    _register_games()
    with contextlib.suppress(ImportError):  # Atari is an extra; without it the list is shorter
        ale.register()
    return sorted([*gymnasium.registry, *families.known_ids()])


def unknown_id(env_id: str, known: Iterable[str]) -> UniRLError:
    """The error for an id that is not among `known`, with the closest names."""
    known = list(known)
    # Case and a missing namespace are what people get wrong most: compare without them, answer with
    # the real id.
    folded = {_fold(name): name for name in reversed(known)}
    close = difflib.get_close_matches(_fold(env_id), folded, n=3, cutoff=0.6)
    names = [f'"{folded[name]}"' for name in close]
    hint = f"Did you mean {' or '.join(names)}?" if names else "No known id is similar."
    return UniRLError(f'env "{env_id}" is unknown', hint, "(unirl list envs)")


def missing_package(config: EnvConfig, error: ImportError) -> UniRLError:
    """The error for an environment whose package is not installed, naming the extra that installs
    it."""
    if config.is_multi_agent:
        return _missing_for_agents(config, error)
    what = f'env "{config.id}" needs a package that is not installed'
    for family, remedy in SIM_REMEDIES.items():
        if config.id.startswith(family):
            return UniRLError(what, str(error), remedy)
    if not isinstance(error, ModuleNotFoundError):  # installed, and still not importable
        return UniRLError(
            f'env "{config.id}" cannot be imported', str(error), "use a newer version of the id"
        )
    spec = gymnasium.registry.get(config.id)
    # What was imported says most; what the id stands for says least: another engine may run it.
    clues = (error.name or "", str(error), str(spec.entry_point) if spec else "")
    extras = [EXTRAS[name] for clue in clues for name in EXTRAS if name in clue.lower()]
    if extras:
        rule = f'it comes with the extra "{extras[0]}" ({error})'
        return UniRLError(what, rule, f"pip install 'unirl[{extras[0]}]'")
    return UniRLError(what, str(error), _install(error.name))


def import_registering_module(config: EnvConfig) -> None:
    """Import config.import_module, if there is one; UniRLError where that is not possible.

    ModuleNotFoundError where a package that it imports is missing; what else it raises is its own.
    """
    if not config.import_module:
        return
    what = f'module "{config.import_module}" that should register env "{config.id}"'
    try:
        import_named(config.import_module, what)
    except ModuleNotFoundError:
        raise  # the module exists; something that it imports does not
    except ImportError as error:
        raise UniRLError(
            f"{what} cannot be imported",
            f"import_module must be importable where the actors run: {error}",
            "correct what it imports",
        ) from error


def _register_games() -> None:
    if RECALL_CUE not in gymnasium.registry:
        gymnasium.register(RECALL_CUE, "unirl.envs.games.recall_cue:RecallCue")


def _missing_for_agents(config: EnvConfig, error: ImportError) -> UniRLError:
    """PettingZoo has extras of its own, one for each of its families of games."""
    if not isinstance(error, ModuleNotFoundError):  # a family that became a package of its own
        return UniRLError(
            f'env "{config.id}" cannot be imported',
            str(error),
            "install what the message names; other packages' ids are pettingzoo/<module>:<factory>",
        )
    module = (error.name or "").partition(".")[0]
    if module == "pettingzoo":
        remedy = f"pip install 'unirl[{EXTRAS[module]}]'"
        rule = f'it comes with the extra "{EXTRAS[module]}" ({error})'
    elif ":" in config.id or config.import_module:  # what it lacks may be anything
        remedy = _install(module)
        rule = str(error)
    else:
        remedy = f"pip install 'pettingzoo[{config.id.split('/')[1]}]'"
        rule = f"PettingZoo's games need packages of their own ({error})"
    return UniRLError(f'env "{config.id}" needs a package that is not installed', rule, remedy)


def _install(module: str | None) -> str:
    return f"pip install {module}" if module else "install what the message names"


def _fold(env_id: str) -> str:
    """An id as suggestions compare it; of PettingZoo's long ids only the game's name."""
    if env_id.startswith(MULTI_AGENT):
        env_id = env_id.rpartition("/")[2]
    return env_id.lower().removeprefix("ale/")
