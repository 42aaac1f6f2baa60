"""`unirl scale RUN POOL N`: more or fewer members while a run trains."""

from __future__ import annotations

from collections.abc import Sequence

from unirl.commands import run_folder
from unirl.errors import UniRLError
from unirl.storage import run_lock

_SECONDS = 60.0


def scale(arguments: Sequence[str]) -> int:
    """Tell the run in this folder, and wait until it did."""
    words = [each for each in arguments if not each.startswith("--")]
    if len(words) != 3 or len(words) < len(arguments) or not words[2].isdigit():
        raise UniRLError(
            f"unirl scale {' '.join(arguments)}",
            "it takes a run, a pool and how many members the pool is to have",
            "unirl scale runs/pong actor 6",
        )
    run_dir = run_folder.folder_of(run_folder.find(words[0]))
    if not (run_dir / run_lock.NAME).exists():
        raise UniRLError(
            f"no run trains in {run_dir}",
            "what has ended cannot be given more members",
            f"unirl resume {run_dir}",
        )
    from unirl.launch.scaling import ask

    ask(run_dir, words[1], int(words[2]), _SECONDS)
    print(f"pool {words[1]} of {run_dir} has {words[2]} members from now on")
    return 0
