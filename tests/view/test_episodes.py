"""Episodes are found, opened with what the learner knows of their tokens, and exported, from a
store that a run may be writing, or from samples.
"""

from __future__ import annotations

import json
import math
import random
import threading
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tests.llm.trajectories.stored_episodes import completion, record, straight, tree
from tests.view.asking import Asker
from tests.view.page_runs import AGENT, HOSTILE, add_lines, begin
from unirl.llm.agents.episode import ROOT, Episode, Turn
from unirl.llm.outcome import Score
from unirl.llm.trajectories.config import StoreConfig
from unirl.llm.trajectories.store import open_store

ENDINGS = ("stop", "time", "max_turns")
GRPO = 'recipe = "grpo"\n[reward.weights]\nexact = 1.0\nshort = 0.5\n'


def stored(folder: Path, number: int) -> list[dict[str, Any]]:
    """Writes episodes of all kinds; returns what is known of each."""
    begin(folder, AGENT)
    draw, facts = random.Random(3), []
    with closing(open_store(StoreConfig(), folder)) as store:
        for ticket in range(number):
            ending, reward = draw.choice(ENDINGS), draw.choice((0.0, 0.5, 1.0))
            version, task = draw.randrange(9), draw.choice(("sums", "maps"))
            made = straight(ticket, turns=1 + ticket % 3, version=version)
            made = Episode(made.turns, ending, seconds=draw.random())
            scores = {"exact": Score(reward)}
            ep = store.put(record(made, run="agent", ticket=ticket, task=task, scores=scores))
            facts.append({"id": ep, "ending": ending, "reward": reward, "version": version,
                          "task": task, "turns": 1 + ticket % 3,
                          "seconds": made.seconds})  # fmt: skip
    return facts


def said(question: str, answer: str) -> Episode:
    messages = ({"role": "user", "content": question},)
    drawn = completion(random.Random(1), 4, 1)
    turn = Turn(ROOT, (1, 2), drawn, messages, {"role": "assistant", "content": answer}, "prompt")
    return Episode([turn])


Facts = dict[str, Any]
QUESTIONS: list[tuple[str, Callable[[Facts], bool], Callable[[Facts], Any]]] = [
    ("", lambda e: True, lambda e: -e["id"]),
    ("sort=old", lambda e: True, lambda e: e["id"]),
    ("task=sums", lambda e: e["task"] == "sums", lambda e: -e["id"]),
    ("ending=time&reward_min=0.5", lambda e: e["ending"] == "time" and e["reward"] >= 0.5,
     lambda e: -e["id"]),
    ("reward_max=0.5&sort=-turns", lambda e: e["reward"] <= 0.5, lambda e: (-e["turns"], -e["id"])),
    ("version_min=3&version_max=5&sort=reward", lambda e: 3 <= e["version"] <= 5,
     lambda e: (e["reward"], -e["id"])),
    ("sort=seconds&state=done", lambda e: True, lambda e: e["seconds"]),
    ("task=none", lambda e: False, lambda e: 0),
]  # fmt: skip


def test_every_filter_and_order_finds_what_a_search_of_all_finds(tmp_path: Path) -> None:
    facts = stored(tmp_path / "agent", 60)
    asker = Asker(tmp_path)
    for query, holds, order in QUESTIONS:
        expected = [each["id"] for each in sorted(filter(holds, facts), key=order)]
        found, after = list[int](), "0"
        while after is not None:  # page by page
            page = asker.of("agent", f"/episodes?{query}&limit=7&after={after}").value
            assert page["total"] == len(expected)
            found += [row["id"] for row in page["rows"]]
            after = page["next"]
        assert found == expected, query
    counts = {each["value"]: each["count"] for each in page["facets"]["ending"]}
    assert counts == {end: sum(e["ending"] == end for e in facts) for end in ENDINGS}


def test_texts_are_found_and_what_was_not_searched_is_said(tmp_path: Path) -> None:
    stored(tmp_path / "agent", 5)
    with closing(open_store(StoreConfig(), tmp_path / "agent")) as store:
        made = said("Wie heißt du?", 'Ünïcode "quoted" <b>')
        wanted = store.put(record(made, run="agent", ticket=70, task="names"))
    asker = Asker(tmp_path)
    for text in ("hei%C3%9Ft", "%C3%9CN%C3%8FCODE", "%22quoted%22", "names", "%3Cb%3E"):
        found = asker.of("agent", f"/episodes?text={text}").value
        assert [row["id"] for row in found["rows"]] == [wanted], text
        assert (found["searched"], found["unsearched"]) == (6, 0)
    assert asker.of("agent", "/episodes?text=absent").value["total"] == 0


