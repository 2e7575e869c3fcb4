"""Isolation of a guest that controls its kernel or QEMU: a hostile program replaces these.

Each test has its control: the same program, started by the same driver without the sandbox, succeeds.
``docs/isolation.md`` maps the attacks to these tests.
"""

from __future__ import annotations

import base64
import ctypes
import json
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from tests.kit import KIT
from tests.kit.guests import BEGIN, root_disk_guest
from tests.kit.hypervisors import BOOT, Bench, bench, host_addresses, mentioning, said
from tests.kit.waiting import wait_until
from vmjobs.errors import HypervisorError
from vmjobs.hypervisor import procs
from vmjobs.hypervisor.base import (
    ENDPOINT_ADDRESS,
    ENDPOINT_PORT,
    GATEWAY_ADDRESS,
    NAMESERVER_ADDRESS,
    BootImage,
    DataDisk,
    Hypervisor,
    ShutdownCause,
    VmConfig,
    VmState,
)
from vmjobs.hypervisor.libvirt.connection import node_connection
from vmjobs.hypervisor.libvirt.driver import Libvirt
from vmjobs.hypervisor.sandbox import bubblewrap
from vmjobs.hypervisor.sandbox.process_launcher import LaunchedProcess, Launcher
from vmjobs.hypervisor.uml import mconsole
from vmjobs.hypervisor.uml.driver import UserModeLinux
from vmjobs.model import BootMethod, HypervisorKind, NetworkMode
from vmjobs.subprocess import run

#: Both kinds of VMs: a User Mode Linux kernel, and QEMU that libvirt starts.
each = pytest.mark.parametrize("node", [HypervisorKind.UML, HypervisorKind.QEMU], indirect=True)
ROOT = os.geteuid() == 0
_Tries = dict[str, tuple[str, str]]
_Found = dict[str, bool]


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

    def broken(self, tries: _Tries, then: str = "end", posing: str = "") -> VmConfig:
        """A hostile VM: its guest controls its kernel."""
        root = self.directory / "root"
        root.write_bytes(bytes(4096))
        image = BootImage("", root, kernel=root)
        return self.vm(image, *self.told(tries, then, posing))

    def told(self, tries: _Tries, then: str = "end", posing: str = "") -> tuple[str, ...]:
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

    def reached(self, tries: _Tries, *, isolated: bool) -> _Found:
        """Return which of the attacks succeeded."""
        found = self.tell(self.broken(tries), isolated=isolated)
        assert list(found) == list(tries)
        return found

    def tell(self, vm: VmConfig, *, isolated: bool) -> _Found:
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

    def check(self, tries: _Tries, *, control: Callable[[str], bool] = lambda _: True) -> None:
        """Check that no attack succeeds, and that those of ``control`` do without a sandbox."""
        assert self.reached(tries, isolated=True) == dict.fromkeys(tries, False)
        wanted = {name: True for name in tries if control(name)}
        found = self.reached(tries, isolated=False)
        assert {name: done for name, done in found.items() if name in wanted} == wanted


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One hostile program for all tests: libvirt probes each new one for seconds."""
    path = tmp_path_factory.mktemp("broken") / "broken-kernel"
    shutil.copy(KIT / "broken_kernel.py", path)
    path.chmod(0o755)
    return path


@pytest.fixture
def node(request: pytest.FixtureRequest, tmp_path: Path, program: Path) -> Iterator[Node]:
    made = Node(tmp_path, program, getattr(request, "param", HypervisorKind.UML))
    yield made
    for name in made.names:
        made.driver(isolated=True).destroy(name)
        UserModeLinux().destroy(name)
    assert mentioning(str(tmp_path)) == []


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


@pytest.mark.parametrize("shared", [True, False])
def test_users_of_one_guest_are_kept_apart_if_there_are_several(tmp_path: Path, shared: bool) -> None:
    """By ptrace. With seccomp, for one user, a process can take over the guest's kernel."""
    program = tmp_path / "stub_calls"
    compiler = ["musl-gcc", "-O1", "-Wall", "-Wextra", "-Werror", "-static", "-o", program]
    run([*compiler, KIT / "stub_calls.c"], timeout=60)
    guest = root_disk_guest(tmp_path, f"{BEGIN}stub_calls\npoweroff -f\n", program)
    with bench(UserModeLinux(), guest, tmp_path, shared=shared) as made:
        told = made.run("")
    found = re.search(r"calls=(\d+) behind=(\d+)", told)
    assert found, told
    assert int(found[1]) > 5, "the program knows where the kernel's code is"
    assert (int(found[2]) == 0) is shared


