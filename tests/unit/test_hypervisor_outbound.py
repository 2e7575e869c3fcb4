"""Outbound policy of guests: rules that nftables accepts, and the addresses they cover."""

from __future__ import annotations

import subprocess
from ipaddress import IPv4Address, IPv4Network

import pytest

from vmjobs.config import Config
from vmjobs.errors import HypervisorError
from vmjobs.hypervisor.network.outbound import (
    NON_PUBLIC_NETWORKS,
    OutboundPolicy,
    nftables_rules,
    node_addresses,
    resolve_networks,
)
from vmjobs.model import PublishedPort


@pytest.mark.parametrize(
    "policy", [OutboundPolicy(), OutboundPolicy(allow=("10.1.0.0/16", "10.1.2.3"), deny=("8.8.8.8",))]
)
def test_rules_are_those_of_nftables(policy: OutboundPolicy) -> None:
    text = nftables_rules(
        policy,
        [IPv4Network("10.0.0.1"), IPv4Network("192.0.2.9"), IPv4Network("9.9.9.9")],
        [PublishedPort.model_validate("2222:22")],
    )
    check = ["unshare", "-Urn", "nft", "--check", "-f", "-"]
    done = subprocess.run(check, input=text, text=True, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("address", "public"),
    [
        ("8.8.8.8", True),
        ("172.32.0.1", True),
        ("100.128.0.1", True),
        ("0.0.0.0", False),  # noqa: S104
        ("10.255.255.255", False),
        ("100.64.0.1", False),
        ("127.1.2.3", False),
        ("169.254.169.254", False),
        ("172.31.255.255", False),
        ("192.168.1.1", False),
        ("224.0.0.251", False),
        ("255.255.255.255", False),
    ],
)
def test_what_is_public(address: str, public: bool) -> None:
    assert any(IPv4Address(address) in network for network in NON_PUBLIC_NETWORKS) is not public


def test_the_nodes_own_addresses_are_known() -> None:
    assert IPv4Network("127.0.0.1") in node_addresses()


def test_names_stand_for_their_addresses() -> None:
    assert list(resolve_networks(["192.0.2.7/24", "localhost"])) == [
        IPv4Network("192.0.2.0/24"),
        IPv4Network("127.0.0.1"),
    ]
    with pytest.raises(HypervisorError, match=r"no-such-host\.invalid of network_allow"):
        list(resolve_networks(["no-such-host.invalid"]))


@pytest.mark.parametrize("word", ["fd00::/8", "10.0.0.0/33", "10.0.0.256", "a host", "-x", ""])
def test_what_is_no_address_is_refused_at_start(word: str) -> None:
    with pytest.raises(ValueError, match="network_deny"):
        Config(network_deny=(word,))
