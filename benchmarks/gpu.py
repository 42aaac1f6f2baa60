"""Runs on a machine with a GPU that nobody has prepared and that reaches no network, and writes the
block `gpu` of RESULTS.md.

    make gpu                                       # all parts, without those that are done
    make gpu GPU_ARGS="--parts tests,sim"          # only these
    make gpu GPU_ARGS="--within 540" WHEELS=dir    # what fits in nine minutes; the rest next time
    make gpu GPU_ARGS="--again --parts pong"       # though it is done

What UniRL needs besides torch is taken from the machine's own Python, and from wheels that were
carried there (requirements/gpu.txt): they are installed into a virtual environment of this clone,
from the folder alone. A part whose packages are missing is left out by name. Results are kept in
--out: results.json, log.txt and block.md, rewritten after each part. Without a GPU nothing is run;
--cpu runs everything at tiny sizes, which shows that it works and measures nothing.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import shlex
import site
import subprocess
import sys
import venv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import measure
from gpu_parts import LIMIT_SECONDS, PARTS, Part

ROOT = Path(__file__).resolve().parents[1]
_PROBE = """
import importlib.util, json, sys
found = {"torch": None, "gpu": None, "memory_gib": 0}
try:
    import torch
    found["torch"] = torch.__version__
    if torch.cuda.is_available():
        about = torch.cuda.get_device_properties(0)
        found |= {"gpu": about.name, "memory_gib": round(about.total_memory / 2**30)}
except ImportError:
    pass
found["missing"] = [name for name in sys.argv[1:] if importlib.util.find_spec(name) is None]
print(json.dumps(found))
"""


def probe(python: str) -> dict[str, Any]:
    """What this interpreter finds: torch, a GPU, and which modules are missing."""
    modules = sorted({name for part in PARTS for name in part.needs})
    done = subprocess.run(
        [python, "-c", _PROBE, *modules], capture_output=True, text=True, timeout=120
    )
    if done.returncode:
        raise SystemExit(f"{python} cannot be asked what is installed:\n{done.stderr[-2000:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def make_environment(folder: Path, wheels: Path | None) -> tuple[Path, list[str]]:
    """A virtual environment that sees all that this interpreter sees, with these wheels on top; its
    interpreter, and the wheels that do not install here. torch itself is never replaced.
    """
    python = folder / "bin" / "python"
    chosen = sorted(wheels.glob("*.whl")) if wheels is not None and wheels.is_dir() else []
    chosen = [one for one in chosen if one.name.split("-")[0] != "torch"]
    stamp, names = folder / "wheels.json", [one.name for one in chosen]
    if python.exists() and stamp.exists():
        installed = json.loads(stamp.read_text())
        if installed["asked"] == names:
            return python, installed["refused"]
    # Without pip of its own: this interpreter's installs, and ensurepip is often missing.
    venv.create(folder, clear=True, symlinks=True, system_site_packages=True, with_pip=False)
    own = next((folder / "lib").glob("python*/site-packages"))
    # Of a virtual environment (torch is often in one) a second one sees nothing, only what is below
    # both. And the clone itself, which needs no building.
    seen = [
        *site.getsitepackages(),
        *([site.getusersitepackages()] if site.ENABLE_USER_SITE else []),
    ]
    lines = [str(ROOT), *(f"import site; site.addsitedir({path!r})" for path in seen)]
    (own / "unirl-gpu.pth").write_text("\n".join(lines) + "\n")
    refused = _install(python, chosen)
    stamp.write_text(json.dumps({"asked": names, "refused": refused}))
    return python, refused


def _install(python: Path, wheels: Sequence[Path]) -> list[str]:
    """Those that could not be installed. All in one go, else one by one."""
    if not wheels:
        return []
    command = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet"]
    command += ["--disable-pip-version-check", "--no-index", "--no-deps", "--no-compile"]
    # Indexes and constraints of a connected machine mean nothing here.
    environment = {**os.environ, "PIP_CONFIG_FILE": os.devnull}

    def fails(some: Sequence[Path]) -> bool:
        words = [*command, *map(str, some)]
        done = subprocess.run(words, env=environment, capture_output=True, text=True)
        if done.returncode and len(some) == 1:
            print(f"{some[0].name} is not installed: {done.stderr.strip()[-300:]}", flush=True)
        return done.returncode != 0

    return [one.name for one in wheels if fails([one])] if fails(wheels) else []


class Results:
    """What each part came to, kept in a folder."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self._file = folder, folder / "results.json"
        self.parts: dict[str, dict[str, Any]] = {}
        if self._file.exists():
            self.parts = json.loads(self._file.read_text())

    def is_done(self, part: Part, machine: str) -> bool:
        known = self.parts.get(part.name, {})
        return known.get("state") == "done" and known.get("machine") == machine

    def record(self, name: str, **outcome: Any) -> None:
        self.parts[name] = outcome
        aside = self._file.with_suffix(".tmp")
        aside.write_text(json.dumps(self.parts, indent=1))
        aside.replace(self._file)

    def log(self, text: str) -> None:
        with (self.folder / "log.txt").open("a") as file:
            file.write(text)


