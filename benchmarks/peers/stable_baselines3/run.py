"""Stable-Baselines3 2.9.2 PPO (arXiv 1707.06347) at its fastest on two cores, in its own .venv.

Pong is ALE/Pong-v5 (sticky actions) behind SB3's own AtariWrapper with RL Zoo's numbers: 8
environments, 128 steps, 4 epochs, minibatches of 256, Nature CNN. RL Zoo's CartPole (20 epochs) and
HalfCheetah (one environment, minibatches of 64) would be slower still: here they get 4 epochs and
larger batches. One env step is one agent decision, however many epochs use it. `--try` compares
DummyVecEnv and SubprocVecEnv, one torch thread and two.

    python3 benchmarks/peers/stable_baselines3/run.py --env pong --seconds 60 --json
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from peer import Clock, Peer, Settings  # noqa: E402

# vector: "dummy" steps the environments one by one in this process, "subproc" each in its own.
# The rest of the keys goes to PPO as it is.
PRESETS: dict[str, Settings] = {
    "pong": {
        "vector": "dummy",
        "num_envs": 8,
        "num_threads": 2,
        "n_steps": 128,
        "n_epochs": 4,
        "batch_size": 256,
        "learning_rate": 2.5e-4,
        "clip_range": 0.1,
        "vf_coef": 0.5,
        "ent_coef": 0.01,
    },
    "cartpole": {
        "vector": "dummy",
        "num_envs": 8,
        "num_threads": 1,
        "n_steps": 128,
        "n_epochs": 4,
        "batch_size": 256,
        "learning_rate": 1e-3,
        "clip_range": 0.2,
        "vf_coef": 0.5,
        "ent_coef": 0.0,
    },
    "halfcheetah": {
        "vector": "dummy",
        "num_envs": 16,
        "num_threads": 1,
        "n_steps": 128,
        "n_epochs": 4,
        "batch_size": 512,
        "learning_rate": 3e-4,
        "clip_range": 0.2,
        "vf_coef": 0.5,
        "ent_coef": 0.0,
    },
}
CANDIDATES: dict[str, list[Settings]] = {
    "pong": [
        {"num_threads": 1},
        {"vector": "subproc"},
        {"vector": "subproc", "num_threads": 1},
        {"vector": "subproc", "num_envs": 16, "n_steps": 64},
    ],
    "cartpole": [{"num_threads": 2}, {"vector": "subproc"}, {"num_envs": 32, "n_steps": 64}],
    "halfcheetah": [{"num_threads": 2}, {"vector": "subproc"}, {"num_envs": 32, "n_steps": 64}],
}
IDS = {"pong": "ALE/Pong-v5", "cartpole": "CartPole-v1", "halfcheetah": "HalfCheetah-v5"}


def train(env: str, settings: Settings, clock: Clock, folder: Path) -> str:
    import torch
    from stable_baselines3 import PPO
    from stable_baselines3.common.callbacks import BaseCallback
    from stable_baselines3.common.env_util import make_vec_env
    from stable_baselines3.common.vec_env import (
        DummyVecEnv,
        SubprocVecEnv,
        VecFrameStack,
        VecNormalize,
    )

    class Stop(BaseCallback):
        """Asks the clock before each rollout: all that was rolled out before has been learned."""

        stop = False

        def _on_rollout_start(self) -> None:
            self.stop = clock.done(self.num_timesteps)

        def _on_step(self) -> bool:
            return not self.stop

    rest = dict(settings)
    vector, num_envs = rest.pop("vector"), rest.pop("num_envs")
    num_threads = rest.pop("num_threads")
    torch.set_num_threads(num_threads)
    kinds = {"dummy": DummyVecEnv, "subproc": SubprocVecEnv}
    vec_env: Any = make_vec_env(
        lambda: make(env), n_envs=num_envs, seed=1, vec_env_cls=kinds[vector]
    )
    if env == "pong":
        vec_env = VecFrameStack(vec_env, 4)
    elif env == "halfcheetah":
        vec_env = VecNormalize(vec_env)
    # Its MlpPolicy is what is compared: 2 x 64 tanh, one such network for policy and one for value.
    policy = "CnnPolicy" if env == "pong" else "MlpPolicy"
    model = PPO(policy, vec_env, device="cpu", verbose=0, max_grad_norm=0.5, **rest)
    model.learn(10**12, callback=Stop(), log_interval=10**9)
    vec_env.close()
    return (
        f"PPO, {num_envs} envs ({vector}), {rest['n_steps']} steps, {rest['n_epochs']} epochs, "
        f"minibatches of {rest['batch_size']}, {num_threads} torch threads, fp32"
    )


def make(env: str) -> Any:
    """One environment, preprocessed as RL Zoo does."""
    import gymnasium

    if env != "pong":
        return gymnasium.make(IDS[env])
    import ale_py
    from stable_baselines3.common.atari_wrappers import AtariWrapper

    gymnasium.register_envs(ale_py)
    return AtariWrapper(gymnasium.make(IDS[env], frameskip=1))


PEER = Peer(
    script=Path(__file__).resolve(),
    name="Stable-Baselines3 2.9.2 PPO",
    presets=PRESETS,
    passes="n_epochs",
    train=train,
    candidates=CANDIDATES,
)

if __name__ == "__main__":
    PEER.main(__doc__ or "")
