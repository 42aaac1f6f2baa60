"""What a rank is on a node of a cluster: one call that lasts as long as it learns."""

from __future__ import annotations

import pickle
import shutil
import socket
from pathlib import Path

from unirl.errors import QueueClosed, UniRLError
from unirl.runners.cluster.actor import NodeNeeds
from unirl.runners.cluster.shipping import Parcel, arrive


class RankActor:
    """search_path, folder: where the driver finds modules. parcel: what of them may be missing."""

    def __init__(
        self, search_path: list[str], folder: str, needs: NodeNeeds, parcel: Parcel | None
    ) -> None:
        self._unpacked: Path | None = None
        self._error: UniRLError | None = None
        try:
            needs.check(socket.gethostname())
        except UniRLError as error:
            self._error = error  # raised here it would be Ray's own error, with a trace
            return
        self._unpacked = arrive(search_path, folder, parcel)

    def follow(self, work: bytes) -> None:
        """Until the first rank lets it end, or is gone. work: a function of the driver, which came
        by Ray's own connection.
        """
        if self._error is not None:
            raise self._error
        try:
            pickle.loads(work)()
        except QueueClosed:
            pass  # the first rank has ended
        finally:
            if self._unpacked is not None:
                shutil.rmtree(self._unpacked, ignore_errors=True)
