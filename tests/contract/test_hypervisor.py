"""The same tests for every hypervisor driver, with real guests."""

from __future__ import annotations

import hashlib
import os
import pickle
import re
import shutil
import signal
import socket
import socketserver
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.kit import hypervisors
from tests.kit.guests import direct_boot_guest, kernel_tree, root_disk_guest
from tests.kit.hypervisors import (
    BOOT,
    Bench,
    Endpoint,
    endpoint,
    host_addresses,
    kill_all,
    mentioning,
    said,
)
from tests.kit.real_mode import untested
from tests.kit.waiting import wait_until
from vmjobs.agent.cluster_vms.vm_instance import CONSOLE_TICK_SECONDS
from vmjobs.agent.guest.endpoint import serving
from vmjobs.agent.guest.guest_session import GuestSession
from vmjobs.agent.vm.events import EventQueue
from vmjobs.errors import HypervisorError
from vmjobs.hypervisor import procs
from vmjobs.hypervisor.base import (
    SSH_PORT,
    BootImage,
    DataDisk,
    Hypervisor,
    ShutdownCause,
    VmConfig,
    VmState,
    VmUsage,
)
from vmjobs.hypervisor.libvirt.connection import Connection, node_connection
from vmjobs.hypervisor.libvirt.driver import Libvirt
from vmjobs.hypervisor.network.outbound import OutboundPolicy
from vmjobs.hypervisor.sandbox import helper_processes
from vmjobs.hypervisor.uml import kernel_boot
from vmjobs.hypervisor.uml.driver import UserModeLinux
from vmjobs.model import MIB, HypervisorKind, NetworkMode

#: Seconds within which a VM must be gone after a call of :meth:`Hypervisor.destroy`.
DESTROY = 20.0
#: Least processor seconds of a guest that has worked.
WORK = 1.0

KINDS = [HypervisorKind.UML, HypervisorKind.QEMU, HypervisorKind.KVM]


#: Hypervisors that can save VMs; the others report that they cannot.
SAVES = pytest.mark.parametrize("driver", [HypervisorKind.QEMU, HypervisorKind.KVM], indirect=True)


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


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_boots_speaks_and_powers_off(bench: Bench) -> None:
    """No console output is lost."""
    vm = bench.vm("hello")
    vm.console.write_text("kept from before\n")
    bench.driver.start(vm)
    assert vm.name in bench.driver.list()
    text = bench.end(vm)
    assert bench.driver.state(vm.name) is VmState.GONE
    assert vm.name not in bench.driver.list()
    assert text.startswith("kept from before\n")
    assert "guest: up" in text
    assert "guest: done" in text
    check_ending(bench.driver, vm.name, {ShutdownCause.POWEROFF})


def check_ending(driver: Hypervisor, name: str, expected: set[ShutdownCause]) -> None:
    assert driver.shutdown_cause(name) in expected
    assert driver.shutdown_cause(name) in expected, "it is remembered"
    driver.destroy(name)
    assert driver.shutdown_cause(name) is ShutdownCause.UNKNOWN, "it is forgotten"


@pytest.mark.parametrize(
    ("do", "expected", "words"),
    [
        ("reset", {ShutdownCause.RESET}, ""),
        # Our kernels are told to restart after a panic: QEMU's do, UML's exit.
        (
            "panic",
            {ShutdownCause.RESET, ShutdownCause.PANICKED},
            "Kernel panic - not syncing: Attempted to kill init",
        ),
    ],
)
def test_a_vm_that_does_not_power_off_is_told_from_one_that_does(
    bench: Bench, do: str, expected: set[ShutdownCause], words: str
) -> None:
    vm = bench.vm(do)
    bench.driver.start(vm)
    text = bench.end(vm)
    assert words in text
    assert text.count("guest: up") == 1, "it booted again"
    check_ending(bench.driver, vm.name, expected)


def test_destroy_ends_a_busy_guest_for_good(bench: Bench) -> None:
    vm = bench.start("spin", "spinning")
    bench.driver.stop(vm.name)  # the guest may ignore it
    began = time.monotonic()
    bench.driver.destroy(vm.name)
    assert time.monotonic() - began < DESTROY
    assert bench.driver.state(vm.name) is VmState.GONE
    assert mentioning(vm.name) == []
    assert files_of_libvirt(vm.name) == []
    bench.driver.destroy(vm.name)


