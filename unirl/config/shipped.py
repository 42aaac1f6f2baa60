"""The configs that come with UniRL, by name: `@cartpole`."""

from __future__ import annotations

from pathlib import Path

from unirl.errors import UniRLError, suggestion


def shipped_configs() -> dict[str, Path]:
    folder = Path(__file__).parent.parent / "configs"
    return {path.stem: path for path in sorted(folder.glob("*.toml"))}


def config_file(name: str) -> Path:
    """What an @ names: a path, or the name of a shipped config. Raises UniRLError."""
    if "/" in name or name.endswith(".toml"):
        return Path(name)
    known = shipped_configs()
    if name not in known:
        raise UniRLError(
            f'config "{name}" is not among the shipped ones',
            f"there are {', '.join(known) or 'none'}; your own need their suffix: @{name}.toml",
            suggestion(name, known) or "see them all: unirl list configs",
        )
    return known[name]