def kernel_of(name: str) -> int:
    """Process id of the VM's kernel, as seen from outside."""
    words = f"umid={name}"
    (first,) = (one for one in procs.scan() if bubblewrap.is_leader(one) and words in one.argv)
    return bubblewrap.inner_processes(first)[0].pid


def chain(words: str) -> list[int]:
    """Process ids of a VM, oldest first."""
    stats = {
        p: Path(f"/proc/{p}/stat").read_text().rpartition(")")[2].split() for p in mentioning(words)
    }
    assert len(stats) == 4
    return sorted(stats, key=lambda pid: (int(stats[pid][19]), pid))


@each
def test_files_of_others_and_of_the_agent(node: Node, victim: VmConfig) -> None:
    state = node.directory / "state"
    state.mkdir()
    token = state / "token"
    token.write_text("a secret")
    run = victim.workdir
    tries: _Tries = {
        "read the agent's token": ("read", str(token)),
        "write the agent's state": ("write", str(token)),
        "list the agent's state": ("listing", str(state)),
        "make a file there": ("create", str(state / "new")),
        "read another's disk": ("read", str(victim.disks[0].path)),
        "write another's disk": ("write", str(victim.disks[0].path)),
        "read another's console": ("read", str(victim.console)),
        "write another's console": ("write", str(victim.console)),
        "list another's directory": ("listing", str(run)),
        "make a file in it": ("create", str(run / secrets.token_hex(4))),
        "read another's overlay": ("read", str(run / "overlay")),
        "through a process of its": ("listing", f"/proc/{kernel_of(victim.name)}/cwd"),
        "through a file's link": ("listing", "/proc/self/cwd/.."),
        "read the node's users": ("read", "/etc/passwd"),
        "write its own image": ("write", str(node.directory / "root")),
    }
    before = token.read_bytes(), victim.disks[0].path.read_bytes()
    assert node.reached(tries, isolated=True) == dict.fromkeys(tries, False)
    assert (token.read_bytes(), victim.disks[0].path.read_bytes()) == before
    assert node.reached(tries, isolated=False) == dict.fromkeys(tries, True)


@each
def test_its_own_image_cannot_be_written_by_its_own_name(node: Node) -> None:
    name = "base" if node.kind is HypervisorKind.UML else str(node.directory / "root")
    tries: _Tries = {
        "write the image": ("write", name),
        "write /usr": ("create", f"/usr/{secrets.token_hex(8)}"),
    }
    assert not any(node.reached(tries, isolated=True).values())
    assert node.reached({"write the image": ("write", name)}, isolated=False) == {
        "write the image": True
    }


def test_what_is_its_own_it_has(node: Node) -> None:
    """The sandbox is not empty: it has what a kernel needs."""
    tries: _Tries = {
        "image": ("read", "base"),
        "overlay": ("write", "overlay"),
        "disk": ("write", "disk1"),
        "memory": ("create", "/dev/shm/memory"),  # noqa: S108
        "management": ("create", "mine"),
    }
    assert all(node.reached(tries, isolated=True).values())


@each
def test_sockets_of_the_agent_and_of_other_vms(node: Node, victim: VmConfig) -> None:
    with ExitStack() as stack:
        abstract = f"vmjobs-test-{secrets.token_hex(6)}"
        for address in (node.directory / "agent.sock", node.directory / "endpoint", f"\0{abstract}"):
            server = stack.enter_context(socket.socket(socket.AF_UNIX))
            server.bind(str(address))
            server.listen()
        console = f"/proc/{kernel_of(victim.name)}/cwd/{victim.name}/mconsole"
        node.check(
            {
                "agent's socket": ("connect", str(node.directory / "agent.sock")),
                "another's endpoint": ("connect", str(node.directory / "endpoint")),
                "abstract socket": ("connect", f"@{abstract}"),
            }
        )
        # It takes datagrams: the test checks whether its directory is reachable.
        node.check({"another's management": ("listing", str(Path(console).parent))})


@each
def test_the_hosts_network(node: Node) -> None:
    with socket.create_server(("0.0.0.0", 0)) as server:  # noqa: S104
        port = server.getsockname()[1]
        tries: _Tries = {
            f"tcp to {host}": ("tcp", f"{host}:{port}") for host in ("127.0.0.1", *host_addresses())
        }
        tries |= {
            f"a socket of family {number.name}": ("family", str(number.value))
            for number in (socket.AF_INET, socket.AF_INET6, socket.AF_NETLINK)
        }
        node.check(tries)
    # Not every kernel has these, so their controls may fail.
    others = (socket.AF_VSOCK, socket.AF_ALG, socket.AF_PACKET)
    rare: _Tries = {number.name: ("family", str(number.value)) for number in others}
    assert not any(node.reached(rare, isolated=True).values())