@pytest.mark.parametrize("driver", [HypervisorKind.UML], indirect=True)
def test_a_vm_that_lost_the_process_for_its_disks_has_ended(bench: Bench) -> None:
    """Debian's kernel, used where vmjobs' own is missing, has such a process."""
    bench.driver = UserModeLinux(kernel_boot.DEBIAN_KERNEL)
    vm = bench.start("count", "count=1")
    listed = subprocess.check_output(["pgrep", "-f", f"umid={vm.name} "], text=True).split()
    os.kill(max(int(pid) for pid in listed if procs.is_traced(int(pid)) is False), signal.SIGKILL)
    ends_soon(bench, vm)


@pytest.mark.parametrize("driver", [HypervisorKind.UML], indirect=True)
@pytest.mark.parametrize("shared", [False, True])
def test_a_guest_that_several_users_share_is_traced(bench: Bench, shared: bool) -> None:
    """A single job's guest is not: it runs faster, on vmjobs' own kernel."""
    vm = bench.start("count", "count=1", shared=shared)
    assert "Linux version 7" in said(vm.console), "make kernel"
    listed = subprocess.check_output(["pgrep", "-f", f"umid={vm.name} "], text=True).split()
    kernel = max(int(pid) for pid in listed)
    children = procs.children(kernel)
    assert children
    assert {procs.is_traced(child) for child in children} == {shared}


@pytest.mark.parametrize("driver", [HypervisorKind.UML], indirect=True)
def test_a_job_has_several_processors_of_uml_and_a_shared_guest_one(bench: Bench) -> None:
    assert "processors=2" in bench.run("processors", cpus=2)
    for driver, fields in (
        (bench.driver, {"shared": True}),
        (UserModeLinux(kernel_boot.DEBIAN_KERNEL), {}),
    ):
        with pytest.raises(HypervisorError, match="needs 2 processors, and UML has 1"):
            driver.start(bench.vm("processors", cpus=2, **fields))


@pytest.mark.soak_for("qemu")
def test_a_vm_that_lost_its_way_outside_has_ended(bench: Bench) -> None:
    vm = bench.start("count", "count=1", network=bench.network(NetworkMode.OUTBOUND))
    assert bench.driver.wait(vm.name, 1.0) is VmState.RUNNING
    _, carries = helper_processes.find(vm.name)
    os.kill(carries.pid, signal.SIGKILL)
    ends_soon(bench, vm)


def ends_soon(bench: Bench, vm: VmConfig) -> None:
    """Check that a VM that lost a process ends: an idle host notices within a second."""
    began = time.monotonic()
    wait_until(
        lambda: bench.driver.wait(vm.name, CONSOLE_TICK_SECONDS) is VmState.GONE, BOOT, "it ends"
    )
    assert time.monotonic() - began < 3
    assert bench.driver.shutdown_cause(vm.name) is ShutdownCause.KILLED


@pytest.mark.soak_for("qemu")
def test_a_vm_whose_guest_leaves_its_network_goes_on(bench: Bench) -> None:
    network = bench.network()
    with endpoint(network):
        vm = bench.vm("unplugged", network=network)
        bench.driver.start(vm)
        assert bench.driver.wait(vm.name, BOOT) is VmState.GONE
        assert "guest: done" in said(vm.console)
        assert bench.driver.shutdown_cause(vm.name) is ShutdownCause.POWEROFF


def test_what_never_was_is_gone(bench: Bench) -> None:
    name = "vmjobs-test-never-was"
    assert bench.driver.state(name) is VmState.GONE
    assert bench.driver.wait(name, 10) is VmState.GONE
    bench.driver.stop(name)
    bench.driver.destroy(name)
    with pytest.raises(HypervisorError):
        bench.driver.pause(name)


