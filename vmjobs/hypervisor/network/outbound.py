"""Destinations of guests in mode ``outbound``: public addresses, adjusted by the site.

Pure but for :func:`node_addresses` and the resolution of names; the rules are for nftables (nft(8)).
"""

from __future__ import annotations

import json
import socket
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from ipaddress import IPv4Network, collapse_addresses
from typing import Final

from vmjobs.errors import HypervisorError
from vmjobs.hypervisor.base import GUEST_ADDRESS, NAMESERVER_ADDRESS
from vmjobs.hypervisor.network.namespaces import TAP
from vmjobs.model import PublishedPort
from vmjobs.subprocess import run

#: The interface of a VM's network namespace that leads to the node's network.
OUTBOUND_DEVICE: Final = "out0"
#: Non-public addresses: IANA's registry of special-purpose addresses (RFC 6890), and multicast.
NON_PUBLIC_NETWORKS: Final = tuple(
    map(
        IPv4Network,
        (
            *("0.0.0.0/8", "10.0.0.0/8", "100.64.0.0/10", "127.0.0.0/8", "169.254.0.0/16"),
            *("172.16.0.0/12", "192.0.0.0/24", "192.0.2.0/24", "192.168.0.0/16", "198.18.0.0/15"),
            *("198.51.100.0/24", "203.0.113.0/24", "224.0.0.0/4", "240.0.0.0/4"),
        ),
    )
)
_TIMEOUT_SECONDS: Final = 10.0


@dataclass(frozen=True)
class OutboundPolicy:
    """A site's exceptions: IPv4 addresses, networks (``192.0.2.0/24``), host names.

    allow: even if private, or the node's own. deny: overrides everything else.
    """

    allow: tuple[str, ...] = ()
    deny: tuple[str, ...] = ()


def nftables_rules(
    policy: OutboundPolicy, own: Collection[IPv4Network], published: Collection[PublishedPort] = ()
) -> str:
    """Return the rules of a VM's network namespace.

    own: addresses of the node. published: the VM's ports that others may connect to, from any address.
    Its packets to them do not begin connections. It may connect to its own published ports.
    """
    answers = "".join(
        f"ip saddr {GUEST_ADDRESS} tcp sport {port} tcp flags & (syn | ack) != syn accept\n    "
        for port in sorted({one.vm_port for one in published})
    )
    itself = "".join(
        f"ip daddr @own tcp dport {port} accept\n    "
        for port in sorted({one.port for one in published})
    )
    return f"""
table ip outbound {{
  {_set("denied", resolve_networks(policy.deny))}
  {_set("allowed", resolve_networks(policy.allow))}
  {_set("own", own)}
  {_set("closed", [*NON_PUBLIC_NETWORKS, *own])}
  chain forward {{
    type filter hook forward priority 0; policy drop;
    iifname "{OUTBOUND_DEVICE}" oifname "{TAP}" accept
    iifname "{TAP}" oifname "{OUTBOUND_DEVICE}" jump leaving
  }}
  chain leaving {{
    {answers}ip daddr {NAMESERVER_ADDRESS} meta l4proto {{ tcp, udp }} th dport 53 accept
    ip daddr @denied goto refuse
    {itself}ip daddr @allowed accept
    ip daddr @closed goto refuse
    accept
  }}
  chain refuse {{ reject with icmp type admin-prohibited; }}
}}
"""


def _set(name: str, members: Iterable[IPv4Network]) -> str:
    listed = ", ".join(map(str, collapse_addresses(members)))
    elements = f"elements = {{ {listed} }}" if listed else ""
    return f"set {name} {{ type ipv4_addr; flags interval; {elements} }}"


def resolve_networks(words: Iterable[str]) -> Iterator[IPv4Network]:
    """Yield the networks of addresses, networks and host names.

    Raises:
        HypervisorError: a host name cannot be resolved.
    """
    for word in words:
        try:
            yield IPv4Network(word, strict=False)
        except ValueError:
            try:
                found = socket.getaddrinfo(word, None, socket.AF_INET, socket.SOCK_STREAM)
            except OSError as error:
                raise HypervisorError(
                    f"the host {word} of network_allow or network_deny is not known: {error.strerror}"
                ) from error
            yield from (IPv4Network(where[0]) for *_, where in found)


def node_addresses() -> list[IPv4Network]:
    output = run(["ip", "-json", "-4", "address"], timeout=_TIMEOUT_SECONDS, error=HypervisorError).text
    return [
        IPv4Network(one["local"]) for link in json.loads(output) for one in link.get("addr_info", ())
    ]
