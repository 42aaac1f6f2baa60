"""What is said of files that cannot be written."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from unirl.errors import UniRLError
from unirl.storage.disk import explained


@pytest.mark.parametrize("number", [errno.EROFS, errno.EACCES, errno.EPERM])
def test_a_file_that_may_not_be_written_is_named(number: int, tmp_path: Path) -> None:
    said = pytest.raises(UniRLError, match=r"plot\.png cannot be read or written")
    with said as caught, explained(tmp_path, "free some space"):
        raise OSError(number, os.strerror(number), str(tmp_path / "plot.png"))
    assert os.strerror(number) in caught.value.parts[1]
    assert "permissions" in caught.value.parts[2]


def test_a_name_that_is_too_long_is_shortened(tmp_path: Path) -> None:
    said = pytest.raises(UniRLError, match=r"\.\.\.a+ cannot be read or written")
    with said as caught, explained(tmp_path, "free some space"):
        (tmp_path / ("a" * 300)).touch()
    assert len(caught.value.parts[0]) < 200


def test_other_errors_pass(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError), explained(tmp_path, "free some space"):
        (tmp_path / "no" / "file").touch()
