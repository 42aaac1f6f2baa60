"""Several servers as one engine, against real HTTP servers of this machine."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("httpx2", reason="servers are asked through it")

from tests.llm.completion_server import END, CompletionServer, table
from tests.llm.test_openai_engine import PAUSES, check_logp
from unirl.errors import UniRLError
from unirl.llm.engine import Completion, EngineConfig, EngineFailed, Request, SamplingConfig
from unirl.llm.engines.make import make_engine
from unirl.llm.engines.router import Router
from unirl.llm.models.model import ModelConfig

LOOK = 0.05


def request(name: str, tokens: int = 20, prompt: int = 3) -> Request:
    return Request(name, (prompt, 5), SamplingConfig(max_tokens=tokens), seed=7)


def run(
    what: Callable[[Router], Awaitable[Any]], *servers: CompletionServer, **settings: Any
) -> Any:
    model = settings.pop("model", "table")
    if servers:
        settings["url"] = ", ".join(server.url for server in servers)
    config = EngineConfig(kind="openai", timeout_seconds=5.0, **settings)

    async def main() -> Any:
        router = Router(ModelConfig(path=model), config, pauses=PAUSES, look_seconds=LOOK)
        try:
            await router.start()
            return await asyncio.wait_for(what(router), 30.0)
        finally:
            await router.close()

    return asyncio.run(main())


def asked(server: CompletionServer) -> list[list[int]]:
    """Prompts of requests, without the one that a start asks for one token of."""
    return [body["prompt"] for body in server.bodies if body["max_tokens"] > 1]


def endless(*servers: CompletionServer) -> None:
    for server in servers:
        server.weights[:, END] = -100


def test_prompts_stay_together_and_go_where_fewest_tokens_are_in_flight() -> None:
    async def many(router: Router) -> None:
        names = [(group, i) for group in range(6) for i in range(3)]
        work = [router.generate(request(f"{g}.{i}", prompt=3 + g)) for g, i in names]
        await asyncio.gather(*work)

    with CompletionServer(seconds_per_token=5e-3) as one, CompletionServer() as other:
        other.seconds_per_token = 5e-3
        run(many, one, other)
        first, second = ({prompt[0] for prompt in asked(server)} for server in (one, other))
    assert not first & second and len(first) == len(second) == 3
    assert len(asked(one)) == len(asked(other)) == 9


def test_turns_of_a_session_stay_with_its_server_while_it_answers() -> None:
    async def turns(router: Router) -> None:
        async def session(name: str, first: int, num: int) -> None:
            for i in range(num):
                turn = request(f"{name}.{first + i}", 3, prompt=int(name[0]))
                await router.generate(replace(turn, may_continue=True))

        names = [f"{i}.0" for i in range(3, 7)]
        for first in (0, 1, 2):  # with pauses, in which no turn is in flight
            await asyncio.gather(*(session(name, first, 1) for name in names))
        assert not {*homes(one)} & {*homes(other)} and len(homes(one) + homes(other)) == 12
        assert len({*homes(one)}) == len({*homes(other)}) == 2
        one.faults.update({"/v1/models": 0, "/v1/completions": 0})
        await asyncio.gather(*(session(name, 3, 2) for name in names))
        assert len(homes(other)[6:]) == 8

    def homes(server: CompletionServer) -> list[int]:
        return [prompt[0] for prompt in asked(server)]

    with CompletionServer() as one, CompletionServer() as other:
        endless(one, other)
        run(turns, one, other)


@pytest.mark.parametrize("how", ["hangs", "hangs up"])
def test_what_a_dead_server_had_is_continued_by_another(how: str) -> None:
    async def lose(router: Router) -> Completion:
        task = asyncio.create_task(router.generate(request("0.0", tokens=30)))
        while len(one.streamed) + len(other.streamed) < 12:
            await asyncio.sleep(0.01)
        dead = one if len(one.streamed) > len(other.streamed) else other
        dead.faults.update({"/v1/models": 0, "/v1/completions": 0})
        other_one = other if dead is one else one
        other_one.silent_after = other_one.hangs_up_after = -1
        found: Completion = await task
        assert router.stats()["servers"] == 1
        return found

    with CompletionServer() as one, CompletionServer() as other:
        endless(one, other)
        other.weights = one.weights
        for server in (one, other):
            server.seconds_per_token = 0.01
            server.silent_after = 12 if how == "hangs" else -1
            server.hangs_up_after = 12 if how == "hangs up" else -1
        done = run(lose, one, other)
        second = other if len(asked(one)[0]) == 2 else one
        continued = asked(second)[-1]
    assert len(done.tokens) == 30 and done.finish == "length"
    assert len(continued) > 2 and tuple(continued[2:]) == done.tokens[: len(continued) - 2]
    check_logp(done, one.weights, SamplingConfig())


def test_servers_join_and_leave_by_a_file_while_it_continues(tmp_path: Path) -> None:
    names = tmp_path / "servers.txt"

    async def change(router: Router) -> None:
        number = 0

        async def until(condition: Callable[[], bool]) -> None:
            nonlocal number
            while not condition():
                number += 1
                await asyncio.gather(
                    *(router.generate(request(f"{number + i}.0", 3)) for i in range(2))
                )

        await until(lambda: len(asked(one)) > 2)
        names.write_text(f"# both\n{one.url}\n{other.url}\n")
        await until(lambda: len(asked(other)) > 2)
        names.write_text("not a url\n")  # half written, say: what is known stays
        await asyncio.sleep(3 * LOOK)
        last = asyncio.create_task(router.generate(request("last.0", 40)))
        await asyncio.sleep(LOOK)
        names.write_text(f"{other.url}\n")
        assert len((await last).tokens) == 40  # one that leaves finishes what it has
        await until(lambda: router.stats()["servers"] == 1)
        await asyncio.sleep(3 * LOOK)
        before = len(asked(one))
        goal = len(asked(other)) + 3
        await until(lambda: len(asked(other)) > goal)
        assert len(asked(one)) == before

    with CompletionServer(seconds_per_token=5e-3) as one, CompletionServer() as other:
        endless(one, other)
        other.seconds_per_token = 5e-3
        names.write_text(one.url)
        run(change, urls_file=str(names))


def test_each_server_proves_new_weights_and_one_that_refuses_them_is_left_out(
    tmp_path: Path,
) -> None:
    pytest.importorskip("safetensors", reason="weights travel as a safetensors file")
    (tmp_path / "config.json").write_text("{}")

    async def swap(router: Router) -> list[Completion]:
        await router.load_weights({"t": table(1)}, 1)
        assert router.version == 1 and router.stats()["servers"] == 2
        other.refuses_weights = True
        await router.load_weights({"t": table(2)}, 2)
        assert router.version == 2 and router.stats()["servers"] == 1
        found = await asyncio.gather(*(router.generate(request(f"{i}.0")) for i in range(4)))
        other.refuses_weights = False
        while len(router._up()) < 2:
            await asyncio.sleep(LOOK)
        await router.load_weights({"t": table(3)}, 3)
        assert router.stats()["servers"] == 2
        one.refuses_weights = other.refuses_weights = True
        with pytest.raises(EngineFailed, match="out of memory"):
            await router.load_weights({"t": table(4)}, 4)
        return list(found)

    kind = {"kind": "sglang", "model": str(tmp_path)}
    with CompletionServer(**kind) as one, CompletionServer(**kind) as other:
        found = run(swap, one, other, model=str(tmp_path))
    assert {version for done in found for version in done.version} == {2}


def test_no_server_and_wrong_names_are_errors_in_three_parts(tmp_path: Path) -> None:
    async def nothing(router: Router) -> None:
        pass

    empty = tmp_path / "empty.txt"
    empty.write_text("\n")
    with pytest.raises(EngineFailed, match="no server of the router answers: there is none"):
        run_short(nothing, urls_file=str(empty))
    with pytest.raises(UniRLError, match=r"missing\.txt cannot be read") as error:
        run(nothing, urls_file=str(tmp_path / "missing.txt"))
    assert len(error.value.parts) == 3
    with pytest.raises(UniRLError, match=r"must not be set where engine\.url is"):
        EngineConfig(kind="openai", url="http://127.0.0.1:1/v1", urls_file="x")
    two = EngineConfig(kind="openai", url="http://127.0.0.1:1/v1, http://127.0.0.1:2/v1")
    assert isinstance(make_engine(two, ModelConfig(path="tiny")), Router)


def run_short(what: Callable[[Router], Awaitable[Any]], **settings: Any) -> None:
    config = EngineConfig(kind="openai", timeout_seconds=0.2, **settings)
    router = Router(ModelConfig(path="table"), config, pauses=PAUSES, look_seconds=LOOK)
    asyncio.run(router.start())
