"""What our client adds to a step of a world: the same simulator alone, and as a world.

python benchmarks/agent_worlds.py [--steps 3000] [--verifiers PYTHON] [--harbor FOLDER]

PYTHON: an interpreter that has verifiers; a step is an answer that it scores, its work included.
FOLDER: a task of Harbor; a step is the command `true` in its box.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import time
from pathlib import Path

import gymnasium
import numpy as np

from unirl.llm.agents.tool_calls import ToolCall
from unirl.llm.agents.worlds.make import make_world

TASKSETS = Path(__file__).resolve().parents[1] / "tests" / "llm" / "agents" / "servers"


def alone(steps: int) -> list[float]:
    env = gymnasium.make("FrozenLake-v1", render_mode="ansi")
    env.reset(seed=0)
    seconds = []
    for i in range(steps):
        begin = time.perf_counter()
        *_, terminated, truncated, _ = env.step(i % 4)
        env.render()
        seconds.append(time.perf_counter() - begin)
        if terminated or truncated:
            env.reset()
    return seconds


async def as_world(steps: int) -> list[float]:
    client = make_world("gym:FrozenLake-v1", {})()
    await client.reset({}, 0)
    seconds = []
    for i in range(steps):
        begin = time.perf_counter()
        seen = await client.step(str(i % 4))
        seconds.append(time.perf_counter() - begin)
        if seen.has_ended:
            await client.reset({}, i)
    await client.close()
    return seconds


async def as_verifiers(steps: int, python: str) -> list[float]:
    os.environ["PYTHONPATH"] = str(TASKSETS)
    world = make_world("verifiers:verifiers_sums", {"python": python})
    tasks = world.tasks("train") or ()
    client, seconds = world(), []
    for i in range(steps):
        await client.reset({"messages": (), "info": tasks[i % len(tasks)].info}, i)
        begin = time.perf_counter()
        await client.step("4")
        seconds.append(time.perf_counter() - begin)
    await client.close()
    return seconds


async def as_harbor(steps: int, folder: str) -> list[float]:
    world = make_world(f"harbor:{folder}", {})
    (task, *_) = world.tasks("train") or ()
    client, seconds = world(), []
    await client.reset({"messages": task.messages, "info": task.info}, 0)
    for i in range(steps):
        begin = time.perf_counter()
        await client.step(ToolCall(str(i), "bash", {"command": "true"}))
        seconds.append(time.perf_counter() - begin)
    await client.close()
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--verifiers", default="", metavar="PYTHON")
    parser.add_argument("--harbor", default="", metavar="FOLDER")
    given = parser.parse_args()
    steps = given.steps
    found = [("alone", alone(steps)), ("world", asyncio.run(as_world(steps)))]
    if given.verifiers:
        found.append(("verifiers", asyncio.run(as_verifiers(steps, given.verifiers))))
    if given.harbor:
        found.append(("harbor", asyncio.run(as_harbor(min(steps, 300), given.harbor))))
    for name, seconds in found:
        p50, p95 = np.percentile(seconds, [50, 95]) * 1e3
        print(f"{name}: p50 {p50:.3f} ms, p95 {p95:.3f} ms a step")


if __name__ == "__main__":
    main()
