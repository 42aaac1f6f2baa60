"""An episode that was put is there as it was: once, whole, by turn, and by what is known of it."""

from __future__ import annotations

import json
import math
import random
import sqlite3
import stat
import threading
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from tests.llm.trajectories.stored_episodes import completion, group, record, straight, tree
from unirl.errors import UniRLError
from unirl.llm.agents.episode import Episode, Turn
from unirl.llm.engine import Completion
from unirl.llm.outcome import FAILED, Score
from unirl.llm.trajectories import frames
from unirl.llm.trajectories.config import FILE, StoreConfig
from unirl.llm.trajectories.expiry import DAY, counted, expire
from unirl.llm.trajectories.filter import Filter
from unirl.llm.trajectories.queries import QUERIES, answer
from unirl.llm.trajectories.redaction import SHOWN, Redaction
from unirl.llm.trajectories.store import TrajectoryStore, open_store


@pytest.fixture
def store(tmp_path: Path) -> Iterator[TrajectoryStore]:
    with closing(open_store(StoreConfig(), tmp_path)) as store:
        yield store


def test_an_episode_is_read_back_as_it_was(store: TrajectoryStore) -> None:
    given = record()
    ep = store.put(given)
    assert ep is not None and store.get(ep) == given


def test_what_json_and_small_floats_do_not_hold_is_kept_or_shown() -> None:
    odd = Completion((2**40, 1), (-0.1, -math.inf), (1, 2), "aborted", (True, True))
    episode = Episode([Turn(-1, (), odd, info={"where": {1, 2}}), Turn(0, (5,), odd)])
    read, _ = frames.decode(frames.encode(episode))
    assert read.turns[1] == episode.turns[1]
    assert read.turns[0].completion == odd and read.turns[0].info == {"where": "{1, 2}"}


def test_an_episode_of_no_turns_keeps_its_ending_and_prompt(store: TrajectoryStore) -> None:
    given = record(Episode([], "crash", "exit code 1"), prompt=(4, 5))
    ep = store.put(given)
    assert ep is not None and store.get(ep) == given


def test_a_turn_is_read_by_its_own_bytes(store: TrajectoryStore) -> None:
    given = record(straight(turns=60, tokens=400))
    ep = store.put(given)
    assert ep is not None
    before = store.bytes_read
    assert store.turn(ep, 17) == given.episode.turns[17]
    assert store.bytes_read - before < store.bytes_written / 40


def test_a_turn_that_is_not_there_is_explained(store: TrajectoryStore) -> None:
    ep = store.put(record())
    assert ep is not None
    for number in (4, -1):
        with pytest.raises(UniRLError, match="4 turns"):
            store.turn(ep, number)
    with pytest.raises(UniRLError, match="no episode 999"):
        store.turn(999, 0)


def test_a_torn_body_is_found(store: TrajectoryStore) -> None:
    body = frames.encode(tree())
    for broken in (body[:-1], body[:5], b"", b"XXXX" + body[4:]):
        with pytest.raises(ValueError):
            frames.decode(broken)


def test_an_episode_that_comes_twice_is_stored_once(store: TrajectoryStore) -> None:
    assert store.put(record()) is not None
    assert store.put(record()) is None
    assert store.put(record(ticket=-1, place=0)) is not None
    assert store.put(record(ticket=-1, place=0)) is None
    assert store.count() == 2 and store.num_duplicates == 2
    # The same tokens of another place are another attempt.
    assert store.put(record(place=0)) is not None


def test_an_episode_that_two_connections_send_at_once_is_stored_once(tmp_path: Path) -> None:
    stores = [open_store(StoreConfig(), tmp_path) for _ in range(2)]
    given = [each for ticket in range(20) for each in group(ticket)]

    def send(store: TrajectoryStore) -> None:
        for each in given:
            store.put(each)

    threads = [threading.Thread(target=send, args=(store,)) for store in stores]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert stores[0].count() == len(given)
    assert sum(store.num_duplicates for store in stores) == len(given)
    for store in stores:
        store.close()


def test_what_was_rolled_back_is_entered_again(store: TrajectoryStore) -> None:
    bad = record(ticket=2, created=None)
    for _ in range(2):
        with pytest.raises(Exception, match=r"."):
            store.put_many([*group(1), bad])
    store.put_many(group(1))
    assert store.count(Filter(run="test")) == 2


