"""A repository on each database that vmjobs supports; PostgreSQL is a private cluster."""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest
from repository_kit import image_store

from images.store import ImageStore
from repository.migrations import upgrade
from repository.service import Repository, open_repository
from vmjobs.config import Config

POSTGRESQL_HOMES = sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)


def _unprivileged(arguments: list[str]) -> list[str]:
    """PostgreSQL refuses to run as root."""
    if os.geteuid() != 0:
        return arguments
    return ["setpriv", "--reuid=postgres", "--regid=postgres", "--clear-groups", "--", *arguments]


@pytest.fixture(scope="session")
def postgresql() -> Iterator[Path]:
    """A PostgreSQL cluster of our own on a Unix socket; the directory of that socket."""
    assert POSTGRESQL_HOMES, "PostgreSQL is not installed: these tests must run, not be skipped"
    home = POSTGRESQL_HOMES[0]
    root = Path(tempfile.mkdtemp(prefix="vmjobs-pg-"))
    if os.geteuid() == 0:
        user = pwd.getpwnam("postgres")
        os.chown(root, user.pw_uid, user.pw_gid)
    data = root / "data"
    create = [str(home / "initdb"), "-D", str(data), "-U", "vmjobs", "-A", "trust", "--no-sync"]
    subprocess.run(_unprivileged(create), check=True, capture_output=True, cwd=root)
    options = f"-k {root} -c listen_addresses= -c fsync=off -c max_connections=200"
    control = [str(home / "pg_ctl"), "-D", str(data), "-w", "-l", str(root / "log")]
    subprocess.run(
        _unprivileged([*control, "-o", options, "start"]), check=True, capture_output=True, cwd=root
    )
    try:
        upgrade(_create(root, "prepared"))
        yield root
    finally:
        subprocess.run(
            _unprivileged([*control, "-m", "immediate", "stop"]),
            check=True,
            capture_output=True,
            cwd=root,
        )
        shutil.rmtree(root)


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
    return _create(request.getfixturevalue("postgresql"), f"e{uuid.uuid4().hex}")


@pytest.fixture(params=["sqlite", "postgresql"])
def config(request: pytest.FixtureRequest, tmp_path: Path) -> Config:
    """Settings with a fresh, migrated database."""
    if request.param == "sqlite":
        url = f"sqlite:///{tmp_path / 'vmjobs.db'}"
        upgrade(url)
    else:
        name = f"t{uuid.uuid4().hex}"
        url = _create(request.getfixturevalue("postgresql"), name, template="prepared")
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
def images(tmp_path: Path) -> ImageStore:
    """An image store with one image, ``hep``."""
    return image_store(tmp_path / "images")


@pytest.fixture
def repository(config: Config, images: ImageStore) -> Iterator[Repository]:
    """A repository on either database."""
    opened = open_repository(config, images, migrate=False)
    yield opened
    opened.close()
