# mypy: ignore-errors
"""What runs in another interpreter, for packages that cannot share ours: one JSON line in, one out.

It imports nothing of ours and works with every Python from 3.9 on. Run by its path:

    PYTHON bridge_script.py skyrl NAME KEYWORDS      an environment of skyrl-gym
    PYTHON bridge_script.py verifiers NAME KEYWORDS  a taskset of verifiers

Requests: {"do": "reset", "task": ..., "seed": ...}, {"do": "step", "text": ...}, {"do": "tasks",
"split": ...}, {"do": "score", ...}. Answers: what was asked for, or {"error": ..., "where": ...}.
Whatever the package prints goes to standard error.
"""

import asyncio
import inspect
import json
import os
import sys
import traceback

MOST_TASKS = 4096
"""Of a taskset that never ends."""


class SkyRL:
    def __init__(self, name, keywords):
        import skyrl_gym

        self.make, self.name = skyrl_gym.make, name
        self.config = keywords.pop("env_config", {})
        self.keywords, self.env = keywords, None
        if name not in skyrl_gym.envs.registration.registry:
            known = ", ".join(sorted(skyrl_gym.envs.registration.registry))
            raise SystemExit(f"skyrl-gym has no environment {name}; there are: {known}")

    def reset(self, task, seed):
        self.close()
        info = dict(task.get("info") or {})
        extras = dict(info.get("extras") or info)
        if "reward_model" not in extras and "reward_spec" not in extras:
            truth = {"method": "rule", "ground_truth": task.get("answer", "")}
            extras["reward_model"] = extras["reward_spec"] = truth
        config = AttributeDict(self.config)
        self.env = self.make(self.name, env_config=config, extras=extras, **self.keywords)
        prompt = [dict(each) for each in task.get("messages") or ()]
        begun, about = self.env.init(prompt)
        # What it puts behind the prompt; a prompt that it writes itself replaces ours.
        is_longer = list(begun[: len(prompt)]) == prompt
        return {"messages": begun[len(prompt) :] if is_longer else begun, "info": about}

    def step(self, text):
        out = self.env.step(text)
        return {
            "messages": out["observations"],
            "reward": float(out["reward"]),
            "done": bool(out["done"]),
            "info": out.get("metadata") or {},
        }

    def close(self):
        env, self.env = self.env, None
        if env is not None:
            env.close()


class AttributeDict(dict):
    """What skyrl-gym takes as its config: keys that are attributes as well."""

    def __getattr__(self, name):
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


class Verifiers:
    """A taskset of verifiers, version 1 of its interface: its tasks, and the rewards that they give
    a trace of what the model said. Tools, simulated users and boxes are those of its own harnesses.
    """

    def __init__(self, name, keywords):
        import verifiers.v1 as vf
        from verifiers.v1.graph import MessageNode
        from verifiers.v1.state import state_cls
        from verifiers.v1.trace import TraceTask
        from verifiers.v1.types import AssistantMessage, SystemMessage, UserMessage
        from verifiers.v1.utils import loaders

        self.vf, self.node, self.state_of, self.trace_task = vf, MessageNode, state_cls, TraceTask
        self.roles = {"assistant": AssistantMessage, "system": SystemMessage, "user": UserMessage}
        config = loaders.taskset_config_type(name)(id=name, **keywords)
        found = loaders.load_taskset(config)
        self.all_tasks = list(found if found.bounded else found.take(MOST_TASKS))
        own = type(found).toolsets.__func__
        needs = own is not vf.Taskset.toolsets.__func__ and "tools"
        for task in self.all_tasks[:1]:
            needs = needs or self.needs_of(task)
        if needs:
            raise SystemExit(
                f"taskset {name} needs {needs}, which its own harnesses bring: let them drive, "
                "with agent.command"
            )
        self.loop, self.trace, self.task = asyncio.new_event_loop(), None, None

    def needs_of(self, task):
        kind, base = type(task), self.vf.Task
        if kind.NEEDS_CONTAINER:
            return "a container"
        if kind.toolsets.__func__ is not base.toolsets.__func__:
            return "tools"
        hooks = [*task.hooks("reward"), *task.hooks("metric")]
        named = [inspect.signature(each).parameters.get("runtime") for each in hooks]
        is_run = any(each is not None and each.default is each.empty for each in named)
        if is_run or kind.setup is not base.setup or kind.finalize is not base.finalize:
            return "a runtime"
        return "" if task.data.prompt else "a user who begins"

    def tasks(self, split):
        """One in ten is held out."""
        chosen = enumerate(self.all_tasks)
        rows = [i for i, _ in chosen if (i % 10 == 9) == (split == "held_out")]
        return {"tasks": [{"prompt": self.prompt(i), "index": i} for i in rows]}

    def prompt(self, index):
        data = self.all_tasks[index].data
        begun = [{"role": "system", "content": data.system_prompt}] if data.system_prompt else []
        if isinstance(data.prompt, str):
            return [*begun, {"role": "user", "content": data.prompt}]
        return begun + [plain(each.model_dump(exclude_none=True)) for each in data.prompt]

    def reset(self, task, seed):
        index = dict(task.get("info") or {})["verifiers"]["index"]
        self.task = own = self.all_tasks[index]
        about = self.trace_task(type=type(own).__name__, data=own.data, key=own.key, hash=own.hash)
        self.trace = self.vf.Trace(
            task=about,
            state=self.state_of(type(own))(),
            agent=self.vf.AgentInfo(config=self.vf.AgentConfig()),
        )
        for each in self.prompt(index):
            self.say(each, False)
        return {"messages": [], "info": {}}

    def say(self, message, sampled):
        nodes = self.trace.nodes
        said = self.roles[message["role"]](**message)
        parent = len(nodes) - 1 if nodes else None
        nodes.append(self.node(parent=parent, message=said, sampled=sampled))

    def step(self, text):
        self.say({"role": "assistant", "content": text}, True)
        self.loop.run_until_complete(self.task.score(self.trace))
        scores = {name: each and each.score for name, each in self.trace.rewards.items()}
        if not scores or None in scores.values():
            raise ValueError(f"not all rewards were given: {scores}")
        about = {"rewards": scores, "metrics": plain(self.trace.metrics)}
        return {"messages": [], "reward": float(self.trace.reward), "done": True, "info": about}

    def close(self):
        self.trace = self.task = None


def plain(value):
    return json.loads(json.dumps(value, default=str))


def main():
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    kind, name, keywords = sys.argv[1:4]
    try:
        env = {"skyrl": SkyRL, "verifiers": Verifiers}[kind](name, json.loads(keywords))
        answer = {"ready": True}
    except BaseException as error:
        answer = failure(error)
        env = None
    print(json.dumps(answer), file=out, flush=True)
    if env is None:
        return
    for line in sys.stdin:
        request = json.loads(line)
        do = request.pop("do")
        try:
            answer = getattr(env, do)(**request) or {}
        except BaseException as error:
            answer = failure(error)
        print(json.dumps(answer, default=str), file=out, flush=True)


def failure(error):
    frames = traceback.extract_tb(error.__traceback__)
    where = f"{frames[-1].filename}:{frames[-1].lineno}" if frames else ""
    return {"error": f"{type(error).__name__}: {error}", "where": where}


if __name__ == "__main__":
    main()