def test_pause_and_resume(bench: Bench) -> None:
    vm = bench.start("count", "count=3")
    began = time.monotonic()
    assert bench.driver.wait(vm.name, 0.5) is VmState.RUNNING
    assert 0.4 < time.monotonic() - began < 5
    bench.driver.pause(vm.name)
    assert bench.driver.state(vm.name) is VmState.PAUSED
    assert vm.name in bench.driver.list()
    before = said(vm.console)
    assert bench.driver.wait(vm.name, 1.0) is VmState.PAUSED
    assert said(vm.console) == before
    bench.driver.pause(vm.name)
    for _ in range(2):
        bench.driver.resume(vm.name)
        assert bench.driver.state(vm.name) is VmState.RUNNING
    wait_until(lambda: len(said(vm.console)) > len(before), 20, "the guest goes on")
    bench.driver.pause(vm.name)
    bench.driver.destroy(vm.name)
    assert bench.driver.state(vm.name) is VmState.GONE


@pytest.mark.soak_for("False")
@SAVES
@pytest.mark.parametrize("paused", [False, True])
def test_a_vm_that_was_saved_goes_on_where_it_was(bench: Bench, paused: bool) -> None:
    """Its files have other paths then; the data on its disks is kept, too."""
    driver, first = bench.driver, bench.start("count", "count=5")
    assert driver.platform
    if paused:
        driver.pause(first.name)  # it must run after it is restored
    memory = bench.directory / "memory"
    driver.save(first.name, memory)
    assert driver.state(first.name) is VmState.GONE
    assert mentioning(first.name) == []
    driver.destroy(first.name)
    before = counted(first.console)
    second = replace(
        first,
        saved=memory,
        workdir=bench.directory / "elsewhere",
        console=bench.directory / "another.console",
    )
    first.workdir.rename(second.workdir)
    driver.start(second)
    assert driver.state(second.name) is VmState.RUNNING
    wait_until(lambda: len(counted(second.console)) > 5, BOOT, "it goes on")
    driver.destroy(second.name)
    after = counted(second.console)
    assert after == list(range(after[0], after[0] + len(after)))
    assert after[0] in {before[-1] + 1, before[-1] + 2}, "the last line may not have been out yet"
    assert counted(first.console) == before


def counted(console: Path) -> list[int]:
    """Return the numbers that a counting guest has printed, in whole lines."""
    lines = said(console).replace("\r", "").split("\n")[:-1]
    # The kernel may print in the middle of a line.
    return [int(found[1]) for line in lines if (found := re.match(r"count=(\d+)", line))]


@pytest.mark.soak_for("qemu")
def test_saving_what_cannot_be_saved_leaves_it_running(bench: Bench) -> None:
    vm = bench.start("count", "count=3")
    with pytest.raises(HypervisorError):
        bench.driver.save(vm.name, bench.directory / "no-such-directory" / "memory")
    before = counted(vm.console)
    wait_until(lambda: len(counted(vm.console)) > len(before) + 2, 20, "the guest goes on")
    with pytest.raises(HypervisorError):
        bench.driver.save("vmjobs-test-never-was", bench.directory / "memory")


@SAVES
def test_a_saved_vm_does_not_open_files_that_its_disk_names(bench: Bench) -> None:
    """Its overlay comes from another node, and may be forged."""
    driver, vm = bench.driver, bench.start("count", "count=1")
    memory, overlay = bench.directory / "memory", vm.workdir / "overlay.qcow2"
    driver.save(vm.name, memory)
    driver.destroy(vm.name)
    overlay.unlink()
    make = ["qemu-img", "create", "-q", "-f", "qcow2", "-o", f"data_file={bench.directory}/secret"]
    subprocess.run([*make, overlay, "64M"], check=True)
    with pytest.raises(HypervisorError, match="which VM overlays never have"):
        driver.start(replace(vm, saved=memory))
    assert driver.state(vm.name) is VmState.GONE


@pytest.mark.soak_for("15")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_vm_that_is_killed_did_not_power_off(bench: Bench, number: signal.Signals) -> None:
    vm = bench.start("spin", "spinning")
    kill_all(vm.name, number)
    assert bench.driver.wait(vm.name, BOOT) is VmState.GONE
    assert bench.driver.shutdown_cause(vm.name) in {ShutdownCause.KILLED, ShutdownCause.CRASHED}


