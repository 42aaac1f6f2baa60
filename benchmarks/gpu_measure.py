"""One part of benchmarks/gpu.py: measures, and prints a JSON object with its rows.

python benchmarks/gpu_measure.py sim
python benchmarks/gpu_measure.py grpo --tiny     # on the CPU, to see that it works
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from unirl.device import with_index  # noqa: E402

Row = list[str]


class Size:
    """How large everything is: as on a GPU, or as small as it gets, on the CPU."""

    def __init__(self, tiny: bool) -> None:
        self.tiny, self.seconds = tiny, 0.3 if tiny else 8.0
        self.device = with_index(torch.device("cpu" if tiny else "cuda"))

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def reset_peak(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)

    def peak(self) -> int:
        """Bytes of the GPU at most since then; 0 on the CPU."""
        return torch.cuda.max_memory_allocated(self.device) if self.device.type == "cuda" else 0


def sim(size: Size) -> list[Row]:
    """Steps of a pure torch task without a policy, each batch of steps one recorded graph."""
    return [simulated("torch/Cartpole", num, size) for num in (64,) if size.tiny] or [
        simulated("torch/Cartpole", num, size) for num in (4096, 65536)
    ]


def simulated(env_id: str, num_envs: int, size: Size) -> Row:
    from unirl.envs.config import EnvConfig
    from unirl.envs.sim.make import make_device_env

    env = make_device_env(EnvConfig(id=env_id), num_envs, size.device)
    env.reset(seed=1, random_phases=True)
    action = torch.zeros((num_envs, *env.spec.action_space.shape), device=size.device)

    def steps() -> None:
        for _ in range(16):
            env.step(action)

    steps()
    advance: Callable[[], None] = steps
    if env.spec.capturable and size.device.type == "cuda":
        size.synchronize()
        graph = torch.cuda.CUDAGraph()
        for generator in env.generators():
            graph.register_generator_state(generator)
        with torch.cuda.graph(graph):
            steps()
        advance = graph.replay
    advance()
    size.synchronize()
    num_steps, started = 0, time.monotonic()
    while time.monotonic() - started < size.seconds:
        for _ in range(8):
            advance()
        size.synchronize()
        num_steps += 8 * 16 * num_envs
    rate = num_steps / (time.monotonic() - started)
    env.close()
    return [f"{env_id}, {num_envs} environments", f"{rate:,.0f} env steps/s simulated"]


def cartpole(size: Size) -> list[Row]:
    many = ("64",) if size.tiny else ("512", "4096")
    return [row for num in many for row in bench(size, "@sim-cartpole", "--sim.num-envs", num)]


def ant(size: Size) -> list[Row]:
    num = 8 if size.tiny else 4096
    rows = [simulated("warp/Ant-isaac", num, size)]
    return rows + bench(size, "@warp-ant", "--sim.num-envs", str(num))


def pong(size: Size) -> list[Row]:
    few = ["--actor.num-actors", "1"] if size.tiny else ["--actor.num-actors", "8"]
    return bench(size, "@pong", *few, learner=True)


def halfcheetah(size: Size) -> list[Row]:
    return bench(size, "@halfcheetah", "--runner.kind", "processes", learner=True)


def bench(size: Size, *words: str, learner: bool = False) -> list[Row]:
    """`unirl bench`: training end to end, and what acting and learning can do alone."""
    flag = "--learner.device" if learner else "--sim.device"
    own = [flag, size.device.type, "--seconds", str(size.seconds)]
    (report,) = json.loads(unirl("bench", *words, *own, "--json"))["plans"]
    rows = []
    for stage, found in report["stages"].items():
        reads = found.get("host_reads_per_iteration")
        rows.append(
            [
                f"{' '.join(words)}, {stage.replace('_', ' ')}",
                f"{found['env_steps_per_second']:,.0f} env steps/s"
                + (f", {reads:g} host reads per iteration" if reads is not None else ""),
            ]
        )
    return [*rows, ["what limits it", report["limit"]["text"].partition(". ")[0]]]


def publish(size: Size) -> list[Row]:
    """Copies of a model that its publication needs on the learner's device, and seconds."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from unirl.llm.models.model import flat_weights
    from unirl.llm.rollout import Incoming
    from unirl.llm.weights.transfer import SharedMemorySender
    from unirl.transports.local import LentWeightStore
    from unirl.transports.shared_weights import SharedWeightStore

    width, layers = (64, 2) if size.tiny else (2048, 16)
    config = LlamaConfig(
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=layers,
        num_attention_heads=width // 64,
        vocab_size=256 if size.tiny else 128256,
    )
    with torch.device(size.device):
        weights = flat_weights(LlamaForCausalLM(config).to(torch.bfloat16))
    num_bytes = sum(value.nbytes for value in weights.values())
    sender = SharedMemorySender()
    rows = []
    for name, store in (
        ("one process", LentWeightStore()),
        ("several processes", SharedWeightStore(weights)),
    ):
        incoming = Incoming(store)
        size.reset_peak()
        for version in range(2):  # the first allocates what is kept
            started = time.monotonic()
            store.publish(weights, version)
            store.pull(incoming, version - 1)
            sender.write(incoming.weights, torch.bfloat16)
            size.synchronize()
            seconds = time.monotonic() - started
        copies = (size.peak() - num_bytes) / num_bytes
        rows.append(
            [
                f"{num_bytes / 1e6:,.1f} MB, {name}, to an engine's workers",
                f"{seconds:.3f} s" + ("" if size.tiny else f", {copies:.2f} copies on the GPU"),
            ]
        )
    sender.close()
    return rows


