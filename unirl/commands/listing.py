"""`unirl list`: environments, recipes, engines or shipped configs, one per line."""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Callable, Sequence
from pathlib import Path

from unirl import config as configs
from unirl import registry
from unirl.commands.arguments import parse
from unirl.commands.command import NoOptions
from unirl.config.shipped import shipped_configs
from unirl.errors import UniRLError

ENGINES = {
    "auto": "ale for ALE/*, else the environment's own vector class where it has one, else sync",
    "vector": "the environment's own vector class; the fastest where it exists",
    "sync": "Gymnasium, one environment after the other in the actor's process",
    "async": "Gymnasium, one process per environment; for steps far slower than 100 microseconds",
    "envpool": "EnvPool's C++ threads; has ids of its own",
    "ale": "ale-py's C++ threads; ALE/* only",
}
"""Values of env.engine, as `unirl list engines` shows them."""


def list_things(arguments: Sequence[str]) -> int:
    kinds: dict[str, Callable[[], dict[str, str]]] = {
        "envs": _list_envs,
        "recipes": _list_recipes,
        "engines": _list_engines,
        "configs": _list_configs,
    }
    positional, _ = parse(arguments, NoOptions)
    if not positional or positional[0] not in kinds or len(positional) > 2:
        found = " ".join(positional) or "nothing"
        raise UniRLError(
            f'"{found}" cannot be listed',
            f"there are {', '.join(kinds)}, each with a filter if wanted",
            configs.suggestion(positional[0] if positional else "", kinds)
            or "unirl list envs Pong",
        )
    wanted = positional[1].lower() if len(positional) == 2 else ""
    things = kinds[positional[0]]()
    width = max((len(name) for name in things), default=0)
    for name, text in things.items():
        if wanted in f"{name} {text}".lower():
            print(f"{name:<{width}}  {text}".rstrip())
    return 0


def _list_envs() -> dict[str, str]:
    from unirl.envs.make import known_env_ids

    return {env_id: "atari" if env_id.startswith("ALE/") else "" for env_id in known_env_ids()}


def _list_recipes() -> dict[str, str]:
    # A recipe's module imports torch: its docstring is read without running it.
    found = {}
    for name, module in registry.RECIPES.items():
        spec = importlib.util.find_spec(module)
        source = Path(spec.origin).read_text() if spec is not None and spec.origin else ""
        found[name] = (ast.get_docstring(ast.parse(source)) or "").partition("\n")[0]
    return found


def _list_engines() -> dict[str, str]:
    modules = {"envpool": "envpool", "ale": "ale_py"}
    missing = {name for name, module in modules.items() if importlib.util.find_spec(module) is None}
    return {n: text + (" (not installed)" if n in missing else "") for n, text in ENGINES.items()}


def _list_configs() -> dict[str, str]:
    found = {}
    for name, path in shipped_configs().items():
        first = path.read_text().partition("\n")[0]
        found["@" + name] = first.lstrip("# ") if first.startswith("#") else ""
    return found