@pytest.mark.soak_for("qemu")
def test_what_a_vm_has_used_is_seen_while_it_runs(bench: Bench) -> None:
    vm = bench.vm("work", "lines=-1")
    assert bench.driver.usage(vm.name) == VmUsage()
    began = time.monotonic()
    bench.driver.start(vm)
    bench.until(vm, "filled")
    enough = bench.driver.usage(vm.name).cpu_seconds + WORK
    wait_until(lambda: bench.driver.usage(vm.name).cpu_seconds > enough, BOOT, "it has worked")
    then = bench.driver.usage(vm.name)
    assert then.cpu_seconds < (os.cpu_count() or 1) * (time.monotonic() - began)
    assert MIB * 64 <= then.memory < MIB * (vm.memory + 256)
    bench.driver.destroy(vm.name)
    assert bench.driver.usage(vm.name) == VmUsage(), "it is forgotten"


def test_what_a_vm_has_used_is_known_after_its_end(bench: Bench) -> None:
    """In full where the kernel counts it; of QEMU, as much as was observed."""
    network = bench.network()
    with endpoint(network):
        native = bench.driver.kind is not HypervisorKind.QEMU
        vm = bench.vm("work", f"lines={60 if native else 10}", network=network)
        bench.driver.start(vm)
        if bench.driver.kind is not HypervisorKind.UML:
            bench.until(vm, "filled")
            seen = bench.driver.usage
            wait_until(lambda: seen(vm.name).cpu_seconds > WORK, BOOT, "it has worked")
        bench.end(vm)
        used = bench.driver.usage(vm.name)
    assert used.cpu_seconds > WORK
    assert MIB * 64 <= used.memory < MIB * (vm.memory + 256)
    assert bench.driver.usage(vm.name) == used, "it is remembered"


@pytest.mark.soak_for("qemu")
def test_console_is_complete(bench: Bench) -> None:
    lines = 120_000
    text = bench.run("flood", f"lines={lines}")
    tail = " 0123456789012345678901234567890123456789"
    flood = [line.removesuffix(tail) for line in text.splitlines() if line.endswith(tail)]
    assert len(text) > 5_000_000
    assert flood == [str(number) for number in range(1, lines + 1)]


def test_disks(bench: Bench) -> None:
    job, scratch, output = (bench.directory / name for name in ("job", "scratch,a:b c", "output"))
    job.write_bytes(b"the job!".ljust(1 << 20, b"\0"))
    for path in (scratch, output):
        with path.open("wb") as file:
            file.truncate(8 << 20)
    before = digest(bench.image.root), digest(job)
    text = bench.run(
        "disks", disks=(DataDisk(job, read_only=True), DataDisk(scratch), DataDisk(output))
    )
    assert "root=scribbled" in text
    assert "job=the job!" in text
    assert "scratch=written" in text
    assert "disks=4" in text
    assert output.read_bytes().startswith(b"output of the guest\0")
    assert (digest(bench.image.root), digest(job)) == before


@pytest.mark.soak_for("qemu")
def test_an_overlay_that_is_to_be_kept_outlives_its_vm(bench: Bench) -> None:
    before = digest(bench.image.root)
    kept, workdir = bench.directory / "kept, a:b", bench.directory / "same"
    disks = []
    for name in ("job", "scratch", "output"):
        disks.append(DataDisk(bench.directory / name))
        with disks[-1].path.open("wb") as file:
            file.truncate(8 << 20)

    def first_bytes(overlay: Path | None) -> str:
        workdir.mkdir()
        text = bench.run("disks", disks=tuple(disks), workdir=workdir, overlay=overlay)
        shutil.rmtree(workdir)
        return next(line for line in text.splitlines() if line.startswith("root=")).strip("\r")

    assert first_bytes(kept) != "root=scribbled"
    assert first_bytes(kept) == "root=scribbled"
    assert first_bytes(None) != "root=scribbled"
    assert digest(bench.image.root) == before


