"""Five packages are folders at the root, linked into unirl/, mapped into the wheel: they agree."""

from __future__ import annotations

import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path, PurePosixPath

import pytest

ROOT = Path(__file__).resolve().parents[1]
SETUPTOOLS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
PACKAGES: list[str] = SETUPTOOLS["packages"]
PACKAGE_DIR: dict[str, str] = SETUPTOOLS["package-dir"]
DATA_PACKAGES = {"unirl.configs"}
"""Folders of data alone: listed as packages so that their files travel."""


def repository_files() -> list[PurePosixPath]:
    """What git tracks or would track: new files count before they are committed, ignored never."""
    # A checkout of another user (a container's, say) is read all the same.
    command = ["git", "-c", "safe.directory=*", "ls-files", "-z", "-co", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    if listed.returncode != 0:
        pytest.skip(f"not a git checkout: {listed.stderr.strip()}")
    names = [name for name in listed.stdout.split("\0") if name]
    return [PurePosixPath(name) for name in names if (ROOT / name).exists()]


def package_of(folder: PurePosixPath) -> str | None:
    """The import name of a folder given by its real path; None outside the package."""
    by_folder = {real: package for package, real in PACKAGE_DIR.items()}
    for parent in (folder, *folder.parents):
        if str(parent) in by_folder:
            return ".".join((by_folder[str(parent)], *folder.relative_to(parent).parts))
    return ".".join(folder.parts) if folder.parts[:1] == ("unirl",) else None


def expected_modules() -> set[str]:
    """Paths inside the wheel of every module that git knows."""
    modules = set()
    for file in repository_files():
        package = package_of(file.parent) if file.suffix == ".py" else None
        if package is not None:
            modules.add("/".join((*package.split("."), file.name)))
    return modules


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy of what git knows: leftovers of earlier builds hide no missing file."""
    source, built = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for file in repository_files():
        target = source / file
        target.parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / file).is_symlink():
            target.symlink_to((ROOT / file).readlink())
        else:
            target.write_bytes((ROOT / file).read_bytes())
    options = ["--quiet", "--no-build-isolation", "--no-deps", "--no-index"]
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        *options,
        "--wheel-dir",
        str(built),
        str(source),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = built.glob("*.whl")
    return path


def test_every_folder_with_modules_is_a_listed_package() -> None:
    folders = {file.parent for file in repository_files() if file.suffix == ".py"}
    found = {package for folder in folders if (package := package_of(folder)) is not None}
    assert found | DATA_PACKAGES == set(PACKAGES)
    for package in found:
        folder = ROOT / PACKAGE_DIR.get(package, package.replace(".", "/"))
        assert (folder / "__init__.py").is_file(), f"{folder} holds modules but no __init__.py"


def test_every_link_points_to_the_folder_that_the_wheel_maps() -> None:
    links = {f"unirl.{path.name}": path for path in (ROOT / "unirl").iterdir() if path.is_symlink()}
    assert links.keys() == PACKAGE_DIR.keys()
    for package, link in links.items():
        # Relative, or a clone elsewhere would read somebody else's files.
        assert str(link.readlink()) == f"../{PACKAGE_DIR[package]}"
        assert (ROOT / PACKAGE_DIR[package]).is_dir() and not (
            ROOT / PACKAGE_DIR[package]
        ).is_symlink()


def test_the_wheel_has_one_top_level_and_every_module_of_the_repository(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.split("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"unirl"}
    assert {name for name in names if name.endswith(".py")} == expected_modules()


def test_the_wheel_carries_the_configs_the_license_and_the_type_marker(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    configs = {f"unirl/configs/{f.name}" for f in repository_files() if f.match("configs/*.toml")}
    assert configs, "no config is shipped"
    assert configs <= names
    assert "unirl/py.typed" in names
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_the_wheel_carries_the_built_page_and_none_of_its_sources(wheel: Path) -> None:
    names = {name for name in zipfile.ZipFile(wheel).namelist() if name.startswith("unirl/view/")}
    built = {f"unirl/view/assets/{path.name}" for path in (ROOT / "unirl/view/assets").iterdir()}
    assert {"unirl/view/assets/index.html", "unirl/view/assets/LICENSES.txt"} <= built <= names
    assert not any(name.startswith("unirl/view/app/") for name in names)


def test_an_installed_wheel_imports_its_own_packages(wheel: Path, tmp_path: Path) -> None:
    site = tmp_path / "site"
    options = ["--quiet", "--no-deps", "--no-index", "--target", str(site)]
    install = [sys.executable, "-m", "pip", "install", *options, str(wheel)]
    subprocess.run(install, check=True, capture_output=True, timeout=120)
    names = [package for package in PACKAGES if package not in DATA_PACKAGES]
    # From another folder and with the target first: neither checkout nor editable install answers.
    code = (
        f"import importlib, sys; sys.path.insert(0, {str(site)!r})\n"
        "for name in sys.argv[1:]: print(importlib.import_module(name).__file__)"
    )
    found = subprocess.run(
        [sys.executable, "-c", code, *names],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert found.returncode == 0, found.stderr
    files = found.stdout.split()
    assert len(files) == len(names)
    assert all(Path(file).is_relative_to(site) for file in files), files
