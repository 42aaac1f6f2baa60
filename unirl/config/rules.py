"""Rules that many configs state: a setting below its bound fails with the bound."""

from __future__ import annotations

from unirl.errors import UniRLError


def check_at_least(least: int, table: str, config: object, *names: str) -> None:
    """Raise UniRLError unless each of these settings of `config`, the keys of `table`, is that
    large.
    """
    for name in names:
        value = getattr(config, name)
        if not value >= least:
            raise UniRLError(
                f"{table}.{name} is {value}",
                f"{table}.{name} >= {least} must hold",
                f"set it to {least} or more",
            )


def check_positive(key: str, value: float | None, remedy: str) -> None:
    """Raise UniRLError unless the setting is > 0, or None."""
    check_setting(value is None or value > 0, key, value, "must be > 0", remedy)


def check_setting(holds: bool, key: str, value: object, rule: str, remedy: str) -> None:
    """Raise UniRLError unless the rule holds for a setting."""
    if not holds:
        raise UniRLError(f"{key} is {value}", f"it {rule}", remedy)