@pytest.mark.parametrize("mode", [NetworkMode.REPOSITORY, NetworkMode.OUTBOUND])
def test_its_own_network_leads_nowhere_else(node: Node, mode: NetworkMode) -> None:
    """It sends raw frames; nothing of another VM's network is in its own."""
    driver, vm = node.driver(isolated=True), node.broken({})
    networks = [driver.open_network(mode, [ENDPOINT_PORT]) for _ in range(2)]
    ports = [network.listening[ENDPOINT_PORT].getsockname() for network in networks]
    assert ports == [(ENDPOINT_ADDRESS, ENDPOINT_PORT)] * 2
    own: _Tries = {"the endpoint's address": ("answers", ENDPOINT_ADDRESS)}
    others = ("127.0.0.1", GATEWAY_ADDRESS, NAMESERVER_ADDRESS, "169.254.1.1", *host_addresses())
    tries: _Tries = {at: ("ping", at) for at in others}
    tries |= {
        "as the node's loopback": ("ping", f"{ENDPOINT_ADDRESS} from 127.0.0.1"),
        "a second device": ("tap", "tap1"),
        "rights over it": ("capability", ""),
        "handles of it": ("handles", ""),
        "a socket there": ("family", str(socket.AF_INET.value)),
    }
    told = node.told({**own, **tries})
    found = node.tell(replace(vm, cmdline=told, network=networks[0]), isolated=True)
    assert found == {**dict.fromkeys(own, True), **dict.fromkeys(tries, False)}
    for network in networks:
        network.listening[ENDPOINT_PORT].setblocking(False)
        with pytest.raises(BlockingIOError), network.listening[ENDPOINT_PORT] as server:
            server.accept()
        network.close()
        network.dhcp.close()


@each
def test_processes_of_others(node: Node, victim: VmConfig) -> None:
    with subprocess.Popen(["sleep", "600"]) as bystander:
        try:
            tries: _Tries = {}
            for who, pid in (("kernel", kernel_of(victim.name)), ("bystander", bystander.pid)):
                tries |= {
                    f"see the {who}": ("processes", str(pid)),
                    f"signal the {who}": ("kill", str(pid)),
                }
            tries["trace the bystander"] = ("trace", str(bystander.pid))
            tries["trace the test"] = ("trace", str(os.getpid()))
            node.check(tries, control=lambda name: ROOT or not name.startswith("trace"))
        finally:
            bystander.kill()


@each
def test_rights_and_kernel_interfaces(node: Node) -> None:
    tries: _Tries = {
        "capabilities": ("capability", ""),
        "rights by a setuid program": ("gain", ""),
        "mount": ("mount", ""),
        "a user namespace": ("userns", ""),
        "one by clone": ("clone", ""),
        "another's namespace": ("setns", ""),
        "io_uring": ("call", "io_uring_setup"),
        "keys": ("call", "keyctl"),
        "bpf": ("call", "bpf"),
        "events": ("call", "perf_event_open"),
        "handles of files": ("call", "open_by_handle_at"),
        "the environment": ("environment", "HOME"),
    }
    if node.kind is HypervisorKind.UML:  # libvirt opens some for QEMU
        tries["handles that were left open"] = ("handles", "")
    sure = {"rights by a setuid program", "a user namespace", "one by clone", "another's namespace"}
    rare = {"io_uring", "keys", "bpf", "events", "handles of files", "the environment"}
    rare |= {"handles that were left open"}
    node.check(tries, control=lambda name: name in sure or (ROOT and name not in rare))


@each
def test_memory_that_processes_share(node: Node) -> None:
    key = secrets.randbits(30) | 1
    libc = ctypes.CDLL(None, use_errno=True)
    segment = libc.shmget(key, 4096, 0o1600)
    assert segment >= 0
    try:
        node.check({"another's segment": ("shm", str(key))})
    finally:
        libc.shmctl(segment, 0, None)


