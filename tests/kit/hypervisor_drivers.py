"""Fixtures for tests that run with every hypervisor driver."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kit import hypervisors
from tests.kit.guests import direct_boot_guest, kernel_tree, root_disk_guest
from tests.kit.hypervisors import BOOT, Bench
from tests.kit.once_per_run import once
from tests.kit.real_mode import untested
from tests.kit.waiting import PATIENCE
from vmjobs.hypervisor.base import BootImage, Hypervisor
from vmjobs.hypervisor.libvirt import driver as libvirt
from vmjobs.hypervisor.libvirt.connection import node_connection
from vmjobs.hypervisor.libvirt.driver import Libvirt
from vmjobs.hypervisor.uml import driver as uml
from vmjobs.hypervisor.uml.driver import UserModeLinux
from vmjobs.hypervisor.xen import driver as xen
from vmjobs.model import HypervisorKind

#: On a Xen host (``deploy/soak-xen.sh``) the others work as anywhere.
KINDS = (
    [HypervisorKind.UML, HypervisorKind.QEMU, HypervisorKind.KVM]
    if xen.unavailable_reason()
    else [HypervisorKind.XEN]
)
#: Seconds that KVM may take to boot a kernel: what a node allows it, too (``probe_seconds``).
KVM_BOOT = 30.0


def working_driver(kind: HypervisorKind, factory: pytest.TempPathFactory) -> tuple[Hypervisor, str]:
    """Return a driver and its version, or skip the test where it boots no kernel.

    Each is probed once in a run of tests: KVM may boot nothing, which takes the whole deadline.
    """
    kernels = lambda: (kernel_tree() / "boot").glob("vmlinuz-*")  # noqa: E731
    if kind is HypervisorKind.UML:
        driver: Hypervisor = UserModeLinux()
    elif kind is HypervisorKind.XEN:
        driver = xen.Xen(kernels=kernels)
    else:
        driver = Libvirt(kind, node_connection(), kernels=kernels)

    def probe() -> list[str]:
        result = driver.probe(KVM_BOOT * PATIENCE if kind is HypervisorKind.KVM else BOOT)
        return [result.version, "" if result.works else result.detail]

    version, fault = once(factory, f"probe-{kind}", probe)
    if fault:
        pytest.skip(f"{kind}: {fault}{untested(kind)}")
    assert version
    return driver, version


@pytest.fixture(scope="session", params=KINDS)
def driver(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Hypervisor:
    return working_driver(request.param, tmp_path_factory)[0]


@pytest.fixture(scope="session")
def image(driver: Hypervisor, tmp_path_factory: pytest.TempPathFactory) -> BootImage:
    directory = tmp_path_factory.mktemp("guest")
    if driver.kind is HypervisorKind.UML:
        return root_disk_guest(directory)
    return direct_boot_guest(directory, kernel_tree())


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have drivers wait for kernels, and for their ends, while those get no processor time."""
    for module, name in ((uml, "ANSWER_SECONDS"), (uml, "ENDING_SECONDS"), (libvirt, "ENDING_SECONDS")):
        monkeypatch.setattr(module, name, BOOT)


@pytest.fixture
def bench(driver: Hypervisor, image: BootImage, tmp_path: Path, patient: None) -> Iterator[Bench]:
    with hypervisors.bench(driver, image, tmp_path) as made:
        yield made
