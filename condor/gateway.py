"""Files for the VMs of a grid gateway, by role: scripts, configuration and keys. Pure.

Scripts and shared configuration are files in ``condor/gateway/``; this module makes the parts that
differ between gateways and between their VMs.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import secrets as randomness
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime, timedelta
from typing import Final

from condor import names
from condor.gateway_nodes import NODE_TOKEN_LIFETIME, node_user, nodes_config
from condor.pool.idtoken import create_token
from condor.worker import accounts, escaped, packaged_file, slot_users
from vmjobs.cluster.wire import PoolToken
from vmjobs.errors import Fault, Forbidden, InvalidSpec, NotFound
from vmjobs.gateway.spec import Gateway, GatewayRole, GatewayVm

#: The account that the storage element's own check uses.
CHECK_ACCOUNT: Final = "check"
#: Names that mean something else in a gateway's VMs; the VMs reject those of other accounts of theirs.
RESERVED_NAMES: Final = frozenset({CHECK_ACCOUNT, "condor", "root", "xrootd"})
#: The user name in a worker's token is this and the VM's name.
WORKER_USER_PREFIX: Final = "worker-"
#: File name of the pool's signing key, in HTCondor's directory of keys.
KEY_NAME: Final = "gateway"
#: Tokens are renewed whenever a VM starts, and once half of this is over. Reinstalling a gateway
#: invalidates them all.
TOKEN_LIFETIME: Final = timedelta(days=30)
#: A collector refuses tokens issued in the future, and a guest's clock may be slow.
CLOCK_SLACK: Final = timedelta(minutes=10)

#: The port of the pool, and of the schedd, unless another one is published.
POOL_PORT: Final = 9618

#: Names of a gateway's secrets.
POOL_KEY: Final = "pool-key"
STORAGE_KEY: Final = "storage-key"
CHECK_KEY: Final = "storage-check-key"

_Files = dict[str, bytes]


class GatewayKit:
    """Implements :class:`vmjobs.gateway.supervisor.RoleFiles`."""

    def __init__(self, clock: Callable[[], datetime] = lambda: datetime.now(UTC)) -> None:
        self._clock = clock

    def secrets(self, gateway: Gateway) -> Mapping[str, bytes]:
        """New keys: one that signs the pool's tokens, and those of the storage element's users.

        Raises:
            InvalidSpec: the declared VMs do not form a gateway.
        """
        check_roles(gateway)
        return {
            POOL_KEY: base64.b64encode(randomness.token_bytes(48)),
            STORAGE_KEY: randomness.token_hex(32).encode(),
            CHECK_KEY: randomness.token_hex(32).encode(),
        }

    def files(
        self, gateway: Gateway, vm: GatewayVm, secrets: Mapping[str, bytes]
    ) -> Mapping[str, bytes]:
        """A VM gets only the keys that it needs. Raises as :meth:`secrets`."""
        check_roles(gateway)
        own = {
            GatewayRole.COMPUTING_ELEMENT: self._computing_element,
            GatewayRole.STORAGE_ELEMENT: _storage_element,
            GatewayRole.USER_INTERFACE: self._user_interface,
            GatewayRole.WORKER: self._worker,
            GatewayRole.SERVICE: _service,
        }[vm.role]
        return {
            "script": packaged_file("gateway", f"{vm.role}.sh"),
            "common.sh": packaged_file("gateway", "common.sh"),
            "ssh_relay": packaged_file("worker", "ssh_relay.sh"),
            **own(gateway, vm, secrets),
        }

    def token(self, gateway: Gateway, vm: GatewayVm, secrets: Mapping[str, bytes]) -> PoolToken:
        """That of a user interface has a line for each of the gateway's people: name and token."""
        match vm.role:
            case GatewayRole.COMPUTING_ELEMENT:
                return self._make_token(gateway, secrets, "condor")
            case GatewayRole.WORKER:
                user = WORKER_USER_PREFIX + vm.name
                return self._make_token(gateway, secrets, user, "ADVERTISE_STARTD", "READ")
            case GatewayRole.USER_INTERFACE:
                tokens = {name: self.person_token(gateway, name, secrets) for name in gateway.people}
                lines = "".join(f"{name} {made.token}\n" for name, made in tokens.items())
                expires = min(made.expires for made in tokens.values())
                return PoolToken(token=lines, identity=f"*@{gateway.domain}", expires=expires)
        raise Forbidden(f"a {vm.role} needs no token")

    def person_token(self, gateway: Gateway, person: str, secrets: Mapping[str, bytes]) -> PoolToken:
        gateway.check_person(person)
        if not gateway.of_role(GatewayRole.COMPUTING_ELEMENT):
            raise NotFound(f"the gateway {gateway.name} has no computing element to submit to")
        return self._make_token(gateway, secrets, person, "READ", "WRITE")

    def node_token(self, gateway: Gateway, node: str, secrets: Mapping[str, bytes]) -> PoolToken:
        """A token for one of the site's nodes, which advertises itself in the gateway's pool."""
        rights = ("ADVERTISE_STARTD", "ADVERTISE_MASTER", "READ")
        user = node_user(node, secrets)
        return self._make_token(gateway, secrets, user, *rights, lifetime=NODE_TOKEN_LIFETIME)

    def _make_token(
        self,
        gateway: Gateway,
        secrets: Mapping[str, bytes],
        user: str,
        *authorizations: str,
        lifetime: timedelta = TOKEN_LIFETIME,
    ) -> PoolToken:
        begin, identity = self._clock() - CLOCK_SLACK, f"{user}@{gateway.domain}"
        token = create_token(
            secrets[POOL_KEY],
            KEY_NAME,
            identity,
            now=begin,
            lifetime=lifetime,
            authorizations=authorizations,
        )
        return PoolToken(token=token, identity=identity, expires=begin + lifetime)

    def _computing_element(
        self, gateway: Gateway, vm: GatewayVm, secrets: Mapping[str, bytes]
    ) -> _Files:
        return {
            **_condor(gateway, vm, "90-gateway-condor.conf", "92-gateway-ce.conf"),
            "91-gateway-site.conf": packaged_file("config", "site.conf"),
            # For jobs in VMs, on nodes of the site that have an agent.
            "93-gateway-schedd.conf": packaged_file("config", "schedd.conf"),
            "94-gateway-negotiator.conf": packaged_file("config", "negotiator.conf"),
            "95-gateway-nodes.conf": nodes_config(gateway, secrets),
            "people": _people(gateway),
            "pool-key": secrets[POOL_KEY],
            "token": self._token(gateway, vm, secrets),
        }

    def _user_interface(self, gateway: Gateway, vm: GatewayVm, secrets: Mapping[str, bytes]) -> _Files:
        return {
            **_condor(gateway, vm, "90-gateway-condor.conf", "93-gateway-ui.conf"),
            "91-gateway-submit.conf": packaged_file("config", "submit.conf"),
            "people": _people(gateway),
            "token": self._token(gateway, vm, secrets),
            "example.sub": _example(gateway),
            **{f"keys/{name}": _lines(*person.keys) for name, person in gateway.people.items()},
            **{f"storage/{name}": _keytab(name, secrets) for name in gateway.people},
        }

    def _worker(self, gateway: Gateway, vm: GatewayVm, secrets: Mapping[str, bytes]) -> _Files:
        # Its own domain: its accounts have no meaning on other hosts.
        here = {"UID_DOMAIN": gateway.fqdn(vm), **slot_users(vm.cpus)}
        return {
            **_condor(gateway, vm, "98-gateway-worker.conf", **here),
            names.STARTD_CONFIG: packaged_file("worker", "startd.conf"),
            "accounts": _lines(*accounts(vm.cpus)),
            "token": self._token(gateway, vm, secrets),
        }

    def _token(self, gateway: Gateway, vm: GatewayVm, secrets: Mapping[str, bytes]) -> bytes:
        return _lines(self.token(gateway, vm, secrets).token)


