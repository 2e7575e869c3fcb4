"""Repositories and sites, on each supported database where the database matters."""

from __future__ import annotations

import os
import shutil
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import URL, Engine, event
from sqlalchemy.dialects.sqlite.pysqlite import SQLiteDialect_pysqlite as SQLite
from werkzeug.routing import Rule

from repository.db import database as databases
from repository.service import Repository, open_repository
from repository.storage.objects import ObjectStore, open_objects
from tests.kit.api_site import Site, make_site, serving
from tests.kit.cluster_nodes import World
from tests.kit.object_store import Store
from tests.kit.once_per_run import after_run, once
from tests.kit.postgres import PostgresCluster
from tests.kit.repository_jobs import migrated_sqlite, prepare_library, push_library
from tests.kit.waiting import Clock
from vmjobs.client.transport import ApiClient, Retries
from vmjobs.config import Config

#: Parameters and fixtures that start a server.
_SERVERS = {"postgresql", "own_postgresql", "s3", "_s3_process", "own_s3_server"}
#: Python's audit events for the start of a process (docs.python.org/3/library/audit_events.html).
_STARTS = {"subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.exec"}
_guarded: list[str] = []


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests for ``make check``: tests in one process, except rows that need a server."""
    for item in items:
        if any(map(item.get_closest_marker, ("starts_processes", "slow", "soak"))):
            continue
        if item.get_closest_marker("in_process") and isinstance(item, pytest.Function):
            rows = item.callspec.params.values() if hasattr(item, "callspec") else ()
            if _SERVERS.isdisjoint([*map(str, rows), *item.fixturenames]):
                item.add_marker("quick")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Fail a test that starts a process although its mark forbids it."""
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


@pytest.fixture(scope="session", autouse=True)
def _nothing_is_done_twice() -> Iterator[None]:
    """Compile routes and statements once, and skip fsync, because no test cuts the power."""
    compile_builder, open_engine = Rule._compile_builder, databases._engine
    builders: dict[tuple[object, ...], Any] = {}
    statements: dict[str, Any] = {}

    def builder(rule: Rule, append_unknown: bool = True) -> Any:
        key = (rule.rule, *rule._trace, append_unknown)
        if key not in builders:
            builders[key] = compile_builder(rule, append_unknown)
        return builders[key]

    def engine(url: URL) -> Engine:
        made = open_engine(url)
        if made.dialect.name == "sqlite":
            made._compiled_cache = statements.setdefault("sqlite", made._compiled_cache)
            event.listen(made, "connect", lambda link, _: link.execute("PRAGMA synchronous=OFF"))
        return made

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Rule, "_compile_builder", builder)
        patch.setattr(databases, "_engine", engine)
        patch.setattr(SQLite, "__eq__", lambda _, other: isinstance(other, SQLite))
        patch.setattr(SQLite, "__hash__", lambda _: 0)
        patch.setattr(os, "fsync", lambda _: None)
        yield


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run tests on SQLite, and those marked ``both_databases`` on PostgreSQL, too."""
    marked = metafunc.definition.get_closest_marker("both_databases")
    chosen = [mark.args[0] for mark in metafunc.definition.iter_markers("parametrize")]
    if marked and "database" in metafunc.fixturenames and "database" not in chosen:
        metafunc.parametrize("database", ["sqlite", "postgresql"], indirect=True)


@pytest.fixture(scope="session")
def postgresql(tmp_path_factory: pytest.TempPathFactory) -> PostgresCluster:
    """The cluster that all tests of this run share."""

    def start() -> list[str]:
        made = PostgresCluster.make()
        script = 'root=$1; shift; cd "$root"; "$@"; rm -rf "$root"'
        after_run(script, made.root, *made.command(*made.STOP))
        return [str(made.root)]

    return PostgresCluster(Path(*once(tmp_path_factory, "postgresql", start)))


@pytest.fixture
def own_postgresql() -> Iterator[PostgresCluster]:
    """A cluster that a test may stop."""
    made = PostgresCluster.make()
    yield made
    made.stop()
    shutil.rmtree(made.root)


@pytest.fixture(scope="session", autouse=True)
def _clients_are_patient() -> Iterator[None]:
    """Let clients wait for a service whose disk other tests keep busy."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ApiClient, "default_retries", Retries(deadline=120, read=240))
        yield


@pytest.fixture
def database(request: pytest.FixtureRequest) -> str:
    """The kind of database."""
    return str(getattr(request, "param", "sqlite"))


@pytest.fixture
def empty_database(request: pytest.FixtureRequest, tmp_path: Path, database: str) -> str:
    """The URL of a database without tables."""
    if database == "sqlite":
        return f"sqlite:///{tmp_path / 'empty.db'}"
    made: str = request.getfixturevalue(database).create(f"e{uuid.uuid4().hex}")
    return made


def _settings(request: pytest.FixtureRequest) -> dict[str, Any]:
    """The values of all ``settings`` marks; the nearest mark wins."""
    marks = reversed(list(request.node.iter_markers("settings")))
    return {name: value for mark in marks for name, value in mark.kwargs.items()}


@pytest.fixture
def config(request: pytest.FixtureRequest, tmp_path: Path, database: str) -> Config:
    """Settings with a fresh, migrated database, and with the test's ``settings`` marks."""
    if database == "sqlite":
        url = migrated_sqlite(tmp_path / "vmjobs.db")
    else:
        url = request.getfixturevalue(database).create(f"t{uuid.uuid4().hex}", "prepared")
    values = {
        "max_cpus": 8,
        "max_memory": 4096,
        "max_disk": 2048,
        "max_run_seconds": 86400,
        "max_stream_bytes": 1000,
        "routes": {"site": "condor site.grid site.grid"},
        **_settings(request),
    }
    return Config(data_dir=tmp_path, database_url=url, **values)


@pytest.fixture
def repository(config: Config) -> Iterator[Repository]:
    """A repository; its library has one image, ``hep``."""
    if config.database_url.startswith("sqlite"):
        prepare_library(config.data_dir)
    opened = open_repository(config, migrate=False)
    if not config.database_url.startswith("sqlite"):
        push_library(opened)
    yield opened
    opened.close()


@pytest.fixture
def other(config: Config, repository: Repository) -> Iterator[Repository]:
    """The same repository, opened as another process would open it."""
    opened = open_repository(config, migrate=False)
    yield opened
    opened.close()


@pytest.fixture(params=["local", "s3"])
def object_store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    """An empty place for objects."""
    return Store("" if request.param == "local" else request.getfixturevalue("s3_url"), tmp_path)


@pytest.fixture
def objects(object_store: Store) -> ObjectStore:
    """The store at that place."""
    return object_store.open()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def images(config: Config, clock: Clock) -> Iterator[Repository]:
    """A repository without images."""
    database = databases.Database(config.database)
    yield Repository(config, database, open_objects(config), clock=clock)
    database.close()


@pytest.fixture
def site(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Site]:
    """An API with the settings of the test's marks."""
    made = make_site(tmp_path, **_settings(request))
    yield made
    made.repository.close()


@pytest.fixture
def url(site: Site) -> Iterator[str]:
    """Serve the site on a real socket; yields its URL."""
    with serving(site.app) as address:
        yield address


@pytest.fixture
def world(request: pytest.FixtureRequest) -> World:
    """Two nodes, with a site or with a repository alone."""
    with_site = "site" in request.fixturenames
    repository = request.getfixturevalue("site" if with_site else "repository")
    return World(repository.repository if with_site else repository, "n1", "n2")
