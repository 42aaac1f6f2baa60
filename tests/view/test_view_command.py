"""`unirl view` as people start it: bad input is explained, a run that trains is watched as it does,
one file is saved.
"""

from __future__ import annotations

import contextlib
import json
import re
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.view.page_runs import AGENT, CARTPOLE, HOSTILE, add_lines, begin, write_agent_run
from unirl import cli
from unirl.view.live import Client
from unirl.view.view import View

ROOT = Path(__file__).resolve().parents[2]
CONFIG = CARTPOLE.format(seed=1, lr=0.1)


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert cli.main(["view", *words]) == 2
    said = capsys.readouterr().err
    assert len(said.strip().splitlines()) == 3, said
    return said


def test_what_cannot_be_shown_is_explained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert 'no folder "runs"' in refused(capsys)
    assert 'no folder "nowhere"' in refused(capsys, "nowhere")
    (tmp_path / "empty").mkdir()
    assert "no run in empty" in refused(capsys, "empty")
    begin(tmp_path / "run", CONFIG)
    assert "port is 70000" in refused(capsys, "run", "--port", "70000")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert f"cannot listen on 127.0.0.1:{port}" in refused(capsys, "run", "--port", port)
    assert "cannot listen on no.such.host" in refused(capsys, "run", "--host", "no.such.host.")
    assert "cannot be written" in refused(capsys, "run", "--save", "nowhere/out.html")


def test_one_file_has_the_runs_and_no_text_of_them_acts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_agent_run(tmp_path / "agent")
    begin(tmp_path / "plain", CONFIG)
    (tmp_path / "plain/videos").mkdir()
    (tmp_path / "plain/videos/step_1.mp4").write_bytes(b"film")
    with (tmp_path / "plain/videos/step_2.mp4").open("wb") as file:
        file.truncate(40_000_000)
    out = tmp_path / "out.html"
    assert cli.main(["view", str(tmp_path), "--save", str(out)]) == 0
    assert out.stat().st_mode & 0o077 == 0
    page = out.read_text()
    before, _, rest = page.partition('<script type="application/json" id="saved">')
    block, _, after = rest.partition("</script>")
    assert "src=" not in before.partition("<body")[0] and "Content-Security-Policy" in before
    answers, files = (json.loads(block)[key] for key in ("answers", "files"))
    runs = {run["name"]: run["id"] for run in answers["/api/runs"]}
    assert set(runs) == {"agent", "plain"}
    base = f"/api/runs/{runs['agent']}"
    listed = answers[f"{base}/episodes"]["rows"]
    assert len(listed) == 50 and all(f"{base}/episodes/{row['id']}" in answers for row in listed)
    assert "reward" in answers["/api/series?x=seconds"][runs["agent"]]
    # Exports and videos are in it, as far as there is room for them.
    for row in listed:
        export = files[f"{base}/episodes/{row['id']}/export?format=atif"]
        assert b"schema_version" in urllib.request.urlopen(export).read()
    films = f"/api/runs/{runs['plain']}/videos"
    assert urllib.request.urlopen(files[f"{films}/step_1.mp4"]).read() == b"film"
    assert f"{films}/step_2.mp4" not in files
    texts = json.dumps([answers[f"{base}/episodes/{row['id']}"] for row in listed])
    assert json.dumps(HOSTILE)[1:-1] in texts and HOSTILE not in page
    assert "onerror" not in after


@contextlib.contextmanager
def server(*words: str) -> Iterator[tuple[str, str]]:
    """Address and token."""
    command = [sys.executable, "-m", "unirl", "view", *words, "--port", "0"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            found = re.search(r"(http://\S+)/\?token=(\S+)", process.stdout.readline())
            assert found is not None
            yield found[1], found[2]
        finally:
            process.terminate()


def opened(address: tuple[str, str], path: str) -> Any:
    headers = {"Authorization": f"Bearer {address[1]}"}
    return urllib.request.urlopen(
        urllib.request.Request(address[0] + path, headers=headers), None, 60
    )


def test_a_run_that_trains_is_seen_from_its_first_row_to_its_end(tmp_path: Path) -> None:
    begin(tmp_path / "old", CONFIG)
    train = [
        sys.executable, "-m", "unirl", "train", "@cartpole", "--name", "new", "--runs-dir",
        str(tmp_path), "--runner.kind", "inline", "--run.total-steps", "2000000000",
        "--run.max-seconds", "4", "--run.target-return", "none", "--run.log-seconds", "0.2",
    ]  # fmt: skip
    with (
        server(str(tmp_path)) as address,
        opened(address, "/api/live") as news,
        subprocess.Popen(train, cwd=ROOT, stdout=subprocess.DEVNULL),
    ):
        for kind, _ in messages(news):
            if kind == "runs":  # the list has changed
                break
        runs = json.loads(opened(address, "/api/runs").read())
        id, state = next((run["id"], run["state"]) for run in runs if run["name"] == "new")
        rows, events, states = [], list[str](), [state]  # the next ones come by changes
        with opened(address, f"/api/live?runs={id}") as own:
            for kind, value in messages(own):
                if kind == "row":
                    rows.append(value["row"])
                elif kind == "event":
                    events.append(value["event"]["event"])
                elif kind == "state" and value["run"] == id:
                    states.append(value["state"])
                    if value["state"] != "training":
                        break
    assert "training" in states and states[-1] == "ended" and events[-1] == "ended"
    written = [json.loads(line) for line in (tmp_path / "new/metrics.jsonl").open()]
    assert len(rows) >= 5 and rows == written[-len(rows) :]
    assert written[-1]["staleness/age/0"] > 0


def messages(stream: Any) -> Iterator[tuple[str, Any]]:
    kind = ""
    for line in stream:
        name, _, value = line.decode().rstrip("\n").partition(": ")
        if name == "event":
            kind = value
        elif name == "data":
            yield kind, json.loads(value)


def test_a_client_that_does_not_read_is_sent_that_it_has_lost_something() -> None:
    client = Client(frozenset({"a"}))
    for number in range(10_000):
        client.put(("row", {"number": number}))
    found = [client.queue.get_nowait() for _ in range(client.queue.qsize())]
    assert len(found) <= 256 and found[0] == ("lost", {})
    assert found[-1] == ("row", {"number": 9999})


def test_rows_that_were_cut_off_are_asked_for_again(tmp_path: Path) -> None:
    begin(tmp_path / "run", AGENT)
    path = tmp_path / "run/metrics.jsonl"
    add_lines(path, [{"step": i, "seconds": 1.0} for i in range(3)])
    view = View([tmp_path])
    (id,) = view.folders.runs()
    live, watched = view.live, frozenset({id})
    live.begin(watched)
    assert live.news(watched) == []
    row = {"step": 3, "seconds": 1.0}
    add_lines(path, [row])
    assert live.news(watched) == [(id, ("row", {"run": id, "row": row}))]
    path.with_suffix(".new").write_text('{"step": 1, "seconds": 1.0}\n')
    path.with_suffix(".new").replace(path)
    assert live.news(watched) == [(id, ("lost", {"run": id}))]
    add_lines(path, [row])
    assert all(run is None for run, _ in live.news(frozenset()))  # nobody watches it any more


def test_the_command_line_and_the_server_need_no_torch() -> None:
    code = (
        "import sys, unirl.cli, unirl.view.server, unirl.llm.trajectories.exports.atif\n"
        "print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.strip() == "False", done.stderr
