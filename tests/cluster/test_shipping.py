"""What nodes get of the user's code: all that was imported and not installed, or a folder."""

from __future__ import annotations

import importlib
import os
import sys
import tempfile
from pathlib import Path

import pytest

from unirl.errors import UniRLError
from unirl.runners.cluster import shipping
from unirl.runners.cluster.shipping import pack


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "own"
    for name in ("shipped_package", "shipped_package/data", ".git", "runs/one"):
        (folder / name).mkdir(parents=True)
    for name in (
        "shipped_one.py", "shipped_not_imported.py", "shipped_package/__init__.py",
        "shipped_package/data/table.csv", ".git/HEAD", "runs/one/big.bin",
    ):  # fmt: skip
        (folder / name).write_text("NUMBER = 7\n")
    monkeypatch.syspath_prepend(str(folder))
    for name in ("shipped_one", "shipped_package"):
        importlib.import_module(name)
        monkeypatch.delitem(sys.modules, name)
        monkeypatch.setitem(sys.modules, name, importlib.import_module(name))
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return folder


def names(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def test_imported_modules_are_sent_as_a_whole_and_installed_ones_are_not(own: Path) -> None:
    parcel = pack("")
    assert parcel is not None and parcel.is_here()
    got = names(parcel.unpack())
    sent = {"shipped_one.py", "shipped_package/__init__.py", "shipped_package/data/table.csv"}
    assert sent <= got and "shipped_not_imported.py" not in got
    assert not any(name.startswith(("unirl/", "torch/", "numpy/", "pytest/")) for name in got)
    os.utime(own / "shipped_one.py", (1, 1))
    assert not parcel.is_here()


def test_a_folder_is_sent_with_its_data_but_without_runs(own: Path) -> None:
    parcel = pack(str(own))
    assert parcel is not None and parcel.is_working_dir
    folder = parcel.unpack()
    assert names(folder) == {
        "shipped_one.py", "shipped_not_imported.py", "shipped_package/__init__.py",
        "shipped_package/data/table.csv",
    }  # fmt: skip
    assert sys.path[0] == str(folder)


def test_what_is_no_folder_or_too_much_is_refused(
    own: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(UniRLError, match="there is none of this name"):
        pack(str(own / "none"))
    monkeypatch.setattr(shipping, "_MOST_BYTES", 20)
    with pytest.raises(UniRLError, match="the largest file is"):
        pack(str(own))
    assert pack("") is None and "Nothing is sent" in caplog.text
