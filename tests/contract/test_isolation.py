"""Isolation of a guest that controls its kernel or QEMU: a hostile program replaces these.

Each test has its control: the same program, started by the same driver without the sandbox, succeeds.
``docs/isolation.md`` maps the attacks to these tests.
"""

from __future__ import annotations

import ctypes
import os
import re
import secrets
import socket
import subprocess
import sys
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from tests.kit import KIT
from tests.kit.guests import BEGIN, root_disk_guest
from tests.kit.hostile_vms import Node, Tries, each, hostile_node
from tests.kit.hypervisors import BOOT, bench, host_addresses, said
from vmjobs.errors import HypervisorError
from vmjobs.hypervisor import procs
from vmjobs.hypervisor.base import (
    ENDPOINT_ADDRESS,
    ENDPOINT_PORT,
    GATEWAY_ADDRESS,
    NAMESERVER_ADDRESS,
    BootImage,
    VmConfig,
    VmState,
)
from vmjobs.hypervisor.sandbox import bubblewrap
from vmjobs.hypervisor.uml import mconsole
from vmjobs.hypervisor.uml.driver import UserModeLinux
from vmjobs.model import HypervisorKind, NetworkMode
from vmjobs.subprocess import run

pytest_plugins = ["tests.kit.hostile_vms"]
node = hostile_node  # tests.kit.agent_node has a fixture of this name
ROOT = os.geteuid() == 0


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


@each
def test_files_of_others_and_of_the_agent(node: Node, victim: VmConfig) -> None:
    state = node.directory / "state"
    state.mkdir()
    token = state / "token"
    token.write_text("a secret")
    run = victim.workdir
    tries: Tries = {
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
    tries: Tries = {
        "write the image": ("write", name),
        "write /usr": ("create", f"/usr/{secrets.token_hex(8)}"),
    }
    assert not any(node.reached(tries, isolated=True).values())
    assert node.reached({"write the image": ("write", name)}, isolated=False) == {
        "write the image": True
    }


def test_what_is_its_own_it_has(node: Node) -> None:
    """The sandbox is not empty: it has what a kernel needs."""
    tries: Tries = {
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
                # It takes datagrams: the test checks whether its directory is reachable.
                "another's management": ("listing", str(Path(console).parent)),
            }
        )


@each
def test_the_hosts_network(node: Node) -> None:
    with socket.create_server(("0.0.0.0", 0)) as server:  # noqa: S104
        port = server.getsockname()[1]
        tries: Tries = {
            f"tcp to {host}": ("tcp", f"{host}:{port}") for host in ("127.0.0.1", *host_addresses())
        }
        tries |= {
            f"a socket of family {number.name}": ("family", str(number.value))
            for number in (socket.AF_INET, socket.AF_INET6, socket.AF_NETLINK)
        }
        node.check(tries)
    # Not every kernel has these, so their controls may fail.
    others = (socket.AF_VSOCK, socket.AF_ALG, socket.AF_PACKET)
    rare: Tries = {number.name: ("family", str(number.value)) for number in others}
    assert not any(node.reached(rare, isolated=True).values())


@pytest.mark.parametrize("mode", [NetworkMode.REPOSITORY, NetworkMode.OUTBOUND])
def test_its_own_network_leads_nowhere_else(node: Node, mode: NetworkMode) -> None:
    """It sends raw frames; nothing of another VM's network is in its own."""
    driver, vm = node.driver(isolated=True), node.broken({})
    networks = [driver.open_network(mode, [ENDPOINT_PORT]) for _ in range(2)]
    ports = [network.listening[ENDPOINT_PORT].getsockname() for network in networks]
    assert ports == [(ENDPOINT_ADDRESS, ENDPOINT_PORT)] * 2
    own: Tries = {"the endpoint's address": ("answers", ENDPOINT_ADDRESS)}
    others = ("127.0.0.1", GATEWAY_ADDRESS, NAMESERVER_ADDRESS, "169.254.1.1", *host_addresses())
    tries: Tries = {at: ("ping", at) for at in others}
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
            tries: Tries = {}
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
    tries: Tries = {
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
    tries: Tries = {"addresses": ("addresses", str(8 << 30))}
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
    assert "Linux" in mconsole.command(kernel_of(victim.name), victim.name, "version", BOOT)


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
