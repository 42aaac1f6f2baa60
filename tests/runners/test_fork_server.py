"""What actors import late may be loaded once for all of them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SCRIPT = """
import sys
from unirl.runners.fork_server import process_context

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