def check_roles(gateway: Gateway) -> None:
    """Check that these VMs form a gateway.

    Raises:
        InvalidSpec: with every fault.
    """
    elements = gateway.of_role(GatewayRole.COMPUTING_ELEMENT)
    faults = [
        Fault(f"machines.{extra.name}.role", "twice", f"{elements[0].name} is the computing element")
        for extra in elements[1:]
    ]
    if not elements:
        faults = [
            Fault(
                f"machines.{m.name}.role", "missing", f"a {m.role} needs a computing element beside it"
            )
            for m in gateway.machines
            if m.role in (GatewayRole.USER_INTERFACE, GatewayRole.WORKER)
        ]
    faults += _people_faults(gateway)
    for element in elements[:1]:
        faults += _publishing_faults(gateway, element)
    if faults:
        raise InvalidSpec("the gateway's declaration has faults", faults=faults)


def _people_faults(gateway: Gateway) -> Iterator[Fault]:
    if not gateway.people:
        for vm in gateway.of_role(GatewayRole.USER_INTERFACE):
            yield Fault("people", "missing", f"is missing: the users of {vm.name}")
    for name in gateway.people:
        if name in RESERVED_NAMES or name.startswith(WORKER_USER_PREFIX):
            yield Fault(f"people.{name}", "reserved", f"{name} is an account of the gateway's own")


