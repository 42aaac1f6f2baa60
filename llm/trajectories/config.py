"""Where trajectories are kept, how much of them, and for how long."""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from unirl.config.rules import check_at_least
from unirl.config.secrets import is_redacted
from unirl.errors import UniRLError

FILE = "trajectories.db"
"""Of a run, in its folder."""
DATABASES = ("postgresql://", "postgres://", "sqlite://")


@dataclass(frozen=True)
class StoreConfig:
    """Episodes are written behind the commit of their slot: a slow or broken store slows nothing,
    and never ends a run.
    """

    enabled: bool = True
    """False: nothing is kept."""
    url: str = field(default="", metadata={"secret": True})
    """"": trajectories.db in the run folder. postgresql://USER@HOST/NAME: a database that several
    runs and machines share; env:NAME: the variable that holds such a URL, with a password, say.
    """
    bodies_url: str = ""
    """"": tokens and texts are in the database, too. s3://BUCKET/FOLDER: they are in a bucket; keys
    are taken from the variables AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY.
    """
    run_id: str = ""
    """What tells this run from others of its name in a database that they share. "": it is drawn,
    and kept in config.toml.
    """
    max_bodies: int = 64
    """Episodes that may wait to be written with all their tokens. Beyond it tokens and texts are
    dropped and counted, the rows with rewards and endings never. More: survives longer stalls, more
    memory.
    """
    required: bool = False
    """True: a run whose episodes cannot be stored, or not be marked as learned from, ends with an
    error. False: it continues, and counts them.
    """
    expire_days: float = 30.0
    """Age at which an episode expires. More: a larger file. 0: never."""
    max_lag: int = 0
    """Updates that an episode may be behind the policy before it expires. 0: any number."""
    max_per_task: int = 0
    """Episodes of a task that are kept; the oldest expire first. 0: all."""
    redact: bool = True
    """Replace what looks like a key or a password in texts before they are written. Token ids stay
    as they are.
    """

    def __post_init__(self) -> None:
        check_at_least(1, "store", self, "max_bodies")
        check_at_least(0, "store", self, "expire_days", "max_lag", "max_per_task")
        kinds = {
            "url": (*DATABASES, "env:"),
            "bodies_url": ("s3://",),
        }
        for name, known in kinds.items():
            value = getattr(self, name)
            if value and not value.startswith(known):
                raise UniRLError(
                    f"store.{name} is {value.partition('://')[0]}://...",
                    f"it begins with one of {', '.join(known)}",
                    f"leave store.{name} out: the run folder is then used",
                )

    def run_name(self, folder: Path) -> str:
        """By what the store knows the run of this folder."""
        return f"{folder.name}-{self.run_id}" if self.url and self.run_id else folder.name

    def with_id(self) -> StoreConfig:
        """With an id where one is needed and none was given."""
        if not self.url or self.run_id:
            return self
        return replace(self, run_id=secrets.token_hex(4))

    @property
    def database(self) -> str:
        """The database's URL, read from its variable if it is in one."""
        url = self.url
        if url.startswith("env:"):
            url = os.environ.get(url[4:], "")
            if not url:
                raise UniRLError(
                    f"store.url names the variable {self.url[4:]}, which is not set",
                    "env:NAME is the variable that holds the URL of a database",
                    f"export {self.url[4:]}=postgresql://...",
                )
            if not url.startswith(DATABASES):
                raise UniRLError(  # it may hold anything: it is not shown
                    f"the variable {self.url[4:]} holds no URL of a database",
                    f"it begins with one of {', '.join(DATABASES)}",
                    f"export {self.url[4:]}=postgresql://...",
                )
        if is_redacted(url):
            raise UniRLError(
                "the URL of this run's trajectories is not known",
                "store.url may hold a password, so config.toml does not keep it",
                "give it again: --store.url env:NAME, with the URL in the variable NAME",
            )
        return url


def known_part(table: Mapping[str, Any]) -> StoreConfig:
    """The store's settings in the tables of a run's config.toml; a run without them has the
    defaults.
    """
    found = table.get("store")
    found = found if isinstance(found, Mapping) else {}
    names = ("url", "bodies_url", "run_id")
    return StoreConfig(**{name: found[name] for name in names if isinstance(found.get(name), str)})
