"""A folder onto the Hugging Face hub, through its client; source:
https://huggingface.co/docs/huggingface_hub.

The client finds the token (HF_TOKEN, or the file that `hf auth login` writes) and the address
(HF_ENDPOINT). The token is neither shown nor stored here.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from unirl.errors import UniRLError


def check_access(repo_id: str) -> None:
    """Raise UniRLError where a push to this repository cannot succeed; the hub is not asked."""
    hub = _client()
    try:
        hub.utils.validate_repo_id(repo_id)
    except ValueError as error:
        raise UniRLError(
            f'"{repo_id}" is no name of a repository',
            str(error).splitlines()[0],
            "write it as USER/NAME, or as NAME for your own",
        ) from error
    if hub.get_token() is None:
        raise UniRLError(
            "nobody is logged in to the Hugging Face hub",
            f"writing to {repo_id} needs a token: HF_TOKEN, or the file that hf auth login writes",
            "hf auth login, with a token that may write",
        )


def push_folder(folder: Path, repo_id: str, *, private: bool, message: str) -> str:
    """Make the repository where it is missing and write the folder's files in one commit; returns
    its address. private: where it is made.
    """
    hub = _client()
    api = hub.HfApi()
    try:
        repo = api.create_repo(repo_id, private=private, exist_ok=True)
        files = sorted(path for path in folder.rglob("*") if path.is_file())
        operations = [
            hub.CommitOperationAdd(str(path.relative_to(folder)), str(path)) for path in files
        ]
        api.create_commit(repo.repo_id, operations, commit_message=message)
    except hub.errors.HfHubHTTPError as error:
        status = error.response.status_code if error.response is not None else 0
        raise UniRLError(
            f"{api.endpoint} refused {repo_id} ({status or type(error).__name__})",
            (error.server_message or str(error)).splitlines()[0],
            "check that the token may write there: hf auth whoami"
            if status in (401, 403)
            else "try again later",
        ) from error
    except (OSError, hub.errors.HTTPError) as error:  # the second is its HTTP library's
        raise UniRLError(
            f"{api.endpoint} cannot be reached ({type(error).__name__})",
            f"it is what HF_ENDPOINT says, or the hub's own address: {error}".splitlines()[0],
            "check the network and the address, and try again",
        ) from error
    return str(repo.url)


def _client() -> Any:
    try:
        import huggingface_hub
        import huggingface_hub.errors
        import huggingface_hub.utils  # it has both only once they were imported
    except ImportError as error:
        raise UniRLError(
            "the Hugging Face hub cannot be reached",
            "it is written to through package huggingface_hub, which is not installed",
            "pip install 'unirl[export]'",
        ) from error
    return huggingface_hub