def grpo(size: Size) -> list[Row]:
    return trained(size, "@reverse", seconds=60)


def smollm2(size: Size, engine: str = "hf") -> list[Row]:
    with tempfile.TemporaryDirectory() as folder:
        unirl("model", "smollm2", f"{folder}/smollm2")
        words = ["--model", f"{folder}/smollm2", "--engine", engine]
        return trained(size, "@digits", *words, seconds=70)


def vllm(size: Size) -> list[Row]:
    return smollm2(size, "vllm")


def trained(size: Size, *words: str, seconds: float) -> list[Row]:
    """A training of so many seconds at most: tokens per second, and what it learned."""
    limit = ["--run.max-seconds", "3" if size.tiny else str(seconds), "--run.log-seconds", "1"]
    # vLLM finds its device by itself.
    engine = [] if "vllm" in words else ["--engine.device", size.device.type]
    with tempfile.TemporaryDirectory() as folder:
        own = ["--runs-dir", folder, "--name", "run", "--no-console", *limit, *engine]
        unirl("train", *words, "--learner.device", size.device.type, *own)
        lines = (Path(folder) / "run" / "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    rates = sorted(row["perf/tokens_per_s"] for row in rows if "perf/tokens_per_s" in row)
    rate = f"{rates[len(rates) // 2]:,.0f} tokens/s" if rates else "no rate"
    last = rows[-1]
    return [
        [
            " ".join(words[:1]),
            f"{rate} (median of {len(rates)} lines), reward {rows[0].get('reward', 0):.2f} ->"
            f" {last.get('reward', 0):.2f} in {last['seconds']:.0f} s",
        ]
    ]


def unirl(*words: str) -> str:
    """What a command printed; its errors end this script."""
    command = [sys.executable, "-m", "unirl", *words]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise SystemExit(f"unirl {' '.join(words)} exited with {done.returncode}")
    return done.stdout


MEASURES: dict[str, Callable[[Any], list[Row]]] = {
    "sim": sim,
    "train": cartpole,
    "ant": ant,
    "pong": pong,
    "halfcheetah": halfcheetah,
    "publish": publish,
    "grpo": grpo,
    "smollm2": smollm2,
    "vllm": vllm,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("part", choices=list(MEASURES))
    parser.add_argument("--tiny", action="store_true")
    flags = parser.parse_args()
    print(json.dumps({"rows": MEASURES[flags.part](Size(flags.tiny))}), flush=True)


if __name__ == "__main__":
    main()