def _publishing_faults(gateway: Gateway, element: GatewayVm) -> Iterator[Fault]:
    """Yield faults of a computing element's ports. HTCondor tells its clients the port that it has."""
    where = f"machines.{element.name}.publish"
    if len(element.publish) > 1:
        yield Fault(where, "too_many", "a computing element publishes one port, which is its pool's")
    elif any(one.port != one.vm_port for one in element.publish):
        yield Fault(
            where, "different", "a computing element has the port that it publishes: write it once"
        )
    if element.publish and gateway.host is None:
        text = "is missing: the name or address by which other hosts reach the computing element"
        yield Fault("host", "missing", text)


def _condor(gateway: Gateway, vm: GatewayVm, *shipped: str, **settings: str) -> _Files:
    """HTCondor's configuration: the files that such VMs share, and the one of this VM."""
    element = gateway.of_role(GatewayRole.COMPUTING_ELEMENT)[0]
    own = {
        "CONDOR_HOST": gateway.fqdn(element),
        "COLLECTOR_HOST": _collector(gateway),
        "TRUST_DOMAIN": gateway.domain,
        "UID_DOMAIN": gateway.domain,
        "FILESYSTEM_DOMAIN": gateway.fqdn(vm),
        "NETWORK_HOSTNAME": gateway.fqdn(vm),
        "NETWORK_INTERFACE": str(vm.address),
        "GATEWAY_PEOPLE": ", ".join(f"{name}@{gateway.domain}" for name in gateway.people),
        **settings,
    }
    if element.publish:  # VMs of the gateway use its address on their own network
        own["PRIVATE_NETWORK_NAME"] = gateway.domain
    if element.publish and vm == element:
        own |= {
            "BIND_ALL_INTERFACES": "True",
            "PRIVATE_NETWORK_INTERFACE": str(vm.address),
            "SHARED_PORT_PORT": str(vm.publish[0].port),
            "TCP_FORWARDING_HOST": str(gateway.host),
        }
    return {
        "condor.sh": packaged_file("gateway", "condor.sh"),
        **{name: packaged_file("gateway", name) for name in shipped},
        "99-gateway-machine.conf": _lines(*(f"{key} = {escaped(own[key])}" for key in own)),
    }


def _collector(gateway: Gateway) -> str:
    """The collector of the pool: its host, with the port unless that is HTCondor's own."""
    element = gateway.of_role(GatewayRole.COMPUTING_ELEMENT)[0]
    port = element.publish[0].port if element.publish else POOL_PORT
    return gateway.fqdn(element) + ("" if port == POOL_PORT else f":{port}")


def _people(gateway: Gateway) -> bytes:
    """A line for each of the gateway's people: account and its number."""
    return _lines(*(f"{name} {_number(name)}" for name in gateway.people))


def _number(name: str) -> int:
    """A user id, the same on all VMs, and independent of the other people."""
    return 10**6 + int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big") % 10**9


def _storage_element(gateway: Gateway, _vm: GatewayVm, secrets: Mapping[str, bytes]) -> _Files:
    own = _keytab_line(CHECK_ACCOUNT, 1, secrets[CHECK_KEY])
    return {
        "xrootd.cfg": packaged_file("gateway", "xrootd.cfg"),
        # a: everything; l: look up names. XRootD's acc.authdb.
        "authdb": _lines(
            *(f"u {name} /store a" for name in gateway.people), f"u {CHECK_ACCOUNT} /store l"
        ),
        "storage-keytab": b"".join(_keytab(name, secrets) for name in gateway.people) + own,
        "check-keytab": own,
    }


def _keytab(person: str, secrets: Mapping[str, bytes]) -> bytes:
    """A person's own key for the storage element."""
    key = hmac.digest(secrets[STORAGE_KEY], person.encode(), "sha256").hex()
    return _keytab_line(person, _number(person), key.encode())


def _service(_gateway: Gateway, vm: GatewayVm, _secrets: Mapping[str, bytes]) -> _Files:
    commands = {"run": vm.run, "check": vm.check}
    return {name: _lines(command) for name, command in commands.items() if command is not None}


def _keytab_line(user: str, number: int, key: bytes) -> bytes:
    """A key for XRootD's Simple Shared Secret, as ``xrdsssadmin`` writes it."""
    return _lines(f"0 u:{user} g:{user} n:{user} N:{number} c:1 e:0 k:{key.decode()}")


def _example(gateway: Gateway) -> bytes:
    element = gateway.fqdn(gateway.of_role(GatewayRole.COMPUTING_ELEMENT)[0])
    text = packaged_file("gateway", "example.sub").decode()
    return text.replace("@COMPUTING_ELEMENT@", element).replace("@POOL@", _collector(gateway)).encode()


def _lines(*lines: str) -> bytes:
    return "".join(f"{line}\n" for line in lines).encode()
