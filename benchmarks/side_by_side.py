"""A peer and UniRL in turn, A B A B, at equal passes over the data, on the same task and cores.

One env step is one decision of one environment that was learned from, counted once however many
passes use it. Each system gets all cores of the pairing while it runs, start and warm-up are not
counted, nothing is saved or evaluated while the clock runs. A ratio is taken round by round, so
that a drift of the machine cancels. PAIRINGS says what runs against what; pairings of language
models, which are compared by equal updates, are in side_by_side_language.py.

    python benchmarks/side_by_side.py pong-sample-factory pong-rllib --rounds 3 --seconds 40
    python benchmarks/side_by_side.py cartpole-sample-factory --no-write
    python benchmarks/side_by_side.py digits-trl --rounds 3 --model models/smollm2
    python benchmarks/side_by_side.py --list
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import statistics
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import measure
import side_by_side_language as language
from train_unirl import RATE, Row, Window, train_unirl

PEERS = Path(__file__).resolve().parent / "peers"


@dataclass(frozen=True)
class Pairing:
    """One comparison."""

    peer: str
    """Folder under peers/; its run.py holds the peer's settings."""
    env: str
    """What its run.py calls the task."""
    unirl: str
    """What follows `unirl train`."""
    required: float | None = None
    """The ratio UniRL / peer that is asked for. None: only reported."""
    settings: tuple[str, ...] = ()
    """KEY=VALUE that differ from the peer's preset."""
    cores: int = 2
    """How many both run on. 1: both sides of an on-device training are one thread."""


# One pass over the data: IMPALA, Nature CNN, in bf16 where the CPU multiplies it. The peers' queues
# let samples grow old as well; at most 1 update old, the learner waits for a twentieth of the time.
PONG = (
    "impala @pong --policy.torso nature --policy.feature-size 512 --actor.unroll-length 20"
    " --learner.epochs 1 --learner.minibatches 1 --learner.policy-clip none"
    " --queue.max-staleness 3 --no-policy.normalize-images --env.random-burst-probability 0"
    " --no-env.last-action --env.frame-size 84 --policy.image-stride 4"
)
# Two layers of 64, as everywhere; one actor process feeds the learner whole vectors, and one pass
# over them is made, as the peers do.
CARTPOLE = (
    "impala @cartpole --learner.policy-clip none --learner.epochs 1 --learner.minibatches 1"
    " --runner.kind processes --queue.max-staleness 1"
    " --actor.num-envs 256 --actor.unroll-length 32"
)
# Two actors with an EnvPool of one thread each; one pass over the data, one network for policy and
# value, observations and returns normalised, as the peer has it.
HALFCHEETAH = (
    "impala --env.id HalfCheetah-v5 --env.engine envpool --env.num-threads 1"
    " --actor.num-actors 2 --actor.num-envs 128 --actor.unroll-length 32"
    " --queue.batch-size 2 --queue.max-staleness 2 --runner.kind processes"
    " --learner.epochs 1 --learner.minibatches 1 --policy.shared-torso"
)
# Four passes over 8 x 128 decisions in minibatches of 256: what Stable-Baselines3 does on Atari,
# with its network and pixels that are only divided by 255.
PPO_PONG = (
    "ppo --env.id ALE/Pong-v5 --policy.torso nature --policy.feature-size 512"
    " --no-policy.normalize-images --policy.compute-dtype auto --runner.kind processes"
    " --actor.num-actors 2 --actor.num-envs 4 --actor.unroll-length 128 --env.num-threads 1"
    " --queue.batch-size 2 --learner.epochs 4 --learner.minibatches 4 --runner.learner-threads 2"
)
PPO_CARTPOLE = (
    "ppo --env.id CartPole-v1 --no-policy.shared-torso --actor.num-envs 8"
    " --actor.unroll-length 128 --learner.epochs 4 --learner.minibatches 4"
    " --runner.learner-threads 1"
)
PPO_HALFCHEETAH = (
    "ppo --env.id HalfCheetah-v5 --env.engine sync --no-policy.shared-torso"
    " --policy.normalize-obs --learner.normalize-reward --actor.num-envs 16"
    " --actor.unroll-length 128 --learner.epochs 4 --learner.minibatches 4"
    " --runner.learner-threads 1"
)
# Eight passes in minibatches of 8,192, networks of 32-32 each: the task's usual settings.
ONDEVICE = (
    "ondevice --env.id torch/Cartpole --sim.num-envs {num_envs} --sim.unroll-length 16"
    " --policy.hidden 32,32 --policy.activation elu --no-policy.shared-torso"
    " --learner.epochs 8 --learner.minibatches {minibatches} --runner.learner-threads 1"
)
ONDEVICE_512 = ONDEVICE.format(num_envs=512, minibatches=1)
ONDEVICE_4096 = ONDEVICE.format(num_envs=4096, minibatches=8)
SF_ENVPOOL = ("vector=envpool", "num_envs=256")

