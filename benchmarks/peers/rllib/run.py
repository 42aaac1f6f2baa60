"""RLlib 2.60 IMPALA (arXiv 1802.01561) at its fastest on two cores, in a .venv of its own.

New API stack. Pong is ALE/Pong-v5 (sticky actions) and Nature CNN as an RLModule of its own, since
RLlib's default network pads its convolutions and takes floats only. `--set vector=sync` takes
RLlib's own Atari wrapper instead of ale-py's C++ vector environment. One env step is one agent
decision that the learner used once: true entries of the loss mask, without RLlib's extra row per
chunk. Tried on a loaded machine: on Pong learning in the main process was fastest (785 env steps/s,
against 548 and 204 with one and two env runners beside a learner process); on CartPole the learner
process was (9 300 against 7 800; 6 000 with sync environments).

    python3 benchmarks/peers/rllib/run.py --env pong --seconds 60 --json
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from peer import Clock, Peer, Settings  # noqa: E402

# vector: "vector_entry_point" steps an env runner's environments in C++ or numpy, "sync" does it
# one by one.
# learners: 0 learns in the main process, 1 in a process of its own, asynchronously.
PRESETS: dict[str, Settings] = {
    "pong": {
        "vector": "vector_entry_point",
        "runners": 2,
        "num_envs": 16,
        "fragment": 32,
        "learners": 0,
        "aggregators": 0,
        "batch": 512,
        "epochs": 1,
        "learning_rate": 5e-4,
        "entropy": 0.01,
    },
    "cartpole": {
        "vector": "vector_entry_point",
        "runners": 2,
        "num_envs": 16,
        "fragment": 50,
        "learners": 1,
        "aggregators": 0,
        "batch": 2000,
        "epochs": 1,
        "learning_rate": 5e-4,
        "entropy": 0.01,
    },
}
CANDIDATES: dict[str, list[Settings]] = {
    "pong": [
        {"learners": 1},
        {"learners": 1, "runners": 1},
        {"batch": 1024},
        {"num_envs": 32},
        {"vector": "sync"},
    ],
    "cartpole": [{"learners": 0}, {"num_envs": 64}, {"runners": 1}, {"vector": "sync"}],
}
IDS = {"pong": "ALE/Pong-v5", "cartpole": "CartPole-v1"}
DECISIONS = "num_decisions_learned_lifetime"


def train(env: str, settings: Settings, clock: Clock, folder: Path) -> str:
    import ray
    from ray.rllib.algorithms.impala import IMPALAConfig
    from ray.rllib.algorithms.impala.torch.impala_torch_learner import IMPALATorchLearner
    from ray.rllib.core.columns import Columns
    from ray.rllib.core.rl_module.rl_module import RLModuleSpec
    from ray.tune.registry import register_env

    class CountingLearner(IMPALATorchLearner):  # type: ignore[misc]
        """Counts the decisions in each batch; RLlib's counter includes bootstrap rows."""

        def compute_loss_for_module(self, *, module_id: str, batch: Any, **rest: Any) -> Any:
            num_decisions = int(batch[Columns.LOSS_MASK].sum())
            self.metrics.log_value((module_id, DECISIONS), num_decisions, reduce="lifetime_sum")
            return super().compute_loss_for_module(module_id=module_id, batch=batch, **rest)

    ray.init(
        # Names for the scheduler, not cores: every actor must be scheduled.
        num_cpus=4,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="error",
        object_store_memory=10**9,
        _temp_dir=str(folder),
    )
    if env == "pong":
        register_env(env, atari(settings["vector"]))
    config = (
        IMPALAConfig()
        .environment(env if env == "pong" else IDS[env])
        .env_runners(
            num_env_runners=settings["runners"],
            num_envs_per_env_runner=settings["num_envs"],
            rollout_fragment_length=settings["fragment"],
            gym_env_vectorize_mode=settings["vector"],
        )
        .learners(
            num_learners=settings["learners"],
            num_aggregator_actors_per_learner=settings["aggregators"],
        )
        .training(
            learner_class=CountingLearner,
            train_batch_size_per_learner=settings["batch"],
            num_epochs=settings["epochs"],
            lr=settings["learning_rate"],
            entropy_coeff=settings["entropy"],
            vf_loss_coeff=0.5,
            grad_clip=40.0,
        )
        .reporting(min_time_s_per_iteration=1)
    )
    if env == "pong":
        config = config.rl_module(rl_module_spec=RLModuleSpec(module_class=nature_cnn()))
    else:
        config = config.rl_module(
            model_config={
                "fcnet_hiddens": [64, 64],
                "fcnet_activation": "tanh",
                "vf_share_layers": True,
            }
        )
    algorithm = config.build_algo()
    num_steps = 0
    while not clock.done(num_steps):
        learner = algorithm.train().get("learners", {}).get("default_policy", {})
        num_steps = int(learner.get(DECISIONS, num_steps))
    algorithm.stop()
    ray.shutdown()
    where = "in the main process" if settings["learners"] == 0 else "in its own process"
    return (
        f"IMPALA, {settings['runners']} env runners of {settings['num_envs']} envs "
        f"({settings['vector']}), fragments of {settings['fragment']}, batches of "
        f"{settings['batch']}, {settings['epochs']} epoch, learner {where}, fp32"
    )


