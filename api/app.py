"""The Flask application, put together from what it is handed; it holds no state of its own."""

from __future__ import annotations

from collections.abc import Mapping

from flask import Flask
from werkzeug.wrappers import Response

from api import (
    attempts,
    blobs,
    builds,
    converters,
    image_bytes,
    images,
    jobs,
    nodes,
    problems,
    service,
    uploads,
)
from api.services import Dispatcher, HealthCheck, Services, attach
from api.tokens import Issuer
from repository.service import Repository
from vmjobs.config import Config


def create_app(
    config: Config,
    repository: Repository,
    *,
    dispatcher: Dispatcher,
    issuer: Issuer,
    checks: Mapping[str, HealthCheck] | None = None,
) -> Flask:
    """The API as a WSGI application.

    checks: what ``/healthz`` asks besides database and storage, by name.
    """
    app = Flask("vmjobs", static_folder=None)
    app.json.sort_keys = False  # type: ignore[attr-defined]
    known = {
        "database": repository.ping,
        "storage": repository.objects.check,
        **(checks or {}),
    }
    attach(app, Services(config, repository, repository.images, dispatcher, issuer, known))
    converters.install(app)
    problems.install(app)
    for part in (jobs, attempts, blobs, images, image_bytes, uploads, builds, nodes, service):
        app.register_blueprint(part.blueprint)
    app.after_request(_harden)
    image_bytes.install(app)
    return app


def _harden(response: Response) -> Response:
    response.headers.setdefault("X-Content-Type-Options", "nosniff")
    response.headers.setdefault("Referrer-Policy", "no-referrer")
    return response