PAIRINGS = {
    "pong-sample-factory": Pairing("sample_factory", "pong", PONG, 2.5),
    "pong-rllib": Pairing("rllib", "pong", PONG, 3.5),
    "pong-sb3": Pairing("stable_baselines3", "pong", PPO_PONG, 2.0),
    "pong-pufferlib": Pairing("pufferlib", "pong", PONG),
    "pong-torchrl": Pairing("torchrl", "pong", PPO_PONG),
    "cartpole-sample-factory": Pairing("sample_factory", "cartpole", CARTPOLE, 8.0),
    "cartpole-sample-factory-envpool": Pairing(
        "sample_factory", "cartpole", CARTPOLE, settings=SF_ENVPOOL
    ),
    "cartpole-rllib": Pairing("rllib", "cartpole", CARTPOLE),
    "cartpole-sb3": Pairing("stable_baselines3", "cartpole", PPO_CARTPOLE),
    "cartpole-pufferlib": Pairing("pufferlib", "cartpole", CARTPOLE),
    "cartpole-torchrl": Pairing("torchrl", "cartpole", PPO_CARTPOLE),
    "halfcheetah-sample-factory": Pairing("sample_factory", "halfcheetah", HALFCHEETAH, 1.8),
    "halfcheetah-sb3": Pairing("stable_baselines3", "halfcheetah", PPO_HALFCHEETAH),
    "halfcheetah-pufferlib": Pairing("pufferlib", "halfcheetah", HALFCHEETAH),
    "halfcheetah-torchrl": Pairing("torchrl", "halfcheetah", PPO_HALFCHEETAH),
    "cartpole-512-rsl-rl": Pairing("rsl_rl", "cartpole-512", ONDEVICE_512, 1.2, cores=1),
    "cartpole-4096-rsl-rl": Pairing("rsl_rl", "cartpole-4096", ONDEVICE_4096, 1.3, cores=1),
    "cartpole-512-rsl-rl-bf16": Pairing(
        "rsl_rl", "cartpole-512", ONDEVICE_512, settings=("bfloat16=True",), cores=1
    ),
    "cartpole-4096-rsl-rl-bf16": Pairing(
        "rsl_rl", "cartpole-4096", ONDEVICE_4096, settings=("bfloat16=True",), cores=1
    ),
}


def train_ours(pairing: Pairing, window: Window) -> Row:
    """UniRL with this pairing's flags."""
    return train_unirl(pairing.env, shlex.split(pairing.unirl), window)


def train_peer(pairing: Pairing, window: Window) -> Row:
    """The peer's own script; the memory in its row is that of the peer's process tree alone."""
    command = [*_script(pairing), "--env", pairing.env, "--json"]
    command += ["--seconds", str(window.seconds), "--warm-up-seconds", str(window.warm_up_seconds)]
    for setting in pairing.settings:
        command += ["--set", setting]
    return measure.run(command, timeout_seconds=window.timeout_seconds).row


def install(pairing: Pairing) -> None:
    """Make the peer's environment before any clock runs."""
    subprocess.run([*_script(pairing), "--install"], check=True)


def _script(pairing: Pairing) -> list[str]:
    return [sys.executable, str(PEERS / pairing.peer / "run.py")]


def compare(name: str, pairing: Pairing, window: Window, num_rounds: int) -> str:
    """Run both in turn and describe the outcome in Markdown."""
    install(pairing)
    ours: list[Row] = []
    theirs: list[Row] = []
    for round_index in range(num_rounds):
        for rows, train in ((theirs, train_peer), (ours, train_ours)):
            load = os.getloadavg()[0]
            rows.append(train(pairing, window))
            print(
                f"{name}, round {round_index + 1}, load before {load:.1f}: {json.dumps(rows[-1])}",
                flush=True,
            )
        if theirs[-1]["passes"] != ours[-1]["passes"]:
            raise SystemExit(
                f"{name}: {theirs[-1]['system']} makes {theirs[-1]['passes']} passes over the data,"
                f" UniRL {ours[-1]['passes']}; they must be equal: set --learner.epochs"
            )
    return report(pairing, ours, theirs)


