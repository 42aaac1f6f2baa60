"""The tables, alike in SQLite and Postgres.

The index (episode, step) has no tokens and no texts, so scanning it never touches bodies. A lease
is a ticket's: a group is learned from as a whole.
"""

from __future__ import annotations

from unirl.errors import UniRLError

VERSION = 1

EPISODE = (
    "ticket", "place", "group_size", "task", "task_id", "task_digest", "split", "state", "ending",
    "why", "reward", "outcome", "scores", "version_min", "version_max", "trained_version", "turns",
    "segments", "drawn", "tokens", "seconds", "seconds_model", "seconds_tools", "agent", "env",
    "env_digest", "sandbox", "engine", "tokenizer_digest", "template_digest", "created", "finished",
)  # fmt: skip
"""What is known of an episode from the start, besides `hash` and where its body is."""

TABLES = """
CREATE TABLE IF NOT EXISTS meta (name TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS run (
    id {id}, name TEXT NOT NULL UNIQUE, config_digest TEXT, started {real}
);
CREATE TABLE IF NOT EXISTS episode (
    id {id}, run {int} NOT NULL,
    ticket {int} NOT NULL, place INTEGER NOT NULL, group_size INTEGER NOT NULL,
    task TEXT, task_id TEXT, task_digest TEXT, split TEXT,
    state TEXT NOT NULL, ending TEXT, why TEXT, reward {real}, outcome {real}, scores TEXT,
    version_min {int}, version_max {int}, trained_version {int},
    turns INTEGER, segments INTEGER, drawn {int}, tokens {int},
    seconds {real}, seconds_model {real}, seconds_tools {real},
    agent TEXT, env TEXT, env_digest TEXT, sandbox TEXT, engine TEXT,
    tokenizer_digest TEXT, template_digest TEXT,
    created {real} NOT NULL, finished {real}, hash {blob} NOT NULL,
    body_key TEXT, body_size {int}
);
CREATE UNIQUE INDEX IF NOT EXISTS episode_once ON episode (run, ticket, place, hash);
CREATE INDEX IF NOT EXISTS episode_task ON episode (task, created);
CREATE INDEX IF NOT EXISTS episode_task_id ON episode (task, task_id, created);
CREATE INDEX IF NOT EXISTS episode_created ON episode (created);
CREATE INDEX IF NOT EXISTS episode_state ON episode (state, run, ticket);
CREATE INDEX IF NOT EXISTS episode_ending ON episode (ending, created) WHERE ending <> 'stop';
CREATE TABLE IF NOT EXISTS step (
    ep {int} NOT NULL, idx INTEGER NOT NULL, parent INTEGER, segment INTEGER, origin TEXT,
    tool TEXT, ok INTEGER, error TEXT, reward {real}, drawn {int}, tokens {int}, version {int},
    started {real}, seconds {real}, PRIMARY KEY (ep, idx)
){in_order};
CREATE INDEX IF NOT EXISTS step_tool ON step (tool, ok) WHERE tool IS NOT NULL;
CREATE TABLE IF NOT EXISTS lease (
    run {int} NOT NULL, ticket {int} NOT NULL, consumer TEXT NOT NULL, until {real},
    update_number {int}, PRIMARY KEY (run, ticket)
);
CREATE INDEX IF NOT EXISTS lease_until ON lease (until) WHERE until IS NOT NULL;
CREATE INDEX IF NOT EXISTS lease_consumer ON lease (consumer) WHERE consumer <> 'learner';
CREATE INDEX IF NOT EXISTS lease_update ON lease (run, update_number);
CREATE TABLE IF NOT EXISTS counter (name TEXT PRIMARY KEY, value {int} NOT NULL);
CREATE TABLE IF NOT EXISTS body (ep {int} PRIMARY KEY, data {blob} NOT NULL)
"""
"""`id`, `int`, `real` and `blob` are the database's own types; `in_order`: rows are in their key's
own tree, which saves a page of each transaction. They are small: it has no texts but errors."""


def other_version(found: str) -> UniRLError:
    """found: the tables'."""
    return UniRLError(
        "the trajectories were written by another version of UniRL",
        f"their tables are of version {found}, this one reads {VERSION}",
        "use the version that wrote them",
    )


def statements(types: dict[str, str]) -> list[str]:
    return [each.strip() for each in TABLES.format(**types).split(";") if each.strip()]