@each
def test_what_it_takes_of_memory_and_disk_is_bounded(node: Node) -> None:
    tries: _Tries = {"addresses": ("addresses", str(8 << 30))}
    assert node.reached(tries, isolated=True) == {"addresses": False}
    assert node.reached(tries, isolated=False) == {"addresses": True}
    for isolated in (True, False):
        vm = node.broken({})
        own = "disk1" if node.kind is HypervisorKind.UML else str(vm.disks[0].path)
        vm = replace(vm, cmdline=node.told({"disk": ("grow", f"{own}:{3 << 30}")}))
        assert node.tell(vm, isolated=isolated) == {"disk": not isolated}


def test_the_number_of_its_processes_is_bounded() -> None:
    """The kernel limits it for all users but root."""
    assert 20 < forks(processes=40) < 40
    assert 60 < forks(processes=100) < 100


def test_who_may_not_have_that_much_has_what_it_may() -> None:
    """The sandbox cannot raise limits: those of the agent are the highest possible."""
    code = """
import os, resource, subprocess
from vmjobs.hypervisor.sandbox import bubblewrap
for which in (resource.RLIMIT_AS, resource.RLIMIT_FSIZE):
    resource.setrlimit(which, (1 << 30, 1 << 30))
bounds, filtered = bubblewrap.ResourceLimits(*[1 << 40] * 5), bubblewrap.open_seccomp_filter()
argv = bubblewrap.command(["true"], binds=(), bounds=bounds, filtered=filtered, env={})
raise SystemExit(subprocess.run(argv, pass_fds=[filtered], check=False).returncode)
"""
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0


FORKS = """
import os, signal
made = []
try:
    while len(made) < 500:
        made.append(os.fork())
        if made[-1] == 0:
            signal.pause()
except BlockingIOError:
    pass
print(len(made), flush=True)
"""


def forks(processes: int) -> int:
    """How many processes a program in a sandbox can start."""
    filtered = bubblewrap.open_seccomp_filter()
    bounds = bubblewrap.ResourceLimits(
        memory=0, cpus=0, address=1 << 40, file=1 << 30, processes=processes
    )
    told = ["/usr/bin/python3", "-c", FORKS]
    argv = bubblewrap.command(told, binds=(), bounds=bounds, filtered=filtered, env={})
    nobody = 65534 if ROOT else None
    try:
        done = subprocess.run(
            argv,
            pass_fds=[filtered],
            user=nobody,
            group=nobody,
            extra_groups=[] if ROOT else None,
            start_new_session=True,
            capture_output=True,
            timeout=60,
            check=True,
        )
    finally:
        os.close(filtered)
    return int(done.stdout)


def test_nothing_is_left_of_it_however_it_hides(node: Node) -> None:
    driver, vm = node.driver(isolated=True), node.broken({}, then="hide")
    driver.start(vm)
    assert driver.wait(vm.name, BOOT) is VmState.GONE
    assert mentioning(vm.name) == []
    driver.destroy(vm.name)


def test_it_cannot_pass_for_another_vm(node: Node, victim: VmConfig) -> None:
    driver, vm = node.begun("pose", victim.name)
    _, phantom = node.begun("pose", "vmjobs-test-phantom")
    wait_until(lambda: len(mentioning(f"umid={victim.name}")) > 4, 10, "it poses")
    names = driver.list()
    assert {vm.name, phantom.name, victim.name} <= set(names)
    assert "vmjobs-test-phantom" not in names
    driver.destroy(vm.name)
    driver.destroy(phantom.name)
    assert mentioning(vm.name) == mentioning("vmjobs-test-phantom") == []
    assert UserModeLinux().state(victim.name) is VmState.RUNNING


# The first process of a namespace, the third of a VM, ignores SIGTERM.
@pytest.mark.parametrize(
    ("node", "which", "number"),
    [
        *((HypervisorKind.UML, which, signal.SIGKILL) for which in range(4)),
        *((HypervisorKind.UML, which, signal.SIGTERM) for which in (0, 1, 3)),
        *((HypervisorKind.QEMU, which, signal.SIGKILL) for which in range(4)),
    ],
    indirect=["node"],
)
def test_when_one_of_its_processes_is_killed_all_are_gone(
    node: Node, image: BootImage, which: int, number: signal.Signals
) -> None:
    if node.kind is HypervisorKind.UML:
        driver, vm = node.begun(then="stay")
        words = f"umid={vm.name}"
    else:  # the VM need not boot
        driver = Libvirt(HypervisorKind.QEMU, node_connection())
        vm = node.vm(BootImage(image.digest, image.root, boot=BootMethod.BIOS), "do=count")
        driver.start(vm)
        words = f"guest={vm.name},"
    os.kill(chain(words)[which], number)
    assert driver.wait(vm.name, BOOT) is VmState.GONE
    wait_until(lambda: mentioning(vm.name) == [], 10, "all are gone")
    assert driver.shutdown_cause(vm.name) in {ShutdownCause.KILLED, ShutdownCause.CRASHED}


