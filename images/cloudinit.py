"""NoCloud seed disks: small disks labelled ``cidata`` that configure cloud images.

The disk is an ISO 9660 file system with the three files that cloud-init looks for. This process makes
it from the job alone, and does not open the image for it.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from importlib import resources
from pathlib import Path
from typing import Any, Final

import pycdlib
from pycdlib.pycdlibexception import PyCdlibException

from vmjobs.errors import HypervisorError, reason_of
from vmjobs.hypervisor.base import (
    GATEWAY_ADDRESS,
    GUEST_ADDRESS,
    GUEST_NETMASK_BITS,
    NAMESERVER_ADDRESS,
)
from vmjobs.hypervisor.network.guest_network import MAC
from vmjobs.model import JobSpec, JobTicket, NetworkMode

#: The label that cloud-init looks for:
#: https://docs.cloud-init.io/en/latest/reference/datasources/nocloud.html
LABEL: Final = "cidata"

#: Runs the kit with the Python interpreter that cloud-init itself uses.
_LAUNCHER: Final = """\
#!/bin/sh
for python in python3 /usr/libexec/platform-python /usr/local/bin/python3 python; do
    command -v "$python" >/dev/null 2>&1 && break
done
exec "$python" - <<'END-OF-VMJOBS-KIT'
{kit}
END-OF-VMJOBS-KIT
"""


def write_seed(path: Path, ticket: JobTicket) -> None:
    """Write the disk for one attempt at a job.

    Raises:
        HypervisorError: the disk cannot be made.
    """
    iso = pycdlib.PyCdlib()
    try:
        iso.new(interchange_level=3, vol_ident=LABEL, joliet=3, rock_ridge="1.09")
        for number, (name, text) in enumerate(seed_files(ticket)):
            data = text.encode()
            names: dict[str, Any] = {"rr_name": name, "joliet_path": f"/{name}"}
            iso.add_fp(io.BytesIO(data), len(data), f"/FILE{number}.;1", **names)
        with path.open("xb") as file:
            iso.write_fp(file)
    except (PyCdlibException, OSError) as error:
        raise HypervisorError(f"cannot make the cloud-init disk: {reason_of(error)}") from error
    finally:
        iso.close()


def seed_files(ticket: JobTicket) -> Iterator[tuple[str, str]]:
    """Names and texts of the disk's files: JSON, as YAML without quoting errors."""
    meta = {"instance-id": ticket.attempt, "local-hostname": f"vmjob-{ticket.index}"}
    yield "meta-data", json.dumps(meta, indent=1) + "\n"
    yield "user-data", user_data(ticket.spec)
    yield "network-config", json.dumps(network_config(ticket.spec.network), indent=1) + "\n"


def user_data(spec: JobSpec) -> str:
    """The job's own user data, its script's launcher, or an empty configuration."""
    if spec.user_data:
        return spec.user_data
    if not spec.script:
        return "#cloud-config\n{}\n"
    kit = resources.files("images.guest").joinpath("cloud_kit.py").read_text("utf-8")
    return _LAUNCHER.format(kit=kit)


def network_config(mode: NetworkMode) -> dict[str, Any]:
    """Static configuration of the VM's only network card, to avoid a wait for DHCP."""
    if mode is NetworkMode.NONE:
        return {"version": 1, "config": "disabled"}
    card: dict[str, Any] = {
        "match": {"macaddress": MAC},
        "set-name": "eth0",
        "dhcp4": False,
        "addresses": [f"{GUEST_ADDRESS}/{GUEST_NETMASK_BITS}"],
    }
    if mode is NetworkMode.OUTBOUND:
        card["routes"] = [{"to": "0.0.0.0/0", "via": GATEWAY_ADDRESS}]
        card["nameservers"] = {"addresses": [NAMESERVER_ADDRESS]}
    return {"version": 2, "ethernets": {"eth0": card}}