def atari(vector: str) -> Any:
    """What RLlib's env runners make their Pong with: 4 frames of 84 x 84 pixels, uint8."""

    def make(context: Any) -> Any:
        import ale_py
        import gymnasium
        import numpy as np

        gymnasium.register_envs(ale_py)
        ale_py.ALEInterface.setLoggerMode(ale_py.LoggerMode.Error)
        if vector == "sync":
            from ray.rllib.env.wrappers.atari_wrappers import wrap_atari_for_new_api_stack

            env = gymnasium.make(IDS["pong"], frameskip=1)
            env = wrap_atari_for_new_api_stack(env, dim=84, framestack=4)
            return env
        from ale_py.vector_env import AtariVectorEnv

        class Pong(AtariVectorEnv):  # type: ignore[misc]
            """Without infos, which RLlib would take apart environment by environment."""

            def reset(self, **options: Any) -> Any:
                return np.array(super().reset(**options)[0]), {}

            def step(self, actions: Any) -> Any:
                obs, reward, terminated, truncated, _ = super().step(np.asarray(actions))
                return np.array(obs), reward, terminated, truncated, {}

        return Pong("pong", num_envs=context["num_envs"], num_threads=1, noop_max=30)

    return make


def nature_cnn() -> Any:
    """Nature DQN's convolutions and one hidden layer under a policy and a value head."""
    import torch
    from ray.rllib.core.columns import Columns
    from ray.rllib.core.rl_module.apis import ValueFunctionAPI
    from ray.rllib.core.rl_module.torch import TorchRLModule
    from torch import nn

    class NatureCNN(TorchRLModule, ValueFunctionAPI):  # type: ignore[misc]
        """Takes [N, 4, 84, 84], or [N, 84, 84, 4] from RLlib's wrapper."""

        def setup(self) -> None:
            self._body = nn.Sequential(
                nn.Conv2d(4, 32, 8, 4), nn.ReLU(),
                nn.Conv2d(32, 64, 4, 2), nn.ReLU(),
                nn.Conv2d(64, 64, 3, 1), nn.ReLU(),
                nn.Flatten(), nn.Linear(7 * 7 * 64, 512), nn.ReLU(),
            )  # fmt: skip
            self._policy = nn.Linear(512, int(self.action_space.n))
            self._value = nn.Linear(512, 1)

        def _embed(self, batch: Any) -> Any:
            obs = batch[Columns.OBS]
            if obs.shape[-1] == 4:
                obs = obs.permute(0, 3, 1, 2)
            return self._body(obs.float() * (1 / 255) if obs.dtype == torch.uint8 else obs.float())

        def _forward(self, batch: Any, **_: Any) -> Any:
            return {Columns.ACTION_DIST_INPUTS: self._policy(self._embed(batch))}

        def _forward_train(self, batch: Any, **_: Any) -> Any:
            embeddings = self._embed(batch)
            return {
                Columns.ACTION_DIST_INPUTS: self._policy(embeddings),
                Columns.EMBEDDINGS: embeddings,
            }

        def compute_values(self, batch: Any, embeddings: Any = None) -> Any:
            return self._value(self._embed(batch) if embeddings is None else embeddings)[:, 0]

    return NatureCNN


PEER = Peer(
    script=Path(__file__).resolve(),
    name="RLlib 2.60.0 IMPALA",
    presets=PRESETS,
    passes="epochs",
    train=train,
    candidates=CANDIDATES,
    environment={"RAY_USAGE_STATS_ENABLED": "0", "RAY_DEDUP_LOGS": "0"},
)

if __name__ == "__main__":
    PEER.main(__doc__ or "")
