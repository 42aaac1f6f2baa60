"""Bodies as objects of an S3 bucket: obstore. The database keeps their keys and sizes."""

from __future__ import annotations

import datetime
import time
from collections.abc import Iterator
from typing import Any, cast

from unirl.errors import UniRLError
from unirl.llm.trajectories.databases.database import SECONDS, StoreFailed

ORPHAN_SECONDS = 3600.0
"""Age at which an object without a row is one that a dead process left."""


class Bucket:
    def __init__(self, url: str, seconds: float = SECONDS, *, check: bool = True) -> None:
        """Of a service other than Amazon's AWS_ENDPOINT_URL is the address. seconds: for a request.
        check: whether it can be reached.
        """
        try:
            import obstore
            from obstore import exceptions
            from obstore.store import from_url
        except ImportError as error:
            raise UniRLError(
                "trajectories cannot be kept in a bucket",
                f"the package obstore is not installed ({error})",
                "pip install 'unirl[s3]'",
            ) from error
        self._obstore, make = obstore, cast(Any, from_url)  # its types have a case for each cloud
        self._exists = exceptions.AlreadyExistsError
        self._url = url
        try:
            self._store = make(
                url,
                client_options={"timeout": f"{seconds:.0f}s", "allow_http": True},
                retry_config={"max_retries": 2, "retry_timeout": datetime.timedelta(0, seconds)},
            )
            if check:
                next(iter(self._obstore.list(self._store, chunk_size=1)), None)
        except Exception as error:  # the package raises types of each cloud
            raise UniRLError(
                f"the bucket {url} cannot be used for trajectories",
                f"it says: {_first_line(error)}",
                "check its name, AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and AWS_ENDPOINT_URL",
            ) from error

    def put(self, key: str, data: bytes) -> None:
        """Write it, unless it is there: the key says what is in it."""
        try:
            self._obstore.put(self._store, key, data, mode="create")
        except self._exists:
            pass
        except Exception as error:
            raise self._failed(error) from error

    def read(self, key: str, begin: int, size: int) -> bytes:
        try:
            return bytes(self._obstore.get_range(self._store, key, start=begin, length=size))
        except Exception as error:
            raise self._failed(error) from error

    def delete(self, keys: list[str]) -> None:
        """Those that are not there any more are passed over."""
        try:
            if keys:
                self._obstore.delete(self._store, keys)
        except FileNotFoundError:
            pass
        except Exception as error:
            raise self._failed(error) from error

    def older_than(self, prefix: str, seconds: float = ORPHAN_SECONDS) -> Iterator[list[str]]:
        """Keys below `prefix` of objects of at least this age, some hundred at a time."""
        before = time.time() - seconds
        try:
            for chunk in self._obstore.list(self._store, prefix, chunk_size=500):
                yield [
                    each["path"] for each in chunk if each["last_modified"].timestamp() <= before
                ]
        except Exception as error:
            raise self._failed(error) from error

    def _failed(self, error: Exception) -> StoreFailed:
        return StoreFailed(
            f"the bucket {self._url} could not be written or read",
            f"it says: {_first_line(error)}",
            "check that it can be reached",
        )


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:300]


def key_part(text: str) -> str:
    """A name as part of a key: no slashes, nothing that a URL would need to escape."""
    return "".join(c if c.isascii() and (c.isalnum() or c in "-_.") else "_" for c in text) or "_"
