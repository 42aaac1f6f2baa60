"""A tiny language model behind an OpenAI-compatible server, which cuts one answer in so many off in
the middle of its JSON.

    python benchmarks/engine_server.py PORT MODEL 40
"""

from __future__ import annotations

import random
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from transformers import AutoModelForCausalLM

from tests.llm.completion_server import CompletionServer


class Sometimes(list[str]):
    """What becomes of the next completions, for ever."""

    def __init__(self, one_in: int) -> None:
        self._random, self._one_in = random.Random(0), one_in

    def __bool__(self) -> bool:
        return True

    def pop(self, index: object = -1) -> str:
        return "json" if self._random.randrange(self._one_in) == 0 else ""


def main(port: int, model: str, one_in: int) -> None:
    network = AutoModelForCausalLM.from_pretrained(model, dtype="float32").eval()
    server = CompletionServer(kind="sglang", model=model, network=network, port=port)
    server.broken = Sometimes(one_in)
    with server:
        print("ready", flush=True)
        time.sleep(1e6)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