def test_who_asks_its_first_process_to_end_asks_it(node: Node) -> None:
    """As libvirt ends QEMU, which then writes the state of its disks."""
    driver, vm = node.begun(then="heed")
    os.kill(chain(f"umid={vm.name}")[0], signal.SIGTERM)
    assert driver.wait(vm.name, BOOT) is VmState.GONE
    assert mentioning(vm.name) == []
    assert "told to end" in said(vm.console).splitlines()


def test_its_management_console_cannot_be_anothers(node: Node, victim: VmConfig) -> None:
    """It puts a link in place of its own console; the driver does not follow."""
    home = node.directory / "home"
    (home / "vmjobs-a").mkdir(parents=True)
    (home / "vmjobs-a" / "mconsole").symlink_to(
        f"/proc/{kernel_of(victim.name)}/cwd/{victim.name}/mconsole"
    )
    (home / "vmjobs-b").symlink_to(f"/proc/{kernel_of(victim.name)}/cwd/{victim.name}")
    with subprocess.Popen(["sleep", "600"], cwd=home) as broken:
        try:
            for name in ("vmjobs-a", "vmjobs-b"):
                with pytest.raises(HypervisorError):
                    mconsole.command(broken.pid, name, "version", 5.0)
        finally:
            broken.kill()
    assert "Linux" in mconsole.command(kernel_of(victim.name), victim.name, "version", 5.0)


@pytest.mark.parametrize("node", [HypervisorKind.UML], indirect=True)
def test_one_that_has_ended_before_it_is_looked_at(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    begin = Launcher.start

    def start_and_see_it_end(*args: Any) -> LaunchedProcess:
        process = begin(*args)
        assert process.status(BOOT) == 1
        return process

    _break_sandbox(node, monkeypatch)
    monkeypatch.setattr(Launcher, "start", start_and_see_it_end)
    with pytest.raises(HypervisorError, match="cannot isolate VMs here: bwrap: No permissions"):
        node.driver(isolated=True).start(node.broken({}))


def _break_sandbox(node: Node, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put a bubblewrap that fails first on the path; return its directory."""
    empty = node.directory / "bin"
    empty.mkdir()
    fake = empty / "bwrap"
    fake.write_text("#!/bin/sh\necho 'bwrap: No permissions to create new namespace' >&2\nexit 1\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{empty}:{os.environ['PATH']}")
    return empty


@each
def test_without_a_sandbox_nothing_runs(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """If bubblewrap fails, and if it is missing."""
    empty = _break_sandbox(node, monkeypatch)
    driver, vm = node.driver(isolated=True), node.broken({})
    with pytest.raises(
        HypervisorError, match="cannot isolate VMs here: bwrap: No permissions"
    ) as refused:
        driver.start(vm)
    assert "isolation" in refused.value.hint
    assert not UserModeLinux().probe(BOOT).works
    assert mentioning(vm.name) == []
    if node.kind is HypervisorKind.QEMU:
        return  # its driver needs other programs on the path, too
    monkeypatch.setenv("PATH", str(empty))
    (empty / "bwrap").unlink()
    with pytest.raises(HypervisorError, match="bwrap is not installed"):
        node.driver(isolated=True).start(node.broken({}))
    assert mentioning(vm.name) == []


def test_a_guest_can_use_all_of_its_memory(node: Node, image: BootImage) -> None:
    """The memory limit of its kernel is not below it."""
    driver, vm = UserModeLinux(), node.vm(image, "do=fill")
    driver.start(vm)
    assert driver.wait(vm.name, BOOT) is VmState.GONE, said(vm.console)
    told = dict(line.partition("=")[::2] for line in said(vm.console).splitlines())
    assert told["sum"] == told["again"]
    assert len(told["sum"].split()[0]) == 32


def test_bytes_of_memory_are_bounded(node: Node) -> None:
    _, vm = node.begun(then="stay")
    shared = os.statvfs(f"/proc/{kernel_of(vm.name)}/root/dev/shm")
    home = os.statvfs(f"/proc/{kernel_of(vm.name)}/root/vm")
    assert shared.f_blocks * shared.f_frsize < 140 << 20
    assert home.f_blocks * home.f_frsize <= 1 << 20
