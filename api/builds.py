"""Builds: images that the service makes of recipes, boots, and publishes if they pass."""

from __future__ import annotations

from typing import Final

from flask import Blueprint
from pydantic import Field
from werkzeug.wrappers import Response

from api.images import CREATE, viewer
from api.jobs import IDEMPOTENCY_KEY, idempotency_key
from api.operation import (
    Reply,
    Strict,
    anyone_with,
    backend,
    caller,
    json_reply,
    operation,
    read_body,
    read_query,
)
from api.tokens import Scope
from repository.builds import MAX_LIST
from vmjobs.wire import Build, BuildList, BuildRequest

blueprint = Blueprint("builds", __name__, url_prefix="/v1/builds")

TAG: Final = "builds"
READ: Final = anyone_with(Scope.STORAGE_READ, Scope.STORAGE_CREATE)


class BuildQuery(Strict):
    """Which builds to list."""

    limit: int = Field(100, ge=1, le=MAX_LIST, description="builds at most")


@blueprint.post("")
@operation(
    "buildImage",
    tag=TAG,
    access=CREATE,
    body=BuildRequest,
    headers=(IDEMPOTENCY_KEY,),
    replies={202: Reply("a builder will take it up", Build, {"Location": "the build"})},
    errors=(409,),
)
def create() -> Response:
    """Have an image built of a recipe.

    It is published, and gets its name, only after it has booted and passed its recipe's probes.
    """
    key = idempotency_key()
    parts = backend()
    found = parts.repository.builds.create(
        viewer(), read_body(BuildRequest), key, parts.dispatcher.build_image
    )
    return json_reply(found, 202, {"Location": f"/v1/builds/{found.id}"})


@blueprint.get("")
@operation(
    "listBuilds", tag=TAG, access=READ, query=BuildQuery, replies={200: Reply("the builds", BuildList)}
)
def index() -> Response:
    """List one's own builds, newest first."""
    found = backend().repository.builds.list(caller().subject, read_query(BuildQuery).limit)
    return json_reply(BuildList(builds=tuple(found)))


@blueprint.get("/<id:build>")
@operation("getBuild", tag=TAG, access=READ, replies={200: Reply("the build", Build)}, errors=(404,))
def show(build: str) -> Response:
    """Show one build of one's own: how far it is, or why it failed. Administrators see all."""
    who = viewer()
    return json_reply(backend().repository.builds.get(build, None if who.admin else who.user))


@blueprint.delete("/<id:build>")
@operation(
    "cancelBuild",
    tag=TAG,
    access=CREATE,
    replies={200: Reply("it has ended", Build)},
    errors=(404, 409),
)
def cancel(build: str) -> Response:
    """Cancel a build of one's own, or as an administrator anybody's. Repeating the call is no error.

    A builder that is at it ends within seconds whatever it has started. 409 where the build has ended
    already, or its image is being published.
    """
    return json_reply(backend().repository.builds.cancel(build, viewer()))
