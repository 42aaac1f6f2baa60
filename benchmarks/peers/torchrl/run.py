"""TorchRL 0.14.1 PPO, after its own PPO examples, at its fastest on two cores, in its own .venv.

Environments come from Gymnasium as one vector environment with same-step autoreset, the only kind
that GymWrapper takes: ale-py's C++ one for Pong (sticky actions), one by one in this process for
the others. Its wrapper for EnvPool fails with EnvPool 1.2.5. One env step is one agent decision.

    python3 benchmarks/peers/torchrl/run.py --env pong --seconds 60 --json
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from peer import Clock, Peer, Settings  # noqa: E402

PRESETS: dict[str, Settings] = {
    "pong": {
        "num_envs": 8,
        "num_threads": 2,
        "unroll_length": 128,
        "epochs": 4,
        "minibatch": 256,
        "learning_rate": 2.5e-4,
        "entropy": 0.01,
    },
    "cartpole": {
        "num_envs": 16,
        "num_threads": 1,
        "unroll_length": 128,
        "epochs": 4,
        "minibatch": 512,
        "learning_rate": 1e-3,
        "entropy": 0.0,
    },
    "halfcheetah": {
        "num_envs": 16,
        "num_threads": 1,
        "unroll_length": 128,
        "epochs": 4,
        "minibatch": 512,
        "learning_rate": 3e-4,
        "entropy": 0.0,
    },
}
CANDIDATES: dict[str, list[Settings]] = {
    "pong": [{"num_threads": 1}, {"num_envs": 16, "unroll_length": 64}],
    "cartpole": [{"num_threads": 2}, {"num_envs": 64, "unroll_length": 32}],
    "halfcheetah": [{"num_threads": 2}, {"num_envs": 64, "unroll_length": 32}],
}
IDS = {"pong": "ALE/Pong-v5", "cartpole": "CartPole-v1", "halfcheetah": "HalfCheetah-v5"}


def train(env: str, settings: Settings, clock: Clock, folder: Path) -> str:
    import torch

    torch.set_num_threads(settings["num_threads"])
    from torchrl.collectors import Collector
    from torchrl.objectives import ClipPPOLoss
    from torchrl.objectives.value import GAE

    vec_env = make(env, settings["num_envs"])
    policy, value = networks(env, vec_env)
    batch_size = settings["num_envs"] * settings["unroll_length"]
    collector = Collector(
        vec_env, policy, frames_per_batch=batch_size, total_frames=-1, trust_policy=True
    )
    # shifted: one forward pass for a row's value and that of the next one.
    advantage = GAE(gamma=0.99, lmbda=0.95, value_network=value, shifted=True)
    loss_module = ClipPPOLoss(
        policy,
        value,
        clip_epsilon=0.1 if env == "pong" else 0.2,
        entropy_coeff=settings["entropy"],
        critic_coeff=0.5,
        loss_critic_type="l2",
        normalize_advantage=True,
    )
    parameters = list(loss_module.parameters())
    optimizer = torch.optim.Adam(parameters, lr=settings["learning_rate"], eps=1e-5, foreach=True)
    num_steps = 0
    for data in collector:
        with torch.no_grad():
            rows = advantage(data).reshape(-1)
        for _ in range(settings["epochs"]):
            for index in torch.randperm(batch_size).split(settings["minibatch"]):
                loss = loss_module(rows[index])
                total = loss["loss_objective"] + loss["loss_critic"]
                if "loss_entropy" in loss.keys():  # noqa: SIM118 (TensorDict)
                    total = total + loss["loss_entropy"]
                optimizer.zero_grad()
                total.backward()
                torch.nn.utils.clip_grad_norm_(parameters, 0.5, foreach=True)
                optimizer.step()
        num_steps += batch_size
        if clock.done(num_steps):
            break
    collector.shutdown()
    return (
        f"PPO, {settings['num_envs']} envs, {settings['unroll_length']} steps, "
        f"{settings['epochs']} epochs, minibatches of {settings['minibatch']}, "
        f"{settings['num_threads']} torch threads, fp32"
    )


def make(env: str, num_envs: int) -> Any:
    """All environments as one."""
    import gymnasium
    from gymnasium.vector import AutoresetMode
    from torchrl.envs import DoubleToFloat, GymWrapper, TransformedEnv

    if env == "pong":
        import ale_py
        from ale_py.vector_env import AtariVectorEnv

        ale_py.ALEInterface.setLoggerMode(ale_py.LoggerMode.Error)
        vector = AtariVectorEnv(
            "pong", num_envs=num_envs, num_threads=2, autoreset_mode=AutoresetMode.SAME_STEP
        )
    else:
        vector = gymnasium.make_vec(
            IDS[env],
            num_envs=num_envs,
            vectorization_mode="sync",
            vector_kwargs={"autoreset_mode": AutoresetMode.SAME_STEP},
        )
    wrapped = GymWrapper(vector, categorical_action_encoding=True)
    if env == "halfcheetah":
        return TransformedEnv(wrapped, DoubleToFloat(in_keys=["observation"]))
    return wrapped


def networks(env: str, vec_env: Any) -> tuple[Any, Any]:
    """Policy and value operators: shared Nature CNN for pixels, else two layers of 64 each."""
    import torch
    from tensordict.nn import AddStateIndependentNormalScale, TensorDictModule
    from torch import nn
    from torchrl.modules import (
        ActorValueOperator,
        IndependentNormal,
        ProbabilisticActor,
        ValueOperator,
    )

    space = vec_env.action_spec_unbatched
    if env == "halfcheetah":
        head = nn.Sequential(nn.Linear(64, 6), AddStateIndependentNormalScale(6))
        keys, distribution = ["loc", "scale"], IndependentNormal
    else:
        head = nn.Linear(512 if env == "pong" else 64, int(space.n))
        keys, distribution = ["logits"], torch.distributions.Categorical

    def actor(module: Any, source: str) -> Any:
        return ProbabilisticActor(
            TensorDictModule(module, in_keys=[source], out_keys=keys),
            in_keys=keys,
            spec=space,
            distribution_class=distribution,
            return_log_prob=True,
        )

    if env == "pong":

        class Body(nn.Module):
            """Takes [..., 4, 84, 84] pixels."""

            def __init__(self) -> None:
                super().__init__()
                self.layers = nn.Sequential(
                    nn.Conv2d(4, 32, 8, 4), nn.ReLU(),
                    nn.Conv2d(32, 64, 4, 2), nn.ReLU(),
                    nn.Conv2d(64, 64, 3, 1), nn.ReLU(),
                    nn.Flatten(), nn.Linear(7 * 7 * 64, 512), nn.ReLU(),
                )  # fmt: skip

            def forward(self, obs: Any) -> Any:
                flat = obs.reshape(-1, 4, 84, 84).float() * (1 / 255)
                return self.layers(flat).reshape(*obs.shape[:-3], 512)

        body = TensorDictModule(Body(), in_keys=["observation"], out_keys=["hidden"])
        both = ActorValueOperator(
            body, actor(head, "hidden"), ValueOperator(nn.Linear(512, 1), in_keys=["hidden"])
        )
        return both.get_policy_operator(), both.get_value_operator()

    size = vec_env.observation_spec["observation"].shape[-1]

    def layers() -> list[nn.Module]:
        return [nn.Linear(size, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh()]

    value = ValueOperator(nn.Sequential(*layers(), nn.Linear(64, 1)), in_keys=["observation"])
    return actor(nn.Sequential(*layers(), head), "observation"), value


PEER = Peer(
    script=Path(__file__).resolve(),
    name="TorchRL 0.14.1 PPO",
    presets=PRESETS,
    passes="epochs",
    train=train,
    candidates=CANDIDATES,
)

if __name__ == "__main__":
    PEER.main(__doc__ or "")
