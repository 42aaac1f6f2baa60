"""Configs are frozen dataclasses: read from TOML, changed by flags, written back.

Nothing passes unnoticed: an unknown key, and a value of another type, end in a UniRLError that says
what was found and what was expected.
"""

from __future__ import annotations

from unirl.config.field_help import FieldHelp, fields_help, flag_of
from unirl.config.flags import parse_flags
from unirl.config.reading import check_keys, from_mapping, load_toml, override
from unirl.config.tables import merge, nest
from unirl.config.wording import shown
from unirl.config.writing import to_toml
from unirl.errors import suggestion

__all__ = [
    "FieldHelp",
    "check_keys",
    "fields_help",
    "flag_of",
    "from_mapping",
    "load_toml",
    "merge",
    "nest",
    "override",
    "parse_flags",
    "shown",
    "suggestion",
    "to_toml",
]
