"""The groups of a run's store, as a run that learns from them finds them."""

from __future__ import annotations

import json
import socket
from contextlib import closing
from dataclasses import dataclass, replace
from hashlib import blake2b
from pathlib import Path
from typing import Any

from unirl.config import load_toml
from unirl.config.secrets import is_redacted
from unirl.errors import UniRLError
from unirl.llm.assembly import LanguageFacts, probe
from unirl.llm.group import GroupShape
from unirl.llm.language_config import LanguageConfig
from unirl.llm.models.model import load_tokenizer
from unirl.llm.models.vocabulary import vocabulary_digest
from unirl.llm.trajectories.config import FILE, StoreConfig, known_part
from unirl.llm.trajectories.ledger import Ledger
from unirl.llm.trajectories.store import TrajectoryStore, open_store

LEASE_SECONDS = 3600.0
"""That a group which was read is this run's alone, unless it is learned from before."""


@dataclass(frozen=True)
class StoredGroups:
    """Where a run's episodes are. Picklable; each process opens the store by itself."""

    folder: Path
    store: StoreConfig
    run: str | None
    """Its name in a store that several runs share; None: all that is there."""
    settings: dict[str, Any]
    """Its config.toml."""

    @classmethod
    def find(cls, where: Path, own: StoreConfig) -> StoredGroups:
        """Of a run folder. own: the settings of the run that reads, for a URL that is stored
        nowhere. Raises UniRLError where there is no store.
        """
        config = where / "config.toml"
        settings = load_toml(config) if config.is_file() else {}
        store = known_part(settings)
        if is_redacted(store.url):
            store = replace(store, url=own.url)
        if not store.url and not (where / FILE).is_file():
            raise UniRLError(
                f"{where} has no stored episodes",
                f"samples must name the folder of an agent's run, with {FILE} in it",
                "make one: unirl train agent --only rollout",
            )
        is_shared = store.database.startswith("postgres")
        run = store.run_name(where.resolve()) if is_shared else None
        return cls(where, store, run, settings)

    def open(self) -> TrajectoryStore:
        return open_store(self.store, self.folder, create=False)


def consumer_of(folder: Path) -> str:
    """What begins the names of a run's consumers: one for each of its tickets, so that a ticket
    that is issued again gets its group again.
    """
    place = f"{socket.gethostname()}:{folder.resolve()}"
    return f"{folder.name}-{blake2b(place.encode(), digest_size=6).hexdigest()}#"


def find_facts(config: LanguageConfig, samples: str) -> LanguageFacts:
    """What a plan needs that learns from stored episodes. Raises UniRLError where they do not fit
    its settings.
    """
    assert config.store_config is not None
    found = StoredGroups.find(Path(samples).expanduser(), config.store_config)
    with closing(found.open()) as store:
        known = Ledger(store).tickets(found.run)
        if not known:
            raise UniRLError(
                f"the store of {samples} has no groups",
                "a group counts when all of its episodes are there, with their tokens: "
                f"there are {store.count()} episodes, and no whole group",
                "make some: unirl train agent --only rollout",
            )
        _check(config, samples, _facts(store, known[0]), found.settings)
        longest = _longest_prompt(store)
    agent = config.agent_config
    assert agent is not None
    names = len(config.reward.weight_of)
    shape = GroupShape(
        config.rollout.group_size, longest, config.max_tokens, names, agent.max_segments
    )
    return probe(config, shape, config.task.names)


def _facts(store: TrajectoryStore, group: tuple[int, int]) -> dict[str, Any]:
    """What is the same for all groups, of one of them."""
    size, scores = store.database.execute(
        "SELECT group_size, scores FROM episode WHERE run = ? AND ticket = ? AND body_size > 0",
        list(group),
    )[0]
    digests = store.database.execute(
        "SELECT DISTINCT tokenizer_digest FROM episode WHERE body_size > 0"
    )
    return {
        "group_size": int(size),
        "rewards": list(json.loads(scores)),
        "tokenizers": {str(each) for (each,) in digests if each},
    }


def _longest_prompt(store: TrajectoryStore) -> int:
    """What the first turns of episodes were given begins with their group's prompt."""
    found = store.database.execute("SELECT MAX(tokens - drawn) FROM step WHERE idx = 0")
    return int(found[0][0] or 0)


def _check(
    config: LanguageConfig, samples: str, found: dict[str, Any], settings: dict[str, Any]
) -> None:
    agent = config.agent_config
    assert agent is not None
    rewards = list(config.reward.weight_of)
    checks = [
        ("rollout.group_size", found["group_size"], config.rollout.group_size),
        ("reward.weights", ", ".join(found["rewards"]), ", ".join(rewards)),
        *(
            (f"{table}.{key}", settings.get(table, {}).get(key, own), own)
            for table, key, own in (
                ("sampling", "temperature", config.sampling.temperature),
                ("agent", "max_episode_tokens", agent.max_episode_tokens),
            )
        ),
    ]
    for key, stored, wanted in checks:
        if stored != wanted:
            raise UniRLError(
                f"the episodes of {samples} do not fit {key}",
                f"they have {stored}, the config says {wanted}",
                f"set {key} as it was when they were made",
            )
    tokenizer = load_tokenizer(config.model)
    own = vocabulary_digest(tokenizer)
    if others := found["tokenizers"] - {own}:
        raise UniRLError(
            f"the episodes of {samples} are of another model",
            f"the digest of their tokenizer is {min(others)}, that of {config.model.path} is {own}",
            "set model.path to a model with the same tokenizer",
        )
