"""Execute nodes: their announcements and assignments, and the list of nodes."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Final

from flask import Blueprint
from pydantic import Field
from werkzeug.wrappers import Response

from api.attempts import MAX_APPEND_BYTES
from api.images import current_viewer
from api.operation import (
    BinaryBody,
    Operation,
    Reply,
    access_for,
    caller,
    empty_reply,
    json_reply,
    read_body,
    read_limited,
    read_query,
    require_own_node,
)
from api.paging import PageQuery, requested_window
from api.services import repository, services
from api.tokens import Scope
from vmjobs.cluster.pool import PoolVm
from vmjobs.cluster.wire import Assignment, ClusterVmReports, PoolToken, TokenRequest
from vmjobs.errors import Fault, Forbidden, InvalidRequest, Unavailable
from vmjobs.model import FrozenModel, Node
from vmjobs.wire import NodeList, NodeWishes

log = logging.getLogger(__name__)
blueprint = Blueprint("nodes", __name__, url_prefix="/v1/nodes")

READ: Final = access_for(Scope.COMPUTE_READ, Scope.NODE)
AGENT: Final = access_for(Scope.NODE)
#: Longest wait of a request, in seconds: shorter than a stopping server's wait for it.
MAX_WAIT: Final = 25.0


class AssignmentQuery(FrozenModel):
    """The assignment that the agent has."""

    seen: int = Field(-1, ge=-1, le=2**53, description="the revision of the last answer; -1: none")
    wait: float = Field(0, ge=0, le=30, description="seconds to wait for a new one, 25 at most")


class AnnouncementQuery(FrozenModel):
    """Additional wishes of the agent."""

    renew: bool = Field(False, description="renew the token, if it is in the second half of its life")


class ConsoleQuery(FrozenModel):
    """The VM, and the position of an append."""

    incarnation: int = Field(ge=1, le=2**31 - 2, description="number of the VM")
    offset: int = Field(ge=0, le=2**53, description="position in the console, from 0")


@blueprint.get("")
@Operation(
    "listNodes",
    access=READ,
    query=PageQuery,
    replies={200: Reply("a page of nodes", NodeList)},
)
def index() -> Response:
    """List the execute nodes, by name.

    `images` has the cached images that the caller may read; `image_names` is for operators.
    """
    found, cursor = repository().nodes.page(requested_window())
    return json_reply(NodeList(nodes=_visible_nodes(found), next=cursor))


@blueprint.get("/<node:name>")
@Operation("getNode", access=READ, replies={200: Reply("the node", Node)}, errors=(404, 422))
def show(name: str) -> Response:
    """Show one execute node."""
    return json_reply(_visible_nodes([repository().nodes.get(name)])[0])


def _visible_nodes(nodes: Sequence[Node]) -> tuple[Node, ...]:
    """Return nodes without images that the caller may not read."""
    who = current_viewer()
    if who.sees_all:
        return tuple(nodes)
    readable = repository().catalog.readable(who, {digest for node in nodes for digest in node.images})
    return tuple(
        node.model_copy(
            update={
                "images": tuple(digest for digest in node.images if digest in readable),
                "image_names": (),  # names that other users' jobs have used
            }
        )
        for node in nodes
    )


@blueprint.put("/<node:name>")
@Operation(
    "putNode",
    access=AGENT,
    query=AnnouncementQuery,
    body=Node,
    replies={200: Reply("accepted; these are requests to the node", NodeWishes)},
)
def put(name: str) -> Response:
    """Announce a node. A node's token is valid for that node only."""
    require_own_node(name)
    node = read_body(Node)
    if node.name != name:
        fault = Fault("name", "mismatch", "differs from the name in the URL")
        raise InvalidRequest("the body is about another node than the URL", faults=[fault])
    repository().nodes.put(node)
    prefetch_requests = repository().prefetcher.wishes(node)
    if read_query(AnnouncementQuery).renew:
        token = services().issuer.renewed_node_token(caller())
        prefetch_requests = prefetch_requests.model_copy(update={"token": token})
    return json_reply(prefetch_requests)


# --------------------------------------------------------------------------- virtual clusters


@blueprint.get("/<node:name>/members")
@Operation(
    "getNodeShare",
    access=AGENT,
    query=AssignmentQuery,
    replies={200: Reply("all VMs that the node shall run", Assignment)},
)
def share(name: str) -> Response:
    """Show the worker VMs that are assigned to a node.

    With `wait` the answer comes when its revision differs from `seen`, or when the time is over. A
    busy service answers at once.
    """
    require_own_node(name)
    query = read_query(AssignmentQuery)
    found = repository().assignments.get(name)
    if found.revision == query.seen and query.wait:
        services().assignments.wait(name, query.seen, min(query.wait, MAX_WAIT))
        found = repository().assignments.get(name)
    calls = tuple(services().sessions.calls(name))
    return json_reply(found.model_copy(update={"sessions": calls}))


@blueprint.post("/<node:name>/members")
@Operation(
    "reportMembers",
    access=AGENT,
    body=ClusterVmReports,
    replies={204: Reply("accepted")},
)
def report(name: str) -> Response:
    """Report the state of a node's worker VMs. Repeating a report is no error."""
    require_own_node(name)
    repository().assignments.store_reports(name, read_body(ClusterVmReports))
    return empty_reply()


@blueprint.post("/<node:name>/members/<member_id:member_id>/token")
@Operation(
    "mintMemberToken",
    access=AGENT,
    body=TokenRequest,
    replies={200: Reply("an IDTOKEN for this VM", PoolToken)},
)
def token(name: str, member_id: str) -> Response:
    """Issue a token with which a worker VM joins its pool.

    403 if the VM is not this node's, shall stop, or has another number.
    """
    parts = services()
    incarnation = read_body(TokenRequest).incarnation
    try:
        require_own_node(name)
        order = parts.repository.assignments.order_for(name, member_id, incarnation)
    except Forbidden as error:
        log.warning(
            "refused %s a token for VM %d of the member %s of node %s: %s",
            caller().subject,
            incarnation,
            member_id,
            name,
            error.message,
        )
        parts.repository.assignments.count_token(caller().subject, given=False)
        raise
    if parts.token_issuer is None:
        raise Unavailable(
            "pool",
            "this service issues no tokens for worker VMs",
            hint="set pool_key_dir to the directory with the pools' signing keys",
        )
    vm = PoolVm(order.name, incarnation, order.id)
    made = parts.token_issuer.mint(order.pool.name, vm, parts.config.pool_token_seconds)
    parts.repository.assignments.count_token(name, given=True)
    return json_reply(made, headers={"Cache-Control": "no-store"})


@blueprint.post("/<node:name>/members/<member_id:member_id>/console")
@Operation(
    "appendMemberConsole",
    access=AGENT,
    query=ConsoleQuery,
    body=BinaryBody("the bytes to append, 8 MiB at most"),
    replies={204: Reply("appended")},
    errors=(409, 413),
)
def console(name: str, member_id: str) -> Response:
    """Append to the console of a worker VM.

    Bytes that are there already stay as they are, so that a call may be repeated; an offset beyond the
    end is refused with 409.
    """
    require_own_node(name)
    query = read_query(ConsoleQuery)
    data = read_limited(MAX_APPEND_BYTES)
    repository().assignments.append_console(name, member_id, query.incarnation, query.offset, data)
    return empty_reply()
