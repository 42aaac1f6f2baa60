"""Sample Factory 2.1.1 (arXiv 2006.11751) at its fastest on two cores, in a .venv of its own.

One env step is one agent decision that the learner consumed once: Sample Factory's counter, with
its multiplication by the frame skip switched off.

    python3 benchmarks/peers/sample_factory/run.py --env pong --seconds 60 --json
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from peer import Clock, Peer, Settings  # noqa: E402

COMMON: Settings = {
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
PRESETS: dict[str, Settings] = {
    "pong": {
        **COMMON,
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
        **COMMON,
        "vector": "gym",
        "num_envs": 128,
        "batch_size": 8192,
        "encoder_mlp_layers": [64, 64],
        "nonlinearity": "tanh",
        "learning_rate": 1e-3,
        "exploration_loss_coeff": 0.01,
    },
    "halfcheetah": {
        **COMMON,
        "vector": "envpool",
        "num_envs": 64,
        "batch_size": 8192,
        "encoder_mlp_layers": [64, 64],
        "nonlinearity": "tanh",
        "learning_rate": 3e-4,
        "exploration_loss_coeff": 0.0,
        # As in its own MuJoCo examples, and as the others train it here.
        "adaptive_stddev": False,
        "normalize_input": True,
        "normalize_returns": True,
    },
}
CANDIDATES: dict[str, list[Settings]] = {
    "pong": [{"num_envs": 32}, {"batch_size": 2048}],
    "cartpole": [{"num_envs": 64}, {"num_envs": 256}, {"rollout": 16}],
    "halfcheetah": [{"num_envs": 32}, {"num_envs": 128}, {"batch_size": 4096}],
}
# By vector; UniRL's engine "envpool" takes the same ids.
IDS = {
    "pong": {"envpool": "Pong-v5"},
    "cartpole": {"envpool": "CartPole-v1", "gym": "CartPole-v1"},
    "halfcheetah": {"envpool": "HalfCheetah-v5"},
}


def train(env: str, settings: Settings, clock: Clock, folder: Path) -> str:
    from sample_factory.algo.runners.runner import AlgoObserver
    from sample_factory.cfg.arguments import parse_full_cfg, parse_sf_args
    from sample_factory.envs.env_utils import register_env
    from sample_factory.train import make_runner

    rest = dict(settings)
    vector, num_envs = rest.pop("vector"), rest.pop("num_envs")
    if vector not in IDS[env]:
        raise SystemExit(f"{env} runs on {', '.join(IDS[env])} here, not on {vector}")
    rest["num_envs_per_worker"] = 1 if vector == "envpool" else num_envs
    if vector == "envpool":
        rest["env_agents"] = num_envs
    arguments = [f"--env={env}", "--experiment=run", f"--train_dir={folder}"]
    for key, value in rest.items():
        values = value if isinstance(value, list) else [value]
        arguments += [f"--{key}", *map(str, values)]
    register_env(env, make_envpool if vector == "envpool" else make_gym)
    parser, _ = parse_sf_args(arguments)
    parser.add_argument("--env_agents", type=int, default=1)
    cfg = parse_full_cfg(parser, arguments)

    class Stop(AlgoObserver):
        """Reads the learner's counter after an update."""

        def on_training_step(self, runner: Any, _: int) -> None:
            if clock.done(runner.total_env_steps_since_resume or 0):
                runner.cfg.train_for_env_steps = -1  # the runner looks at it right after this call

    cfg, runner = make_runner(cfg)
    runner.register_observer(Stop())
    if runner.init() != 0:
        raise SystemExit("Sample Factory refused its configuration")
    runner.run()
    return (
        f"asynchronous PPO, {settings['num_workers']} workers of {num_envs} envs ({vector}), "
        f"rollouts of {settings['rollout']}, batches of {settings['batch_size']}, "
        f"{settings['num_epochs']} epoch, fp32"
    )


def make_gym(name: str, cfg: Any, env_config: Any, render_mode: str | None = None) -> Any:
    """One Gymnasium environment; a worker holds several and steps them one after another."""
    import gymnasium

    return gymnasium.make(IDS[name]["gym"], render_mode=render_mode)


def make_envpool(name: str, cfg: Any, env_config: Any, render_mode: str | None = None) -> Any:
    """All environments of one worker in one EnvPool with a single thread."""
    import envpool
    import gymnasium
    import numpy as np
    from sf_examples.envpool.envpool_wrappers import EnvPoolResetFixWrapper

    options: dict[str, Any] = {"seed": env_config.env_id if env_config is not None else 0}
    if name == "pong":
        options |= {
            "reward_clip": True,
            "frame_skip": cfg.env_frameskip,
            "repeat_action_probability": 0.25,  # sticky, as everywhere here
        }
    env = envpool.make(
        IDS[name]["envpool"],
        env_type="gymnasium",
        num_envs=cfg.env_agents,
        num_threads=1,
        **options,
    )

    class Pool(EnvPoolResetFixWrapper):  # type: ignore[misc]
        """Sample Factory's own adapter; one worker sees the pool as that many agents."""

        num_agents = cfg.env_agents

        def close(self) -> None:
            """EnvPool's close asks this older Gymnasium for attributes that EnvPool never sets."""

    class Float32(Pool):
        """EnvPool's MuJoCo speaks float64, Sample Factory's networks float32."""

        def __init__(self, env: Any) -> None:
            super().__init__(env)
            shape = env.observation_space.shape
            self.observation_space = gymnasium.spaces.Box(-np.inf, np.inf, shape, np.float32)
            low, high = env.action_space.low, env.action_space.high
            self.action_space = gymnasium.spaces.Box(
                low.astype(np.float32), high.astype(np.float32), dtype=np.float32
            )

        def reset(self, **options: Any) -> Any:
            obs, info = super().reset(**options)
            return obs.astype(np.float32), info

        def step(self, actions: Any) -> Any:
            obs, *rest = super().step(np.asarray(actions, self.env.action_space.dtype))
            return obs.astype(np.float32), *rest

    return Float32(env) if name == "halfcheetah" else Pool(env)


PEER = Peer(
    script=Path(__file__).resolve(),
    name="Sample Factory 2.1.1 APPO",
    presets=PRESETS,
    passes="num_epochs",
    train=train,
    candidates=CANDIDATES,
)

if __name__ == "__main__":
    PEER.main(__doc__ or "")
