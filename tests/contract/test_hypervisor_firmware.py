"""VMs that boot from their disk: BIOS and UEFI, under every hypervisor that can."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.kit import hypervisors
from tests.kit.firmware_guests import bios_disk, uefi_disk
from tests.kit.hypervisor_drivers import working_driver
from tests.kit.hypervisors import Bench
from vmjobs.hypervisor.base import BootImage, DataDisk, Hypervisor, ShutdownCause
from vmjobs.model import HypervisorKind

Disk = Callable[[Path, str, str], BootImage]


@pytest.fixture(scope="module", params=[HypervisorKind.QEMU, HypervisorKind.KVM])
def driver(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Hypervisor:
    found, version = working_driver(request.param, tmp_path_factory)
    assert "UEFI" in version
    return found


@pytest.fixture
def bench(driver: Hypervisor, tmp_path: Path) -> Iterator[Bench]:
    data = tmp_path / "data"
    data.write_bytes(b"\0" * (1 << 20))
    disks = (DataDisk(data, read_only=True), DataDisk(data, read_only=True))
    nothing = BootImage("", data)
    with hypervisors.bench(driver, nothing, tmp_path, disks=disks, memory=256, cmdline=()) as made:
        yield made


@pytest.mark.parametrize(
    ("disk", "do", "shutdown_cause"),
    [
        (bios_disk, "poweroff", ShutdownCause.POWEROFF),
        (bios_disk, "reset", ShutdownCause.RESET),
        (uefi_disk, "poweroff", ShutdownCause.POWEROFF),  # all else is the same as with a BIOS
    ],
)
def test_a_disk_boots_by_itself(
    bench: Bench, disk: Disk, do: str, shutdown_cause: ShutdownCause
) -> None:
    image = disk(bench.directory / "disk", "the disk speaks", do)
    digest = hashlib.sha256(image.root.read_bytes()).hexdigest()
    vm = bench.vm(image=image)
    bench.driver.start(vm)
    assert bench.end(vm).count("the disk speaks") == 1
    assert bench.driver.shutdown_cause(vm.name) is shutdown_cause
    bench.driver.destroy(vm.name)
    assert hashlib.sha256(image.root.read_bytes()).hexdigest() == digest
