"""Logging in to machines of virtual clusters: operators on one side, machines' nodes on the other."""

from __future__ import annotations

import logging
from typing import Final

from flask import Blueprint
from pydantic import Field
from werkzeug.wrappers import Response

from api.operation import (
    Binary,
    Reply,
    Strict,
    anyone_with,
    backend,
    caller,
    empty_reply,
    json_reply,
    operation,
    read_body,
    read_limited,
    read_query,
    require_own,
)
from api.session_hub import Side
from api.tokens import Scope
from vmjobs.cluster.session import (
    MAX_PIECE,
    MAX_WAIT,
    STREAM_ENDED,
    STREAM_HEADER,
    STREAM_OPEN,
    Accepted,
    Session,
    SessionAnswer,
    SessionRequest,
)
from vmjobs.errors import NoLogin, NotFound, Unavailable

log = logging.getLogger(__name__)
blueprint = Blueprint("sessions", __name__, url_prefix="/v1")

TAG: Final = "sessions"
OPERATORS: Final = anyone_with(Scope.ADMIN)
AGENTS: Final = anyone_with(Scope.NODE)
#: Seconds in which the machine's node is to answer; its guest may be on its way to the door meanwhile.
ANSWER_SECONDS: Final = 20.0
_BYTES: Final = Binary("bytes of the session; none: nothing came in time, or it has ended")
_SAID: Final = {STREAM_HEADER: "`open`, or `ended`: nothing comes after these bytes"}


class SendQuery(Strict):
    """Where bytes go on."""

    offset: int = Field(ge=0, le=2**53, description="of the first byte, from 0")
    end: bool = Field(False, description="nothing comes after these bytes")


class ReceiveQuery(Strict):
    """Which bytes are wanted."""

    offset: int = Field(ge=0, le=2**53, description="what comes before it has been received")
    wait: float = Field(0, ge=0, le=30, description="seconds to wait for bytes, 10 at most")


# --------------------------------------------------------------------------- operators


@blueprint.post("/clusters/<cluster:name>/members/<member:member>/sessions")
@operation(
    "openSession",
    tag=TAG,
    access=OPERATORS,
    body=SessionRequest,
    replies={201: Reply("the machine waits for an SSH client", Session)},
    errors=(404, 409),
)
def begin(name: str, member: str) -> Response:
    """Log in to a machine: have its SSH server let in, once, who holds the key.

    The answer comes when the machine's node has taken the session. What an SSH client and the
    machine's server say to each other then travels as the session's bytes. The cluster's history
    has a line about it.
    """
    key, who, parts = read_body(SessionRequest).key, caller().subject, backend()
    clusters = parts.repository.clusters
    door = clusters.door_of(name, member)
    session = parts.sessions.open(who, door.node, door.member, door.incarnation, key)
    try:
        clusters.call(door.node)
        answer = parts.sessions.await_answer(who, session, ANSWER_SECONDS)
        if answer is None or answer.host_key is None:
            raise _silent(door.node) if answer is None else NoLogin(f"{member}: {answer.refused}")
        clusters.note_login(door, who)
    except Exception as error:
        parts.sessions.close(Side.OPERATOR, who, session)
        log.warning("%s could not log in to %s: %s", who, member, error)
        raise
    log.info("%s logs in to %s on %s: session %s", who, member, door.node, session[:8])
    made = Session(id=session, cluster=name, machine=member, node=door.node, host_key=answer.host_key)
    return json_reply(made, 201)


@blueprint.post("/sessions/<id:session>/bytes")
@operation(
    "sendToMachine",
    tag=TAG,
    access=OPERATORS,
    query=SendQuery,
    body=Binary("what the client says, 256 KiB at most"),
    replies={200: Reply("so much of it was taken", Accepted)},
    errors=(404, 409, 413),
)
def send(session: str) -> Response:
    """Send bytes to a machine. What it does not take is to be sent again, from the offset that is
    answered on. Bytes that were sent before are passed over, so that a call may be repeated.
    """
    return _send(Side.OPERATOR, session)


