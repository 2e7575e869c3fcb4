"""Builds: the service builds images from recipes, boots them, and publishes them."""

from __future__ import annotations

from typing import Final

from flask import Blueprint
from pydantic import Field
from werkzeug.wrappers import Response

from api.images import CREATE, current_viewer
from api.jobs import IDEMPOTENCY_KEY, idempotency_key
from api.operation import Operation, Reply, access_for, caller, json_reply, read_body, read_query
from api.services import repository, services
from api.tokens import Scope
from repository.builds.requests import MAX_LIST
from vmjobs.model import FrozenModel
from vmjobs.wire import Build, BuildList, BuildRequest

blueprint = Blueprint("builds", __name__, url_prefix="/v1/builds")

READ: Final = access_for(Scope.STORAGE_READ, Scope.STORAGE_CREATE)


class BuildQuery(FrozenModel):
    """The builds to list."""

    limit: int = Field(100, ge=1, le=MAX_LIST, description="the most builds to list")


@blueprint.post("")
@Operation(
    "buildImage",
    access=CREATE,
    body=BuildRequest,
    headers=(IDEMPOTENCY_KEY,),
    replies={202: Reply("a builder will start it", Build, {"Location": "the build"})},
    errors=(409,),
)
def create() -> Response:
    """Build an image from a recipe.

    The image is published, and named, only after it has booted and passed its recipe's probes.
    """
    key = idempotency_key()
    parts = services()
    found = parts.repository.builds.create(
        current_viewer(), read_body(BuildRequest), key, parts.dispatcher.build_image
    )
    return json_reply(found, 202, {"Location": f"/v1/builds/{found.id}"})


@blueprint.get("")
@Operation("listBuilds", access=READ, query=BuildQuery, replies={200: Reply("the builds", BuildList)})
def index() -> Response:
    """List the caller's builds, newest first."""
    found = repository().builds.list(caller().subject, read_query(BuildQuery).limit)
    return json_reply(BuildList(builds=tuple(found)))


@blueprint.get("/<id:build>")
@Operation("getBuild", access=READ, replies={200: Reply("the build", Build)}, errors=(404,))
def show(build: str) -> Response:
    """Show a build's progress or failure: the caller's own; administrators: any."""
    who = current_viewer()
    return json_reply(repository().builds.get(build, None if who.admin else who.user))


@blueprint.delete("/<id:build>")
@Operation(
    "cancelBuild",
    access=CREATE,
    replies={200: Reply("it has ended", Build)},
    errors=(404, 409),
)
def cancel(build: str) -> Response:
    """Cancel a build: the caller's own; administrators: any. Repeatable without error.

    Its builder ends all that it started within seconds. 409 if the build has ended already, or its
    image is being published.
    """
    return json_reply(repository().builds.cancel(build, current_viewer()))
