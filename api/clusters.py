"""Virtual clusters, as their operators use them."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final, Literal

from flask import Blueprint
from pydantic import Field
from werkzeug.wrappers import Response

from api.images import viewer
from api.operation import (
    Reply,
    Strict,
    anyone_with,
    backend,
    caller,
    count_of,
    empty_reply,
    json_reply,
    operation,
    parse_body,
    read_body,
    read_json,
    read_query,
)
from api.paging import PageQuery, window
from api.ranges import BYTES, RANGE_HEADERS, send
from api.tokens import Scope
from condor.cluster_ads import faults as advertised_faults
from repository.clusters.service import Clusters
from vmjobs.cluster.member import Goal
from vmjobs.cluster.spec import ClusterSpec
from vmjobs.cluster.wire import (
    Applied,
    Assessment,
    Cluster,
    ClusterEvents,
    ClusterList,
    Outcome,
    Scale,
)
from vmjobs.errors import Fault, InvalidRequest, InvalidSpec, Unavailable

log = logging.getLogger(__name__)
blueprint = Blueprint("clusters", __name__, url_prefix="/v1")

TAG: Final = "clusters"
READ: Final = anyone_with(Scope.COMPUTE_READ)
CHANGE: Final = anyone_with(Scope.ADMIN)
_GOALS: Final = {"drain": Goal.DRAIN, "now": Goal.STOP}


class EventQuery(Strict):
    """Which events to list."""

    after: int = Field(0, ge=0, le=2**31 - 1, description="only events with a larger `seq`")


class ConsoleQuery(Strict):
    """Whose console to read."""

    incarnation: int = Field(
        0, ge=0, le=2**31 - 2, description="of which machine; 0: the last one; one before it is kept"
    )


class DeleteQuery(Strict):
    """How machines are to end."""

    mode: Literal["drain", "now"] = Field("drain", description="with their jobs, or now")


# --------------------------------------------------------------------------- looking


@blueprint.get("/clusters")
@operation(
    "listClusters",
    tag=TAG,
    access=READ,
    query=PageQuery,
    replies={200: Reply("a page of clusters", ClusterList)},
)
def index() -> Response:
    """List the virtual clusters by name, without their members."""
    found, cursor = _clusters().page(window())
    return json_reply(ClusterList(clusters=tuple(found), next=cursor))


@blueprint.get("/clusters/<cluster:name>")
@operation(
    "getCluster", tag=TAG, access=READ, replies={200: Reply("the cluster", Cluster)}, errors=(404, 422)
)
def show(name: str) -> Response:
    """Show one virtual cluster with its members."""
    return json_reply(_clusters().get(name))


@blueprint.get("/clusters/<cluster:name>/events")
@operation(
    "listClusterEvents",
    tag=TAG,
    access=READ,
    query=EventQuery,
    replies={200: Reply("events, oldest first", ClusterEvents)},
    errors=(404,),
)
def events(name: str) -> Response:
    """Show a cluster's history; its last thousand lines are kept."""
    found = _clusters().events(name, read_query(EventQuery).after)
    return json_reply(ClusterEvents(events=tuple(found)))


@blueprint.get("/clusters/<cluster:name>/members/<member:member>/console")
@operation(
    "readMemberConsole",
    tag=TAG,
    access=READ,
    query=ConsoleQuery,
    headers=RANGE_HEADERS[:1],
    replies={k: v for k, v in BYTES.items() if k != 304},
    errors=(404, 416),
)
def console(name: str, member: str) -> Response:
    """Read what the machine of a member said on its console.

    It grows while the machine runs. To follow it, ask for the range that begins where the last
    answer ended; 416 means that there is nothing new.
    """
    incarnation = read_query(ConsoleQuery).incarnation
    return send(_clusters().open_console(name, member, incarnation))


@blueprint.post("/cluster-assessments")
@operation(
    "assessCluster",
    tag=TAG,
    access=anyone_with(Scope.COMPUTE_READ, Scope.ADMIN),
    body=ClusterSpec,
    replies={200: Reply("how much of it would run", Assessment)},
)
def assess() -> Response:
    """Say how much of a declaration would run now. Nothing is changed.

    What a cluster of the same name has counts as free.
    """
    spec = _declaration()
    return json_reply(_clusters().assess(viewer(), spec))


# --------------------------------------------------------------------------- changing


