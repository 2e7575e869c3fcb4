"""Execute nodes: what they announce, and what anybody may see of it."""

from __future__ import annotations

from typing import Final

from flask import Blueprint
from werkzeug.wrappers import Response

from api.operation import (
    Reply,
    anyone_with,
    backend,
    caller,
    json_reply,
    operation,
    read_body,
)
from api.tokens import Scope
from vmjobs.errors import Fault, Forbidden, InvalidRequest
from vmjobs.model import Node
from vmjobs.wire import NodeList, NodeWishes

blueprint = Blueprint("nodes", __name__, url_prefix="/v1/nodes")

TAG: Final = "nodes"
READ: Final = anyone_with(Scope.COMPUTE_READ, Scope.NODE)


@blueprint.get("")
@operation("listNodes", tag=TAG, access=READ, replies={200: Reply("the nodes", NodeList)})
def index() -> Response:
    """List the execute nodes."""
    return json_reply(NodeList(nodes=tuple(backend().repository.nodes())))


@blueprint.get("/<node:name>")
@operation("getNode", tag=TAG, access=READ, replies={200: Reply("the node", Node)}, errors=(404, 422))
def show(name: str) -> Response:
    """Show one execute node."""
    return json_reply(backend().repository.node(name))


@blueprint.put("/<node:name>")
@operation(
    "putNode",
    tag=TAG,
    access=anyone_with(Scope.NODE),
    body=Node,
    replies={200: Reply("noted; this is what the node may do", NodeWishes)},
)
def put(name: str) -> Response:
    """Announce a node. A node's token is good for the node it was made for."""
    if caller().subject != name:
        raise Forbidden("this token belongs to another node")
    node = read_body(Node)
    if node.name != name:
        fault = Fault("name", "mismatch", "differs from the name in the URL")
        raise InvalidRequest("the body is about another node than the URL", faults=[fault])
    backend().repository.put_node(node)
    return json_reply(backend().images.wishes(node))
