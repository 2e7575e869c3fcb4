"""The Flask application, assembled from its arguments; it holds no state of its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from flask import Flask
from werkzeug.wrappers import Response

from api import (
    attempts,
    blobs,
    builds,
    clusters,
    condor_jobs,
    converters,
    image_bytes,
    images,
    jobs,
    metrics,
    nodes,
    problems,
    service_info,
    sessions,
    uploads,
)
from api.assignment_stream import AssignmentWatch
from api.services import HealthCheck, Services, TokenIssuer, attach_services
from api.session_link import SessionClient
from api.tokens import ApiTokenIssuer
from repository.broker import TaskPublisher
from repository.service import Repository
from repository.tokens import TokenChecker, TokenRegister
from vmjobs.config import Config

VIEW_MODULES: Final = (
    jobs,
    attempts,
    condor_jobs,
    blobs,
    images,
    image_bytes,
    uploads,
    builds,
    clusters,
    nodes,
    sessions,
    service_info,
    metrics,
)
#: Requests that may wait at once, unless the caller knows the number of threads.
MAX_WAITING_REQUESTS: Final = 4


def create_app(
    config: Config,
    repository: Repository,
    *,
    dispatcher: TaskPublisher,
    issuer: ApiTokenIssuer,
    checks: Mapping[str, HealthCheck] | None = None,
    token_issuer: TokenIssuer | None = None,
    max_waiting_requests: int = MAX_WAITING_REQUESTS,
) -> Flask:
    """Create the API as a WSGI application.

    checks: checks of ``/healthz`` besides database and storage, by name.
    token_issuer: issues IDTOKENs for worker VMs; None: they get none.
    max_waiting_requests: for changes of assignments, and as many for bytes of sessions; each of them
        occupies a thread.
    """
    app = Flask("vmjobs", static_folder=None)
    app.json.sort_keys = False  # type: ignore[attr-defined]
    parts = Services(
        config,
        repository,
        dispatcher,
        issuer,
        AssignmentWatch(repository.assignments.revisions, max_waiting_requests),
        SessionClient(config.data_dir / "run", max_waiting_requests),
        TokenChecker(TokenRegister(repository.database)),
        token_issuer,
        {"database": repository.database.ping, "storage": repository.objects.check, **(checks or {})},
    )
    attach_services(app, parts)
    converters.install(app)
    problems.install(app)
    for part in VIEW_MODULES:
        app.register_blueprint(part.blueprint)
    app.register_blueprint(jobs.sets)
    app.after_request(_add_security_headers)
    image_bytes.install(app)
    return app


def _add_security_headers(response: Response) -> Response:
    response.headers.setdefault("X-Content-Type-Options", "nosniff")
    response.headers.setdefault("Referrer-Policy", "no-referrer")
    return response
