"""Wire models of SSH sessions in cluster VMs, between operators, service and agents."""

from __future__ import annotations

from typing import Annotated, Final

from pydantic import Field, StringConstraints

from vmjobs.model import FrozenModel, LenientModel

#: An OpenSSH public key, as in an ``authorized_keys`` file, without a comment.
PublicKey = Annotated[str, StringConstraints(pattern=r"^ssh-ed25519 [A-Za-z0-9+/]{68}$")]
SessionId = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{32}$")]

#: Maximum bytes of one request, and of those that wait for a reader in each direction.
MAX_PIECE_BYTES: Final = 256 * 1024
MAX_PENDING_BYTES: Final = 1024 * 1024
#: Maximum seconds that a request for bytes waits for some.
MAX_WAIT_SECONDS: Final = 10.0
#: The answer's header that says whether more bytes may follow, and its values.
STREAM_HEADER: Final = "Vmjobs-Stream"
STREAM_OPEN: Final = "open"
STREAM_ENDED: Final = "ended"


class SessionRequest(FrozenModel):
    """The body of ``POST /v1/clusters/{cluster}/members/{member}/sessions``."""

    key: PublicKey = Field(description="OpenSSH ed25519 public key; its holder may log in once")


class ClusterSshSession(LenientModel):
    """A session that the VM's node has accepted. host_key: of the VM's SSH server."""

    id: SessionId
    cluster: str
    machine: str
    node: str
    user: str = "root"
    host_key: PublicKey


class PendingSession(LenientModel):
    """A session that waits for the agent of the VM's node."""

    id: SessionId
    member: str
    incarnation: int
    key: PublicKey


class SessionAnswer(FrozenModel):
    """The body of ``POST /v1/nodes/{node}/sessions/{session}``. refused: why the login failed."""

    host_key: PublicKey | None = None
    refused: str = Field(default="", max_length=1000)


class AppendResult(LenientModel):
    """The answer to appended bytes. offset: of the next byte to send."""

    offset: int
