"""SSH logins to worker VMs: operators on one side, the VMs' nodes on the other."""

from __future__ import annotations

import logging
from typing import Final

from flask import Blueprint
from pydantic import Field
from werkzeug.wrappers import Response

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
from api.services import repository, services
from api.session_hub import Side
from api.tokens import Scope
from vmjobs.cluster.ssh_session import (
    MAX_PIECE_BYTES,
    MAX_WAIT_SECONDS,
    STREAM_ENDED,
    STREAM_HEADER,
    STREAM_OPEN,
    AppendResult,
    ClusterSshSession,
    SessionAnswer,
    SessionRequest,
)
from vmjobs.errors import LoginUnavailable, NotFound, Unavailable
from vmjobs.model import FrozenModel

log = logging.getLogger(__name__)
blueprint = Blueprint("sessions", __name__, url_prefix="/v1")

OPERATORS: Final = access_for(Scope.ADMIN)
AGENTS: Final = access_for(Scope.NODE)
#: Seconds for the node to answer; meanwhile the guest may still be connecting to the SSH relay.
ANSWER_SECONDS: Final = 20.0
_BYTES: Final = BinaryBody("bytes of the session; empty: none came in time, or it has ended")
_STREAM_HEADERS: Final = {STREAM_HEADER: "`open`, or `ended`: these are the last bytes"}


class SendQuery(FrozenModel):
    """Position of the bytes."""

    offset: int = Field(ge=0, le=2**53, description="of the first byte, from 0")
    end: bool = Field(False, description="these are the last bytes")


class ReceiveQuery(FrozenModel):
    """The bytes to receive."""

    offset: int = Field(ge=0, le=2**53, description="earlier bytes have been received")
    wait: float = Field(0, ge=0, le=30, description="seconds to wait for bytes, 10 at most")


# --------------------------------------------------------------------------- operators


@blueprint.post("/clusters/<cluster:name>/members/<member:member>/sessions")
@Operation(
    "openSession",
    access=OPERATORS,
    body=SessionRequest,
    replies={201: Reply("the VM waits for an SSH client", ClusterSshSession)},
    errors=(404, 409),
)
def begin(name: str, member: str) -> Response:
    """Log in to a worker VM: its SSH server accepts this key once.

    The answer comes when the VM's node has accepted the session. The SSH client and the VM's server
    then communicate through the session's bytes. The cluster's history records the login.
    """
    key, who, parts = read_body(SessionRequest).key, caller().subject, services()
    logins = parts.repository.cluster_logins
    target = logins.target(name, member)
    session = parts.sessions.open(who, target.node, target.vm_id, target.incarnation, key)
    try:
        logins.notify_node(target.node)
        answer = parts.sessions.await_answer(who, session, ANSWER_SECONDS)
        if answer is None or answer.host_key is None:
            raise (
                _no_answer_error(target.node)
                if answer is None
                else LoginUnavailable(f"{member}: {answer.refused}")
            )
        logins.record(target, who)
    except Exception as error:
        parts.sessions.close(Side.OPERATOR, who, session)
        log.warning("%s could not log in to %s: %s", who, member, error)
        raise
    log.info("%s logs in to %s on %s: session %s", who, member, target.node, session[:8])
    made = ClusterSshSession(
        id=session, cluster=name, machine=member, node=target.node, host_key=answer.host_key
    )
    return json_reply(made, 201)


@blueprint.post("/sessions/<id:session>/bytes")
@Operation(
    "sendToMachine",
    access=OPERATORS,
    query=SendQuery,
    body=BinaryBody("the client's bytes, 256 KiB at most"),
    replies={200: Reply("the offset of the first byte that was not accepted", AppendResult)},
    errors=(404, 409, 413),
)
def send(session: str) -> Response:
    """Send bytes to a worker VM.

    Send bytes that are not accepted again, from the answered offset on. Bytes that were sent before are
    skipped, so that a call may be repeated.
    """
    return _send(Side.OPERATOR, session)


