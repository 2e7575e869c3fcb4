"""Virtual clusters: the operators' interface."""

from __future__ import annotations

import logging
from typing import Final, Literal

from flask import Blueprint
from pydantic import Field
from werkzeug.wrappers import Response

from api.images import current_viewer
from api.operation import (
    Operation,
    Reply,
    access_for,
    caller,
    describe_fault_count,
    empty_reply,
    json_reply,
    parse_body,
    read_body,
    read_json,
    read_query,
)
from api.paging import EventQuery, PageQuery, requested_window
from api.ranges import STREAM_BYTES, STREAM_BYTES_HEADERS, send
from api.services import repository, services
from api.tokens import Scope
from condor.pool.cluster_ads import faults as advertised_faults
from vmjobs.cluster.spec import ClusterSpec
from vmjobs.cluster.vm_state import Goal
from vmjobs.cluster.wire import (
    ApplyOutcome,
    ApplyResult,
    Assessment,
    Cluster,
    ClusterEvents,
    ClusterList,
    ScaleRequest,
)
from vmjobs.errors import Fault, InvalidRequest, InvalidSpec, Unavailable
from vmjobs.model import FrozenModel

log = logging.getLogger(__name__)
blueprint = Blueprint("clusters", __name__, url_prefix="/v1")

READ: Final = access_for(Scope.COMPUTE_READ)
CHANGE: Final = access_for(Scope.ADMIN)
_GOALS: Final = {"drain": Goal.DRAIN, "now": Goal.STOP}


class ConsoleQuery(FrozenModel):
    """The console to read."""

    incarnation: int = Field(
        0, ge=0, le=2**31 - 2, description="number of the VM; 0: the last; the one before is kept"
    )


class DeleteQuery(FrozenModel):
    """How the VMs are to end."""

    mode: Literal["drain", "now"] = Field("drain", description="after their jobs, or now")


# --------------------------------------------------------------------------- looking


@blueprint.get("/clusters")
@Operation(
    "listClusters",
    access=READ,
    query=PageQuery,
    replies={200: Reply("a page of clusters", ClusterList)},
)
def index() -> Response:
    """List the virtual clusters by name, without their worker VMs."""
    found, cursor = repository().clusters.page(requested_window())
    return json_reply(ClusterList(clusters=tuple(found), next=cursor))


@blueprint.get("/clusters/<cluster:name>")
@Operation("getCluster", access=READ, replies={200: Reply("the cluster", Cluster)}, errors=(404, 422))
def show(name: str) -> Response:
    """Show one virtual cluster with its worker VMs."""
    return json_reply(repository().clusters.get(name))


@blueprint.get("/clusters/<cluster:name>/events")
@Operation(
    "listClusterEvents",
    access=READ,
    query=EventQuery,
    replies={200: Reply("events, oldest first", ClusterEvents)},
    errors=(404,),
)
def events(name: str) -> Response:
    """Show a cluster's history; its last thousand entries are kept."""
    found = repository().clusters.events(name, read_query(EventQuery).after)
    return json_reply(ClusterEvents(events=tuple(found)))


@blueprint.get("/clusters/<cluster:name>/members/<member:member>/console")
@Operation(
    "readMemberConsole",
    access=READ,
    query=ConsoleQuery,
    headers=STREAM_BYTES_HEADERS,
    replies=STREAM_BYTES,
    errors=(404, 416),
)
def console(name: str, member: str) -> Response:
    """Read the console of a worker VM.

    It grows while the VM runs. To follow it, ask for the range that begins where the last answer
    ended; 416 means that there is nothing new.
    """
    reader = repository().clusters.open_console(name, member, read_query(ConsoleQuery).incarnation)
    return send(reader.size, reader.chunks)


@blueprint.post("/cluster-assessments")
@Operation(
    "assessCluster",
    access=access_for(Scope.COMPUTE_READ, Scope.ADMIN),
    body=ClusterSpec,
    replies={200: Reply("how much of it would run", Assessment)},
)
def assess() -> Response:
    """Assess how much of a cluster specification would run now. Nothing is changed.

    The resources of an existing cluster of the same name count as free.
    """
    spec = _read_spec()
    return json_reply(repository().cluster_specs.assess(current_viewer(), spec))


# --------------------------------------------------------------------------- changing


