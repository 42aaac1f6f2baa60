"""Worlds by their names, as agent.world has them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType

from unirl.errors import UniRLError, suggestion
from unirl.llm.agents.worlds.foreign import ForeignWorld
from unirl.llm.agents.worlds.gym import GymWorld
from unirl.llm.agents.worlds.harbor import HarborWorld
from unirl.llm.agents.worlds.nemo_gym import NemoWorld
from unirl.llm.agents.worlds.openenv import OpenEnvWorld
from unirl.llm.agents.worlds.text import TextWorld
from unirl.llm.agents.worlds.world import Bounded, EnvClient, World
from unirl.llm.sandbox.config import SandboxConfig


def make_world(
    spec: str,
    options: Mapping[str, str],
    *,
    seconds: float = 30.0,
    sandbox: SandboxConfig | None = None,
) -> World:
    """The world that spec names; each call of it is a client for one episode, whose steps have this
    deadline. sandbox: of worlds in which the model's programs run. Raises UniRLError for an unknown
    name and for a server that does not answer.
    """
    kind, colon, rest = spec.partition(":")
    if kind not in _REST or not rest:
        raise UniRLError(
            f'there is no world "{spec}"',
            f"a world is written {', '.join(f'{name}:{what}' for name, what in _REST.items())}",
            (suggestion(kind, _REST) if colon else "") or "correct agent.world",
        )
    if kind == "harbor":
        return _BoundedWorld(HarborWorld(rest, options, sandbox or SandboxConfig()), seconds)
    return _BoundedWorld(WORLDS[kind](rest, options), seconds)


WORLDS: Mapping[str, Callable[[str, Mapping[str, str]], World]] = MappingProxyType(
    {
        "gym": GymWorld,
        "nemo": NemoWorld,
        "openenv": OpenEnvWorld,
        "skyrl": partial(ForeignWorld, "skyrl"),
        "text": TextWorld,
        "verifiers": partial(ForeignWorld, "verifiers"),
    }
)
_REST = {
    "gym": "ID",
    "harbor": "FOLDER",
    "nemo": "URL",
    "openenv": "URL",
    "skyrl": "NAME",
    "text": "module:Class",
    "verifiers": "NAME",
}


class _BoundedWorld:
    def __init__(self, world: World, seconds: float) -> None:
        self._world, self._seconds = world, seconds
        self.name, self.tools, self.tasks = world.name, world.tools, world.tasks

    def __call__(self) -> EnvClient:
        return Bounded(self._world(), self.name, self._seconds)
