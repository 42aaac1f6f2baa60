"""What our client adds to a step of a world: the same simulator alone, and as a world.

python benchmarks/agent_worlds.py [--steps 3000]
"""

from __future__ import annotations

import argparse
import asyncio
import time

import gymnasium
import numpy as np

from unirl.llm.agents.worlds.make import make_world


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


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=3000)
    steps = parser.parse_args().steps
    for name, seconds in (("alone", alone(steps)), ("world", asyncio.run(as_world(steps)))):
        p50, p95 = np.percentile(seconds, [50, 95]) * 1e3
        print(f"{name}: p50 {p50:.3f} ms, p95 {p95:.3f} ms a step")


if __name__ == "__main__":
    main()
