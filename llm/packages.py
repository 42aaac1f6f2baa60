"""Packages that are imported where they are needed, and what to do where one is missing."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from unirl.errors import UniRLError


@contextlib.contextmanager
def needs(package: str, what: str, extra: str = "llm") -> Iterator[None]:
    """Raise UniRLError where an import in its block fails. what: the thing that does not work.
    extra: of UniRL, which has the package.
    """
    try:
        yield
    except ImportError as error:
        raise UniRLError(
            what,
            f"the package {package} is not installed ({error})",
            f"pip install 'unirl[{extra}]'",
        ) from error
