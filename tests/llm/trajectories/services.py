"""A Postgres and a bucket for the tests of stores."""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


def program(name: str) -> str:
    found = [shutil.which(name), *map(str, Path("/usr/lib/postgresql").glob(f"*/bin/{name}"))]
    there = [each for each in found if each]
    if not there:
        pytest.skip(f"Postgres is not installed: there is no {name}")
    return max(there)


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with postgres() as url:
        yield url


@contextlib.contextmanager
def postgres() -> Iterator[str]:
    """The URL of a Postgres that nobody else uses. It refuses to be run as root."""
    pytest.importorskip("psycopg", reason="psycopg is not installed: pip install 'unirl[postgres]'")
    user = None
    if os.geteuid() == 0:
        known = {each.pw_name for each in pwd.getpwall()}
        user = next((name for name in ("postgres", "nobody") if name in known), None)
        if user is None:
            pytest.skip("Postgres does not run as root, and there is no other user")
    initdb, pg_ctl = program("initdb"), program("pg_ctl")
    # Another user cannot enter pytest's own folder.
    folder = Path(tempfile.mkdtemp(prefix="unirl-postgres-", dir="/var/tmp"))
    if user is not None:
        shutil.chown(folder, user)
    data, port = folder / "data", free_port()

    def run(*words: str) -> None:
        subprocess.run(words, user=user, check=True, timeout=120, capture_output=True, cwd=folder,
                       env={**os.environ, "HOME": str(folder)})  # fmt: skip

    run(initdb, "-D", str(data), "-A", "trust", "-U", "unirl", "-N")
    options = f"-p {port} -c listen_addresses=127.0.0.1 -k {folder} -F"
    log = str(folder / "log")
    try:
        run(pg_ctl, "-D", str(data), "-o", options, "-l", log, "-w", "start")
        yield f"postgresql://unirl@127.0.0.1:{port}/postgres"
    finally:
        with contextlib.suppress(subprocess.SubprocessError):  # it may not have started
            run(pg_ctl, "-D", str(data), "-m", "immediate", "stop")
        shutil.rmtree(folder)


@pytest.fixture(scope="module")
def bucket() -> Iterator[str]:
    moto = pytest.importorskip("moto.server", reason="moto is not installed: pip install moto[s3]")
    pytest.importorskip("obstore", reason="obstore is not installed: pip install 'unirl[s3]'")
    boto3 = pytest.importorskip("boto3")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (("ACCESS_KEY_ID", "x"), ("SECRET_ACCESS_KEY", "x"),
                            ("REGION", "us-east-1"), ("DEFAULT_REGION", "us-east-1")):  # fmt: skip
            patch.setenv(f"AWS_{name}", value)
        service = moto.ThreadedMotoServer("127.0.0.1", port=free_port(), verbose=False)
        service.start()
        host, port = service.get_host_and_port()
        patch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
        boto3.client("s3", endpoint_url=f"http://{host}:{port}").create_bucket(Bucket="bodies")
        yield "s3://bodies/episodes"
        service.stop()


def emptied(url: str) -> None:
    """No tables of an earlier test are in the database."""
    import psycopg

    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("DROP SCHEMA public CASCADE; CREATE SCHEMA public")
