"""What a guest has of its VM, with every driver: processors, console, disks, network."""

from __future__ import annotations

import hashlib
import os
import shutil
import socket
import socketserver
import threading
from contextlib import suppress
from pathlib import Path

import pytest

from tests.kit.hypervisor_drivers import bench, driver, image, patient
from tests.kit.hypervisors import BOOT, Bench, Endpoint, endpoint, host_addresses, mentioning, said
from tests.kit.waiting import wait_until
from vmjobs.agent.guest.endpoint import serving
from vmjobs.agent.guest.guest_session import GuestSession
from vmjobs.agent.vm.events import EventQueue
from vmjobs.errors import HypervisorError
from vmjobs.hypervisor import procs
from vmjobs.hypervisor.base import SSH_PORT, DataDisk, ShutdownCause, VmState
from vmjobs.hypervisor.network.outbound import OutboundPolicy
from vmjobs.hypervisor.uml import kernel_boot
from vmjobs.hypervisor.uml.driver import UserModeLinux
from vmjobs.model import HypervisorKind, NetworkMode

__all__ = ["bench", "driver", "image", "patient"]


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.mark.parametrize("driver", [HypervisorKind.UML], indirect=True)
def test_a_job_has_several_processors_of_uml_and_a_shared_guest_one(bench: Bench) -> None:
    assert "processors=2" in bench.run("processors", cpus=2)
    for found, fields in (
        (bench.driver, {"shared": True}),
        (UserModeLinux(kernel_boot.DEBIAN_KERNEL), {}),
    ):
        with pytest.raises(HypervisorError, match="needs 2 processors, and UML has 1"):
            found.start(bench.vm("processors", cpus=2, **fields))


@pytest.mark.parametrize("driver", [HypervisorKind.UML], indirect=True)
def test_the_processes_of_a_vm_with_one_processor_share_one_cpu(bench: Bench) -> None:
    vm = bench.start("count", "count=1")
    listed = mentioning(f"umid={vm.name}")
    listed += procs.children(max(listed))  # the guest's
    found = set()
    for pid in listed:
        with suppress(ProcessLookupError):  # a guest's process may have ended
            found.add(frozenset(os.sched_getaffinity(pid)))
    assert [len(cpus) for cpus in found] == [1]


@pytest.mark.soak_for("qemu")
def test_a_vm_whose_guest_leaves_its_network_goes_on(bench: Bench) -> None:
    network = bench.network()
    with endpoint(network):
        vm = bench.vm("unplugged", network=network)
        bench.driver.start(vm)
        assert bench.driver.wait(vm.name, BOOT) is VmState.GONE
        assert "guest: done" in said(vm.console)
        assert bench.driver.shutdown_cause(vm.name) is ShutdownCause.POWEROFF


@pytest.mark.soak_for("qemu")
def test_console_is_complete(bench: Bench) -> None:
    # xenconsoled reads 30 times in 200 ms, a KiB at most (tools/console/daemon/io.c in Xen's source).
    lines = 12_000 if bench.driver.kind is HypervisorKind.XEN else 120_000
    text = bench.run("flood", f"lines={lines}")
    tail = " 0123456789012345678901234567890123456789"
    flood = [line.removesuffix(tail) for line in text.splitlines() if line.endswith(tail)]
    assert len(text) > lines * 45
    assert flood == [str(number) for number in range(1, lines + 1)]


def test_disks(bench: Bench) -> None:
    odd = "" if bench.driver.kind is HypervisorKind.XEN else ",a:b c"
    job, scratch, output = (bench.directory / name for name in ("job", f"scratch{odd}", "output"))
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
    odd = "" if bench.driver.kind is HypervisorKind.XEN else ", a:b"
    kept, workdir = bench.directory / f"kept{odd}", bench.directory / "same"
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
        wait_until(lambda: not mentioning(vm.name), what="all its processes are gone")
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
            patience = [f"within={BOOT:.0f}"] if reached else []
            text = bench.run("confined", f"targets={target}", *patience, network=network)
            server.shutdown()
        assert (f"reached={target}" in text) is reached


@pytest.mark.parametrize("driver", [HypervisorKind.UML], indirect=True)
def test_guest_does_not_mount_the_host(bench: Bench) -> None:
    text = bench.run("hostfs")
    assert "guest: done" in text
    assert "mounted" not in text.partition("guest: up")[2]
