"""An operator's declaration of a gateway, its private network and its VMs. Does no I/O."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from enum import StrEnum
from ipaddress import IPv4Address, IPv4Interface, IPv4Network, ip_network
from typing import Annotated, Any, Final

from pydantic import AfterValidator, Field, StringConstraints, ValidationError

from vmjobs.cluster.spec import ClusterName, ClusterVmLimits
from vmjobs.config import host_and_port
from vmjobs.errors import Fault, InvalidSpec, NotFound
from vmjobs.hypervisor.base import GUEST_ADDRESS, GUEST_NETMASK_BITS
from vmjobs.model import (
    CAPABILITIES,
    FrozenModel,
    HypervisorKind,
    ImageRef,
    PublishedPort,
    check_cpus,
    faults_of,
)

#: The hypervisor of all gateway VMs.
GATEWAY_HYPERVISOR: Final = next(kind for kind in HypervisorKind if CAPABILITIES[kind].private_networks)
MAX_VMS: Final = 32
MAX_PORTS: Final = 64
MAX_PEOPLE: Final = 200
#: Prefix bits of a private network: minimum and maximum.
MIN_PREFIX_BITS: Final = 16
MAX_PREFIX_BITS: Final = 29

#: The network of every VM's first interface, with its guest endpoint and its way to the internet.
GUEST_NETWORK: Final = IPv4Interface(f"{GUEST_ADDRESS}/{GUEST_NETMASK_BITS}").network


def _check_listen(value: str) -> str:
    host_and_port(value)
    return value


#: One label of a host name (RFC 1123).
VmName = Annotated[str, StringConstraints(pattern=r"^[a-z]([a-z0-9-]{0,30}[a-z0-9])?$")]
Domain = Annotated[
    str,
    StringConstraints(
        pattern=r"^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?(\.[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?)+$",
        max_length=200,
    ),
]


#: A host name, or an IPv4 address.
HostName = Annotated[
    str, StringConstraints(pattern=r"^[a-z0-9]([a-z0-9.-]*[a-z0-9])?$", max_length=253)
]


#: A user's account, at most 31 characters.
PersonName = Annotated[str, StringConstraints(pattern=r"^[a-z][a-z0-9-]{0,29}[a-z0-9]$")]
#: A line of an ``authorized_keys`` file (sshd(8)), without options.
LoginKey = Annotated[
    str,
    StringConstraints(
        pattern=r"^(sk-)?(ssh|ecdsa)-[a-z0-9@.-]{3,40} [A-Za-z0-9+/]{60,1400}={0,2}( [ -~]{0,200})?$"
    ),
]
#: Address and port of this host.
ListenAddress = Annotated[str, AfterValidator(_check_listen)]
AbsolutePath = Annotated[str, StringConstraints(pattern=r"^/[ -~]*$", max_length=4096)]
ShellCommand = Annotated[str, StringConstraints(min_length=1, max_length=4096)]


class GatewayRole(StrEnum):
    COMPUTING_ELEMENT = "computing-element"
    STORAGE_ELEMENT = "storage-element"
    USER_INTERFACE = "user-interface"
    WORKER = "worker"
    SERVICE = "service"


class GatewayVm(FrozenModel):
    """One VM. Its name is its host name in the gateway's domain.

    image: in the local store; if missing, built by the recipe of that name. recipe: a recipe's file,
    instead of ``image``. address: in the gateway's network. memory, disk: MiB; disk: for the data of
    its services, which survives restarts. run: shell command of a ``service``, which runs as root;
    check: another one, which succeeds if it answers. publish: ports of this host that lead to the VM's.
    limits: of its use of this host. place: directory of this host for its disks.
    """

    name: VmName
    role: GatewayRole
    image: ImageRef | None = None
    recipe: str | None = Field(default=None, min_length=1, max_length=4096)
    address: IPv4Address
    cpus: int = Field(default=1, ge=1, le=256, strict=True)
    memory: int = Field(default=512, ge=64, le=4 * 1024 * 1024, strict=True, description="MiB")
    disk: int = Field(default=2048, ge=64, le=64 * 1024 * 1024, strict=True, description="MiB")
    hypervisor: HypervisorKind | None = None
    run: ShellCommand | None = None
    check: ShellCommand | None = None
    publish: tuple[PublishedPort, ...] = Field(default=(), max_length=MAX_PORTS)
    limits: ClusterVmLimits = ClusterVmLimits()
    place: AbsolutePath | None = None


class Person(FrozenModel):
    """A user of the gateway. keys: of OpenSSH, for log-ins on the user interface."""

    keys: tuple[LoginKey, ...] = Field(default=(), max_length=16)


class Gateway(FrozenModel):
    """One gateway, with its VMs in the declared order.

    domain: of the VMs' host names. network: private network of the VMs alone. host: name or address
    by which other hosts reach published ports. people: its users, by name of their account. metrics:
    where its supervisor serves metrics for Prometheus.
    """

    name: ClusterName
    domain: Domain
    network: IPv4Network
    host: HostName | None = None
    people: dict[PersonName, Person] = Field(default={}, max_length=MAX_PEOPLE)
    metrics: ListenAddress | None = None
    machines: tuple[GatewayVm, ...] = Field(min_length=1, max_length=MAX_VMS)

    def vm(self, name: str) -> GatewayVm | None:
        return next((vm for vm in self.machines if vm.name == name), None)

    def fqdn(self, vm: GatewayVm) -> str:
        return f"{vm.name}.{self.domain}"

    def of_role(self, role: GatewayRole) -> tuple[GatewayVm, ...]:
        return tuple(vm for vm in self.machines if vm.role is role)

    def check_person(self, name: str) -> None:
        """Raises: NotFound: no person of the gateway has this name."""
        if name not in self.people:
            known = ", ".join(self.people) or "none"
            raise NotFound(f"{name} is none of the people of {self.name}", hint=f"its people: {known}")


def parse_gateway(data: Any) -> Gateway:
    """Validate a declaration from decoded JSON or YAML.

    In it ``gateway`` is the gateway's name, and ``machines`` a mapping by name.

    Raises:
        InvalidSpec: with every fault, by the declaration's names of fields.
    """
    faults: list[Fault] = []
    gateway = None
    try:
        gateway = Gateway.model_validate(_as_model(data))
    except ValidationError as error:
        found = [_as_declared(fault, data) for fault in faults_of(error)]
        # VMs with faults are dropped; the resulting empty list is not a further fault.
        inner = any(fault.field.startswith("machines.") for fault in found)
        faults += [fault for fault in found if not (inner and fault.code == "too_short")]
    known = {fault.field for fault in faults}
    faults += [fault for fault in _consistency_faults(data) if fault.field not in known]
    if gateway is not None:
        faults += [*_cpu_faults(gateway), *_port_faults(gateway)]
    if gateway is None or faults:
        raise InvalidSpec("the gateway's declaration has faults", faults=faults)
    return gateway


#: Declared keys and model fields. A declared "name" maps to an unknown field, so that it is a fault.
_MODEL_KEYS: Final = {"gateway": "name", "name": "name?"}
_DECLARED_KEYS: Final = {model: key for key, model in _MODEL_KEYS.items()}


def _cpu_faults(gateway: Gateway) -> Iterator[Fault]:
    for vm in gateway.machines:
        if why := check_cpus(GATEWAY_HYPERVISOR, vm.cpus, shared=True):
            field = f"machines.{vm.name}.cpus"
            yield Fault(field, "above_hypervisor", f"a gateway runs on {GATEWAY_HYPERVISOR}: {why}")


def _port_faults(gateway: Gateway) -> Iterator[Fault]:
    before: list[tuple[str, PublishedPort]] = []
    for vm in gateway.machines:
        for number, one in enumerate(vm.publish):
            field = f"machines.{vm.name}.publish.{number}"
            if other := next((name for name, port in before if port.overlaps(one)), None):
                yield Fault(field, "twice", f"the port {one} is also published for {other}")
            before.append((vm.name, one))
            if gateway.metrics and host_and_port(gateway.metrics)[1] == one.port:
                yield Fault("metrics", "twice", f"the port {one.port} is published for {vm.name}")


def _as_model(data: Any) -> Any:
    """Convert a declaration to the structure of the models."""
    if not isinstance(data, Mapping):
        return data
    found = {_MODEL_KEYS.get(key, str(key)): value for key, value in data.items()}
    if isinstance(vms := found.get("machines"), Mapping):
        found["machines"] = [_named(name, vm) for name, vm in vms.items()]
    return found


def _named(name: Any, vm: Any) -> Any:
    if not isinstance(vm, Mapping):
        return vm
    return {("name?" if key == "name" else str(key)): value for key, value in vm.items()} | {
        "name": name
    }


def _as_declared(fault: Fault, data: Any) -> Fault:
    """Convert a fault's field from the models' structure to the declaration's."""
    first, *rest = fault.field.removesuffix(".[key]").split(".")  # pydantic's word for a mapping's key
    first = _DECLARED_KEYS.get(first, first)
    vms = data.get("machines") if isinstance(data, Mapping) else None
    if first == "machines" and rest and isinstance(vms, Mapping):
        name = list(vms)[int(rest[0])]
        rest = [str(name), *(part.removesuffix("?") for part in rest[1:] if part != "name")]
    return Fault(".".join([first, *rest]), fault.code, fault.message)