@blueprint.get("/sessions/<id:session>/bytes")
@operation(
    "receiveFromMachine",
    tag=TAG,
    access=OPERATORS,
    query=ReceiveQuery,
    replies={200: Reply("what the machine says", _BYTES, _SAID)},
    errors=(404, 409),
)
def receive(session: str) -> Response:
    """Receive bytes from a machine, as soon as there are any."""
    return _receive(Side.OPERATOR, session)


@blueprint.delete("/sessions/<id:session>")
@operation("leaveSession", tag=TAG, access=OPERATORS, replies={204: Reply("it is over")}, errors=(422,))
def leave(session: str) -> Response:
    """Leave a machine. Repeating the call is no error."""
    backend().sessions.close(Side.OPERATOR, caller().subject, session)
    return empty_reply()


# --------------------------------------------------------------------------- nodes


@blueprint.post("/nodes/<node:name>/sessions/<id:session>")
@operation(
    "answerSession",
    tag=TAG,
    access=AGENTS,
    body=SessionAnswer,
    replies={204: Reply("noted")},
    errors=(404, 409),
)
def answer(name: str, session: str) -> Response:
    """Say whether a machine lets somebody in. The sessions that wait are in the node's share."""
    require_own(name)
    backend().sessions.answer(name, session, read_body(SessionAnswer))
    return empty_reply()


@blueprint.post("/nodes/<node:name>/sessions/<id:session>/bytes")
@operation(
    "sendToOperator",
    tag=TAG,
    access=AGENTS,
    query=SendQuery,
    body=Binary("what the machine says, 256 KiB at most"),
    replies={200: Reply("so much of it was taken", Accepted)},
    errors=(404, 409, 413),
)
def node_send(name: str, session: str) -> Response:
    """Send a machine's bytes to who is logged in to it; as `sendToMachine`."""
    require_own(name)
    return _send(Side.NODE, session)


@blueprint.get("/nodes/<node:name>/sessions/<id:session>/bytes")
@operation(
    "receiveFromOperator",
    tag=TAG,
    access=AGENTS,
    query=ReceiveQuery,
    replies={200: Reply("what is said to the machine", _BYTES, _SAID)},
    errors=(404, 409),
)
def node_receive(name: str, session: str) -> Response:
    """Receive bytes for a machine, as soon as there are any."""
    require_own(name)
    return _receive(Side.NODE, session)


@blueprint.delete("/nodes/<node:name>/sessions/<id:session>")
@operation("endSession", tag=TAG, access=AGENTS, replies={204: Reply("it is over")}, errors=(422,))
def node_leave(name: str, session: str) -> Response:
    """End a session: the machine has nothing more to say. Repeating the call is no error."""
    require_own(name)
    backend().sessions.close(Side.NODE, name, session)
    return empty_reply()


# --------------------------------------------------------------------------- both


def _send(side: Side, session: str) -> Response:
    query, who = read_query(SendQuery), caller().subject
    data = read_limited(MAX_PIECE)
    reached = backend().sessions.send(side, who, session, query.offset, data, query.end)
    return json_reply(Accepted(offset=reached))


def _receive(side: Side, session: str) -> Response:
    query, who = read_query(ReceiveQuery), caller().subject
    wait = min(query.wait, MAX_WAIT)
    data, ended = backend().sessions.receive(side, who, session, query.offset, wait)
    response = Response(data, content_type="application/octet-stream")
    response.headers["Cache-Control"] = "no-store"
    response.headers[STREAM_HEADER] = STREAM_ENDED if ended else STREAM_OPEN
    return response


def _silent(node: str) -> Unavailable:
    try:
        version = backend().repository.node(node).version
    except NotFound:
        version = ""
    release = f" of vmjobs {version}" if version else ""
    return Unavailable(
        "agent",
        f"the agent{release} on {node} did not take the session within {ANSWER_SECONDS:.0f} s",
        hint="does it run, and is it of this service's release?",
    )
