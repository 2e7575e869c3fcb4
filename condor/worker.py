"""Files for a cluster VM: a script, and HTCondor's configuration. Pure.

All but the values of :func:`worker_config` are files in ``condor/worker/``.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import resources
from typing import Final

from condor import names
from condor.node.chirp import literal
from vmjobs.cluster.pool import ClassAdValue
from vmjobs.cluster.wire import ClusterVmOrder

#: Accounts for simultaneous jobs, for each CPU of the VM: jobs that request no CPU share the remaining
#: ones, and then `nobody`.
ACCOUNTS_PER_CPU: Final = 2


class WorkerKit:
    """Implements :class:`vmjobs.agent.cluster_vms.services.GuestFiles`."""

    def files(self, order: ClusterVmOrder, incarnation: int) -> Mapping[str, bytes]:
        return {
            "script": packaged_file("worker", "run.sh"),
            "probe": packaged_file("worker", "probe.sh"),
            "ssh_relay": packaged_file("worker", "ssh_relay.sh"),
            "host": f"{host_name(order.name)}\n".encode(),
            "accounts": "".join(f"{account}\n" for account in accounts(order.cpus)).encode(),
            names.STARTD_CONFIG: packaged_file("worker", "startd.conf"),
            names.CLUSTER_VM_CONFIG: worker_config(order, incarnation).encode(),
        }


def host_name(vm: str) -> str:
    return f"{vm}.{names.CLUSTER_VM_DOMAIN}"


def accounts(cpus: int) -> list[str]:
    """The accounts that run jobs in a VM: one for each dynamic slot."""
    return [f"slot1-{n}" for n in range(1, ACCOUNTS_PER_CPU * cpus + 1)]


def slot_users(cpus: int) -> dict[str, str]:
    """The settings that give each dynamic slot its account."""
    return {f"SLOT1_{n}_USER": account for n, account in enumerate(accounts(cpus), 1)}


def machine_attributes(order: ClusterVmOrder, incarnation: int) -> dict[str, ClassAdValue]:
    """The attributes that are added to HTCondor's own in the machine ad."""
    named = {name.lower() for name in order.attributes}
    default = {} if names.VIRTUAL_CLUSTER.lower() in named else {names.VIRTUAL_CLUSTER: order.cluster}
    return {
        **default,
        **order.attributes,
        names.MEMBER: order.name,
        names.INCARNATION: incarnation,
        names.CLUSTER: order.cluster,
        names.MACHINE: f"{order.id}.{incarnation}",
    }


def worker_config(order: ClusterVmOrder, incarnation: int) -> str:
    """The part of the startd's configuration that differs between VMs."""
    attributes = machine_attributes(order, incarnation)
    settings = {
        "COLLECTOR_HOST": order.pool.collector,
        "CONDOR_HOST": order.pool.collector.partition(":")[0],
        "TRUST_DOMAIN": order.pool.trust_domain,
        "NETWORK_HOSTNAME": host_name(order.name),
        # A domain of its own: users of the pool are not users of the VM.
        "UID_DOMAIN": host_name(order.name),
        "FILESYSTEM_DOMAIN": host_name(order.name),
        "DEDICATED_EXECUTE_ACCOUNT_REGEXP": "slot1-[0-9]+",
        **slot_users(order.cpus),
        "VMJOBS_START": order.start,
        "VMJOBS_PROBE": (
            f"TARGET.{names.PROBE} =?= MY.{names.MACHINE}"
            f" && TARGET.{names.OWNER} =?= {literal(order.pool.user, limit=0)}"
            f" && TARGET.Cmd =?= {literal(names.PROBE_PROGRAM)} && TARGET.TransferExecutable =?= False"
        ),
        **{name: literal(value, limit=0) for name, value in attributes.items()},
    }
    lines = [f"{name} = {escaped(value)}" for name, value in settings.items()]
    lines.append(f"STARTD_ATTRS = $(STARTD_ATTRS) {' '.join((*attributes, names.ADMITTED))}")
    return "\n".join(lines) + "\n"


def escaped(value: str) -> str:
    """A value, escaped for one line of HTCondor's configuration: no macro is expanded in it.

    Raises:
        ValueError: it has a line end or another control character.
    """
    if not value.isprintable():
        raise ValueError(f"{value!r}: control characters are not allowed in HTCondor's configuration")
    return value.replace("$", "$(DOLLAR)")


def packaged_file(folder: str, name: str) -> bytes:
    return (resources.files("condor") / folder / name).read_bytes()
