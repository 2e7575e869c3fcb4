"""``vmjobs serve`` as a separate process that tests talk to and kill."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from vmjobs.client import Client, Retries
from vmjobs.config import Config

SERVE = "from api.serve import serve; from vmjobs.config import load; serve(load())"


def until(condition: Callable[[], bool], seconds: float = 20) -> None:
    """Wait for ``condition``; an assertion fails after ``seconds``."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.05)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def running(config: Config, log: Path, program: str = SERVE) -> Iterator[subprocess.Popen[bytes]]:
    """Run the service as a process; yields it when it is ready."""
    environ = {
        **os.environ,
        "VMJOBS_DATA_DIR": str(config.data_dir),
        "VMJOBS_LISTEN": config.listen,
        "VMJOBS_API_WORKERS": str(config.api_workers),
        "VMJOBS_STORAGE_URL": config.storage_url,
        "VMJOBS_IMAGE_QUOTA": str(config.image_quota),
        "VMJOBS_CONFIG": "/dev/null",
    }
    if config.image_trust_dir is not None:
        environ["VMJOBS_IMAGE_TRUST_DIR"] = str(config.image_trust_dir)
    with log.open("wb") as sink:
        process = subprocess.Popen(
            [sys.executable, "-c", program], env=environ, stderr=sink, stdout=sink
        )
    try:
        with Client(f"http://{config.listen}", retries=Retries(deadline=20, ceiling=0.2)) as client:
            until(lambda: client.health().status == "ok")
        until(lambda: len(children(process)) == config.api_workers)
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(40)


def children(process: subprocess.Popen[bytes]) -> list[int]:
    text = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text()
    return [int(pid) for pid in text.split()]