@blueprint.put("/clusters/<cluster:name>")
@operation(
    "putCluster",
    tag=TAG,
    access=CHANGE,
    body=ClusterSpec,
    replies={
        200: Reply("it is as declared; it may have been so before", Applied),
        201: Reply("it was not there before", Applied, {"Location": "the cluster"}),
    },
    errors=(409,),
)
def put(name: str) -> Response:
    """Declare a virtual cluster. Declaring the same again changes nothing.

    A tag of the image is resolved to a digest now. Machines of an earlier declaration are replaced
    one at a time, after their jobs.
    """
    spec = _declaration(name)
    done = _clusters().apply(viewer(), spec)
    if done.outcome is Outcome.UNCHANGED:
        return json_reply(done)
    _soon()
    if done.outcome is Outcome.CREATED:
        return json_reply(done, 201, {"Location": f"/v1/clusters/{name}"})
    return json_reply(done)


@blueprint.post("/clusters/<cluster:name>/scale")
@operation(
    "scaleCluster",
    tag=TAG,
    access=CHANGE,
    body=Scale,
    replies={200: Reply("the cluster", Cluster)},
    errors=(404, 409),
)
def scale(name: str) -> Response:
    """Have another number of machines, and else the same cluster."""
    size = read_body(Scale).size
    return _done(lambda clusters: clusters.scale(name, size, caller().subject))


@blueprint.post("/clusters/<cluster:name>/wake")
@operation(
    "wakeCluster",
    tag=TAG,
    access=anyone_with(Scope.WAKE, Scope.ADMIN),
    replies={204: Reply("it has a machine, is to have one, or may have none")},
    errors=(404, 422),
)
def wake(name: str) -> Response:
    """Have a machine in a cluster that demand has left none.

    It is kept until the service itself sees a job for it, or for a quarter of an hour. Nothing changes
    where the cluster has machines already, is drained or deleted, or is declared for none.
    """
    if _clusters().wake(name, caller().subject):
        _soon()
    return empty_reply()


@blueprint.post("/clusters/<cluster:name>/drain")
@operation(
    "drainCluster",
    tag=TAG,
    access=CHANGE,
    replies={200: Reply("the cluster", Cluster)},
    errors=(404, 422),
)
def drain(name: str) -> Response:
    """Let all machines end with their jobs, and start none until the cluster is resumed."""
    return _done(lambda clusters: clusters.drain(name, caller().subject))


@blueprint.post("/clusters/<cluster:name>/resume")
@operation(
    "resumeCluster",
    tag=TAG,
    access=CHANGE,
    replies={200: Reply("the cluster", Cluster)},
    errors=(404, 409, 422),
)
def resume(name: str) -> Response:
    """Start machines again after a drain."""
    return _done(lambda clusters: clusters.resume(name, caller().subject))


@blueprint.post("/clusters/<cluster:name>/retry")
@operation(
    "retryCluster",
    tag=TAG,
    access=CHANGE,
    replies={200: Reply("the cluster", Cluster)},
    errors=(404, 409, 422),
)
def retry(name: str) -> Response:
    """Try again at once what has failed: nodes and images where machines only failed, machines that
    wait for another try, and a declaration that the cluster went back from.
    """
    return _done(lambda clusters: clusters.retry(name, caller().subject))


@blueprint.delete("/clusters/<cluster:name>")
@operation(
    "deleteCluster",
    tag=TAG,
    access=CHANGE,
    query=DeleteQuery,
    replies={202: Reply("it goes once its machines are gone", Cluster)},
    errors=(404,),
)
def delete(name: str) -> Response:
    """Have a virtual cluster gone, once its jobs have ended or now. Repeating the call is no error."""
    goal = _GOALS[read_query(DeleteQuery).mode]
    return _done(lambda clusters: clusters.delete(name, goal, caller().subject), 202)


def _clusters() -> Clusters:
    return backend().repository.clusters


def _done(change: Callable[[Clusters], Cluster], status: int = 200) -> Response:
    found = change(_clusters())
    _soon()
    return json_reply(found, status)


def _soon() -> None:
    """Have the change carried out now; without a broker it is, within seconds, nevertheless."""
    try:
        backend().dispatcher.clusters()
    except Unavailable as error:
        log.warning("a change of a cluster waits for the worker's next look: %s", error.message)


def _declaration(name: str | None = None) -> ClusterSpec:
    """The declaration in the request's body.

    Raises:
        InvalidSpec: with every fault of it that keeps it from being applied.
    """
    body = read_json()
    try:
        spec = parse_body(ClusterSpec, body)
    except InvalidRequest as error:
        raise InvalidSpec(count_of("the declaration", error.faults), faults=error.faults) from error
    faults = [*advertised_faults(spec), *_clusters().faults(viewer(), spec)]
    if name is not None and spec.name != name:
        faults.insert(0, Fault("name", "mismatch", "differs from the name in the URL"))
    if faults:
        raise InvalidSpec(count_of("the declaration", faults), faults=faults)
    return spec
