"""Episodes of runs that share a database are seen as those of a folder are, and one that cannot be
reached is said to be so, where its episodes would be.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tests.llm.trajectories.services import emptied, free_port
from tests.llm.trajectories.stored_episodes import record, straight, tree
from tests.view.asking import Asker
from tests.view.page_runs import AGENT, CARTPOLE, begin
from unirl import cli
from unirl.llm.trajectories.config import StoreConfig
from unirl.llm.trajectories.store import open_store

KINDS = (
    "sqlite",
    pytest.param("postgres", marks=pytest.mark.slow),
    pytest.param("bucket", marks=pytest.mark.slow),
)
NAMED = '{run}[store]\nurl = "{url}"\nbodies_url = "{bodies}"\nrun_id = "{id}"\n'
SECRET = "p%40ssw0rd"


def shared(folder: Path, url: str = "env:EPISODES", id: str = "aaaa", bodies: str = "") -> None:
    """The folder of a run that keeps its episodes elsewhere."""
    begin(folder, NAMED.format(run=AGENT, url=url, id=id, bodies=bodies))


@pytest.fixture(params=KINDS)
def store(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> StoreConfig:
    """Two runs have put episodes into one database: `one`, of the folder runs/one, and another."""
    url, bodies = f"sqlite://{tmp_path}/shared.db", ""
    if request.param != "sqlite":
        url = request.getfixturevalue("server")
        emptied(url)
    if request.param == "bucket":
        bodies = request.getfixturevalue("bucket")
    monkeypatch.setenv("EPISODES", url)
    config = StoreConfig(url="env:EPISODES", bodies_url=bodies, run_id="aaaa")
    shared(tmp_path / "runs/one", id="aaaa", bodies=bodies)
    with closing(open_store(config, tmp_path)) as store:
        for ticket in range(5):
            for run in ("one-aaaa", "two-bbbb"):
                made = straight(ticket, turns=1 + ticket % 3)
                store.put(record(made, run=run, ticket=ticket, task=f"of {run[:3]}"))
        store.put(record(tree(), run="one-aaaa", ticket=9, task="forks"))
    return config


def test_each_run_has_its_own_episodes_of_a_database_that_they_share(
    store: StoreConfig, tmp_path: Path
) -> None:
    asker = Asker(tmp_path / "runs")
    found = asker.of("one", "/episodes?sort=old").value
    assert [(row["ticket"], row["task"]) for row in found["rows"]] == [
        *((ticket, "of one") for ticket in range(5)), (9, "forks"),
    ]  # fmt: skip
    assert asker.of("one", "/episodes?task=of+two").value["total"] == 0
    assert asker.of("one", "/episodes?text=answer+2").value["total"] == 1
    assert [row["place"] for row in asker.of("one", "/groups/3").value["rows"]] == [1]
    opened = asker.of("one", f"/episodes/{found['rows'][-1]['id']}").value
    assert [turn["parent"] for turn in opened["outline"]] == [None, 0, 0, None]
    with closing(open_store(store, tmp_path)) as own:
        other = next(row["id"] for row in own.find() if row["run"] == "two-bbbb")
        own.put(record(straight(7), run="one-aaaa", ticket=10))
    for path in (f"/episodes/{other}", f"/episodes/{other}/export"):
        assert asker.of("one", path).status == 404
    assert asker.of("one", "/episodes").value["total"] == 7  # the new one, too


def test_a_folder_that_was_copied_is_known_by_the_runs_id(
    store: StoreConfig, tmp_path: Path
) -> None:
    (tmp_path / "runs/one").rename(tmp_path / "runs/elsewhere")
    shared(tmp_path / "runs/new", id="cccc")
    asker = Asker(tmp_path / "runs")
    assert asker.of("elsewhere", "/episodes").value["total"] == 6
    assert asker.of("new", "/episodes").value["total"] == 0


def test_a_url_that_is_not_kept_is_asked_for_and_given(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("EPISODES", f"sqlite://{tmp_path}/shared.db")
    shared(tmp_path / "runs/one", url="postgresql://(not stored)")
    with closing(open_store(StoreConfig(url="env:EPISODES"), tmp_path)) as store:
        store.put(record(straight(1), run="one-aaaa"))
    assert "--store-url env:NAME" in Asker(tmp_path / "runs").of("one", "/episodes").error[2]
    given = Asker(tmp_path / "runs", store_url="env:EPISODES")
    assert given.of("one", "/episodes").value["total"] == 1
    monkeypatch.chdir(tmp_path)
    assert cli.main(["trajectories", "one"]) == 2
    assert cli.main(["trajectories", "one", "--store-url", "env:EPISODES"]) == 0
    assert "sums" in capsys.readouterr().out
    for command in ("trajectories", "view"):
        assert cli.main([command, "one", "--store-url", "postgresql://me:secret@host/db"]) == 2
        said = capsys.readouterr().err
        assert "secret" not in said and len(said.strip().splitlines()) == 3


HOSTILE = {
    "a variable that is no URL": ("env:SOME_KEY", "a-key-of-somebody"),
    "a variable that is not there": ("env:NOT_THERE", ""),
    "a file elsewhere": ("sqlite:///etc/passwd", "/etc/passwd"),
    "a machine elsewhere": ("postgresql://127.0.0.1:{port}/x", "127.0.0.1"),
    "a URL that is none": ("env:BROKEN", SECRET),
    "a database that refuses": ("env:REFUSED", SECRET),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_nothing_of_the_environment_is_shown_and_no_folder_leads_elsewhere(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, hidden = HOSTILE[case]
    monkeypatch.setenv("SOME_KEY", "a-key-of-somebody")
    monkeypatch.setenv("BROKEN", f"postgresql://me:{SECRET}%zz@[host/db")
    monkeypatch.setenv("REFUSED", f"postgresql://me:{SECRET}@127.0.0.1:{free_port()}/db")
    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.settimeout(0)
        shared(tmp_path / "one", url.format(port=listening.getsockname()[1]))
        begin(tmp_path / "two", CARTPOLE.format(seed=1, lr=0.1))
        asker = Asker(tmp_path)
        answered = asker.of("one", "/episodes")
        assert answered.status == 400 and len(answered.error) == 3
        assert not hidden or hidden not in str(answered.value)
        with pytest.raises(BlockingIOError):
            listening.accept()
    # All else is there, and a file of these runs is saved, with the same words in it.
    assert asker.of("one").value["has"]["episodes"]
    answers = saved(asker("/api/page").body.decode())
    assert answers[f"/api/runs/{asker.id('one')}/episodes"]["error"] == answered.error
    assert answers[f"/api/runs/{asker.id('two')}/episodes"]["total"] == 0


def saved(page: str) -> Any:
    block = page.partition('<script type="application/json" id="saved">')[2]
    return json.loads(block.partition("</script>")[0])["answers"]


@pytest.mark.slow
def test_a_database_that_hangs_is_given_up_and_comes_back(
    server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    emptied(server)
    monkeypatch.setenv("EPISODES", server)
    shared(tmp_path / "runs/one")
    with closing(open_store(StoreConfig(url=server), tmp_path)) as store:
        store.put(record(straight(1), run="one-aaaa"))
    asker = Asker(tmp_path / "runs")
    assert asker.of("one", "/episodes").value["total"] == 1
    import psycopg

    with psycopg.connect(server, autocommit=True) as connection:
        sql = "SELECT pid FROM pg_stat_activity WHERE backend_type = 'client backend'"
        pids = [pid for (pid,) in connection.execute(sql) if pid != connection.info.backend_pid]
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    begun = time.monotonic()
    assert "Postgres says" in asker.of("one", "/episodes").error[1]
    assert time.monotonic() - begun < 6
    for pid in pids:
        os.kill(pid, signal.SIGCONT)
    assert asker.of("one", "/episodes").value["total"] == 1


@pytest.mark.slow
def test_a_server_that_accepts_and_says_nothing_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("EPISODES", f"postgresql://x@127.0.0.1:{silent.getsockname()[1]}/x")
        shared(tmp_path / "one")
        asker = Asker(tmp_path)
        for at_most in (4.0, 0.5):  # for some seconds it is not tried again
            begun = time.monotonic()
            assert "cannot be used" in asker.of("one", "/episodes").error[0]
            assert time.monotonic() - begun < at_most


@pytest.mark.slow
def test_without_its_bucket_an_episode_has_its_row(
    server: str, bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    emptied(server)
    monkeypatch.setenv("EPISODES", server)
    shared(tmp_path / "runs/one", bodies=bucket)
    with closing(open_store(StoreConfig(url=server, bodies_url=bucket), tmp_path)) as store:
        ep = store.put(record(tree(), run="one-aaaa", ticket=3))
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{free_port()}")
    asker = Asker(tmp_path / "runs")
    assert asker.of("one", "/episodes").value["total"] == 1
    opened = asker.of("one", f"/episodes/{ep}").value
    assert opened["turns"] == [] and "bucket" in opened["missing"][0]
    assert "bucket" in asker.of("one", "/groups/3").value["rows"][0]["text"]
    found = asker.of("one", "/episodes?text=brief").value
    assert (found["searched"], found["unsearched"]) == (0, 1)
