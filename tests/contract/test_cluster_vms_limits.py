"""Limits of a cluster VM, across agent restarts and deaths of their helper; its architecture."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import replace

import pytest

from tests.kit.agent_runs import Images
from tests.kit.cluster_vm_node import (
    UML,
    Service,
    assert_forgotten,
    cluster_vm_guest,
    kept,
    kernel_pid,
    order,
)
from vmjobs.agent.cluster_vms.services import ClusterVmServices
from vmjobs.cluster.spec import ClusterVmLimits
from vmjobs.cluster.vm_state import ClusterVmCode
from vmjobs.hypervisor import procs
from vmjobs.hypervisor.sandbox import helper_processes
from vmjobs.hypervisor.sandbox.cpu_throttle import processor_seconds

pytest_plugins = ["tests.kit.cluster_vm_node"]
BUSY = "(while :; do :; done) &"


def share(parts: ClusterVmServices) -> float:
    """Processors that the VM uses on average, in the next 6 seconds."""
    pid = kernel_pid(parts)
    began, before = time.monotonic(), processor_seconds(pid)
    threading.Event().wait(6)
    return (processor_seconds(pid) - before) / (time.monotonic() - began)


def test_a_limited_vm_of_a_cluster(
    service: Service, new_parts: Callable[..., ClusterVmServices]
) -> None:
    parts = new_parts(silence=12.0, more=BUSY)
    limits = ClusterVmLimits(cpu_percent=40, disk_mib_s=20, network_mbit_s=50)
    service.wants(1, order(limits=limits))
    with kept(parts):
        service.wait_running(1)
        assert "the speed of its disks is not limited" in service.last().message
        assert 0.03 < share(parts) < 0.7, "0.4 are allowed, and other tests take some of them"
    parts = new_parts(silence=12.0, more=BUSY)
    with kept(parts):  # the next agent
        assert 0.03 < share(parts) < 0.7
        assert service.last().incarnation == 1, "it was heard of all the while"
        name = parts.journal.vm_name(order().id, 1)
        (holds,) = helper_processes.find(name)
        os.kill(holds.pid, signal.SIGKILL)
        service.wait_running(2)
        assert service.ended().code is ClusterVmCode.GUEST_LOST
        assert procs.read(holds.pid) is None
        assert_forgotten(parts, service, 2)


@pytest.mark.soak
def test_a_limited_vm_that_somebody_froze_is_replaced(
    service: Service, new_parts: Callable[..., ClusterVmServices]
) -> None:
    parts = new_parts(silence=12.0, more=BUSY)
    service.wants(1, order(limits=ClusterVmLimits(cpu_percent=40)))
    with kept(parts):
        service.wait_running(1)
        UML.pause(parts.journal.vm_name(order().id, 1))
        service.wait_running(2)
        assert service.ended().code is ClusterVmCode.GUEST_LOST
        assert_forgotten(parts, service, 2)


def test_an_image_for_other_processors_is_for_other_nodes(
    service: Service, new_parts: Callable[..., ClusterVmServices]
) -> None:
    service.wants(1, order())
    with kept(new_parts(Images(replace(cluster_vm_guest(), architecture="riscv64")))):
        service.wait(lambda last: last.code is ClusterVmCode.NO_HYPERVISOR, "the report of it")
        assert service.last().message.startswith("the image is for riscv64, and this node's ")
