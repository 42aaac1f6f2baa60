"""README.md of an exported policy: how to act with it, without UniRL."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gymnasium import Space, spaces

from unirl.action_space import find_mask, parts
from unirl.envs.config import EnvConfig
from unirl.envs.last_action import LAST_ACTION
from unirl.envs.view.masks import MASK
from unirl.envs.view.obs_view import OBS
from unirl.export import onnx, safetensors, torchscript
from unirl.export.act import ActFunction, Port
from unirl.export.description import FILE as DESCRIPTION
from unirl.export.policy import ExportedPolicy


def usage(
    trained: ExportedPolicy, function: ActFunction, env: EnvConfig, formats: Sequence[str]
) -> str:
    """How to act, in Markdown; the blocks run in the folder of the files."""
    texts = []
    if "onnx" in formats:
        texts += [
            f"`{onnx.FILE}` acts by itself, with any number of rows (pip install onnxruntime):",
            f"```python\n{_onnx_block(trained, function, env)}\n```",
        ]
    if "torchscript" in formats:
        texts += [
            f"`{torchscript.FILE}` is the same function for torch, inputs and outputs in order:",
            f"```python\n{_torch_block(function)}\n```",
        ]
    if "safetensors" in formats:
        texts.append(
            f"`{safetensors.FILE}` holds weights and statistics; `{DESCRIPTION}` says what they"
            " are, how observations are processed, and what actions consist of."
        )
    if set(formats) & {"onnx", "torchscript"}:
        texts += [_table(function), _notes(function, env)]
    return "\n\n".join(text for text in texts if text)


def _onnx_block(trained: ExportedPolicy, function: ActFunction, env: EnvConfig) -> str:
    lines = ["import numpy as np", "import onnxruntime"]
    has_env = not (env.is_sim or env.is_multi_agent or env.last_action)
    if has_env:
        lines = ["import gymnasium", *lines, *_make_env(env)]
    state = [port for port in function.inputs if port.kind == "state"]
    lines += [
        f'policy = onnxruntime.InferenceSession("{onnx.FILE}")',
        "names = [output.name for output in policy.get_outputs()]",
    ]
    if state:
        zeros = [f'"{p.name}": np.zeros((1, {p.shape[0]}), np.float32)' for p in state]
        lines.append(f"state = {{{', '.join(zeros)}}}  # where an episode begins")
    inputs = [_fed(trained, port, env, has_env) for port in function.inputs if port.kind != "state"]
    feed = f"{{{', '.join(inputs)}{', **state' if state else ''}}}"
    step = [f"outputs = dict(zip(names, policy.run(None, {feed})))"]
    if state:
        kept = [f'"{port.name}": outputs["next_{port.name}"]' for port in state]
        step.append(f"state = {{{', '.join(kept)}}}")
    action = _action(trained.action_space, ())
    if not has_env:
        return "\n".join([*lines, *step, f"action = {action}", "print(action)"])
    step += [
        f"obs, reward, terminated, truncated, info = env.step({action})",
        "score, over = score + float(reward), terminated or truncated",
    ]
    begin = ["obs, info = env.reset(seed=1)", "score, over = 0.0, False", "while not over:"]
    return "\n".join([*lines, *begin, *(f"    {line}" for line in step), "print(score)"])


def _make_env(env: EnvConfig) -> list[str]:
    lines = [f"import {env.import_module}"] if env.import_module else []
    settings = dict(env.kwargs)
    if env.max_episode_steps is not None:
        settings["max_episode_steps"] = env.max_episode_steps
    if not env.is_atari:
        return [*lines, f"env = gymnasium.make({_arguments(env.id, settings)})"]
    settings |= {
        "frameskip": 1,
        "repeat_action_probability": env.repeat_action_probability,
        "full_action_space": env.full_action_space,
    }
    return [
        "import ale_py",
        *lines,
        "gymnasium.register_envs(ale_py)",
        f"env = gymnasium.make({_arguments(env.id, settings)})",
        "env = gymnasium.wrappers.AtariPreprocessing(",
        f"    env, noop_max={env.noop_max}, frame_skip={env.frame_skip},"
        f" screen_size={env.frame_size}",
        ")",
        f"env = gymnasium.wrappers.FrameStackObservation(env, {env.frame_stack})",
    ]


def _arguments(env_id: str, settings: dict[str, Any]) -> str:
    words = [f'"{env_id}"', *(f"{key}={value!r}" for key, value in settings.items())]
    return ", ".join(words)


def _fed(trained: ExportedPolicy, port: Port, env: EnvConfig, has_env: bool) -> str:
    """One input of one row."""
    if not has_env:
        return f'"{port.name}": np.zeros({(1, *port.shape)}, "{port.dtype}")'
    space, value, path = trained.observation_space, "obs", port.path
    if env.action_mask == "info" and find_mask(space) is not None:
        if path == (MASK,):
            return f'"{port.name}": np.asarray(info["{MASK}"], "{port.dtype}").reshape(1, -1)'
        if set(space.spaces) == {OBS, MASK}:  # type: ignore[attr-defined]
            space, path = space[OBS], path[1:]  # type: ignore[index]
    for key in path:
        if isinstance(space, spaces.Tuple):
            value, space = f"{value}[{key}]", space[int(key)]
        else:
            value, space = f"{value}[{key!r}]", space[key]  # type: ignore[index]
    return f'"{port.name}": np.asarray({value}, "{port.dtype}")[None]'


def _action(space: Space[Any], path: tuple[str, ...]) -> str:
    if isinstance(space, spaces.Dict):
        inner = (f"{name!r}: {_action(part, (*path, name))}" for name, part in parts(space))
        return f"{{{', '.join(inner)}}}"
    if isinstance(space, spaces.Tuple):
        return f"({''.join(f'{_action(part, (*path, name))}, ' for name, part in parts(space))})"
    return f'outputs["{"/".join(("action", *path))}"][0]'


def _torch_block(function: ActFunction) -> str:
    inputs = ", ".join(
        f"torch.zeros({(1, *port.shape)}, dtype=torch.{port.dtype})" for port in function.inputs
    )
    return "\n".join(
        [
            "import torch",
            f'policy = torch.jit.load("{torchscript.FILE}")',
            f"action, *others = policy({inputs})",
        ]
    )


def _table(function: ActFunction) -> str:
    lines = ["| | name | shape | type | kind |", "|---|---|---|---|---|"]
    for role, ports in (("input", function.inputs), ("output", function.outputs)):
        for port in ports:
            shape = ", ".join(["batch", *map(str, port.shape)])
            lines.append(f"| {role} | `{port.name}` | {shape} | {port.dtype} | {port.kind} |")
    return "\n".join(lines)


def _notes(function: ActFunction, env: EnvConfig) -> str:
    kinds = {port.kind for port in function.inputs}
    notes = [
        "Observations are given as the environment makes them; what normalises them is part of the"
        " function. Actions are the likeliest ones, within their bounds; `logits` are normalised."
    ]
    if "state" in kinds:
        notes.append("State is zero where an episode begins, and `next_state` after each step.")
    if "mask" in kinds:
        notes.append("A mask is 0 where an option is not allowed, in the order of the action.")
    if env.last_action:
        notes.append(
            f"`{LAST_ACTION}` is the action before, counted from 0 and within its bounds; 0 where"
            " an episode begins."
        )
    return " ".join(notes)
