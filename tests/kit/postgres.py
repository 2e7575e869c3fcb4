"""PostgreSQL for tests: a cluster of its own, on a Unix socket."""

from __future__ import annotations

import os
import pwd
import subprocess
import tempfile
from pathlib import Path

import psycopg

from repository.migrations import upgrade

POSTGRESQL_HOMES = sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)


class PostgresCluster:
    """A PostgreSQL cluster for tests, on a Unix socket in ``root``."""

    def __init__(self, root: Path) -> None:
        self.root = root

    @classmethod
    def make(cls) -> PostgresCluster:
        """Start a cluster with a migrated database ``prepared``."""
        assert POSTGRESQL_HOMES, "PostgreSQL is not installed: these tests must run, not be skipped"
        made = cls(Path(tempfile.mkdtemp(prefix="vmjobs-pg-")))
        if os.geteuid() == 0:
            user = pwd.getpwnam("postgres")
            os.chown(made.root, user.pw_uid, user.pw_gid)
        made._run("initdb", "-U", "vmjobs", "-A", "trust", "--no-sync")
        made.start()
        upgrade(made.create("prepared"))
        return made

    def start(self) -> None:
        options = f"-k {self.root} -c listen_addresses= -c fsync=off -c max_connections=200"
        self._run("pg_ctl", "-w", "-t", "240", "-l", str(self.root / "log"), "-o", options, "start")

    def stop(self) -> None:
        """Stop the cluster, as a power cut would."""
        self._run(*self.STOP)

    STOP = ("pg_ctl", "-w", "-t", "240", "-m", "immediate", "stop")

    def create(self, name: str, template: str = "template1") -> str:
        with psycopg.connect(
            host=str(self.root), user="vmjobs", dbname="postgres", autocommit=True
        ) as connection:
            connection.execute(f'CREATE DATABASE "{name}" TEMPLATE "{template}"')
        return f"postgresql://vmjobs@/{name}?host={self.root}"

    def command(self, program: str, *arguments: str) -> list[str]:
        """Run as another user, because PostgreSQL refuses to run as root."""
        user = ["setpriv", "--reuid=postgres", "--regid=postgres", "--clear-groups", "--"]
        words = [str(POSTGRESQL_HOMES[0] / program), "-D", str(self.root / "data"), *arguments]
        return [*user, *words] if os.geteuid() == 0 else words

    def _run(self, *words: str) -> None:
        subprocess.run(self.command(*words), check=True, capture_output=True, cwd=self.root)