def test_a_store_is_read_while_a_run_writes_it_and_nothing_is_left_beside_it(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "agent"
    stored(folder, 3)
    before = sorted(path.name for path in folder.iterdir())
    asker = Asker(tmp_path)
    assert asker.of("agent", "/episodes").value["total"] == 3
    assert sorted(path.name for path in folder.iterdir()) == before
    stop, seen = threading.Event(), [0]
    with closing(open_store(StoreConfig(), folder)) as store:

        def look() -> None:
            while not stop.is_set():
                seen.append(asker.of("agent", "/episodes?limit=1").value["total"])

        looking = threading.Thread(target=look)
        looking.start()
        for ticket in range(100, 200):
            store.put(record(straight(ticket), run="agent", ticket=ticket))
            assert asker.of("agent", "/episodes?limit=1").value["total"] == ticket - 96
        stop.set()
        looking.join()
    assert seen == sorted(seen) and asker.of("agent", "/episodes").value["total"] == 103


def samples_of(episode: Episode, ticket: int, place: int) -> dict[str, Any]:
    """A row of samples.jsonl, as the learner writes it from the slot of this episode."""
    (first, second) = episode.segments((), lambda segment: True)[:2]
    token, mask = (*first.token, *second.token), (*first.mask, *second.mask)
    return {
        "step": 1, "update": 2, "ticket": ticket, "place": place, "reward": [1.0],
        "each": {
            "token": list(token), "drawn": [int(own) for own in mask],
            "new_logp": [-0.125 * i for i in range(len(token))],
            "advantage": [float(i) for i in range(len(token))],
        },
    }  # fmt: skip


def test_tokens_have_what_engine_and_learner_say_of_them(tmp_path: Path) -> None:
    folder, made = tmp_path / "agent", tree()
    begin(folder, AGENT)
    with closing(open_store(StoreConfig(), folder)) as store:
        ep = store.put(record(made, run="agent", ticket=4, place=1, group_size=2))
    (folder / "samples").mkdir()
    row = samples_of(made, 4, 1)
    add_lines(folder / "samples/samples.jsonl", [{**row, "place": 0}, row, {"torn": 1}])
    words = [f"word{i}" for i in range(20)]
    (folder / "samples/vocabulary.json").write_text(json.dumps(words))
    opened = Asker(tmp_path).of("agent", f"/episodes/{ep}").value
    assert opened["learner_recorded"] and len(opened["turns"]) == 4
    known = {i: value for i, value in enumerate(row["each"]["new_logp"])}
    place, seen = 0, 0
    for index, turn in enumerate(made.turns):
        shown = opened["turns"][index]["tokens"]
        assert [token["id"] for token in shown] == [*turn.given, *turn.completion.tokens]
        assert shown[0]["text"] == (words[shown[0]["id"]] if shown[0]["id"] < 20 else f"⟨{shown[0]['id']}⟩")  # noqa: E501  # fmt: skip
        place += len(turn.given)
        for token, logp, version, own in zip(
            shown[len(turn.given) :], turn.completion.logp, turn.completion.version,
            turn.completion.mask, strict=True,
        ):  # fmt: skip
            assert token["drawn"] == own
            if own:
                assert math.isclose(token["logp"], logp, abs_tol=1e-4)
                assert token["version"] == version
            if own and index < 2:  # the first path
                assert (token["learner_logp"], token["advantage"]) == (known[place], place)
                seen += 1
            place += 1
    assert seen == 6
    # The third turn is context alone: the learner says nothing of it.
    assert all("advantage" not in token for token in opened["turns"][2]["tokens"])


def test_an_episode_has_its_tree_its_calls_and_its_rewards(tmp_path: Path) -> None:
    begin(tmp_path / "agent", AGENT)
    with closing(open_store(StoreConfig(), tmp_path / "agent")) as store:
        ep = store.put(record(tree(), run="agent", ticket=4, scores={"exact": Score(0.5), "judge": Score(0, 2, "slow")}))  # noqa: E501  # fmt: skip
    asker = Asker(tmp_path)
    opened = asker.of("agent", f"/episodes/{ep}").value
    assert [turn["parent"] for turn in opened["outline"]] == [None, 0, 0, None]
    assert [turn["origin"] for turn in opened["turns"]] == ["prompt", "extended", "forked", "rewritten"]  # noqa: E501  # fmt: skip
    (call,) = opened["turns"][0]["calls"]
    assert call == {"name": "calculator", "arguments": '{"expression": "1+1"}'}
    assert (opened["turns"][0]["reward"], opened["turns"][0]["seconds_tool"]) == (0.5, 0.125)
    assert opened["rewards"] == {"exact": 0.5, "judge": "no value: slow"}
    for format, mark in (("atif", "schema_version"), ("verifiers", "traces"), ("otlp", "resourceSpans")):  # noqa: E501  # fmt: skip
        exported = asker.of("agent", f"/episodes/{ep}/export?format={format}")
        assert mark in exported.value and "attachment" in exported.headers["content-disposition"]
    assert asker.of("agent", f"/episodes/{ep}/export?format=pickle").status == 400
    assert [row["place"] for row in asker.of("agent", "/groups/4").value["rows"]] == [1]


def test_hostile_and_huge_texts_come_as_text_of_bounded_size(tmp_path: Path) -> None:
    begin(tmp_path / "agent", AGENT)
    huge = HOSTILE + "x" * 3_000_000
    with closing(open_store(StoreConfig(), tmp_path / "agent")) as store:
        ep = store.put(record(said(HOSTILE, huge), run="agent", ticket=1))
    answered = Asker(tmp_path).of("agent", f"/episodes/{ep}")
    assert answered.headers["content-type"] == "application/json" and len(answered.body) < 400_000
    (turn,) = answered.value["turns"]
    assert HOSTILE in turn["given"] and turn["text"].startswith(HOSTILE)
    assert "[cut: " in turn["text"]


def test_samples_are_episodes_where_there_is_no_store(tmp_path: Path) -> None:
    folder = tmp_path / "grpo"
    begin(folder, GRPO)
    (folder / "samples").mkdir()
    rows = [
        {"step": 8, "update": update, "ticket": update, "place": place, "prompt": "2 + 2 =",
         "completion": HOSTILE if place else "4", "reward": [float(place), 1.0],
         "outcome": [0, 0 if update else 1], "advantage": 0.25, "finish": "stop", "tokens": 3,
         "versions": [update, update + 1]}
        for update in range(3) for place in range(2)
    ]  # fmt: skip
    rows[5]["each"] = {"token": [1, 0, 9], "drawn": [1, 1, 0], "version": [2, 3, -1],
                       "logp": [-1.0, None, 0.0], "new_logp": [-1.5, -0.5, None],
                       "advantage": [0.25, 0.25, 0.25]}  # fmt: skip
    path = folder / "samples/samples.jsonl"
    add_lines(path, rows)
    with path.open("ab") as file:
        file.write(b'not json\n{"reward": "x", "versions": {}, "prompt": ["\xff"]}\n{"half')
    (folder / "samples/vocabulary.json").write_text('["zero", "one"]')
    asker = Asker(tmp_path)
    found = asker.of("grpo", "/episodes?sort=old").value
    assert (found["total"], found["source"]) == (7, "samples")
    # The rewards are 1.0 and 0.5 of their sum, and none where one is missing that counts.
    assert [row["reward"] for row in found["rows"][:6]] == [None, None, 0.5, 1.5, 0.5, 1.5]
    assert asker.of("grpo", "/episodes?reward_min=1").value["total"] == 2
    assert asker.of("grpo", "/episodes?text=onerror").value["total"] == 3
    assert [row["place"] for row in asker.of("grpo", "/groups/2").value["rows"]] == [0, 1]
    opened = asker.of("grpo", "/episodes/5").value
    assert opened["turns"][0]["text"] == HOSTILE and opened["rewards"] == {"exact": 1, "short": 1}
    assert opened["turns"][0]["tokens"] == [
        {"text": "one", "id": 1, "drawn": True, "version": 2, "logp": -1.0, "learner_logp": -1.5,
         "advantage": 0.25},
        {"text": "zero", "id": 0, "drawn": True, "version": 3, "learner_logp": -0.5,
         "advantage": 0.25},
        {"text": "⟨9⟩", "id": 9, "drawn": False},
    ]  # fmt: skip
    add_lines(path, [])
    with path.open("a") as file:  # the half row was cut off when the run was resumed
        file.write('": 1}\n' + json.dumps(rows[0]) + "\n")
    assert asker.of("grpo", "/episodes").value["total"] == 9


@pytest.mark.parametrize("path", ["/episodes/99", "/episodes/x", "/episodes/-1", "/groups/99",
                                  "/episodes/" + "9" * 30, "/episodes/99/export"])  # fmt: skip
def test_what_is_not_there_is_explained(tmp_path: Path, path: str) -> None:
    stored(tmp_path / "agent", 1)
    answered = Asker(tmp_path).of("agent", path)
    assert answered.status in (400, 404) and answered.error[0]


def test_a_damaged_store_is_explained(tmp_path: Path) -> None:
    begin(tmp_path / "agent", AGENT)
    (tmp_path / "agent/trajectories.db").write_bytes(b"no database" * 1000)
    answered = Asker(tmp_path).of("agent", "/episodes")
    assert answered.status == 400 and "could not be" in answered.error[0]
    assert Asker(tmp_path).of("agent").status == 200


def test_an_episode_whose_body_has_expired_has_its_row(tmp_path: Path) -> None:
    stored(tmp_path / "agent", 2)
    with closing(open_store(StoreConfig(), tmp_path / "agent")) as store, store.transaction():
        store.drop([1])
    opened = Asker(tmp_path).of("agent", "/episodes/1").value
    assert opened["turns"] == [] and "no tokens" in opened["missing"][0]
