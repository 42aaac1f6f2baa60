"""Sample Factory 2.1.1 (arXiv 2006.11751) at its fastest on two cores, in a .venv of its own.

Any Python 3.11 may start it: the first call makes `.venv` beside this file from requirements.txt.
One env step is one agent decision that the learner consumed once: Sample Factory's counter, with
its multiplication by the frame skip switched off.

    python3 benchmarks/peers/sample_factory/run.py --env pong --seconds 60 --json
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
VENV = HERE / ".venv"
sys.path.insert(0, str(HERE.parents[1]))

import measure  # noqa: E402  (benchmarks/ is a folder of scripts, not a package)

COMMON = {
    "device": "cpu",
    "async_rl": True,
    "serial_mode": False,
    "batched_sampling": True,
    "num_workers": 2,
    "worker_num_splits": 1,
    "rollout": 32,
    "num_epochs": 1,
    "num_batches_per_epoch": 1,
    "use_rnn": False,
    "recurrence": 1,
    "with_vtrace": False,
    "normalize_input": False,
    "normalize_returns": False,
    "summaries_use_frameskip": False,
    # Nothing is saved while the clock runs.
    "save_every_sec": 100_000,
    "save_best_every_sec": 100_000,
    "experiment_summaries_interval": 60,
}
# vector: a worker holds its num_envs in one "envpool", or as many "gym" environments one by one.
PRESETS: dict[str, dict[str, Any]] = {
    "pong": {
        "vector": "envpool",
        "num_envs": 16,
        "batch_size": 1024,
        "env_frameskip": 4,
        "obs_scale": 255.0,
        "encoder_conv_architecture": "convnet_atari",
        "nonlinearity": "relu",
        "learning_rate": 2.5e-4,
        "max_grad_norm": 0.5,
        "exploration_loss_coeff": 0.01,
    },
    "cartpole": {
        "vector": "gym",
        "num_envs": 128,
        "batch_size": 8192,
        "encoder_mlp_layers": [64, 64],
        "nonlinearity": "tanh",
        "learning_rate": 1e-3,
        "exploration_loss_coeff": 0.01,
    },
}
IDS = {"pong": ("Pong-v5", None), "cartpole": ("CartPole-v1", "CartPole-v1")}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--env", choices=PRESETS, default="pong")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument(
        "--warm-up-seconds", type=float, default=10.0, help="counted from the first update"
    )
    parser.add_argument(
        "--json", action="store_true", help="print one line of JSON and nothing else"
    )
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="override the preset"
    )
    parser.add_argument("--inside", help=argparse.SUPPRESS)
    flags = parser.parse_args()
    if flags.inside:
        train(flags, Path(flags.inside))
        return
    install()
    measure.exit_on_terminate()
    folder = Path(tempfile.mkdtemp(prefix="sample-factory-"))
    try:
        command = [str(VENV / "bin" / "python"), __file__, *sys.argv[1:], "--inside", str(folder)]
        timeout_seconds = flags.seconds + flags.warm_up_seconds + 120
        result = measure.run(command, timeout_seconds=timeout_seconds)
        row = {**result.row, "peak_memory_mb": round(result.peak_memory_mb, 1)}
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print(
        json.dumps(row)
        if flags.json
        else "\n".join(f"{key}: {value}" for key, value in row.items())
    )


def install() -> None:
    """Make the environment once; a mark written last says that it is whole."""
    wanted = (HERE / "requirements.txt").read_text()
    mark = VENV / "requirements.installed"
    if mark.exists() and mark.read_text() == wanted:
        return
    print(f"installing Sample Factory into {VENV} (some minutes, once)", file=sys.stderr)
    subprocess.run([sys.executable, "-m", "venv", "--clear", str(VENV)], check=True)
    pip = [
        str(VENV / "bin" / "python"),
        "-m",
        "pip",
        "install",
        "-q",
        "-r",
        str(HERE / "requirements.txt"),
    ]
    subprocess.run(pip, check=True, stdout=sys.stderr)
    mark.write_text(wanted)


def train(flags: argparse.Namespace, folder: Path) -> None:
    """Inside .venv: train for the time asked and print the row; the caller adds the peak memory."""
    from sample_factory.algo.runners.runner import AlgoObserver
    from sample_factory.cfg.arguments import parse_full_cfg, parse_sf_args
    from sample_factory.envs.env_utils import register_env
    from sample_factory.train import make_runner

    settings = {**COMMON, **PRESETS[flags.env], **dict(text.split("=", 1) for text in flags.set)}
    vector, num_envs = settings.pop("vector"), int(settings.pop("num_envs"))
    settings["num_envs_per_worker"] = 1 if vector == "envpool" else num_envs
    if vector == "envpool":
        settings["env_agents"] = num_envs
    arguments = [f"--env={flags.env}", "--experiment=run", f"--train_dir={folder}"]
    for key, value in settings.items():
        values = value if isinstance(value, list) else [value]
        arguments += [f"--{key}", *map(str, values)]
    register_env(flags.env, make_envpool if vector == "envpool" else make_gym)
    parser, _ = parse_sf_args(arguments)
    parser.add_argument("--env_agents", type=int, default=1)
    cfg = parse_full_cfg(parser, arguments)

    class Clock(AlgoObserver):
        """Reads the learner's counter after an update, at the end of the warm-up and at the end."""

        first_update = 0.0

        def __init__(self) -> None:
            self.marks: list[tuple[float, int, float]] = []

        def on_training_step(self, runner: Any, _: int) -> None:
            now = time.monotonic()
            self.first_update = self.first_update or now
            if now - self.first_update < flags.warm_up_seconds:
                return
            done = bool(self.marks) and now - self.marks[0][0] >= flags.seconds
            if not self.marks or done:
                cpu_seconds = measure.tree_cpu_seconds(os.getpid())
                self.marks.append((now, runner.total_env_steps_since_resume or 0, cpu_seconds))
            if done:
                runner.cfg.train_for_env_steps = -1  # the runner looks at it right after this call

    cfg, runner = make_runner(cfg)
    clock = Clock()
    runner.register_observer(clock)
    if runner.init() != 0:
        raise SystemExit("Sample Factory refused its configuration")
    runner.run()
    (start, start_steps, start_cpu), (end, end_steps, end_cpu), *_ = clock.marks
    seconds, steps = end - start, end_steps - start_steps
    row = {
        "system": f"Sample Factory 2.1.1 ({vector})",
        "env": flags.env,
        "env_steps_per_second": round(steps / seconds, 1),
        "cores_used": round((end_cpu - start_cpu) / seconds, 2),
        "seconds": round(seconds, 2),
        "steps": steps,
    }
    print(json.dumps(row), flush=True)


def make_gym(name: str, cfg: Any, env_config: Any, render_mode: str | None = None) -> Any:
    """One Gymnasium environment; a worker holds several and steps them one after another."""
    import gymnasium

    return gymnasium.make(IDS[name][1] or name, render_mode=render_mode)


def make_envpool(name: str, cfg: Any, env_config: Any, render_mode: str | None = None) -> Any:
    """All environments of one worker in one EnvPool with a single thread."""
    import envpool
    from sf_examples.envpool.envpool_wrappers import EnvPoolResetFixWrapper

    options: dict[str, Any] = {"seed": env_config.env_id if env_config is not None else 0}
    if name == "pong":
        options |= {"reward_clip": True, "frame_skip": cfg.env_frameskip}
    env = envpool.make(
        IDS[name][0], env_type="gymnasium", num_envs=cfg.env_agents, num_threads=1, **options
    )

    class Pool(EnvPoolResetFixWrapper):  # type: ignore[misc]
        """Sample Factory's own adapter; one worker sees the pool as that many agents."""

        num_agents = cfg.env_agents

        def close(self) -> None:
            """EnvPool's close asks this older Gymnasium for attributes that EnvPool never sets."""

    return Pool(env)


if __name__ == "__main__":
    main()
