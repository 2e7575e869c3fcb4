"""What only Xen has. Its host is set up as ``docs/operators.md`` says."""

from __future__ import annotations

import pickle
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kit.guests import direct_boot_guest, kernel_tree
from tests.kit.hypervisor_drivers import bench, driver, image, patient
from tests.kit.hypervisors import Bench
from vmjobs.hypervisor.base import VmLimits
from vmjobs.hypervisor.xen.driver import unavailable_reason

__all__ = ["bench", "driver", "image", "patient"]

pytestmark = [
    pytest.mark.soak,
    pytest.mark.xen,
    pytest.mark.skipif(
        bool(unavailable_reason()), reason=f"{unavailable_reason()}: deploy/soak-xen.sh"
    ),
]

_RUN = """
import pickle, sys
from tests.kit import hypervisors
from vmjobs.hypervisor.xen.driver import Xen
image, directory = pickle.load(sys.stdin.buffer)
with hypervisors.bench(Xen(), image, directory) as bench:
    network = bench.network()
    with hypervisors.endpoint(network):
        print(bench.run("network", network=network))
"""
_CONTROLS = (
    ["xl", "list"],
    ["virsh", "-c", "xen:///system", "list"],
    ["xenstore-ls", "/"],
    ["ls", "/var/log/xen/console"],
)


def as_user(user: str, *argv: str, data: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    """Run a program as a user. data: its input."""
    become = ["runuser", "-u", user, "--"]
    return subprocess.run([*become, *argv], input=data, capture_output=True, timeout=600, check=False)


@pytest.fixture
def directory() -> Iterator[Path]:
    """A directory of the agent's user."""
    made = subprocess.check_output(["mktemp", "-d", "-p", "/var/tmp"], text=True).strip()  # noqa: S108
    subprocess.run(["chown", "-R", "vmjobs-agent", made], check=True)
    yield Path(made)
    subprocess.run(["rm", "-rf", made], check=True)


def test_the_agents_user_runs_vms(directory: Path) -> None:
    image = direct_boot_guest(directory, kernel_tree())
    code = f"import sys; sys.path.insert(0, {str(Path.cwd())!r})\n{_RUN}"
    done = as_user("vmjobs-agent", sys.executable, "-c", code, data=pickle.dumps((image, directory)))
    assert done.returncode == 0, done.stderr.decode()
    assert b"guest: done" in done.stdout
    assert b"uploaded=1048576" in done.stdout


@pytest.mark.parametrize("control", _CONTROLS, ids=lambda argv: argv[0])
def test_other_users_control_nothing(control: list[str]) -> None:
    assert subprocess.run(control, capture_output=True, check=False).returncode == 0, (
        "for root it works"
    )
    assert as_user("nobody", *control).returncode != 0


def test_other_users_open_no_device_of_xens() -> None:
    devices = [str(path) for path in Path("/dev/xen").iterdir()]
    assert devices
    for path in [*devices, "/proc/xen/privcmd", "/proc/xen/xenbus"]:
        assert as_user("nobody", "sh", "-c", 'exec 3<>"$0"', path).returncode != 0, path


def test_a_vm_gets_its_share_of_the_processors(bench: Bench) -> None:
    assert bench.driver.unenforced(VmLimits(cpu_percent=25, cpu_weight=50), bench.directory) == ()
    vm = bench.start("spin", "spinning", limits=VmLimits(cpu_percent=25, cpu_weight=50))
    began, before = time.monotonic(), bench.driver.usage(vm.name).cpu_seconds
    time.sleep(20)
    used = bench.driver.usage(vm.name).cpu_seconds - before
    assert 0.05 < used / (time.monotonic() - began) < 0.35


def test_what_xen_cannot_limit_is_said(bench: Bench) -> None:
    (sentence,) = bench.driver.unenforced(VmLimits(disk_bytes=1), bench.directory)
    assert "speed of its disks" in sentence
