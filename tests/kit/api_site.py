"""A whole API on a separate repository, which tests call in process or over HTTP."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, cast

from flask import Flask
from flask.testing import FlaskClient
from werkzeug.serving import WSGIRequestHandler, make_server
from werkzeug.test import TestResponse

from api.app import create_app
from api.services import TokenIssuer
from api.tokens import USER_SCOPES, ApiTokenIssuer, Scope
from repository.broker import TaskPublisher
from repository.service import Repository, open_repository
from tests.kit.repository_jobs import prepare_library, push_library
from vmjobs.config import Config
from vmjobs.errors import Unavailable
from vmjobs.model import JobAction, JobState, ReasonCode, Report, reason

ROOT_DISK = bytes(range(256)) * 8192
ATTEMPT = "a" * 32
OTHER_ATTEMPT = "b" * 32


@dataclass
class Queue:
    """The queue of work for the worker; ``down`` makes it fail as a broker does."""

    arrays: list[str] = field(default_factory=list)
    canceled: list[str] = field(default_factory=list)
    builds: list[str] = field(default_factory=list)
    looks: int = 0
    down: bool = False

    def submit_array(self, array: str) -> None:
        self._check()
        self.arrays.append(array)

    def change_jobs(self, action: JobAction, ids: Sequence[str]) -> None:
        self._check()
        if action is JobAction.CANCEL:
            self.canceled += ids

    def build_image(self, build: str) -> None:
        self._check()
        self.builds.append(build)

    def clusters(self) -> None:
        self._check()
        self.looks += 1

    def _check(self) -> None:
        if self.down:
            raise Unavailable("broker", "the broker does not answer")


@dataclass
class Site:
    app: Flask
    config: Config
    repository: Repository
    queue: Queue
    issuer: ApiTokenIssuer
    image: str
    disk: str

    def caller(self, token: str = "") -> Caller:
        return Caller(self.app.test_client(), token)

    def user(self, name: str = "ada", *groups: str) -> Caller:
        """A user with all of a user's rights."""
        return self.caller(self.issuer.user_token(name, groups=groups))

    def admin(self, name: str = "root") -> Caller:
        return self.caller(self.issuer.user_token(name, USER_SCOPES | {Scope.ADMIN}))

    def node(self, name: str) -> Caller:
        """The agent of an execute node."""
        return self.caller(self.issuer.node_token(name))

    def node_token(self, name: str, age: float, lifetime: float) -> str:
        """A node's token that was issued ``age`` seconds ago."""
        key = self.config.data_dir / "keys" / "issuer.pem"
        issuer = ApiTokenIssuer(key, self.config.issuer, lambda: time.time() - age)
        return issuer.node_token(name, lifetime)

    def agent(self, job_id: str, owner: str = "ada") -> Caller:
        return self.caller(self.issuer.job_token(job_id, owner))

    def stage(self, job_id: str) -> str:
        """Claim a job and stage its files; returns the attempt's path."""
        agent, path = self.agent(job_id), f"/v1/jobs/{job_id}/attempts"
        claim = {"attempt": ATTEMPT, "node": "wn1"}
        assert agent("POST", path, json=claim).status_code == 201
        report = report_of(JobState.STAGING)
        assert agent("POST", f"{path}/{ATTEMPT}/reports", json=report).status_code == 204
        return f"{path}/{ATTEMPT}"


@dataclass
class Caller:
    client: FlaskClient
    token: str

    def __call__(self, method: str, path: str, **more: Any) -> TestResponse:
        headers = dict(more.pop("headers", {}))
        if self.token:
            headers.setdefault("Authorization", f"Bearer {self.token}")
        return self.client.open(path, method=method, headers=headers, **more)

    def problem(self, status: int, method: str, path: str, **more: Any) -> dict[str, Any]:
        """Return the problem document of a call that must fail with ``status``."""
        answer = self(method, path, **more)
        assert answer.status_code == status, answer.text
        assert answer.content_type == "application/problem+json"
        document: dict[str, Any] = answer.get_json(force=True)
        return document

    def submit(self, count: int = 1, **spec: Any) -> list[str]:
        """Submit jobs that can run; returns their ids."""
        answer = self("POST", "/v1/jobs", json={"spec": good_spec(**spec), "count": count})
        assert answer.status_code == 201, answer.text
        return [job["id"] for job in answer.get_json()["jobs"]]


def good_spec(**changes: Any) -> dict[str, Any]:
    return {"image": "tiny", "script": "#!/bin/sh\necho hello\n", **changes}


def report_of(state: JobState, **more: Any) -> dict[str, Any]:
    """A report as an agent sends it."""
    why = reason(ReasonCode.SUCCEEDED if state.final else ReasonCode.PROGRESS)
    return Report(state=state, reason=why, time=datetime.now(UTC), **more).model_dump(mode="json")


def make_site(directory: Path, *, token_issuer: TokenIssuer | None = None, **settings: Any) -> Site:
    """Make a site whose library has one image, ``tiny:latest``."""
    config = Config(data_dir=directory, **settings)
    if config.database_url or config.storage_url or (directory / "vmjobs.db").exists():
        repository = open_repository(config)
        image = push_library(repository, "tiny", ROOT_DISK)
    else:
        image = prepare_library(directory, "tiny", ROOT_DISK)
        repository = open_repository(config, migrate=False)
    queue = Queue()
    issuer = ApiTokenIssuer(directory / "keys" / "issuer.pem", config.issuer)
    publisher = cast(TaskPublisher, queue)
    app = create_app(config, repository, dispatcher=publisher, issuer=issuer, token_issuer=token_issuer)
    disk = image.manifest["root"]["digest"]
    return Site(app, config, repository, queue, issuer, image.digest, disk)


class _Quiet(WSGIRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_request(self, code: int | str = "-", size: int | str = "-") -> None:
        """Log nothing."""


@contextmanager
def serving(app: Any, port: int = 0) -> Iterator[str]:
    """Serve ``app`` on a real socket; yields its URL."""
    server = make_server("127.0.0.1", port, app, threaded=True, request_handler=_Quiet)
    server.daemon_threads = True  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