def report(pairing: Pairing, ours: list[Row], theirs: list[Row]) -> str:
    """The table of medians, the ratio round by round, and the settings of both."""
    lines = []
    for rows in (theirs, ours):
        rates = [row[RATE] for row in rows]
        lines.append(
            [
                rows[0]["system"],
                rows[0]["passes"],
                f"{statistics.median(rates):,.0f}",
                f"{min(rates):,.0f} - {max(rates):,.0f}",
                f"{measure.median(rows, 'peak_memory_mb'):,.0f}",
                f"{measure.median(rows, 'cores_used'):.2f}",
            ]
        )
    columns = ["system", "passes", "env steps/s, median", "min - max", "peak memory, MB"]
    text = measure.table([*columns, "cores used"], lines)
    each = measure.ratios(ours, theirs, RATE)
    ratio = statistics.median(each)
    rounds = ", ".join(f"{value:.2f}" for value in each)
    text += f"\n\n- UniRL / {theirs[0]['system']}: **{ratio:.2f}** (rounds: {rounds})"
    if pairing.required is not None:
        reached = "reached" if ratio >= pairing.required else "NOT reached"
        text += f"; asked for: {pairing.required:g}, {reached}"
    memory = measure.ratios(theirs, ours, "peak_memory_mb")
    text += f"\n- memory of {theirs[0]['system']} / UniRL: {statistics.median(memory):.2f}"
    for rows in (theirs, ours):
        text += f"\n- {rows[0]['system']}: {rows[0]['settings']}"
    for rows in (theirs, ours):
        text += f"\n- core-us per env step of {rows[0]['system']}: {_by_process(rows)}"
    return text


def _by_process(rows: list[Row]) -> str:
    """What each process of a system costs: medians over the rounds."""
    each = [row["core_us_per_env_step"] for row in rows]
    total = statistics.median(1e6 * row["cores_used"] / row[RATE] for row in rows)
    medians = {
        name: statistics.median(one.get(name, 0.0) for one in each)
        for name in dict.fromkeys(name for one in each for name in one)
    }
    words = [f"{name} {value:,.0f}" for name, value in medians.items()]
    return f"{total:,.0f} ({', '.join(words)})"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="PAIRING", help="see --list")
    parser.add_argument("--list", action="store_true", help="print the pairings and stop")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=40.0)
    parser.add_argument("--warm-up-seconds", type=float, default=10.0)
    parser.add_argument("--cores", type=int, help="cores that both run on, not the pairing's own")
    parser.add_argument("--unirl", default="", help='more flags for UniRL: "--actor.num-envs 16"')
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="a setting of the peer"
    )
    parser.add_argument("--no-write", action="store_true", help="leave RESULTS.md as it is")
    language.add_flags(parser)
    flags = parser.parse_args()
    if flags.list or not flags.names:
        for name, pairing in {**PAIRINGS, **language.LANGUAGE_PAIRINGS}.items():
            asked = "" if pairing.required is None else f"  (>= {pairing.required:g})"
            print(f"{name:32} unirl train {pairing.unirl}{asked}")
        return
    known = [*PAIRINGS, *language.LANGUAGE_PAIRINGS]
    if unknown := [name for name in flags.names if name not in known]:
        parser.error(f"unknown: {', '.join(unknown)}; there are {', '.join(known)}")
    measure.exit_on_terminate()
    usable = sorted(os.sched_getaffinity(0))
    window = Window(flags.seconds, flags.warm_up_seconds)
    for name in flags.names:
        if name in language.LANGUAGE_PAIRINGS:
            os.sched_setaffinity(0, usable[: flags.cores or 2])
            language.run(name, flags)
            continue
        pairing = changed(PAIRINGS[name], flags.unirl, flags.set)
        # Inherited by all that is started.
        os.sched_setaffinity(0, usable[: flags.cores or pairing.cores])
        text = compare(name, pairing, window, flags.rounds)
        print(f"\n{text}\n", flush=True)
        if not flags.no_write:
            length = f"{flags.rounds} rounds of {flags.seconds:g} s each, in turn."
            measure.write_block(f"side-by-side-{name}", f"**{name}**\n\n{text}\n\n{length}")


def changed(pairing: Pairing, unirl: str, settings: list[str]) -> Pairing:
    """The pairing with more flags after its own; of a flag given twice the last one counts."""
    words = f"{pairing.unirl} {unirl}".strip()
    return replace(pairing, unirl=words, settings=(*pairing.settings, *settings))


if __name__ == "__main__":
    main()
