"""rsl_rl 5.5.1 PPO on UniRL's torch/Cartpole, at its fastest on one core, in its own .venv.

The environment is UniRL's own, from this clone through its export for rsl_rl, so that only the
training differs: no logs, no check for NaN, no console. The preset computes in fp32, as UniRL does
there; rsl_rl's autocast to bf16 is a candidate. One env step is one agent decision.

    python3 benchmarks/peers/rsl_rl/run.py --env cartpole-512 --seconds 40 --json
"""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from peer import Clock, Peer, Settings  # noqa: E402

ROOT = Path(__file__).resolve().parents[3]
ENV_ID = "torch/Cartpole"
SEED = 1
FAR = 10**12
"""Iterations asked for: the clock ends the training long before."""


def preset(num_envs: int) -> Settings:
    """The task's usual settings (IsaacGymEnvs, CartpolePPO.yaml), whatever num_envs is."""
    return {
        "num_envs": num_envs,
        "num_threads": 1,
        "unroll_length": 16,
        "epochs": 8,
        "minibatch": 8192,
        "learning_rate": 3e-4,
        "desired_kl": 0.008,
        "compile": "off",
        "bfloat16": False,
    }


PRESETS: dict[str, Settings] = {"cartpole-512": preset(512), "cartpole-4096": preset(4096)}
FASTER: list[Settings] = [
    {"compile": "default"},
    {"compile": "max-autotune-no-cudagraphs"},
    {"bfloat16": True},
    {"compile": "default", "bfloat16": True},
]
CANDIDATES = dict.fromkeys(PRESETS, FASTER)


class TimeIsOver(Exception):
    """The clock has counted long enough: the way out of a loop that asks nobody."""


def train(env: str, settings: Settings, clock: Clock, folder: Path) -> str:
    import torch

    torch.set_num_threads(settings["num_threads"])
    from rsl_rl.runners import OnPolicyRunner

    num_steps = 0
    batch_size = settings["num_envs"] * settings["unroll_length"]
    with open(os.devnull, "w") as silence, contextlib.redirect_stdout(silence):
        runner = OnPolicyRunner(make(settings["num_envs"]), config(settings), log_dir=None)
        update = runner.alg.update

        def counted_update() -> dict[str, float]:
            nonlocal num_steps
            losses = update()
            num_steps += batch_size
            if clock.done(num_steps):
                raise TimeIsOver
            return losses

        runner.alg.update = counted_update
        with contextlib.suppress(TimeIsOver):
            runner.learn(FAR, init_at_random_ep_len=True)
    precision = "bf16" if settings["bfloat16"] else "fp32"
    return (
        f"PPO, {settings['num_envs']} envs, {settings['unroll_length']} steps, "
        f"{settings['epochs']} epochs, minibatches of {settings['minibatch']}, "
        f"adaptive learning rate, torch.compile {settings['compile']}, "
        f"{settings['num_threads']} torch threads, {precision}"
    )


def make(num_envs: int) -> Any:
    """UniRL's environment as a VecEnv; it stands behind the peer's own packages on the path."""
    import torch

    sys.path.append(str(ROOT))
    from unirl.envs.config import EnvConfig
    from unirl.envs.sim.make import make_device_env
    from unirl.envs.sim.exports.rsl_rl import RslRlExport

    env = make_device_env(EnvConfig(id=ENV_ID), num_envs, torch.device("cpu"))
    return RslRlExport(env, seed=SEED)


def config(settings: Settings) -> dict[str, Any]:
    """What OnPolicyRunner reads. Values are not clipped, as UniRL's are not."""
    batch_size = settings["num_envs"] * settings["unroll_length"]
    network = {"class_name": "MLPModel", "hidden_dims": [32, 32], "activation": "elu"}
    return {
        "num_steps_per_env": settings["unroll_length"],
        "save_interval": FAR,
        "check_for_nan": False,
        "torch_compile_mode": None if settings["compile"] == "off" else settings["compile"],
        "obs_groups": {"actor": ["policy"], "critic": ["policy"]},
        "actor": {**network, "distribution_cfg": {"class_name": "GaussianDistribution"}},
        "critic": network,
        "algorithm": {
            "class_name": "PPO",
            "num_learning_epochs": settings["epochs"],
            "num_mini_batches": batch_size // settings["minibatch"],
            "learning_rate": settings["learning_rate"],
            "schedule": "adaptive",
            "desired_kl": settings["desired_kl"],
            "clip_param": 0.2,
            "use_clipped_value_loss": False,
            "value_loss_coef": 1.0,
            "gamma": 0.99,
            "lam": 0.95,
            "entropy_coef": 0.0,
            "max_grad_norm": 1.0,
            "use_mixed_precision": settings["bfloat16"],
        },
    }


PEER = Peer(
    script=Path(__file__).resolve(),
    name="rsl_rl 5.5.1 PPO",
    presets=PRESETS,
    passes="epochs",
    train=train,
    candidates=CANDIDATES,
    environment={"GIT_PYTHON_REFRESH": "quiet"},  # its logger imports git, which may be absent
)

if __name__ == "__main__":
    PEER.main(__doc__ or "")
