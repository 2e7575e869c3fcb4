"""The libvirt driver on ``test:///default``, which needs no guest and no daemon.

test_hypervisor.py tests what all drivers do.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from vmjobs.errors import HypervisorError
from vmjobs.hypervisor.base import (
    BootImage,
    PrivateCard,
    PrivateNetwork,
    ShutdownCause,
    VmConfig,
    VmState,
)
from vmjobs.hypervisor.libvirt import kvm
from vmjobs.hypervisor.libvirt.connection import Connection, node_connection
from vmjobs.hypervisor.libvirt.driver import Libvirt
from vmjobs.model import HypervisorKind

NAME = "vmjobs-test-driver"


@pytest.fixture
def driver() -> Iterator[Libvirt]:
    driver = Libvirt(HypervisorKind.QEMU, Connection("test:///default"), domain_type="test")
    yield driver
    driver.destroy(NAME)


@pytest.fixture
def vm(tmp_path: Path) -> VmConfig:
    root = tmp_path / "root"
    root.write_bytes(b"\0" * 4096)
    kernel = tmp_path / "kernel"
    kernel.touch()
    image = BootImage(digest="", root=root, kernel=kernel)
    return VmConfig(NAME, 1, 64, image, (), tmp_path / "console", tmp_path)


def test_vms_of_others_are_not_listed(driver: Libvirt, vm: VmConfig) -> None:
    """libvirt's test driver comes with a VM called ``test``."""
    driver.start(vm)
    assert driver.list() == [NAME]
    assert driver.state("test") is VmState.RUNNING


def test_why_a_vm_cannot_be_started_is_told(driver: Libvirt, vm: VmConfig) -> None:
    driver.start(vm)
    with pytest.raises(HypervisorError, match="runs already"):
        driver.start(vm)
    driver.destroy(NAME)
    vm.image.root.unlink()
    with pytest.raises(HypervisorError, match=r"the disk .* cannot be used: "):
        driver.start(vm)
    assert driver.state(NAME) is VmState.GONE


def test_a_private_network_is_refused(driver: Libvirt, vm: VmConfig) -> None:
    card = PrivateCard(PrivateNetwork((-1, -1)), "02:76:00:00:00:01")
    with pytest.raises(HypervisorError, match="private networks run on uml alone, not on qemu"):
        driver.start(replace(vm, card=card))
    assert driver.list() == []
    with pytest.raises(HypervisorError, match="private networks run on uml alone, not on qemu"):
        driver.open_private_network([])


def test_stop_powers_off(driver: Libvirt, vm: VmConfig) -> None:
    driver.start(vm)
    driver.stop(NAME)
    assert driver.wait(NAME, 30) is VmState.GONE
    assert driver.shutdown_cause(NAME) is ShutdownCause.POWEROFF
    driver.stop(NAME)
    driver.destroy(NAME)
    assert driver.shutdown_cause(NAME) is ShutdownCause.UNKNOWN


def test_no_daemon(tmp_path: Path) -> None:
    driver = Libvirt(
        HypervisorKind.QEMU,
        Connection(f"qemu+unix:///session?socket={tmp_path}/none"),
        kernels=lambda: [Path(__file__)],
    )
    with pytest.raises(HypervisorError, match="cannot list VMs"):
        driver.list()
    result = driver.probe(5)
    assert not result.works
    assert "cannot ask libvirt's version" in result.detail


def test_probe_without_a_kernel() -> None:
    result = Libvirt(HypervisorKind.QEMU, node_connection(), kernels=list).probe(180)
    assert result.works, result.detail
    assert result.detail.startswith("a boot sector ran and powered off, isolated: ")


def test_a_process_may_make_any_number_of_drivers() -> None:
    for _ in range(30):
        assert Libvirt(HypervisorKind.QEMU, node_connection()).state(NAME) is VmState.GONE


def test_a_forked_process_has_a_connection_of_its_own() -> None:
    """A worker forks for each build; its parent's connection would never answer it."""
    mine = node_connection()
    child = os.fork()
    if child == 0:
        os._exit(int(node_connection() is mine))
    assert os.waitpid(child, 0)[1] == 0
    assert node_connection() is mine


def test_probe_of_kvm_without_a_kernel() -> None:
    driver = Libvirt(HypervisorKind.KVM, node_connection(), kernels=list)
    result = driver.probe(5)
    assert not result.works
    assert result.detail.startswith(kvm.unavailable_reason() or "no kernel to boot")
