"""A repository on each database that vmjobs supports; PostgreSQL is a private cluster."""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest
from repository_kit import migrated_sqlite, prepare_library, push_library

from repository.migrations import upgrade
from repository.service import Repository, open_repository
from vmjobs.config import Config

#: Parameters and fixtures that start a server.
_SERVERS = {"postgresql", "s3", "_s3_process", "own_s3_server"}
#: What Python's audit events call the start of a process (docs.python.org/3/library/audit_events.html).
_STARTS = {"subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.exec"}
_guarded: list[str] = []


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what ``make check`` runs: tests in one process, but for their rows that need a server."""
    for item in items:
        if any(map(item.get_closest_marker, ("starts_processes", "slow", "soak"))):
            continue
        if item.get_closest_marker("in_process") and isinstance(item, pytest.Function):
            rows = item.callspec.params.values() if hasattr(item, "callspec") else ()
            if _SERVERS.isdisjoint([*map(str, rows), *item.fixturenames]):
                item.add_marker("quick")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """A test that says to start no process fails if it does."""
    if item.get_closest_marker("quick"):
        _guarded.append(item.nodeid)
    try:
        return (yield)
    finally:
        _guarded.clear()


def _guard(event: str, _arguments: object) -> None:
    if _guarded and event in _STARTS:
        raise AssertionError(f"{_guarded[0]} starts a process: it is no test for `make check`")


sys.addaudithook(_guard)

POSTGRESQL_HOMES = sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)


def _unprivileged(arguments: list[str]) -> list[str]:
    """PostgreSQL refuses to run as root."""
    if os.geteuid() != 0:
        return arguments
    return ["setpriv", "--reuid=postgres", "--regid=postgres", "--clear-groups", "--", *arguments]


class Cluster:
    """A PostgreSQL cluster of our own, on a Unix socket in ``root``."""

    def __init__(self) -> None:
        assert POSTGRESQL_HOMES, "PostgreSQL is not installed: these tests must run, not be skipped"
        self._home = POSTGRESQL_HOMES[0]
        self.root = Path(tempfile.mkdtemp(prefix="vmjobs-pg-"))
        if os.geteuid() == 0:
            user = pwd.getpwnam("postgres")
            os.chown(self.root, user.pw_uid, user.pw_gid)
        self._run("initdb", "-U", "vmjobs", "-A", "trust", "--no-sync")

    def start(self) -> None:
        options = f"-k {self.root} -c listen_addresses= -c fsync=off -c max_connections=200"
        self._run("pg_ctl", "-w", "-l", str(self.root / "log"), "-o", options, "start")

    def stop(self) -> None:
        """As a power cut would."""
        self._run("pg_ctl", "-w", "-m", "immediate", "stop")

    def _run(self, program: str, *arguments: str) -> None:
        command = [str(self._home / program), "-D", str(self.root / "data"), *arguments]
        subprocess.run(_unprivileged(command), check=True, capture_output=True, cwd=self.root)


@pytest.fixture(scope="session")
def postgresql() -> Iterator[Cluster]:
    """The cluster that all tests of this process share."""
    cluster = Cluster()
    cluster.start()
    try:
        upgrade(_create(cluster.root, "prepared"))
        yield cluster
    finally:
        cluster.stop()
        shutil.rmtree(cluster.root)


def _create(socket: Path, name: str, template: str = "template1") -> str:
    with psycopg.connect(
        host=str(socket), user="vmjobs", dbname="postgres", autocommit=True
    ) as connection:
        connection.execute(f'CREATE DATABASE "{name}" TEMPLATE "{template}"')
    return f"postgresql://vmjobs@/{name}?host={socket}"


@pytest.fixture(params=["sqlite", "postgresql"])
def empty_database(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The URL of a database without tables."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'empty.db'}"
    return _create(request.getfixturevalue("postgresql").root, f"e{uuid.uuid4().hex}")


@pytest.fixture(params=["sqlite", "postgresql"])
def config(request: pytest.FixtureRequest, tmp_path: Path) -> Config:
    """Settings with a fresh, migrated database."""
    if request.param == "sqlite":
        url = migrated_sqlite(tmp_path / "vmjobs.db")
    else:
        name = f"t{uuid.uuid4().hex}"
        url = _create(request.getfixturevalue("postgresql").root, name, template="prepared")
    return Config(
        data_dir=tmp_path,
        database_url=url,
        max_cpus=8,
        max_memory=4096,
        max_disk=2048,
        max_run_seconds=86400,
        max_stream_bytes=1000,
        routes={"site": "condor site.grid site.grid"},
    )


@pytest.fixture
def repository(config: Config) -> Iterator[Repository]:
    """A repository on either database; its library has one image, ``hep``."""
    if config.database_url.startswith("sqlite"):
        prepare_library(config.data_dir)
    opened = open_repository(config, migrate=False)
    if not config.database_url.startswith("sqlite"):
        push_library(opened.images)
    yield opened
    opened.close()
