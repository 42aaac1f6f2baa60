"""What an engine behind a server says when the server refuses."""

from __future__ import annotations

from collections.abc import Sequence

from unirl.errors import UniRLError
from unirl.llm.engine import EngineFailed
from unirl.llm.http import BadStatus


def refusal(
    error: BadStatus, url: str, *, model: str, key_variable: str
) -> UniRLError | EngineFailed:
    """UniRLError for what no repetition fixes, else EngineFailed."""
    if error.status in (401, 403):
        return UniRLError(
            f"{url} asks for a key (status {error.status})",
            f"the one in {key_variable} is refused" if key_variable else "none was sent",
            "set engine.api_key_variable to the name of the variable that holds it",
        )
    if error.status == 404 and "model" in error.body.lower():
        return unknown_model(url, model, [])
    if error.status >= 500 or error.status in (408, 429):
        return EngineFailed(
            f"{url} failed (status {error.status})",
            error.body or "it gives no reason",
            "look at the server's log",
        )
    return UniRLError(
        f"{url} refuses a request (status {error.status})",
        error.body or "it gives no reason",
        "change what it names",
    )


def unknown_model(url: str, model: str, names: Sequence[str]) -> UniRLError:
    """names: what it serves, as far as it says."""
    return UniRLError(
        f"{url} does not serve {model}",
        f"it serves {', '.join(names)}" if names else "it does not know the model",
        "set model.path, or engine.options.served_model_name, to one of its names",
    )


def no_token_ids(url: str) -> UniRLError:
    return UniRLError(
        f"{url} returns no token ids",
        "completions must have token_ids when return_token_ids is true: text cannot be turned "
        "back into the tokens that were drawn",
        "use a server that returns them: vLLM, or SGLang",
    )


def no_log_probabilities(url: str, num_tokens: int, num_logp: int) -> UniRLError:
    return UniRLError(
        f"{url} returns no log-probabilities",
        f"{num_tokens} tokens came with {num_logp} of them",
        "use a server that returns them for logprobs = 0, such as vLLM or SGLang",
    )


def no_prompt_log_probabilities(url: str) -> UniRLError:
    return UniRLError(
        f"{url} gives no log-probabilities of a prompt",
        "without them its weights cannot be compared with the learner's",
        "use a server that has echo with logprobs, such as vLLM or SGLang",
    )


def other_distribution(url: str, rule: str) -> UniRLError:
    return UniRLError(
        f"{url} returns log-probabilities of another distribution",
        rule,
        "start vLLM with --logprobs-mode processed_logprobs, or set temperature and top_p to 1 "
        "and top_k to 0",
    )


def takes_no_weights(url: str, *, needed: bool) -> UniRLError:
    """needed: engine vllm was asked for, not a server as it is."""
    return UniRLError(
        f"{url} takes no new weights",
        "engine vllm needs vLLM's development endpoints and UniRL's worker extension"
        if needed
        else "only vLLM with VLLM_SERVER_DEV_MODE=1, SGLang and engine hf have endpoints for that",
        "start it with python -m unirl.llm.engines.vllm.server, or unirl serve --tokens, "
        "or use it where weights stay as they are",
    )
