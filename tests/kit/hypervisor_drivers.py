"""Fixtures for tests that run with every hypervisor driver."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kit import hypervisors
from tests.kit.guests import direct_boot_guest, kernel_tree, root_disk_guest
from tests.kit.hypervisors import BOOT, Bench
from tests.kit.real_mode import untested
from vmjobs.hypervisor.base import BootImage, Hypervisor
from vmjobs.hypervisor.libvirt.connection import Connection, node_connection
from vmjobs.hypervisor.libvirt.driver import Libvirt
from vmjobs.hypervisor.uml.driver import UserModeLinux
from vmjobs.model import HypervisorKind

KINDS = [HypervisorKind.UML, HypervisorKind.QEMU, HypervisorKind.KVM]


@pytest.fixture(scope="session")
def connection() -> Connection:
    return node_connection()


@pytest.fixture(scope="session", params=KINDS)
def driver(request: pytest.FixtureRequest, connection: Connection) -> Hypervisor:
    kind: HypervisorKind = request.param
    if kind is HypervisorKind.UML:
        found: Hypervisor = UserModeLinux()
    else:
        found = Libvirt(kind, connection, kernels=lambda: (kernel_tree() / "boot").glob("vmlinuz-*"))
    result = found.probe(BOOT)
    if not result.works:
        pytest.skip(f"{kind}: {result.detail}{untested(kind)}")
    assert result.version
    return found


@pytest.fixture(scope="session")
def image(driver: Hypervisor, tmp_path_factory: pytest.TempPathFactory) -> BootImage:
    directory = tmp_path_factory.mktemp("guest")
    if driver.kind is HypervisorKind.UML:
        return root_disk_guest(directory)
    return direct_boot_guest(directory, kernel_tree())


@pytest.fixture
def bench(driver: Hypervisor, image: BootImage, tmp_path: Path) -> Iterator[Bench]:
    with hypervisors.bench(driver, image, tmp_path) as made:
        yield made
