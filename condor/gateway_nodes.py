"""Execute nodes of a site that join the pool of a gateway's computing element. Pure.

A node belongs to the gateway as long as the gateway has a secret for it, with which the user name in
the node's token ends. The pool accepts these users only.
"""

from __future__ import annotations

import secrets as randomness
from collections.abc import Collection, Mapping
from datetime import timedelta
from typing import Final

from condor.worker import escaped, packaged_file
from vmjobs.errors import InvalidRequest
from vmjobs.gateway.spec import Gateway, GatewayRole

#: Before a node's name, in the names of its secret and of its user.
NODE_PREFIX: Final = "node-"
#: Before a node's name, in the name of its list of people with accounts there.
ACCOUNTS_PREFIX: Final = "accounts-"
#: Nodes do not renew their tokens.
NODE_TOKEN_LIFETIME: Final = timedelta(days=365)
#: The file of a node's token.
NODE_TOKEN_FILE: Final = "token"  # noqa: S105


def new_node(node: str) -> dict[str, bytes]:
    """A new secret for a node, by its name."""
    return {NODE_PREFIX + node: randomness.token_hex(8).encode()}


def node_names(secrets: Mapping[str, bytes]) -> list[str]:
    """The host names of the gateway's nodes."""
    return [name.removeprefix(NODE_PREFIX) for name in secrets if name.startswith(NODE_PREFIX)]


def node_accounts(node: str, secrets: Mapping[str, bytes]) -> list[str]:
    """The people whose jobs run as the node's accounts of the same name."""
    return secrets.get(ACCOUNTS_PREFIX + node, b"").decode().split()


def node_user(node: str, secrets: Mapping[str, bytes]) -> str:
    """The user name in a node's token."""
    return f"{NODE_PREFIX}{node}.{secrets[NODE_PREFIX + node].decode()}"


def nodes_config(gateway: Gateway, secrets: Mapping[str, bytes]) -> bytes:
    """The computing element's configuration of the nodes that its pool accepts."""
    users = (f"{node_user(node, secrets)}@{gateway.domain}" for node in node_names(secrets))
    return f"GATEWAY_NODES = {', '.join(users)}\n".encode()


def nodes_script(gateway: Gateway, secrets: Mapping[str, bytes], removed: str = "") -> str:
    """A shell script that lets a running computing element accept the present nodes, and no others.

    removed: a node that it drops from the pool.
    """
    text = packaged_file("gateway", "nodes.sh").decode()
    config = nodes_config(gateway, secrets).decode().rstrip("\n")
    return text.replace("@CONFIG@", config).replace("@REMOVED@", removed)


def node_files(
    gateway: Gateway, node: str, token: str, accounts: Collection[str] = ()
) -> dict[str, bytes]:
    """A node's configuration of HTCondor, and its token, by file name.

    accounts: people of the gateway whose jobs run as the node's accounts of the same name.

    Raises:
        InvalidRequest: other hosts cannot reach the pool.
        NotFound: there are no such people.
    """
    for name in accounts:
        gateway.check_person(name)
    published = [one for vm in gateway.of_role(GatewayRole.COMPUTING_ELEMENT) for one in vm.publish]
    if not published:
        raise InvalidRequest(
            f"other hosts cannot reach the pool of {gateway.name}",
            hint="declare a host, and a port to publish for the computing element",
        )
    own = {
        "CONDOR_HOST": str(gateway.host),
        "COLLECTOR_HOST": f"{gateway.host}:{published[0].port}",
        "NETWORK_HOSTNAME": node,
        # HTCondor lets only users of the same domain run as their own accounts.
        "UID_DOMAIN": gateway.domain if accounts else node,
        "GATEWAY_ACCOUNTS": ", ".join(accounts),
    }
    config = "".join(f"{key} = {escaped(value)}\n" for key, value in own.items()).encode()
    return {
        f"60-gateway-{gateway.name}.conf": config + packaged_file("gateway", "node.conf"),
        NODE_TOKEN_FILE: f"{token}\n".encode(),
    }
