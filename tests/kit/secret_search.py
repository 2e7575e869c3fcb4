"""Plants secrets in a grid and searches every place where they could leak."""

from __future__ import annotations

import subprocess
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from tests.kit.grid import NODES, Grid, run

HOSTS = ("submit", "site", *NODES)
SERVICES = (*HOSTS, "api", "worker", "builder", "postgres", "rabbitmq", "secrets")
TMP = "/tmp"  # noqa: S108  looked at, never written to
#: An account that is neither HTCondor's nor vmjobs' nor a job owner's.
STRANGER = "nobody"

#: Reads all processes' arguments and environments until its input ends; prints each once.
WATCH = r"""
import glob, select, sys
seen = set()
while not select.select([sys.stdin], [], [], 0.1)[0]:
    for name in glob.glob("/proc/[0-9]*/cmdline") + glob.glob("/proc/[0-9]*/environ"):
        try:
            with open(name, "rb") as file:
                seen.add(file.read())
        except OSError:
            pass
sys.stdout.buffer.write(b"\n".join(seen))
"""


def planted(what: str) -> str:
    """A new secret whose text names its kind, to identify it in a finding."""
    return f"planted-{what}-{uuid.uuid4().hex}"


def needle(secret: str) -> str:
    """The text to search for: of a JSON web token its signature, as the rest is no secret."""
    return secret.strip().rpartition(".")[2][-64:]


def feed(grid: Grid, service: str, data: str, *command: str, user: str = "root") -> bytes:
    """Run a command in a container with data on stdin, which keeps them out of its arguments."""
    argv = ["docker", "exec", "-i", "-u", user, grid.container(service), *command]
    done = subprocess.run(argv, input=data.encode(), capture_output=True, timeout=120, check=False)
    return done.stdout


@dataclass
class Findings:
    """Where secrets were found: pairs of a secret's name and a place."""

    secrets: dict[str, str]
    found: set[tuple[str, str]] = field(default_factory=set)

    def look(self, place: str, text: bytes) -> None:
        for name, secret in self.secrets.items():
            if needle(secret).encode() in text:
                self.found.add((name, place))

    def look_at_files(self, grid: Grid, service: str, *folders: str, user: str = "root") -> None:
        """Search all files below some directories of a host that a user can read."""
        patterns = "".join(f"{needle(secret)}\n" for secret in self.secrets.values())
        command = ("grep", "-raoF", "-f", "-", "--", *folders)
        lines = feed(grid, service, patterns, *command, user=user)
        for line in lines.decode("utf-8", "replace").splitlines():
            path, _, word = line.partition(":")
            self.look(f"{service}:{path}", word.encode())

    def places(self, name: str) -> set[str]:
        return {place for found, place in self.found if found == name}

    def unexpected(self, allowed: Iterable[tuple[str, str]] = ()) -> list[tuple[str, str]]:
        """All findings except the allowed ones: pairs of secret name and start of a place."""
        may = tuple(allowed)
        return sorted(
            (name, place)
            for name, place in self.found
            if not any(name == n and place.startswith(p) for n, p in may)
        )


@contextmanager
def watching_processes(grid: Grid, findings: Findings) -> Iterator[None]:
    """Search what a stranger on each host sees of all processes, while the context lasts."""
    watchers = {
        service: subprocess.Popen(
            ["docker", "exec", "-i", "-u", STRANGER, grid.container(service), "python3", "-c", WATCH],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        for service in (*HOSTS, "worker", "api")
    }
    try:
        yield
    finally:
        for service, watcher in watchers.items():
            said, _ = watcher.communicate(b"\n", timeout=60)
            assert watcher.returncode == 0
            findings.look(f"ps:{service}", said)


def look_everywhere(grid: Grid, findings: Findings) -> None:
    """Search logs, queues, ads, container settings and service files, but no secret stores."""
    for service in SERVICES:
        container = grid.container(service)
        done = subprocess.run(["docker", "logs", container], capture_output=True, check=True)
        findings.look(f"logs:{service}", done.stdout + done.stderr)
        findings.look(f"inspect:{service}", run("docker", "inspect", container).encode())
    for service in HOSTS:
        findings.look_at_files(
            grid, service, "/var/log", "/var/spool", "/run/condor", "/run/vmjobs", TMP
        )
    for service in ("api", "worker", "builder"):
        findings.look_at_files(grid, service, "/var/log", TMP)
    findings.look_at_files(grid, "submit", "/var/lib/vmjobs/spool")
    for service in ("submit", "site"):
        for tool in ("condor_q -allusers -l", "condor_history -l -limit 500", "condor_status -any -l"):
            said = grid.on(service, *tool.split(), user=STRANGER)
            findings.look(f"ads:{service}:{tool.split()[0]}", said.encode())
