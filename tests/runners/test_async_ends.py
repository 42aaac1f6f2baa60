"""An actor that takes too long to end is cancelled in time to clean up, before it is killed."""

from __future__ import annotations

import asyncio
import time
from functools import partial
from pathlib import Path

import unirl
from tests.runners.test_async_actors import Sleeper, make


class Lingering(Sleeper):
    """What it closes hangs; what comes after that matters."""

    async def close(self) -> None:
        self._once("closing")
        try:
            await asyncio.sleep(300)
        finally:
            time.sleep(0.1)
            self._once("closed")


def test_an_actor_whose_end_hangs_gets_to_clean_up(tmp_path: Path) -> None:
    plan = make("processes", tmp_path)
    plan = plan.with_pool(make_actor=partial(Lingering, fault="", marks=tmp_path))
    unirl.run(plan, tmp_path / "run", console=False)
    assert (tmp_path / "closing").exists()
    assert (tmp_path / "closed").exists()