@blueprint.get("/sessions/<id:session>/bytes")
@Operation(
    "receiveFromMachine",
    access=OPERATORS,
    query=ReceiveQuery,
    replies={200: Reply("the VM's bytes", _BYTES, _STREAM_HEADERS)},
    errors=(404, 409),
)
def receive(session: str) -> Response:
    """Receive bytes from a worker VM, as soon as there are any."""
    return _receive(Side.OPERATOR, session)


@blueprint.delete("/sessions/<id:session>")
@Operation("leaveSession", access=OPERATORS, replies={204: Reply("ended")}, errors=(422,))
def leave(session: str) -> Response:
    """Log out of a worker VM. Repeating the call is no error."""
    services().sessions.close(Side.OPERATOR, caller().subject, session)
    return empty_reply()


# --------------------------------------------------------------------------- nodes


@blueprint.post("/nodes/<node:name>/sessions/<id:session>")
@Operation(
    "answerSession",
    access=AGENTS,
    body=SessionAnswer,
    replies={204: Reply("accepted")},
    errors=(404, 409),
)
def answer(name: str, session: str) -> Response:
    """Report whether a VM accepts a login. Waiting logins are in the assignment."""
    require_own_node(name)
    services().sessions.answer(name, session, read_body(SessionAnswer))
    return empty_reply()


@blueprint.post("/nodes/<node:name>/sessions/<id:session>/bytes")
@Operation(
    "sendToOperator",
    access=AGENTS,
    query=SendQuery,
    body=BinaryBody("the VM's bytes, 256 KiB at most"),
    replies={200: Reply("the offset of the first byte that was not accepted", AppendResult)},
    errors=(404, 409, 413),
)
def node_send(name: str, session: str) -> Response:
    """Send a VM's bytes to the operator; as `sendToMachine`."""
    require_own_node(name)
    return _send(Side.NODE, session)


@blueprint.get("/nodes/<node:name>/sessions/<id:session>/bytes")
@Operation(
    "receiveFromOperator",
    access=AGENTS,
    query=ReceiveQuery,
    replies={200: Reply("the operator's bytes", _BYTES, _STREAM_HEADERS)},
    errors=(404, 409),
)
def node_receive(name: str, session: str) -> Response:
    """Receive bytes for a VM, as soon as there are any."""
    require_own_node(name)
    return _receive(Side.NODE, session)


@blueprint.delete("/nodes/<node:name>/sessions/<id:session>")
@Operation("endSession", access=AGENTS, replies={204: Reply("ended")}, errors=(422,))
def node_leave(name: str, session: str) -> Response:
    """End a session on behalf of its VM. Repeating the call is no error."""
    require_own_node(name)
    services().sessions.close(Side.NODE, name, session)
    return empty_reply()


# --------------------------------------------------------------------------- both


def _send(side: Side, session: str) -> Response:
    query, who = read_query(SendQuery), caller().subject
    data = read_limited(MAX_PIECE_BYTES)
    reached = services().sessions.send(side, who, session, query.offset, data, query.end)
    return json_reply(AppendResult(offset=reached))


def _receive(side: Side, session: str) -> Response:
    query, who = read_query(ReceiveQuery), caller().subject
    wait = min(query.wait, MAX_WAIT_SECONDS)
    data, ended = services().sessions.receive(side, who, session, query.offset, wait)
    response = Response(data, content_type="application/octet-stream")
    response.headers["Cache-Control"] = "no-store"
    response.headers[STREAM_HEADER] = STREAM_ENDED if ended else STREAM_OPEN
    return response


def _no_answer_error(node: str) -> Unavailable:
    try:
        version = repository().nodes.get(node).version
    except NotFound:
        version = ""
    release = f" of vmjobs {version}" if version else ""
    return Unavailable(
        "agent",
        f"the agent{release} on {node} did not accept the session within {ANSWER_SECONDS:.0f} s",
        hint="check that it runs, and has this service's release",
    )