def test_held_out_episodes_that_are_alike_are_all_kept(store: TrajectoryStore) -> None:
    given = record(ticket=-1, place=0)
    others = [replace(given, created=1.8e9), replace(given, task_id="18"), replace(given, run="b")]
    assert None not in store.put_many([given, *others])
    assert store.put(given.bare()) is None


def test_an_episode_without_its_body_is_the_same(store: TrajectoryStore) -> None:
    given = record()
    assert given.bare().digest() == given.digest() == given.body()[1]
    assert store.put_many([given.bare()], bodies=False) != [None]
    assert store.put(given) is None


def test_the_index_has_no_keys_and_no_half_characters(store: TrajectoryStore) -> None:
    secret = "sk-" + "a1B2" * 8
    turn = Turn(-1, (1,), completion(random.Random(0), 2), info={"error": f"\ud83d {secret}\0"})
    ep = store.put(record(Episode([turn], "crash", f"{secret} \ud83d\0")))
    assert ep is not None
    assert store.find()[0]["why"] == f"{SHOWN} ?" and store.steps(ep)[0]["error"] == f"? {SHOWN}"


def test_nobody_else_may_read_the_files(store: TrajectoryStore, tmp_path: Path) -> None:
    store.put(record())
    found = sorted(tmp_path.iterdir())
    assert found[0].name == FILE and len(found) == 3
    assert {stat.S_IMODE(path.stat().st_mode) for path in found} == {0o600}


def test_episodes_are_found_by_what_is_known_of_them(store: TrajectoryStore) -> None:
    old = record(straight(1, version=2), ticket=1, task="sums", created=1.0)
    new = record(replace(straight(2, version=5), ending="time"), ticket=2, task="words",
                 task_id="x", split="eval", scores={"exact": Score(2.0)}, created=2.0)  # fmt: skip
    ids = [store.put(old), store.put(new)]
    for which, expected in (
        (Filter(), [ids[1], ids[0]]),
        (Filter(task="words"), [ids[1]]),
        (Filter(task="sums", task_id="17"), [ids[0]]),
        (Filter(ending="time"), [ids[1]]),
        (Filter(ending="stop"), [ids[0]]),
        (Filter(reward_min=1.0), [ids[1]]),
        (Filter(reward_max=1.0), [ids[0]]),
        (Filter(version=2), [ids[0]]),
        (Filter(ticket=2, split="eval"), [ids[1]]),
        (Filter(run="other"), []),
    ):
        assert [row["id"] for row in store.find(which)] == expected, which
        assert store.count(which) == len(expected)


def test_turns_have_lines_of_their_own(store: TrajectoryStore) -> None:
    ep = store.put(record())
    assert ep is not None
    rows = store.steps(ep)
    assert [row["tool"] for row in rows] == ["calculator", None, None, None]
    assert [row["ok"] for row in rows] == [1, None, None, 0]
    assert [row["segment"] for row in rows] == [0, 0, 1, 2]
    assert [row["drawn"] for row in rows] == [4, 2, 3, 0]
    for name, (columns, _) in QUERIES.items():
        found, _ = answer(store, name)
        assert found == list(columns)
    assert answer(store, "tools")[1] == [["calculator", 1, 0, 4, 0.5]]


def test_a_reward_that_failed_leaves_no_sum(store: TrajectoryStore) -> None:
    given = record(scores={"exact": Score(1.0), "judge": Score(0.0, FAILED, "no answer")})
    ep = store.put(given)
    assert ep is not None and store.find()[0]["reward"] is None
    assert store.get(ep).scores == given.scores


def test_a_finished_attempt_takes_the_place_of_the_one_that_began(store: TrajectoryStore) -> None:
    store.put(record(Episode([]), state="open"))
    assert [row["state"] for row in store.find()] == ["open"]
    store.put(record())
    assert [row["state"] for row in store.find()] == ["done"]


def test_what_looks_like_a_key_is_not_written(store: TrajectoryStore, tmp_path: Path) -> None:
    secret = "sk-" + "a1B2" * 8
    turn = Turn(-1, (1,), completion(random.Random(0), 2),
                ({"role": "user", "content": f"my key is {secret} \n password: hunter2hunter"},),
                {"role": "assistant", "content": f'{{"api_key": "{secret[3:]}"}}'})  # fmt: skip
    ep = store.put(record(Episode([turn])))
    assert ep is not None
    read = store.get(ep).episode.turns[0]
    assert read.messages[0]["content"] == f"my key is {SHOWN} \n password: {SHOWN}"
    assert read.answer["content"] == f'{{"api_key": "{SHOWN}"}}'
    assert read.completion == turn.completion
    assert store.redaction is not None and store.redaction.count == 3


