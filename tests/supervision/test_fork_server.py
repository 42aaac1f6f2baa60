"""What actors import late may be loaded once for all of them, wherever it was found."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import sys
from unirl.supervision.fork_server import process_context

def child():
    sys.exit(7 if "xml.dom.minidom" in sys.modules else 8)

if __name__ == "__main__":
    assert "xml.dom.minidom" not in sys.modules
    context = process_context(1, ["__main__"], preload=sys.argv[1:])
    process = context.Process(target=child)
    process.start()
    process.join(60)
    sys.exit(process.exitcode)
"""


def test_a_module_to_preload_is_there_in_every_process(tmp_path: Path) -> None:
    # In a process of its own: a fork server that runs already loads nothing more.
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    for preload, code in ((["xml.dom.minidom"], 7), ([], 8)):
        done = subprocess.run(
            [sys.executable, str(script), *preload], capture_output=True, text=True, timeout=120
        )
        assert done.returncode == code, done.stderr


PATH_ONLY = """
import sys
sys.path[:] = {path!r}
from unirl.supervision.fork_server import process_context

def child():
    sys.exit(7 if "late" in sys.modules else 8)

if __name__ == "__main__":
    context = process_context(1, preload=["late"])
    process = context.Process(target=child)
    process.start()
    process.join(60)
    sys.exit(process.exitcode)
"""


def test_what_only_sys_path_names_is_preloaded_too(tmp_path: Path) -> None:
    (tmp_path / "late.py").write_text("")
    script = tmp_path / "script.py"
    script.write_text(PATH_ONLY.format(path=[*sys.path, str(tmp_path)]))
    # Elsewhere than the module: the server searches the folder that it was started in.
    done = subprocess.run(
        [sys.executable, "-S", str(script)], capture_output=True, text=True, timeout=120, cwd="/"
    )
    assert done.returncode == 7, done.stderr


TRAIN = """
import os, sys
sys.path[:] = {path!r}
if {early}:
    import multiprocessing
    from multiprocessing import forkserver
    multiprocessing.set_forkserver_preload([])
    forkserver.ensure_running()  # of the program's own: it knows nothing of UniRL
before = dict(os.environ)
import unirl
from unirl.runners.processes import ProcessesRunner

class Few:
    def after_update(self, loop):
        if loop.learner.version == 3:
            loop.stop("test")

    def at_end(self, loop):
        pass

if __name__ == "__main__":
    runner = ProcessesRunner(unirl.make_plan("impala", **{{
        "env.id": "CartPole-v1", "actor.num_envs": 2, "actor.num_actors": 1,
        "actor.unroll_length": 4, "policy.hidden": (8,), "runner.kind": "processes",
        "runner.max_restarts": 0,
    }}))
    runner.run([Few()])
    assert runner.loop.reason == "test"
    assert os.environ.get("PYTHONPATH") == before.get("PYTHONPATH")
"""


@pytest.mark.parametrize("early", [False, True], ids=["our server", "a server from before"])
def test_actors_run_where_unirl_is_found_by_sys_path_alone(tmp_path: Path, early: bool) -> None:
    script = tmp_path / "train.py"
    script.write_text(TRAIN.format(path=sys.path, early=early))
    done = subprocess.run(
        [sys.executable, "-S", str(script)], capture_output=True, text=True, timeout=300, cwd="/"
    )
    assert done.returncode == 0, done.stderr
