# mypy: ignore-errors
"""What runs in another interpreter, for packages that cannot share ours: one JSON line in, one out.

It imports nothing of ours and works with every Python from 3.9 on. Run by its path:

    PYTHON bridge_script.py skyrl NAME KEYWORDS      an environment of skyrl-gym
    PYTHON bridge_script.py verifiers NAME KEYWORDS  an environment of verifiers

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
    """An environment by its tasks and its rubric: the model's turns are driven here by messages."""

    def __init__(self, name, keywords):
        import verifiers

        self.vf = verifiers
        self.env = verifiers.load_environment(name, **keywords)
        self.loop = asyncio.new_event_loop()
        self.state = None

    def tasks(self, split):
        get = self.env.get_dataset if split == "train" else self.env.get_eval_dataset
        return {"tasks": [plain(row) for row in get()]}

    def reset(self, task, seed):
        info = dict(task.get("info") or {})
        row = dict(info.get("verifiers") or {})
        row.setdefault("prompt", [dict(each) for each in task.get("messages") or ()])
        row.setdefault("answer", task.get("answer", ""))
        self.state = {
            "prompt": row["prompt"],
            "completion": [],
            "answer": row["answer"],
            "task": row.get("task", "default"),
            "info": row.get("info") or {},
            "responses": [],
            "trajectory": [],
            "turn": 0,
            "input": row,
            "metrics": {},
            "reward": None,
            "timing": {"generation_ms": 0.0, "scoring_ms": 0.0, "total_ms": 0.0},
        }
        setup = getattr(self.env, "setup_state", None)
        if setup is not None:
            self.state = self.wait(setup(self.state)) or self.state
        return {"messages": [], "info": {}}

    def step(self, text):
        state = self.state
        state["completion"].append({"role": "assistant", "content": text})
        state["turn"] += 1
        answers = getattr(self.env, "env_response", None)
        is_single = isinstance(self.env, self.vf.SingleTurnEnv)
        messages = []
        if answers is not None and not is_single:
            answer = self.wait(answers(state["prompt"] + state["completion"], state))
            messages = list(answer[0] if isinstance(answer, tuple) else answer)
            state["completion"] += messages
        done = is_single or bool(state.get("final_env_response"))
        limit = getattr(self.env, "max_turns", -1)
        done = done or (isinstance(limit, int) and 0 < limit <= state["turn"])
        reward = None
        if done:
            self.wait(self.env.rubric.score_rollout(state))
            reward = float(state["reward"])
        about = {"metrics": state.get("metrics") or {}}
        return {"messages": messages, "reward": reward, "done": done, "info": about}

    def close(self):
        self.state = None

    def wait(self, found):
        return self.loop.run_until_complete(found) if inspect.isawaitable(found) else found


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
