"""A real S3 server for tests: a separate process, on a free port, with its own directory."""

from __future__ import annotations

import os
import secrets
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import boto3
import pytest

from tests.kit.once_per_run import after_run, once
from tests.kit.sockets import free_port

BUILD = Path(__file__).parents[2] / "deploy" / "s3-server.sh"
READY_SECONDS = 120.0
#: What boto3 reads, so that tests never use the account of the person who runs them.
ENVIRONMENT = {
    "AWS_ACCESS_KEY_ID": "vmjobs-tests",
    "AWS_SECRET_ACCESS_KEY": "the-same-in-all-processes-of-a-run",
    "AWS_SHARED_CREDENTIALS_FILE": "/dev/null",
    "AWS_CONFIG_FILE": "/dev/null",
    "AWS_EC2_METADATA_DISABLED": "true",
}
DIES_WITH_US = ("setpriv", "--pdeathsig", "KILL")
_UNWANTED = (
    "AWS_PROFILE",
    "AWS_SESSION_TOKEN",
    "AWS_ENDPOINT_URL",
    "AWS_ENDPOINT_URL_S3",
    "AWS_REGION",
)


class S3Server:
    """One server. ``data`` holds a directory for each bucket, and objects as files in it."""

    def __init__(self, root: Path, data: Path | None = None, port: int = 0) -> None:
        self._data = data or root / "data"
        self._meta = root / "meta"
        self._process: subprocess.Popen[bytes] | None = None
        self._port = port or free_port()
        self.endpoint = f"http://127.0.0.1:{self._port}"

    def start(self, *bound: str) -> int:
        """Start the server and wait until it answers; returns its process id.

        bound: a program to start it with.
        """
        assert self._process is None
        made = subprocess.run([BUILD], stdout=subprocess.PIPE, check=True, text=True)
        for folder in (self._data, self._meta):
            folder.mkdir(parents=True, exist_ok=True)
        address = f"127.0.0.1:{self._port}"
        options = ["--quiet", "--keep-alive", "--port", address, "posix", "--sidecar", str(self._meta)]
        self._process = subprocess.Popen(
            [*(bound or DIES_WITH_US), made.stdout.strip(), *options, str(self._data)],
            env={
                "ROOT_ACCESS_KEY": ENVIRONMENT["AWS_ACCESS_KEY_ID"],
                "ROOT_SECRET_KEY": ENVIRONMENT["AWS_SECRET_ACCESS_KEY"],
                "PATH": os.environ["PATH"],
            },
            stdout=subprocess.DEVNULL,
            stdin=subprocess.DEVNULL,
        )
        deadline = time.monotonic() + READY_SECONDS
        while True:
            try:
                socket.create_connection(("127.0.0.1", self._port), 1).close()
            except OSError:
                assert self._process.poll() is None, "the S3 server has ended"
                assert time.monotonic() < deadline, "the S3 server does not get ready"
                time.sleep(0.02)
            else:
                return self._process.pid

    def kill(self) -> None:
        """Kill the server, as a power cut would."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def bucket(self) -> str:
        name = f"test-{secrets.token_hex(6)}"
        client = boto3.client(
            "s3",
            endpoint_url=self.endpoint,
            region_name="us-east-1",
            aws_access_key_id=ENVIRONMENT["AWS_ACCESS_KEY_ID"],
            aws_secret_access_key=ENVIRONMENT["AWS_SECRET_ACCESS_KEY"],
        )
        client.create_bucket(Bucket=name)
        client.close()
        return name

    def url(self, bucket: str, prefix: str = "") -> str:
        """Return a value for the setting ``storage_url``."""
        return f"s3://{bucket}/{prefix}?endpoint={self.endpoint}"


@pytest.fixture(scope="session")
def _s3_process(tmp_path_factory: pytest.TempPathFactory) -> S3Server:
    def start() -> list[str]:
        root = Path(tempfile.mkdtemp(prefix="vmjobs-s3-"))
        server = S3Server(root)
        process = server.start("setsid")
        after_run('kill -KILL "$1"; rm -rf "$2"', str(process), root)
        return [str(root), server.endpoint.rpartition(":")[2]]

    root, port = once(tmp_path_factory, "s3", start)
    return S3Server(Path(root), port=int(port))


@pytest.fixture
def s3_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set the server's keys where boto3 looks for them, for this process and its children."""
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    for name in _UNWANTED:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def s3_server(_s3_process: S3Server, s3_keys: None) -> S3Server:
    """The server that all tests of this run share; tests that kill one use ``own_s3_server``."""
    return _s3_process


@pytest.fixture
def own_s3_server(s3_keys: None) -> Iterator[S3Server]:
    """A server that a test may kill."""
    with tempfile.TemporaryDirectory(prefix="vmjobs-s3-") as root:
        server = S3Server(Path(root))
        server.start()
        yield server
        server.kill()


@pytest.fixture
def s3_url(s3_server: S3Server) -> str:
    """A ``storage_url`` with an empty bucket."""
    return s3_server.url(s3_server.bucket(), "grid/vmjobs")
