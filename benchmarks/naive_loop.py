"""The bar an engine must beat: a short, competent lock-step actor-critic loop, without UniRL.

All environments step, one forward pass answers them, and after each unroll one V-trace update
(IMPALA, arXiv 1802.01561, eq. 1) goes once over the data, all in one process. What makes it fast
makes any engine fast: vectorised environments, bf16 compute on a copy of fp32 master weights,
channels_last, one conversion per observation, and a malloc that keeps its memory.

    python benchmarks/naive_loop.py --env pong --dtype bf16 --seconds 30 --json
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import resource
import sys
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

# Read once, when a process starts. glibc hands large blocks back to the system, and every update
# would fault their pages in again.
PROCESS_ENVIRONMENT = {
    "MALLOC_MMAP_THRESHOLD_": str(1 << 30),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 40),
    "MALLOC_TOP_PAD_": str(1 << 26),
    # Spinning between calls, torch's threads would hold the cores the environments need next.
    "OMP_WAIT_POLICY": "passive",
}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
GAMMA = 0.99
VALUE_COST = 0.5
ENTROPY_COST = 0.01
MAX_GRAD_NORM = 0.5


@dataclass(frozen=True)
class NaiveSettings:
    """The fastest setting found on two cores; flags override it."""

    num_envs: int
    unroll_length: int
    num_threads: int
    learning_rate: float
    dtype: str


PRESETS = {
    "pong": NaiveSettings(
        num_envs=32, unroll_length=20, num_threads=2, learning_rate=6e-4, dtype="bf16"
    ),
    "cartpole": NaiveSettings(
        num_envs=256, unroll_length=20, num_threads=1, learning_rate=2e-3, dtype="fp32"
    ),
}


class NaiveCNN(nn.Module):
    """Nature DQN's convolutions, one policy-and-value head; takes pixels 0..255, [N, 84, 84, 4]."""

    def __init__(self, num_actions: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(4, 32, 8, 4)
        self.second = nn.Conv2d(32, 64, 4, 2)
        self.third = nn.Conv2d(64, 64, 3, 1)
        self.hidden = nn.Linear(7 * 7 * 64, 512)
        self.head = nn.Linear(512, num_actions + 1)
        for layer in (self.first, self.second, self.third, self.hidden, self.head):
            nn.init.orthogonal_(layer.weight, 0.01 if layer is self.head else 2**0.5)
            nn.init.zeros_(layer.bias)

    def forward(self, obs: Tensor) -> Tensor:
        x = obs.permute(0, 3, 1, 2)  # a channels_last view, not a copy
        # 1/255 goes into 8 thousand weights instead of 28 thousand pixels per observation.
        x = F.relu_(F.conv2d(x, self.first.weight * (1 / 255), self.first.bias, 4))
        x = F.relu_(self.third(F.relu_(self.second(x))))
        return self.head(F.relu_(self.hidden(x.permute(0, 2, 3, 1).flatten(1))))


class NaiveMLP(nn.Module):
    """Two hidden layers of 64 with one policy-and-value head; takes [N, num_features]."""

    def __init__(self, num_features: int, num_actions: int) -> None:
        super().__init__()
        self.first = nn.Linear(num_features, 64)
        self.second = nn.Linear(64, 64)
        self.head = nn.Linear(64, num_actions + 1)

    def forward(self, obs: Tensor) -> Tensor:
        return self.head(torch.tanh(self.second(torch.tanh(self.first(obs)))))


def make(name: str, preset: NaiveSettings) -> tuple[Any, nn.Module, tuple[int, ...]]:
    """The vector environment (next-step autoreset), its network and the network's input shape."""
    if name == "pong":
        import ale_py
        from ale_py.vector_env import AtariVectorEnv

        ale_py.ALEInterface.setLoggerMode(ale_py.LoggerMode.Error)
        env = AtariVectorEnv("pong", preset.num_envs, num_threads=preset.num_threads)
        net = NaiveCNN(int(env.single_action_space.n)).to(memory_format=torch.channels_last)
        return env, net, (84, 84, 4)
    from gymnasium.envs.classic_control.cartpole import CartPoleVectorEnv

    return CartPoleVectorEnv(preset.num_envs, max_episode_steps=500), NaiveMLP(4, 2), (4,)


class Loop:
    """Environments, buffers, master weights and the copy that computes: `unroll`, then `update`."""

    def __init__(self, name: str, preset: NaiveSettings, seed: int) -> None:
        torch.manual_seed(seed)
        dtype = DTYPES[preset.dtype]
        self.num_steps, self.num_envs = preset.unroll_length, preset.num_envs
        self.env, master, shape = make(name, preset)
        self.net = master if dtype == torch.float32 else copy.deepcopy(master).to(dtype)
        self.master, self.weights = list(master.parameters()), list(self.net.parameters())
        for parameter in self.master:
            parameter.grad = torch.zeros_like(parameter)
        self.optimiser = torch.optim.RMSprop(
            self.master, lr=preset.learning_rate, alpha=0.99, eps=1e-5, foreach=True
        )
        # Converted once, as it comes from the environment; acting and learning read it in place.
        self.obs = torch.zeros(self.num_steps + 1, self.num_envs, *shape, dtype=dtype)
        self.action = torch.zeros(self.num_steps, self.num_envs, dtype=torch.int64)
        self.logp = torch.zeros(self.num_steps, self.num_envs)
        self.noise = torch.zeros(self.num_steps, self.num_envs, self.env.single_action_space.n)
        self.reward, self.discount, self.mask = np.zeros(
            (3, self.num_steps, self.num_envs), np.float32
        )
        self._store(self.num_steps, self.env.reset(seed=seed)[0])
        self.done = np.zeros(self.num_envs, np.bool_)
        self.running_return = np.zeros(self.num_envs)
        self.finished_returns: list[float] = []

    def _store(self, row: int, obs: np.ndarray[Any, Any]) -> None:
        source = torch.from_numpy(obs)
        self.obs[row].copy_(source.permute(0, 2, 3, 1) if source.ndim == 4 else source)

    @torch.inference_mode()
    def unroll(self) -> int:
        """Fill the buffers; the number of decisions in them (none in the row after an episode)."""
        self.obs[0].copy_(self.obs[self.num_steps])
        self.noise.exponential_().log_()
        for row in range(self.num_steps):
            logp = F.log_softmax(self.net(self.obs[row])[:, :-1].float(), -1)
            action = (logp - self.noise[row]).argmax(-1)  # the Gumbel trick: an exact sample
            self.action[row] = action
            self.logp[row] = logp.gather(1, action[:, None])[:, 0]
            self.mask[row] = ~self.done
            obs, reward, terminated, truncated, _ = self.env.step(action.numpy())
            self._store(row + 1, obs)
            self.reward[row] = reward
            self.discount[row] = np.where(terminated, 0.0, GAMMA)
            self.running_return += reward
            self.done = terminated | truncated
            if self.done.any():
                self.finished_returns.extend(self.running_return[self.done])
                self.running_return[self.done] = 0
        return int(self.mask.sum())

    def update(self) -> None:
        """One V-trace update; every sample goes once through the backward pass."""
        with torch.no_grad():
            last_value = self.net(self.obs[self.num_steps])[:, -1].float()
        output = self.net(self.obs[: self.num_steps].flatten(0, 1)).float()
        output = output.unflatten(0, (self.num_steps, self.num_envs))
        logp_all = F.log_softmax(output[..., :-1], -1)
        new_logp = logp_all.gather(-1, self.action[..., None])[..., 0]
        value = output[..., -1]
        target, advantage = self._vtrace(
            (new_logp.detach() - self.logp).exp().numpy(),
            value.detach().numpy(),
            last_value.numpy(),
        )
        mask = torch.from_numpy(self.mask)
        policy_loss = -(new_logp * advantage * mask).sum()
        value_loss = 0.5 * ((value - target).square() * mask).sum()
        entropy = -((logp_all.exp() * logp_all).sum(-1) * mask).sum()
        loss = (policy_loss + VALUE_COST * value_loss - ENTROPY_COST * entropy) / mask.sum()
        gradient = torch.autograd.grad(loss, self.weights)
        master_gradient = [parameter.grad for parameter in self.master]
        torch._foreach_copy_(master_gradient, gradient)
        nn.utils.clip_grad_norm_(self.master, MAX_GRAD_NORM, foreach=True)
        self.optimiser.step()
        if self.weights[0] is not self.master[0]:
            with torch.no_grad():
                torch._foreach_copy_(self.weights, self.master)

    def _vtrace(
        self,
        rho: np.ndarray[Any, Any],
        value: np.ndarray[Any, Any],
        last_value: np.ndarray[Any, Any],
    ) -> tuple[Tensor, Tensor]:
        # In numpy: on vectors this short, a call costs a third of torch's.
        rho = np.minimum(rho, 1.0) * self.mask
        next_value = np.concatenate((value[1:], last_value[None]))
        delta = rho * (self.reward + self.discount * next_value - value)
        trace = self.discount * rho
        target, advantage = value + delta, delta.copy()
        correction = np.zeros(self.num_envs, np.float32)  # target minus value, one row later
        for row in range(self.num_steps - 1, -1, -1):
            advantage[row] += rho[row] * self.discount[row] * correction
            correction = delta[row] + trace[row] * correction
            target[row] = value[row] + correction
        return torch.from_numpy(target), torch.from_numpy(advantage)


def measure(loop: Loop, seconds: float, warm_up_seconds: float) -> dict[str, float]:
    """Run for `seconds` after the warm-up, which is not counted."""
    end = time.perf_counter() + warm_up_seconds
    while time.perf_counter() < end:
        loop.unroll()
        loop.update()
    loop.finished_returns.clear()
    steps, elapsed = 0, 0.0
    start, start_cpu = time.perf_counter(), time.process_time()
    while elapsed < seconds:
        steps += loop.unroll()
        loop.update()
        elapsed = time.perf_counter() - start
    return {
        "env_steps_per_second": round(steps / elapsed, 1),
        "peak_memory_mb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, 1),
        "cores_used": round((time.process_time() - start_cpu) / elapsed, 2),
        "seconds": round(elapsed, 2),
        "steps": steps,
        "mean_return": round(float(np.mean(loop.finished_returns[-100:] or [np.nan])), 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--env", choices=PRESETS, default="pong")
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--warm-up-seconds", type=float, default=5.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--dtype", choices=DTYPES)
    parser.add_argument("--num-envs", type=int)
    parser.add_argument("--unroll-length", type=int)
    parser.add_argument("--num-threads", type=int)
    parser.add_argument("--learning-rate", type=float)
    parser.add_argument(
        "--json", action="store_true", help="print one line of JSON and nothing else"
    )
    flags = parser.parse_args()
    if any(os.environ.get(name) != value for name, value in PROCESS_ENVIRONMENT.items()):
        os.execve(
            sys.executable, [sys.executable, *sys.argv], {**os.environ, **PROCESS_ENVIRONMENT}
        )
    default = PRESETS[flags.env]
    preset = NaiveSettings(
        **{
            name: getattr(flags, name) or getattr(default, name)
            for name in NaiveSettings.__dataclass_fields__
        }
    )
    torch.set_num_threads(preset.num_threads)
    result = measure(Loop(flags.env, preset, flags.seed), flags.seconds, flags.warm_up_seconds)
    row = {"system": f"naive loop {preset.dtype}", "env": flags.env, **result}
    print(
        json.dumps(row)
        if flags.json
        else "\n".join(f"{name}: {value}" for name, value in row.items())
    )


if __name__ == "__main__":
    main()