def test_guest_reaches_its_endpoint(bench: Bench) -> None:
    """Even if its working directory is deeply nested."""
    workdir = bench.directory / ("d" * 60) / ("e" * 50) / "work"
    workdir.mkdir(parents=True)
    network = bench.network()
    with endpoint(network) as server:
        vm = bench.vm("network", network=network, workdir=workdir)
        bench.driver.start(vm)
        assert mentioning(vm.name)
        text = bench.end(vm)
        wait_until(lambda: not mentioning(vm.name), 10, "all its processes are gone")
    assert "small=hello" in text
    assert f"sum={hashlib.md5(Endpoint.large).hexdigest()}" in text  # noqa: S324
    assert "uploaded=1048576" in text
    assert [path for path, _ in server.requests] == ["/small", "/large", "/upload"]


@pytest.mark.soak_for("qemu")
@pytest.mark.parametrize("mode", [NetworkMode.REPOSITORY, NetworkMode.OUTBOUND])
def test_guest_waits_at_its_door(bench: Bench, mode: NetworkMode) -> None:
    """The listener may close, and open again for a running VM."""
    network = bench.network(mode, SSH_PORT)
    vm = bench.start("door", "guest: up", network=network)
    answer(network.listening[SSH_PORT], b"")
    again = bench.driver.open_network(mode, [SSH_PORT], running=vm.name)
    again.close()
    answer(again.listening[SSH_PORT], b"come in")
    assert "door=come in" in bench.end(vm)


def answer(server: socket.socket, word: bytes) -> None:
    """Accept one connection of the guest, send ``word``, and stop listening."""
    with server:
        server.settimeout(BOOT)
        guest, _ = server.accept()
        with guest:
            guest.settimeout(BOOT)
            assert guest.recv(6, socket.MSG_WAITALL) == b"hello\n"
            guest.sendall(word)


@pytest.mark.parametrize("mode", [NetworkMode.REPOSITORY, NetworkMode.OUTBOUND])
@pytest.mark.parametrize("driver", [HypervisorKind.UML], indirect=True)
def test_guest_gets_its_address_by_dhcp(bench: Bench, mode: NetworkMode) -> None:
    network = bench.network(mode)
    with serving(GuestSession("a token", EventQueue(), {}, 0), network):
        text = bench.run("dhcp", network=network)
    beyond = "10.0.2.2, 10.0.2.3" if mode is NetworkMode.OUTBOUND else ", "
    assert f"bound=10.0.2.15 via {beyond}" in text


@pytest.mark.soak_for("qemu")  # its network is the same
@pytest.mark.parametrize("mode", [NetworkMode.REPOSITORY, NetworkMode.OUTBOUND])
def test_guest_does_not_reach_the_host(bench: Bench, mode: NetworkMode) -> None:
    """In mode ``repository`` it reaches no other address either, nor a name server."""
    network = bench.network(mode)
    with (
        endpoint(network),
        socket.create_server(("127.0.0.1", 0)) as private,
        socket.create_server(("0.0.0.0", 0)) as public,  # noqa: S104
    ):
        own, open_to_all = private.getsockname()[1], public.getsockname()[1]
        targets = [f"{address}:{own}" for address in ("10.0.2.1", "10.0.2.2", "127.0.0.1", "10.0.2.3")]
        targets += [f"{address}:{open_to_all}" for address in ("0.0.0.0", *host_addresses())]  # noqa: S104
        targets += ["10.0.2.100:22", "192.0.2.1:80"]
        targets += ["10.0.2.3:53"] if mode is NetworkMode.REPOSITORY else []
        text = bench.run("confined", f"targets={','.join(targets)}", network=network)
        assert "small=hello" in text
        assert "reached=" not in text.replace(
            "reached=dns", "" if mode is NetworkMode.OUTBOUND else "!"
        )
        for listener in (private, public):
            listener.setblocking(False)
            with pytest.raises(BlockingIOError):
                listener.accept()


@pytest.mark.parametrize("driver", [HypervisorKind.UML], indirect=True)
def test_guest_reaches_what_its_site_allows_and_nothing_that_it_denies(bench: Bench) -> None:
    """The server has an address of this host, which is otherwise closed to guests."""
    address = host_addresses()[0]
    for policy, reached in (
        (OutboundPolicy(), False),
        (OutboundPolicy(allow=(address,)), True),
        (OutboundPolicy(allow=(f"{address}/30",), deny=(address,)), False),
    ):
        bench.driver = UserModeLinux(policy=policy)
        network = bench.network(NetworkMode.OUTBOUND)
        with (
            endpoint(network),
            socketserver.TCPServer((address, 0), socketserver.BaseRequestHandler) as server,
        ):
            threading.Thread(target=server.serve_forever, daemon=True).start()
            target = f"{address}:{server.server_address[1]}"
            text = bench.run("confined", f"targets={target}", network=network)
            server.shutdown()
        assert (f"reached={target}" in text) is reached


