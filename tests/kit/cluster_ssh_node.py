"""A node with a cluster VM that runs the product's SSH server, to be killed.

As a program: arguments are its folder, the service's URL and its token.
"""

from __future__ import annotations

import sys
import threading
from dataclasses import replace
from pathlib import Path

from tests.kit import ROOT
from tests.kit.agent_runs import Images
from tests.kit.cluster_vm_node import Kit, cluster_vm_guest, cluster_vm_services, kept
from vmjobs.agent.cluster_vms.services import ClusterVmServices
from vmjobs.client import AssignmentClient
from vmjobs.cluster.wire import ClusterVmOrder

#: A job's account as in condor/worker/run.sh; starts the script ``ssh_relay`` in the background.
MORE = """
echo 'slot1-1:x:64101:64101::/nonexistent:/usr/sbin/nologin' >>/etc/passwd
cp ./ssh_relay /run/ssh_relay
setsid bash /run/ssh_relay &
"""


class SshRelayKit(Kit):
    """A script that keeps running, and the product's ``ssh_relay.sh`` beside it."""

    def files(self, order: ClusterVmOrder, incarnation: int) -> dict[str, bytes]:
        script = (ROOT / "condor" / "worker" / "ssh_relay.sh").read_bytes()
        return {**super().files(order, incarnation), "ssh_relay": script}


def parts_of(folder: Path, url: str, token: str) -> ClusterVmServices:
    assignments = AssignmentClient(url, token, "n1")
    made = cluster_vm_services(folder, assignments, Images(cluster_vm_guest("worker")))
    return replace(made, kit=SshRelayKit(MORE), sessions=assignments)


if __name__ == "__main__":
    with kept(parts_of(Path(sys.argv[1]), *sys.argv[2:])):
        threading.Event().wait()
