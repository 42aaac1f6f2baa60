"""What Ray reads from the environment when it is imported."""

from __future__ import annotations

import os
import secrets

from unirl.runners.config import RayConfig


def prepare_environment(config: RayConfig) -> None:
    """A cluster of our own lets nobody in without a token: who reaches the ports of one that asks
    for none runs code on it. What users have set stays.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    # A learner in a long update is to notice that the head is gone, and to write its checkpoint,
    # before Ray ends this process.
    os.environ.setdefault("RAY_gcs_rpc_server_reconnect_timeout_s", "3600")
    if config.address:  # what answers there may be no head: Ray would ask it for 14 minutes
        os.environ.setdefault("RAY_gcs_server_port_wait_time_s", "1")
        os.environ.setdefault("RAY_py_gcs_connect_timeout_s", "5")
    if not config.address and "RAY_AUTH_MODE" not in os.environ:
        os.environ["RAY_AUTH_MODE"] = "token"
    is_locked = os.environ.get("RAY_AUTH_MODE") == "token"
    if not config.address and is_locked and "RAY_AUTH_TOKEN_PATH" not in os.environ:
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
