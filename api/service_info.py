"""The service's description of itself: version and limits, health, OpenAPI document."""

from __future__ import annotations

import logging
from typing import Any, Final

from flask import Blueprint, current_app
from pydantic import RootModel
from werkzeug.wrappers import Response

from api.operation import PUBLIC, Operation, Reply, json_reply
from api.services import HealthCheck, services
from vmjobs import __version__
from vmjobs.errors import VMJobsError
from vmjobs.model import MAX_ARRAY, MAX_SCRIPT_BYTES, HypervisorKind, NetworkMode, Strategy
from vmjobs.wire import Health, Limits, ServiceInfo

log = logging.getLogger(__name__)
blueprint = Blueprint("service", __name__)

API_VERSION: Final = "v1"
RETENTION: Final = "jobs, their outputs and logs are kept until the operator removes them"


class Document(RootModel[dict[str, Any]]):
    """An OpenAPI document."""


@blueprint.get("/v1/service-info")
@Operation("getServiceInfo", access=PUBLIC, replies={200: Reply("the service", ServiceInfo)})
def info() -> Response:
    """Show versions, limits and choices."""
    config = services().config
    return json_reply(
        ServiceInfo(
            version=__version__,
            api_version=API_VERSION,
            strategies=tuple(Strategy),
            hypervisors=tuple(HypervisorKind),
            networks=tuple(NetworkMode),
            routes=tuple(sorted({*config.routes, config.default_route})),
            default_route=config.default_route,
            limits=Limits(
                cpus=config.max_cpus,
                memory=config.max_memory,
                disk=config.max_disk,
                run_seconds=config.max_run_seconds,
                script_bytes=MAX_SCRIPT_BYTES,
                array=MAX_ARRAY,
                stream_bytes=config.max_stream_bytes,
            ),
            retention=RETENTION,
        )
    )


@blueprint.get("/healthz")
@Operation(
    "getHealth",
    access=PUBLIC,
    replies={
        200: Reply("everything answers", Health),
        503: Reply("something does not answer; the body names it", Health),
    },
)
def health() -> Response:
    """Show whether the service and the services it needs work. Needs no token."""
    states = {name: _state(name, check) for name, check in services().checks.items()}
    good = all(state == "ok" for state in states.values())
    body = Health(status="ok" if good else "unavailable", services=states)
    return json_reply(body, 200 if good else 503, {} if good else {"Retry-After": "5"})


def _state(name: str, check: HealthCheck) -> str:
    """Return ``ok``, or a sentence without internals."""
    try:
        check()
    except VMJobsError as error:
        log.warning("%s is not healthy: %s", name, error.message)
    except Exception:
        log.exception("the check of %s failed", name)
    else:
        return "ok"
    return f"the {name} does not answer"


@blueprint.get("/openapi.json")
@Operation("getOpenAPI", access=PUBLIC, replies={200: Reply("the OpenAPI document", Document)})
def document() -> Response:
    """Describe this interface."""
    from api.openapi import build  # noqa: PLC0415 - it imports all views, this one included

    response = json_reply(Document(build(current_app)))
    response.headers["Cache-Control"] = "public, max-age=300"
    return response
