"""A published port: a TCP port of a node that leads to a port of a VM."""

from __future__ import annotations

from ipaddress import IPv4Address
from typing import Annotated, Any, Final

from pydantic import Field, model_validator

from vmjobs.model.base import FrozenModel

_ANY: Final = IPv4Address("0.0.0.0")  # noqa: S104 - what the operator publishes is for others
_FORMAT: Final = "must be like 1094, 2222:22 (this host's port, the VM's) or 192.0.2.5:2222:22"

Port = Annotated[int, Field(ge=1, le=65535, strict=True)]


class PublishedPort(FrozenModel):
    """Written as ``1094``, ``2222:22`` (the node's port, the VM's) or ``192.0.2.5:2222:22``.

    address: of the node; ``0.0.0.0``: all of its addresses.
    """

    address: IPv4Address = _ANY
    port: Port
    vm_port: Port

    def __str__(self) -> str:
        """The node's side, as in ``192.0.2.5:2222``."""
        return f"{self.port}" if self.address == _ANY else f"{self.address}:{self.port}"

    def overlaps(self, other: PublishedPort) -> bool:
        """Whether both claim the same port of an address."""
        same_address = self.address == other.address or _ANY in (self.address, other.address)
        return same_address and self.port == other.port

    @model_validator(mode="before")
    @classmethod
    def _parse(cls, data: Any) -> Any:
        if isinstance(data, dict):
            return data
        words = str(data).split(":")
        address = words.pop(0) if "." in words[0] else str(_ANY)
        if len(words) not in {1, 2} or not all(word.isascii() and word.isdigit() for word in words):
            raise ValueError(_FORMAT)
        return {"address": address, "port": int(words[0]), "vm_port": int(words[-1])}
