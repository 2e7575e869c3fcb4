"""A real grid gateway on this host, used only through its users' commands."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.kit import ROOT
from tests.kit.cli import VMJOBS

#: Timeout of a command in seconds.
COMMAND = 300.0


@dataclass(frozen=True)
class Gateway:
    """An installed gateway. place: its state directory.

    pool_port, login_port: of its computing element and its user interface on this host. allowed:
    addresses that its VMs may reach, though they are private.
    """

    place: Path
    pool_port: int = 0
    login_port: int = 0
    allowed: Sequence[str] = field(default=(), kw_only=True)

    def command(
        self, *words: str | Path, status: int = 0, stdin: bytes = b""
    ) -> subprocess.CompletedProcess[bytes]:
        """Run ``vmjobs gateway ...`` and assert its exit status."""
        first, *more = map(str, words)
        argv = [VMJOBS, "gateway", *first.split()]
        argv += ["--state-dir", str(self.place), *more]
        environ = {**os.environ, "VMJOBS_NETWORK_ALLOW": ",".join(self.allowed)}
        ended = subprocess.run(
            argv, cwd=ROOT, input=stdin, capture_output=True, timeout=COMMAND, check=False, env=environ
        )
        assert ended.returncode == status, f"{argv}\n{ended.stdout.decode()}\n{ended.stderr.decode()}"
        return ended

    def run(self, vm: str, script: str, status: int = 0, stdin: bytes = b"") -> str:
        ended = self.command("ssh", vm, "--", script, status=status, stdin=stdin)
        return ended.stdout.decode()

    def ada(self, script: str, status: int = 0) -> str:
        """Run a command as a user on the user interface VM; return output and errors."""
        told = f"{script}\n".encode()
        return self.run("ui", "exec su - ada -c 'exec sh -s 2>&1'", status, told)

    def jobs(self, vm: str) -> dict[int, int]:
        """The jobs in a VM's queue: cluster to JobStatus."""
        lines = self.run(vm, "condor_q -all -autoformat ClusterId JobStatus").splitlines()
        return {int(line.split()[0]): int(line.split()[1]) for line in lines}

    def ended(self, vm: str) -> set[int]:
        """The clusters of the jobs in a VM's history."""
        return {int(line) for line in self.run(vm, "condor_history -autoformat ClusterId").split()}