@pytest.mark.parametrize("driver", [HypervisorKind.UML], indirect=True)
def test_guest_does_not_mount_the_host(bench: Bench) -> None:
    text = bench.run("hostfs")
    assert "guest: done" in text
    assert "mounted" not in text.partition("guest: up")[2]


def test_what_cannot_start_leaves_nothing(bench: Bench) -> None:
    """Cases: a name in use, a missing disk, and a file that is no saved VM."""
    driver, vm = bench.driver, bench.vm("count")
    driver.start(vm)
    again = bench.directory / "again"
    again.mkdir()
    with pytest.raises(HypervisorError):
        driver.start(replace(vm, workdir=again))
    assert driver.state(vm.name) is VmState.RUNNING
    driver.destroy(vm.name)  # its disks remain
    saved = bench.directory / "memory"
    saved.write_bytes(bytes(4096))
    with pytest.raises(HypervisorError):
        driver.start(replace(vm, saved=saved))
    assert driver.state(vm.name) is VmState.GONE
    other = bench.vm("hello", image=replace(bench.image, root=bench.directory / "no such file"))
    with pytest.raises(HypervisorError):
        driver.start(other)
        # A kernel may notice only after its start.
        bench.end(other)
        raise HypervisorError("it panicked")
    assert driver.state(other.name) is VmState.GONE
    driver.destroy(other.name)
    assert mentioning(other.name) == []


_STARTER = """
import pickle, sys
from dataclasses import replace
from vmjobs.hypervisor.libvirt.connection import Connection, node_connection
from vmjobs.hypervisor.libvirt.driver import Libvirt
from vmjobs.hypervisor.network.outbound import OutboundPolicy
from vmjobs.hypervisor.uml.driver import UserModeLinux
from vmjobs.model import HypervisorKind, NetworkMode
machine, kind = pickle.load(sys.stdin.buffer)
driver = UserModeLinux() if kind is HypervisorKind.UML else Libvirt(kind, node_connection())
driver.start(replace(machine, network=driver.open_network(NetworkMode.OUTBOUND, [80])))
print("started", flush=True)
driver.wait(machine.name, 600)
"""


def test_vm_of_a_killed_starter_is_found(bench: Bench) -> None:
    vm = bench.vm("count")
    starter = subprocess.Popen(
        [sys.executable, "-c", _STARTER], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert starter.stdin
    assert starter.stdout
    with starter.stdin as data:
        pickle.dump((vm, bench.driver.kind), data)
    with starter.stdout as words:
        assert words.readline() == b"started\n"
    # An agent's supervisor ends all of its descendants.
    family = {p.pid: ancestors(p.pid) for p in procs.scan() if vm.name in " ".join(p.argv)}
    assert family
    assert [pid for pid, above in family.items() if starter.pid in above] == []
    starter.send_signal(signal.SIGKILL)
    starter.wait()
    bench.until(vm, "count=3")
    assert vm.name in bench.driver.list()
    assert bench.driver.state(vm.name) is VmState.RUNNING
    assert bench.driver.wait(vm.name, 0.2) is VmState.RUNNING
    bench.driver.destroy(vm.name)
    assert bench.driver.state(vm.name) is VmState.GONE
    assert mentioning(vm.name) == []


def ancestors(pid: int) -> list[int]:
    found = []
    while pid > 1:
        stat = Path(f"/proc/{pid}/stat").read_text("utf-8", "replace")
        pid = int(stat.rpartition(")")[2].split()[1])
        found.append(pid)
    return found


def files_of_libvirt(name: str) -> list[str]:
    """Files that libvirt keeps of a VM, for root and for other users."""
    places = (Path("/run/vmjobs"), Path.home() / ".cache/libvirt", Path.home() / ".config/libvirt")
    return [str(path) for place in places for path in place.rglob(f"*{name}*")]
