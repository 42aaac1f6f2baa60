# mypy: ignore-errors
"""A server of openenv, 0.3 and 0.10: PYTHON openenv_guess.py PORT."""

import os
import random
import sys
import time

import uvicorn
from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State


class Guess(Action):
    text: str


class Said(Observation):
    text: str = ""


class Game(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed=None, episode_id=None, **rest):
        self.number = random.Random(seed).randint(1, 9)
        return Said(text="Guess a number from 1 to 9.")

    def step(self, action, timeout_s=None, **rest):
        if action.text == "boom":
            raise RuntimeError("boom")
        if action.text == "hang":
            time.sleep(60)
        if action.text == "die":
            os._exit(1)
        right = action.text.strip() == str(self.number)
        return Said(text="Right." if right else "Wrong.", reward=float(right), done=right)

    @property
    def state(self):
        return State()

    def list_splits(self):
        return ["train", "test"]

    def list_tasks(self, split):
        return [{"question": f"{split} {i}"} for i in range(3)]


app = create_fastapi_app(Game, Guess, Said, max_concurrent_envs=2)
uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
