"""Limits of a cluster's machine, over restarts of its node's agent and after what holds it has died."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import pytest
from hypervisor_host import wait_until
from members_node import (
    UML,
    Images,
    Service,
    clear,
    kept,
    kernel_pid,
    member_guest,
    member_parts,
    order,
    remains,
)

from vmjobs.agent.members.parts import MemberParts
from vmjobs.cluster.member import MemberCode
from vmjobs.cluster.spec import Limits
from vmjobs.hypervisor import netproc, procs
from vmjobs.hypervisor.regulator import processor_seconds

SECONDS = 60.0
BUSY = "(while :; do :; done) &"


def share(parts: MemberParts) -> float:
    """Processors that the machine uses on average, for the next seconds."""
    pid = kernel_pid(parts)
    began, before = time.monotonic(), processor_seconds(pid)
    threading.Event().wait(3)
    return (processor_seconds(pid) - before) / (time.monotonic() - began)


def test_a_limited_machine_of_a_cluster(tmp_path: Path) -> None:
    service = Service(tmp_path / "service")
    service.folder.mkdir()

    def node() -> MemberParts:
        return member_parts(tmp_path / "members", service, Images(member_guest()), 6.0, BUSY)

    parts = node()
    limits = Limits(cpu_percent=40, disk_mib_s=20, network_mbit_s=50)
    service.wants(1, order(limits=limits))
    try:
        with kept(parts):
            wait_until(lambda: service.is_running(1), SECONDS, "it runs")
            last = service.last()
            assert last is not None
            assert "the speed of its disks is not limited" in last.message
            assert 0.25 < share(parts) < 0.5
        parts = node()
        with kept(parts):  # the next agent
            assert 0.25 < share(parts) < 0.5
            assert service.is_running(1), "it was heard of all the while"
            name = parts.journal.machine_name(order().id, 1)
            (carrier,) = netproc.regulating(name)
            assert "--bits" in carrier.argv
            os.kill(carrier.pid, signal.SIGKILL)
            wait_until(lambda: service.is_running(2), SECONDS, "another one runs in its stead")
            told = [r.code for r in service.reports if r.incarnation == 1]
            assert MemberCode.GUEST_LOST in told
            assert procs.read(carrier.pid) is None
            service.wants(2)
            wait_until(lambda: remains(parts) == [], SECONDS, "nothing is left")
    finally:
        clear(parts.journal.prefix)


@pytest.mark.soak
def test_a_limited_machine_that_somebody_froze_is_replaced(tmp_path: Path) -> None:
    service = Service(tmp_path / "service")
    service.folder.mkdir()
    parts = member_parts(tmp_path / "members", service, Images(member_guest()), 6.0, BUSY)
    service.wants(1, order(limits=Limits(cpu_percent=40)))
    try:
        with kept(parts):
            wait_until(lambda: service.is_running(1), SECONDS, "it runs")
            UML.pause(parts.journal.machine_name(order().id, 1))
            wait_until(lambda: service.is_running(2), SECONDS, "another one runs in its stead")
            told = [r.code for r in service.reports if r.incarnation == 1]
            assert MemberCode.GUEST_LOST in told
            service.wants(2)
            wait_until(lambda: remains(parts) == [], SECONDS, "nothing is left")
    finally:
        clear(parts.journal.prefix)
