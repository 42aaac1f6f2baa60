"""The Python that programs in sandboxes are run by, and the paths that it needs to be there."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from typing import NamedTuple

from unirl.errors import UniRLError

_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32",
           "/etc/ld.so.cache", "/etc/alternatives")  # fmt: skip
_ASK = """\
import json, sys
print(json.dumps([sys.executable, [sys.prefix, sys.base_prefix, sys.exec_prefix], sys.path[1:]]))
"""
_SECONDS = 60.0


class Interpreter(NamedTuple):
    program: str
    binds: list[str]
    """Paths of this machine that can be read in a sandbox."""
    paths: list[str]
    """sys.path, for what is imported ahead."""


@functools.lru_cache
def interpreter(python: str = "") -> Interpreter:
    """Of this program ("": the one that runs this). Raises UniRLError when it is none."""
    if not python or python == sys.executable:
        program, paths = sys.executable, sys.path[1:]
        prefixes = [sys.prefix, sys.base_prefix, sys.exec_prefix]
    else:
        try:
            asked = subprocess.run(
                [python, "-c", _ASK], capture_output=True, timeout=_SECONDS, check=True, cwd="/"
            )
            program, prefixes, paths = json.loads(asked.stdout)
        except (OSError, subprocess.SubprocessError, ValueError) as error:
            raise UniRLError(
                f'sandbox.python is "{python}", which is no Python', str(error), "name another one"
            ) from None
    prefixes = [os.path.realpath(each) for each in prefixes] + prefixes
    binds = [path for path in _SYSTEM if os.path.lexists(path)]
    for prefix in dict.fromkeys(prefixes):
        if not any(prefix == each or prefix.startswith(f"{each}/") for each in binds):
            binds.append(prefix)
    # Only what is in there can be imported in a sandbox too.
    paths = [path for path in paths if any(path.startswith(f"{each}/") for each in binds)]
    return Interpreter(program, binds, paths)