def test_an_escape_before_what_is_redacted_stays_whole() -> None:
    for text in (
        "Password:\nAdministrator",
        'say "password"\n: "Administrator"',
        "secret\n=\n1234567890",
    ):
        json.loads(Redaction({})(json.dumps({"content": text})))


@pytest.mark.parametrize(
    "text",
    [
        "the secret of the password protected archive is an authentication token",
        "a task about keys: which key opens the door?",
        "x = 1",
    ],
)
def test_plain_words_are_not_redacted(text: str) -> None:
    assert Redaction({"API_KEY": "short", "HOME_KEY": "/usr/share"})(text) == text


def test_values_of_the_variables_of_keys_are_redacted() -> None:
    redaction = Redaction({"MY_TOKEN": 'q"w\\e-12345'})
    assert redaction('{"a":"q\\"w\\\\e-12345"}') == f'{{"a":"{SHOWN}"}}'


def test_a_policy_cannot_make_redaction_slow() -> None:
    for text in ("api_key" * 20000, "eyJ-" * 30000, "-----BEGIN PRIVATE KEY-----" * 4000):
        Redaction({})(text)  # quadratic time would be minutes: the test's own limit


def test_episodes_expire_by_age_lag_change_and_quota(store: TrajectoryStore) -> None:
    def put(seed: int, created: float, **changes: object) -> None:
        version = int(changes.pop("version", 9))  # type: ignore[call-overload]
        store.put(record(straight(seed, version=version), ticket=seed, created=created, **changes))

    now = 100 * DAY
    put(1, now - 31 * DAY)
    put(2, now, version=3)
    put(3, now, env_digest="e0")
    put(4, now - 3 * DAY, task="many")
    put(5, now - 2 * DAY, task="many")
    put(6, now - 1 * DAY, task="many")
    put(7, now)
    config = StoreConfig(max_lag=4, max_per_task=2)
    digests = {"env:calculator": "e1"}
    found = expire(store, config, version=10, digests=digests, now=now)
    assert found == {"age": 1, "lag": 1, "changed": 1, "quota": 1} == counted(store)
    left = {row["ticket"] for row in store.find() if row["state"] == "done"}
    assert left == {5, 6, 7}
    assert store.count(Filter(state="expired")) == 4
    with pytest.raises(UniRLError, match="expired"):
        store.get(store.find(Filter(ticket=1))[0]["id"])
    assert expire(store, config, version=10, digests=digests, now=now) == {}
    # Twice as old: the lines go, too.
    expire(store, replace(config, max_lag=0), now=now + 61 * DAY)
    expire(store, replace(config, max_lag=0), now=now + 61 * DAY)
    assert store.count() == 0


def test_a_file_that_expires_does_not_grow(store: TrajectoryStore, tmp_path: Path) -> None:
    sizes = []
    for number in range(8):
        for seed in range(40):
            ticket, created = 1000 * number + seed, number * 40.0 * DAY
            store.put(record(straight(ticket, tokens=400), ticket=ticket, created=created))
        expire(store, StoreConfig(), now=(number + 1) * 40.0 * DAY - DAY)
        sizes.append((tmp_path / FILE).stat().st_size)
        store.database.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    assert max(sizes[4:]) <= 1.1 * max(sizes[1:4])


def test_a_store_that_cannot_be_used_is_explained(tmp_path: Path) -> None:
    (tmp_path / FILE).write_bytes(b"this is no database" * 100)
    with pytest.raises(UniRLError, match="cannot be kept"):
        open_store(StoreConfig(), tmp_path)
    with pytest.raises(UniRLError, match="cannot be kept"):
        open_store(StoreConfig(), tmp_path / "missing")
    with pytest.raises(UniRLError, match="begins with one of"):
        StoreConfig(url="mysql://x")
    with pytest.raises(UniRLError, match="not set"):
        _ = StoreConfig(url="env:NO_SUCH_URL_IS_SET").database


def test_tables_of_another_version_are_refused(tmp_path: Path) -> None:
    open_store(StoreConfig(), tmp_path).close()
    with closing(sqlite3.connect(tmp_path / FILE)) as file, file:
        file.execute("UPDATE meta SET value = '99'")
    with pytest.raises(UniRLError, match="version 99"):
        open_store(StoreConfig(), tmp_path)
