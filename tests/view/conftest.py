"""Services that these tests share."""

from tests.llm.trajectories.services import bucket, server

__all__ = ["bucket", "server"]
