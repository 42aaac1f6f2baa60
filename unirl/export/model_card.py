"""What the hub reads at the head of a README.md; source:
https://huggingface.co/docs/hub/model-cards.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


def front_matter(name: str, config: Mapping[str, Any], result: Mapping[str, Any] | None) -> str:
    """YAML between two lines of dashes. config: tables of config.toml; result: an evaluation's.

    Values are JSON, which YAML reads: no text of a config can become another key.
    """
    recipe = str(config.get("recipe", ""))
    about: dict[str, Any] = {"library_name": "unirl"}
    model = config.get("model")
    if isinstance(model, Mapping):
        about |= {"pipeline_tag": "text-generation", "library_name": "transformers"}
        base = str(model.get("path", ""))
        if _HUB_ID.fullmatch(base) and not base.startswith((".", "models/")):
            about["base_model"] = base
    else:
        about["pipeline_tag"] = "reinforcement-learning"
    env = config.get("env")
    env_id = str(env.get("id", "")) if isinstance(env, Mapping) else ""
    tags = ["unirl", "reinforcement-learning", recipe, env_id]
    about["tags"] = [tag for tag in tags if tag]
    if result is not None and env_id:
        value = f"{result['return_mean']:.2f} +/- {result.get('return_std', 0.0):.2f}"
        task = {"type": "reinforcement-learning", "name": "reinforcement-learning"}
        metric = {"type": "mean_reward", "name": "mean_reward", "value": value, "verified": False}
        dataset = {"name": env_id, "type": env_id}
        results = [{"task": task, "dataset": dataset, "metrics": [metric]}]
        about["model-index"] = [{"name": name, "results": results}]
    lines = [f"{key}: {json.dumps(value)}" for key, value in about.items()]
    return "\n".join(["---", *lines, "---"]) + "\n"
