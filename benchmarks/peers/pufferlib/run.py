"""PufferLib 3.0 (its trainer PuffeRL, a PPO) at its fastest on two cores, in a .venv of its own.

CartPole is PufferLib's own C environment, Pong and HalfCheetah are EnvPool's, stepped inside the
training process. Minibatches are whole batches: PuffeRL draws them by priority, and a smaller one
would use some decisions twice and others never. One env step is one agent decision.

    python3 benchmarks/peers/pufferlib/run.py --env cartpole --seconds 60 --json
"""

from __future__ import annotations

import re
import subprocess
import sys
import tarfile
import tempfile
import urllib.request
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from peer import Clock, Peer, Settings, check_sha256, pip  # noqa: E402

SHA256 = "7df3a3e3f5f894d78d2a1f5374097890aec01473183e748abefe4f3faa10eaa9"
# Of its environments in C only CartPole is built, and nothing for CUDA.
PATCHES = {
    'shutil.which("nvcc")': "False",
    "pufferlib/ocean/**/binding.c": "pufferlib/ocean/cartpole/binding.c",
}
# setup.py downloads these where they are missing; CartPole needs none of them.
UNNEEDED = ("raylib-5.5_webassembly", "box2d-web", "box2d-linux-amd64")

# env_threads: EnvPool's. epochs: PuffeRL's update_epochs.
PRESETS: dict[str, Settings] = {
    "cartpole": {
        "num_envs": 1024,
        "env_threads": 1,
        "num_threads": 2,
        "unroll_length": 16,
        "epochs": 1,
        "learning_rate": 2e-3,
    },
    "pong": {
        "num_envs": 32,
        "env_threads": 2,
        "num_threads": 2,
        "unroll_length": 32,
        "epochs": 1,
        "learning_rate": 5e-4,
    },
    "halfcheetah": {
        "num_envs": 64,
        "env_threads": 2,
        "num_threads": 2,
        "unroll_length": 64,
        "epochs": 1,
        "learning_rate": 3e-4,
    },
}
CANDIDATES: dict[str, list[Settings]] = {
    "cartpole": [{"num_threads": 1}, {"num_envs": 512}, {"num_envs": 4096}, {"unroll_length": 32}],
    "pong": [{"num_threads": 1}, {"num_envs": 16}, {"num_envs": 64}],
    "halfcheetah": [{"num_threads": 1}, {"env_threads": 1}, {"num_envs": 128}],
}
IDS = {"pong": "Pong-v5", "halfcheetah": "HalfCheetah-v5"}


def train(env: str, settings: Settings, clock: Clock, folder: Path) -> str:
    import torch

    torch.set_num_threads(settings["num_threads"])
    from pufferlib import pufferl

    class Trainer(pufferl.PuffeRL):  # type: ignore[misc]
        """Without the dashboard, which it would print four times a second."""

        def print_dashboard(self, *_: Any, **__: Any) -> None:
            pass

    # True where a program named nvcc is on the path, whatever was built.
    pufferl.ADVANTAGE_CUDA = False
    vec_env = make(env, settings)
    batch_size = settings["num_envs"] * settings["unroll_length"]
    config = {
        **defaults(pufferl),
        "env": env,
        "device": "cpu",
        "torch_deterministic": False,
        "optimizer": "adam",
        "adam_eps": 1e-8,
        "adam_beta1": 0.9,
        "anneal_lr": False,
        "use_rnn": False,
        "total_timesteps": 10**12,
        "checkpoint_interval": 10**9,
        "data_dir": str(folder),
        "batch_size": batch_size,
        "minibatch_size": batch_size,
        "max_minibatch_size": batch_size,
        "bptt_horizon": settings["unroll_length"],
        "update_epochs": settings["epochs"],
        "learning_rate": settings["learning_rate"],
        "prio_alpha": 0.0,
    }
    trainer = Trainer(config, vec_env, network(env, vec_env))
    learned = 0
    while not clock.done(learned):
        trainer.evaluate()
        trainer.train()
        learned = trainer.global_step
    trainer.utilization.stop()
    engine = "own C env" if env == "cartpole" else f"EnvPool, {settings['env_threads']} threads"
    return (
        f"PPO, {settings['num_envs']} envs ({engine}), unroll length "
        f"{settings['unroll_length']}, batches of {batch_size}, "
        f"{settings['epochs']} epoch, {settings['num_threads']} torch threads, fp32"
    )


def defaults(pufferl: Any) -> dict[str, Any]:
    """The section [train] of PufferLib's default.ini."""
    import ast
    import configparser

    parser = configparser.ConfigParser()
    parser.read(Path(pufferl.__file__).parent / "config" / "default.ini")
    values: dict[str, Any] = {}
    for key, text in parser["train"].items():
        try:
            values[key] = ast.literal_eval(text)
        except (ValueError, SyntaxError):
            values[key] = text
    return values


