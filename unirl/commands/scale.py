"""`unirl scale RUN POOL N`: more or fewer members while a run trains; auto: as many as it needs."""

from __future__ import annotations

from collections.abc import Sequence

from unirl.commands import run_folder
from unirl.errors import UniRLError
from unirl.storage import run_lock

_SECONDS = 60.0


def scale(arguments: Sequence[str]) -> int:
    """Tell the run in this folder, and wait until it did."""
    words = [each for each in arguments if not each.startswith("--")]
    is_sound = len(words) == 3 and (words[2].isdigit() or words[2] == "auto")
    if not is_sound or len(words) < len(arguments):
        raise UniRLError(
            f"unirl scale {' '.join(arguments)}",
            "it takes a run, a pool and how many members the pool is to have, or auto",
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

    size = None if words[2] == "auto" else int(words[2])
    ask(run_dir, words[1], size, _SECONDS)
    number = "as many members as are of use" if size is None else f"{size} members"
    print(f"pool {words[1]} of {run_dir} has {number} from now on")
    return 0