def _consistency_faults(data: Any) -> Iterator[Fault]:
    """Yield faults between fields, as far as the fields are valid."""
    if not isinstance(data, Mapping):
        return
    network = _network(data.get("network"))
    if network is not None and (found := tuple(_network_faults(network))):
        yield from found
        network = None
    vms = data.get("machines")
    if not isinstance(vms, Mapping):
        return
    taken: dict[IPv4Address, str] = {}
    for name, vm in vms.items():
        if isinstance(vm, Mapping):
            where = f"machines.{name}"
            yield from _vm_faults(where, vm)
            yield from _address_faults(f"{where}.address", vm.get("address"), network, taken, name)


def _network(text: Any) -> IPv4Network | None:
    try:
        found = ip_network(text)
    except ValueError:
        return None
    return found if isinstance(found, IPv4Network) else None


def _network_faults(network: IPv4Network) -> Iterator[Fault]:
    if not MIN_PREFIX_BITS <= network.prefixlen <= MAX_PREFIX_BITS:
        yield Fault(
            "network",
            "size",
            f"must have between {MIN_PREFIX_BITS} and {MAX_PREFIX_BITS} bits of prefix",
        )
    if not network.is_private:
        yield Fault("network", "public", "must be a private network, like 10.77.0.0/24")
    if network.overlaps(GUEST_NETWORK):
        yield Fault(
            "network",
            "outside",
            f"must not overlap {GUEST_NETWORK}, the network of VMs' first interfaces",
        )