def run_part(part: Part, python: str, results: Results, machine: str, *, on_cpu: bool) -> None:
    """Run it within its limit and keep what it printed: a JSON object with rows, or anything."""
    print(f"{part.name}: {part.what} (at most {part.limit_seconds} s) ...", flush=True)
    words = [python, *part.words(on_cpu=on_cpu)]
    done = measure.run(words, timeout_seconds=part.limit_seconds, cwd=ROOT)
    seconds = round(done.wall_seconds)
    results.log(f"\n== {part.name}, {seconds} s\n{done.stdout}{done.stderr}")
    state = "done" if done.returncode == 0 else "failed"
    rows: list[list[str]] = []
    if done.timed_out:
        state, said = "timed out", f"after {part.limit_seconds} s"
    elif part.name == "tests":
        said = (done.stdout.strip().splitlines() or ["nothing"])[-1].strip("= ")
    else:
        try:
            rows, said = done.row["rows"], ""
        except (RuntimeError, KeyError):
            state, said = "failed", (done.stderr.strip().splitlines() or ["no output"])[-1]
    results.record(
        part.name,
        state=state,
        seconds=seconds,
        machine=machine,
        rows=rows,
        said=said[:300],
        date=datetime.datetime.now(datetime.UTC).date().isoformat(),
    )
    print(f"  {state} in {seconds} s{': ' + said if said else ''}", flush=True)
    for row in rows:
        print(f"  {' | '.join(row)}", flush=True)


def block(results: Results, missing: dict[str, list[str]]) -> str:
    """Everything that is known, as Markdown."""
    lines: list[list[object]] = []
    for part in PARTS:
        known = results.parts.get(part.name)
        if known is None:
            why = f"left out: {', '.join(missing[part.name])} missing" if missing[part.name] else ""
            lines.append([part.name, part.what, why or "not run yet"])
            continue
        rows = known["rows"] or [[known["said"] or known["state"]]]
        if known["state"] != "done":
            rows = [[f"{known['state']}: {known['said']}"]]
        for i, row in enumerate(rows):
            what = part.what if not i else ""
            lines.append([part.name if not i else "", what, ": ".join(map(str, row))])
    machines = sorted({one["machine"] for one in results.parts.values()})
    return f"{measure.table(['part', 'what', 'result'], lines)}\n\n{'; '.join(machines)}"


def chosen_parts(names: str) -> list[Part]:
    known = {part.name: part for part in PARTS}
    if not names:
        return list(PARTS)
    unknown = [name for name in names.split(",") if name not in known]
    if unknown:
        raise SystemExit(
            f"there is no part {', '.join(unknown)}. There are {', '.join(known)}. "
            "Try: --parts tests,sim"
        )
    return [known[name] for name in names.split(",")]


def describe(parts: Sequence[Part], *, on_cpu: bool) -> str:
    lines = []
    for part in parts:
        command = shlex.join(["python", *part.words(on_cpu=on_cpu)])
        needs = f"   (needs {', '.join(part.needs)})" if part.needs else ""
        lines.append(f"  {part.name:<12}{part.limit_seconds:>4} s  {command}{needs}")
    limit = sum(part.limit_seconds for part in parts)
    return "\n".join([f"{len(parts)} parts, at most {limit} s together:", *lines])


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--parts", default="", help=",".join(part.name for part in PARTS))
    parser.add_argument("--again", action="store_true", help="run also what is done")
    parser.add_argument("--within", type=float, default=LIMIT_SECONDS, help="seconds in all")
    parser.add_argument("--wheels", type=Path, help="folder of wheels to install")
    parser.add_argument("--venv", type=Path, default=ROOT / ".venv-gpu", help="where to")
    parser.add_argument("--bare", action="store_true", help="this Python as it is, no environment")
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "gpu", help="results")
    parser.add_argument("--results", type=Path, default=measure.RESULTS, help="file of the block")
    parser.add_argument("--cpu", action="store_true", help="at tiny sizes, without a GPU")
    parser.add_argument("--list", action="store_true", help="say what would run")
    flags = parser.parse_args(arguments)
    parts, begun = chosen_parts(flags.parts), datetime.datetime.now()
    found = probe(sys.executable)
    if flags.list or (found["gpu"] is None and not flags.cpu):
        if found["gpu"] is None:
            torch = f"torch {found['torch']}" if found["torch"] else "no torch"
            print(f"No GPU here ({torch} in {sys.executable}). On a machine with one it would run")
        print(describe(parts, on_cpu=flags.cpu))
        return 0
    python, refused = sys.executable, list[str]()
    if not flags.bare:
        environment, refused = make_environment(flags.venv, flags.wheels)
        python, found = str(environment), probe(str(environment))
    where = f"{found['gpu']}, {found['memory_gib']} GiB" if found["gpu"] else "tiny sizes, no GPU"
    machine = f"{where}, torch {found['torch']}"
    print(machine, *(f"not installed: {name}" for name in refused), sep="\n", flush=True)
    results = Results(flags.out)
    missing = {
        part.name: [name for name in part.needs if name in found["missing"]] for part in PARTS
    }
    for part in parts:
        left = flags.within - (datetime.datetime.now() - begun).total_seconds()
        if missing[part.name]:
            print(f"{part.name}: left out, {', '.join(missing[part.name])} missing")
        elif results.is_done(part, machine) and not flags.again:
            print(f"{part.name}: done already ({results.parts[part.name]['seconds']} s)")
        elif part.limit_seconds > left:
            print(f"{part.name}: left for the next time, {left:.0f} s are left")
        else:
            run_part(part, python, results, machine, on_cpu=flags.cpu)
    body = block(results, missing)
    (flags.out / "block.md").write_text(body + "\n")
    if found["gpu"] is not None or flags.results != measure.RESULTS:
        measure.write_block("gpu", body, results=flags.results)
    print(body)
    states = [results.parts.get(part.name, {}).get("state", "done") for part in parts]
    return int(any(state != "done" for state in states))


if __name__ == "__main__":
    measure.exit_on_terminate()
    sys.exit(main())