def make(env: str, settings: Settings) -> Any:
    """All environments as one, in PufferLib's own interface."""
    num_envs = settings["num_envs"]
    if env == "cartpole":
        from pufferlib.ocean.cartpole.cartpole import Cartpole

        return Cartpole(num_envs=num_envs, report_interval=1000)
    import envpool
    import gymnasium
    import numpy as np
    import pufferlib

    options = {"reward_clip": True, "repeat_action_probability": 0.25} if env == "pong" else {}
    pool = envpool.make(
        IDS[env],
        env_type="gymnasium",
        num_envs=num_envs,
        num_threads=settings["env_threads"],
        seed=1,
        **options,
    )

    class Pool(pufferlib.PufferEnv):  # type: ignore[misc]
        """EnvPool writing into PufferLib's buffers."""

        def __init__(self) -> None:
            space = pool.observation_space
            dtype = np.uint8 if env == "pong" else np.float32
            self.single_observation_space = gymnasium.spaces.Box(
                space.low.min(), space.high.max(), space.shape, dtype
            )
            self.single_action_space = pool.action_space
            if env == "halfcheetah":
                self.single_action_space = gymnasium.spaces.Box(-1, 1, (6,), np.float32)
            self.num_agents = num_envs
            super().__init__()

        def reset(self, seed: int | None = None) -> Any:
            self.observations[:] = pool.reset()[0]
            return self.observations, []

        def step(self, actions: Any) -> Any:
            obs, reward, terminated, truncated, _ = pool.step(
                actions.astype(pool.action_space.dtype)
            )
            self.observations[:] = obs
            self.rewards[:] = reward
            self.terminals[:] = terminated
            self.truncations[:] = truncated
            return self.observations, self.rewards, self.terminals, self.truncations, []

        def close(self) -> None:
            pool.close()

    return Pool()


def network(env: str, vec_env: Any) -> Any:
    """Nature CNN for pixels, else two hidden layers of 64; one head for policy, one for value."""
    import torch
    from torch import nn

    obs, actions = vec_env.single_observation_space, vec_env.single_action_space

    class Network(nn.Module):
        """What PuffeRL calls: forward_eval while acting, forward while learning."""

        def __init__(self) -> None:
            super().__init__()
            if env == "pong":
                self.body = nn.Sequential(
                    nn.Conv2d(4, 32, 8, 4), nn.ReLU(),
                    nn.Conv2d(32, 64, 4, 2), nn.ReLU(),
                    nn.Conv2d(64, 64, 3, 1), nn.ReLU(),
                    nn.Flatten(), nn.Linear(7 * 7 * 64, 512), nn.ReLU(),
                )  # fmt: skip
            else:
                self.body = nn.Sequential(
                    nn.Linear(obs.shape[0], 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh()
                )
            width = 512 if env == "pong" else 64
            self.num_actions = actions.shape[0] if env == "halfcheetah" else int(actions.n)
            self.policy = nn.Linear(width, self.num_actions)
            self.value = nn.Linear(width, 1)
            self.log_std = nn.Parameter(torch.zeros(1, self.num_actions))

        def forward(self, observations: Any, state: Any = None) -> Any:
            if env == "pong":
                observations = observations.float() * (1 / 255)
            hidden = self.body(observations)
            logits, value = self.policy(hidden), self.value(hidden)
            if env == "halfcheetah":
                logits = torch.distributions.Normal(
                    logits, self.log_std.exp().expand_as(logits), validate_args=False
                )
            return logits, value

        forward_eval = forward

    return Network()


def source_address(venv: Path, folder: Path) -> str:
    """Where pip's index has the source release: pip itself cannot download it, since it runs setup.py
    for its metadata, and that wants CUDA.
    """
    command = [str(venv / "bin" / "python"), "-m", "pip", "download", "-vv", "--no-cache-dir"]
    command += ["--no-deps", "--no-build-isolation", "--no-binary", ":all:", "-d", str(folder)]
    done = subprocess.run([*command, "pufferlib==3.0.0"], capture_output=True, text=True)
    found = re.search(r"https?://\S+/pufferlib-3\.0\.0\.tar\.gz", done.stdout + done.stderr)
    if found is None:
        raise SystemExit(f"pip finds no source of pufferlib 3.0.0:\n{done.stderr[-1000:]}")
    return found.group()


def build(venv: Path) -> None:
    """Download the source release, adapt its setup.py and install it."""
    with tempfile.TemporaryDirectory(prefix="pufferlib-") as name:
        folder = Path(name)
        archive = folder / "pufferlib-3.0.0.tar.gz"
        urllib.request.urlretrieve(source_address(venv, folder), archive)
        check_sha256(archive, SHA256)
        with tarfile.open(archive) as file:
            file.extractall(folder, filter="data")
        source = folder / "pufferlib-3.0.0"
        text = (source / "setup.py").read_text()
        for before, after in PATCHES.items():
            if before not in text:
                raise SystemExit(f"setup.py of PufferLib has no {before!r} to replace")
            text = text.replace(before, after)
        (source / "setup.py").write_text(text)
        for unneeded in UNNEEDED:
            (source / unneeded).mkdir()
        pip(venv, ["--no-build-isolation", "--no-deps", str(source)])


PEER = Peer(
    script=Path(__file__).resolve(),
    name="PufferLib 3.0.0 PPO",
    presets=PRESETS,
    passes="epochs",
    train=train,
    candidates=CANDIDATES,
    finish_install=build,
)

if __name__ == "__main__":
    PEER.main(__doc__ or "")
