"""VMs whose guests control their kernel or QEMU, and others beside them."""

from __future__ import annotations

import base64
import json
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from tests.kit import KIT
from tests.kit.guests import root_disk_guest
from tests.kit.hypervisors import BOOT, Bench, bench, mentioning, said
from tests.kit.waiting import wait_until
from vmjobs.errors import HypervisorError
from vmjobs.hypervisor.base import BootImage, DataDisk, Hypervisor, VmConfig, VmState
from vmjobs.hypervisor.libvirt.connection import node_connection
from vmjobs.hypervisor.libvirt.driver import Libvirt
from vmjobs.hypervisor.uml.driver import UserModeLinux
from vmjobs.model import HypervisorKind

#: Both kinds of VMs: a User Mode Linux kernel, and QEMU that libvirt starts.
each = pytest.mark.parametrize("node", [HypervisorKind.UML, HypervisorKind.QEMU], indirect=True)
Tries = dict[str, tuple[str, str]]
Found = dict[str, bool]


@dataclass
class Node:
    """A node with resources of others, and VMs of one driver, isolated or not."""

    directory: Path
    program: Path
    kind: HypervisorKind
    names: list[str] = field(default_factory=list)

    def vm(self, image: BootImage, *words: str) -> VmConfig:
        made = Bench(UserModeLinux(), image, self.directory, {"memory": 128}, self.names).vm()
        disk = made.workdir.with_suffix(".disk")
        disk.write_bytes(b"the disk of " + made.name.encode().ljust(1 << 20, b"\0"))
        return replace(made, disks=(DataDisk(disk),), cmdline=words)

    def broken(self, tries: Tries, then: str = "end", posing: str = "") -> VmConfig:
        """A hostile VM: its guest controls its kernel."""
        root = self.directory / "root"
        root.write_bytes(bytes(4096))
        image = BootImage("", root, kernel=root)
        return self.vm(image, *self.told(tries, then, posing))

    def told(self, tries: Tries, then: str = "end", posing: str = "") -> tuple[str, ...]:
        """The command line of such a kernel."""
        words = base64.b64encode(json.dumps(tries).encode()).decode()
        return (f"tries={words}", f"then={then}", f"as={posing}")

    def driver(self, *, isolated: bool) -> Hypervisor:
        if self.kind is HypervisorKind.UML:
            return UserModeLinux(str(self.program), isolated=isolated)
        return Libvirt(self.kind, node_connection(), isolated=isolated, program=str(self.program))

    def begun(self, then: str, posing: str = "") -> tuple[Hypervisor, VmConfig]:
        """Start a hostile VM in isolation; return its driver and the VM."""
        driver, vm = self.driver(isolated=True), self.broken({}, then, posing)
        driver.start(vm)
        wait_until(lambda: "tried all" in said(vm.console), BOOT, "it has begun")
        return driver, vm

    def start(self, driver: Hypervisor, vm: VmConfig) -> None:
        """Start a hostile VM. libvirt waits for QEMU's greeting, which this does not send."""
        with nullcontext() if self.kind is HypervisorKind.UML else suppress(HypervisorError):
            driver.start(vm)

    def reached(self, tries: Tries, *, isolated: bool) -> Found:
        """Return which of the attacks succeeded."""
        found = self.tell(self.broken(tries), isolated=isolated)
        assert list(found) == list(tries)
        return found

    def tell(self, vm: VmConfig, *, isolated: bool) -> Found:
        """Run a hostile VM; return which of its attacks succeeded."""
        driver = self.driver(isolated=isolated)
        self.start(driver, vm)
        # A script's process has its interpreter's name: without a sandbox, no driver sees a kernel.
        wait_until(lambda: "tried all" in said(vm.console).splitlines(), BOOT, "all was tried")
        assert driver.wait(vm.name, BOOT) is VmState.GONE, said(vm.console)
        driver.destroy(vm.name)
        lines = said(vm.console).splitlines()
        told = [json.loads(line) for line in lines if line.startswith('{"try"')]
        sys.stdout.write("\n".join(map(str, told)))  # shown where a test fails
        return {one["try"]: one["done"] for one in told}

    def check(self, tries: Tries, *, control: Callable[[str], bool] = lambda _: True) -> None:
        """Check that no attack succeeds, and that those of ``control`` do without a sandbox."""
        assert self.reached(tries, isolated=True) == dict.fromkeys(tries, False)
        wanted = {name: True for name in tries if control(name)}
        found = self.reached(tries, isolated=False)
        assert {name: done for name, done in found.items() if name in wanted} == wanted


@pytest.fixture(scope="session")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One hostile program for all tests: libvirt probes each new one for seconds."""
    path = tmp_path_factory.mktemp("broken") / "broken-kernel"
    shutil.copy(KIT / "broken_kernel.py", path)
    path.chmod(0o755)
    return path


@pytest.fixture
def hostile_node(request: pytest.FixtureRequest, tmp_path: Path, program: Path) -> Iterator[Node]:
    made = Node(tmp_path, program, getattr(request, "param", HypervisorKind.UML))
    yield made
    for name in made.names:
        made.driver(isolated=True).destroy(name)
        UserModeLinux().destroy(name)
    wait_until(lambda: not mentioning(str(tmp_path)), what="nothing of them to be left")


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> BootImage:
    return root_disk_guest(tmp_path_factory.mktemp("guest"))


@pytest.fixture(scope="module")
def neighbour(tmp_path_factory: pytest.TempPathFactory, image: BootImage) -> Iterator[VmConfig]:
    folder = tmp_path_factory.mktemp("neighbour")
    disk = folder / "disk"
    disk.write_bytes(b"the disk of another".ljust(1 << 20, b"\0"))
    with bench(UserModeLinux(), image, folder, memory=128, disks=(DataDisk(disk),)) as made:
        yield made.start("count", "count=2")


@pytest.fixture
def victim(neighbour: VmConfig) -> Iterator[VmConfig]:
    """Another VM, which runs and goes on during all attacks."""
    before = len(said(neighbour.console))
    yield neighbour
    assert UserModeLinux().state(neighbour.name) is VmState.RUNNING
    wait_until(lambda: len(said(neighbour.console)) > before, BOOT, "it counts on")
