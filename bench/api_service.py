"""An API to measure against, in a directory that is removed afterwards."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from api.tokens import make_issuer
from tests.kit.processes import running
from tests.kit.sockets import free_port
from vmjobs.config import Config

#: Writes its peak memory to a file, because wait4 includes the parent's peak.
PROGRAM = """
import atexit, os, pathlib
def peak():
    lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    line = next(line for line in lines if line.startswith("VmHWM"))
    pathlib.Path(os.environ["BENCH_PEAK"]).write_text(line.split()[1])
atexit.register(peak)
from vmjobs.cli.main import main
main()
"""


@dataclass(frozen=True)
class Ran:
    """A program that ran. seconds: of wall-clock time; memory: its peak, in KiB."""

    seconds: float
    out: str
    memory: int = 0


def timed(command: list[str], environ: dict[str, str] | None = None) -> Ran:
    """Run a program to its end. Raises CalledProcessError."""
    with tempfile.TemporaryFile("w+") as out:
        began = time.perf_counter()
        subprocess.run(command, env=environ, stdout=out, stderr=subprocess.DEVNULL, check=True)
        seconds = time.perf_counter() - began
        out.seek(0)
        return Ran(seconds, out.read())


@dataclass(frozen=True)
class Service:
    config: Config
    home: Path
    url: str

    def vmjobs(self, *arguments: str | Path, url: str = "") -> Ran:
        """Run ``vmjobs …`` with a separate cache; ``url``: of a proxy in front of the API."""
        token = self.home / "token"
        if not token.exists():
            token.write_text(make_issuer(self.config).user_token("bench"))
        own = {
            "VMJOBS_CONFIG": "/dev/null",
            "VMJOBS_API_URL": url or self.url,
            "VMJOBS_TOKEN_FILE": str(token),
            "VMJOBS_DATA_DIR": str(self.home / "local"),
            "VMJOBS_IMAGE_DIR": str(self.home / "local" / "images"),
            "XDG_CACHE_HOME": str(self.home / "cache"),
        }
        peak = self.home / "peak"
        own["BENCH_PEAK"] = str(peak)
        command = [sys.executable, "-c", PROGRAM, *map(str, arguments)]
        ran = timed(command, {**os.environ, **own})
        return replace(ran, memory=int(peak.read_text()))


@contextmanager
def service(home: Path, workers: int = 2) -> Iterator[Service]:
    """Run a fresh API below ``home``, warm: every process has answered."""
    home.mkdir(parents=True)
    listen = f"127.0.0.1:{free_port()}"
    config = Config(data_dir=home / "data", listen=listen, api_workers=workers)
    with running(config, home / "log"):
        yield Service(config, home, f"http://{listen}")