@blueprint.put("/clusters/<cluster:name>")
@Operation(
    "putCluster",
    access=CHANGE,
    body=ClusterSpec,
    replies={
        200: Reply("the cluster is as specified, perhaps unchanged", ApplyResult),
        201: Reply("created", ApplyResult, {"Location": "the cluster"}),
    },
    errors=(409,),
)
def put(name: str) -> Response:
    """Create or update a virtual cluster. Repeating the call changes nothing.

    A tag of the image is resolved to a digest now. VMs of an earlier specification are replaced one at
    a time, after their jobs.
    """
    spec = _read_spec(name)
    done = repository().cluster_specs.apply(current_viewer(), spec)
    if done.outcome is ApplyOutcome.UNCHANGED:
        return json_reply(done)
    _trigger_reconciler()
    if done.outcome is ApplyOutcome.CREATED:
        return json_reply(done, 201, {"Location": f"/v1/clusters/{name}"})
    return json_reply(done)


@blueprint.post("/clusters/<cluster:name>/scale")
@Operation(
    "scaleCluster",
    access=CHANGE,
    body=ScaleRequest,
    replies={200: Reply("the cluster", Cluster)},
    errors=(404, 409),
)
def scale(name: str) -> Response:
    """Change the number of worker VMs, and nothing else."""
    size = read_body(ScaleRequest).size
    return _reply_changed(repository().cluster_actions.scale(name, size, caller().subject))


@blueprint.post("/clusters/<cluster:name>/wake")
@Operation(
    "wakeCluster",
    access=access_for(Scope.WAKE, Scope.ADMIN),
    replies={204: Reply("it has a VM, gets one, or may have none")},
    errors=(404, 422),
)
def wake(name: str) -> Response:
    """Start a worker VM in a cluster that has none for lack of demand.

    It is kept until the service itself sees a job for it, or for a quarter of an hour. Nothing changes
    if the cluster has VMs already, is drained or deleted, or is specified for none.
    """
    if repository().cluster_actions.wake(name, caller().subject):
        _trigger_reconciler()
    return empty_reply()


@blueprint.post("/clusters/<cluster:name>/drain")
@Operation(
    "drainCluster",
    access=CHANGE,
    replies={200: Reply("the cluster", Cluster)},
    errors=(404, 422),
)
def drain(name: str) -> Response:
    """End all VMs after their jobs, and start none until the cluster is resumed."""
    return _reply_changed(repository().cluster_actions.drain(name, caller().subject))


@blueprint.post("/clusters/<cluster:name>/resume")
@Operation(
    "resumeCluster",
    access=CHANGE,
    replies={200: Reply("the cluster", Cluster)},
    errors=(404, 409, 422),
)
def resume(name: str) -> Response:
    """Start VMs again after a drain."""
    return _reply_changed(repository().cluster_actions.resume(name, caller().subject))


@blueprint.post("/clusters/<cluster:name>/retry")
@Operation(
    "retryCluster",
    access=CHANGE,
    replies={200: Reply("the cluster", Cluster)},
    errors=(404, 409, 422),
)
def retry(name: str) -> Response:
    """Retry failures at once.

    These are nodes and images on which VMs only failed, VMs that wait for another try, and a
    specification that the cluster rolled back.
    """
    return _reply_changed(repository().cluster_actions.retry(name, caller().subject))


@blueprint.delete("/clusters/<cluster:name>")
@Operation(
    "deleteCluster",
    access=CHANGE,
    query=DeleteQuery,
    replies={202: Reply("it is removed once its VMs are gone", Cluster)},
    errors=(404,),
)
def delete(name: str) -> Response:
    """Delete a cluster, after its jobs or now. Repeating the call is no error."""
    goal = _GOALS[read_query(DeleteQuery).mode]
    return _reply_changed(repository().cluster_actions.delete(name, goal, caller().subject), 202)


def _reply_changed(cluster: Cluster, status: int = 200) -> Response:
    """Trigger the reconciler, and answer with the cluster that was changed."""
    _trigger_reconciler()
    return json_reply(cluster, status)


def _trigger_reconciler() -> None:
    """Trigger the reconciler; without a broker, it runs by itself within seconds."""
    try:
        services().dispatcher.clusters()
    except Unavailable as error:
        log.warning("a change of a cluster waits for the next run of the reconciler: %s", error.message)


def _read_spec(name: str | None = None) -> ClusterSpec:
    """Return the cluster specification in the request's body.

    Raises:
        InvalidSpec: with every fault that prevents its use.
    """
    body = read_json()
    try:
        spec = parse_body(ClusterSpec, body)
    except InvalidRequest as error:
        raise InvalidSpec(
            describe_fault_count("the specification", error.faults), faults=error.faults
        ) from error
    faults = [*advertised_faults(spec), *repository().cluster_specs.faults(current_viewer(), spec)]
    if name is not None and spec.name != name:
        faults.insert(0, Fault("name", "mismatch", "differs from the name in the URL"))
    if faults:
        raise InvalidSpec(describe_fault_count("the specification", faults), faults=faults)
    return spec
