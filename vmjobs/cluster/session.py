"""Logging in to a machine of a cluster: what travels about it between operators, service and agents."""

from __future__ import annotations

from typing import Annotated, Final

from pydantic import Field, StringConstraints

from vmjobs.model import Frozen
from vmjobs.wire import Envelope

#: An OpenSSH public key, as it stands in an ``authorized_keys``; without a comment.
PublicKey = Annotated[str, StringConstraints(pattern=r"^ssh-ed25519 [A-Za-z0-9+/]{68}$")]
SessionId = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{32}$")]

#: Bytes that may be sent at once, and that wait for a reader in each direction at most.
MAX_PIECE: Final = 256 * 1024
MAX_WAITING: Final = 1024 * 1024
#: Seconds that a request for bytes waits for some at most.
MAX_WAIT: Final = 10.0
#: The answer's header that says whether more bytes may follow, and its values.
STREAM_HEADER: Final = "Vmjobs-Stream"
STREAM_OPEN: Final = "open"
STREAM_ENDED: Final = "ended"


class SessionRequest(Frozen):
    """The body of ``POST /v1/clusters/{cluster}/members/{member}/sessions``."""

    key: PublicKey = Field(description="whose private half logs in, once; OpenSSH's ed25519")


class Session(Envelope):
    """A session that the machine's node has taken. host_key: of the machine's SSH server."""

    id: SessionId
    cluster: str
    machine: str
    node: str
    user: str = "root"
    host_key: PublicKey


class SessionCall(Envelope):
    """A session that waits for the agent of the machine's node."""

    id: SessionId
    member: str
    incarnation: int
    key: PublicKey


class SessionAnswer(Frozen):
    """The body of ``POST /v1/nodes/{node}/sessions/{session}``. refused: why nobody can log in."""

    host_key: PublicKey | None = None
    refused: str = Field(default="", max_length=1000)


class Accepted(Envelope):
    """The answer to appended bytes: the offset of the first that is not there yet."""

    offset: int