def _vm_faults(where: str, vm: Mapping[str, Any]) -> Iterator[Fault]:
    if "image" not in vm and "recipe" not in vm:
        yield Fault(f"{where}.image", "missing", "is missing, and so is recipe")
    if "image" in vm and "recipe" in vm:
        yield Fault(f"{where}.recipe", "twice", "a VM must have an image or a recipe, not both")
    if vm.get("role") == GatewayRole.SERVICE and "run" not in vm:
        yield Fault(f"{where}.run", "missing", "is missing: the command of the service")
    for field in ("run", "check"):
        if field in vm and vm.get("role") != GatewayRole.SERVICE:
            yield Fault(f"{where}.{field}", "role", f"is for VMs with the role {GatewayRole.SERVICE}")


def _address_faults(
    where: str, text: Any, network: IPv4Network | None, taken: dict[IPv4Address, str], name: str
) -> Iterator[Fault]:
    if not isinstance(text, str):
        if text is not None:
            yield Fault(where, "address", "must be an address like 10.77.0.10")
        return
    try:
        address = IPv4Address(text)
    except ValueError:
        return
    if address in taken:
        yield Fault(where, "twice", f"is also the address of {taken[address]}")
    taken.setdefault(address, name)
    if network is None:
        return
    if address not in network:
        yield Fault(where, "outside", f"is not in the network {network}")
    elif address in {network.network_address, network.broadcast_address}:
        yield Fault(where, "reserved", f"is reserved in the network {network}")
