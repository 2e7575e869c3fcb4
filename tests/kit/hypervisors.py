"""The host's side of the contract tests: endpoints, listeners and waiting for the console."""

from __future__ import annotations

import http.server
import json
import os
import pickle
import secrets
import signal
import socketserver
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.kit.waiting import wait_until
from vmjobs.hypervisor.base import (
    ENDPOINT_PORT,
    BootImage,
    DriverChooser,
    Hypervisor,
    Network,
    ProbeResult,
    VmConfig,
    VmNeeds,
    VmState,
)
from vmjobs.hypervisor.select import choose
from vmjobs.model import HypervisorKind, NetworkMode

#: Seconds that a guest may take to boot and do its little work, on a slow host too.
BOOT = 180.0


def said(console: Path) -> str:
    """The console's contents so far."""
    return console.read_text("utf-8", "replace") if console.exists() else ""


@dataclass
class Bench:
    """A driver whose VMs are removed after the test. fields: of all these VMs."""

    driver: Hypervisor
    image: BootImage
    directory: Path
    fields: Mapping[str, Any] = field(default_factory=dict)
    names: list[str] = field(default_factory=list)
    networks: list[Network] = field(default_factory=list)

    def network(self, mode: NetworkMode = NetworkMode.REPOSITORY, *doors: int) -> Network:
        """Open a network for a new VM. doors: ports in addition to the endpoint's."""
        self.networks.append(self.driver.open_network(mode, (ENDPOINT_PORT, *doors)))
        return self.networks[-1]

    def vm(self, do: str = "", *words: str, **fields: Any) -> VmConfig:
        """Configure a VM whose guest does ``do``. words: more parameters of its kernel."""
        name = f"vmjobs-test-{secrets.token_hex(6)}"
        self.names.append(name)
        workdir = self.directory / name
        workdir.mkdir()
        usual = {"cpus": 1, "memory": 192, "image": self.image, "disks": (), "workdir": workdir}
        usual |= {"console": self.directory / f"{name}.console", "cmdline": (f"do={do}", *words)}
        return VmConfig(name=name, **{**usual, **self.fields, **fields})

    def start(self, do: str, words: str, **fields: Any) -> VmConfig:
        """Start a VM, and wait until its guest prints these words."""
        vm = self.vm(do, **fields)
        self.driver.start(vm)
        self.until(vm, words)
        return vm

    def until(self, vm: VmConfig, words: str) -> None:
        wait_until(lambda: words in said(vm.console), BOOT, f"the guest says {words}")

    def end(self, vm: VmConfig) -> str:
        """Wait until a VM has ended by itself; returns its console."""
        assert self.driver.wait(vm.name, BOOT) is VmState.GONE, said(vm.console)
        return said(vm.console)

    def run(self, do: str, *words: str, **fields: Any) -> str:
        """Run a guest to its end; returns its console."""
        vm = self.vm(do, *words, **fields)
        self.driver.start(vm)
        text = self.end(vm)
        self.driver.destroy(vm.name)
        return text


@contextmanager
def bench(driver: Hypervisor, image: BootImage, directory: Path, **fields: Any) -> Iterator[Bench]:
    """Make a bench, and verify at the end that nothing remains of its VMs."""
    made = Bench(driver, image, directory, fields)
    yield made
    for name in made.names:  # others run VMs at the same time
        driver.destroy(name)
        wait_until(lambda name=name: not mentioning(name), what="all its processes are gone")  # type: ignore[misc]
    assert not set(made.names) & set(driver.list())
    for network in made.networks:
        network.close()
        network.dhcp.close()
        for listening in network.listening.values():
            listening.close()


def chooser(drivers: Mapping[HypervisorKind, Hypervisor]) -> DriverChooser:
    """Choose among these drivers as an agent does whose probes have all booted a guest."""

    def choosing(needs: VmNeeds) -> Hypervisor:
        found = [ProbeResult(kind, True, "", 0.0, abilities=d.abilities) for kind, d in drivers.items()]
        return drivers[choose(tuple(drivers), needs, found)]

    return choosing


#: Starts a VM, and waits for its end.
_STARTER = """
import pickle, sys
from dataclasses import replace
from vmjobs.hypervisor.libvirt.connection import node_connection
from vmjobs.hypervisor.libvirt.driver import Libvirt
from vmjobs.hypervisor.uml.driver import UserModeLinux
from vmjobs.hypervisor.xen.driver import Xen
from vmjobs.model import HypervisorKind
vm, kind, mode, hidden = pickle.load(sys.stdin.buffer)
if kind is HypervisorKind.UML:
    driver = UserModeLinux()
elif kind is HypervisorKind.XEN:
    driver = Xen()
else:
    driver = Libvirt(kind, node_connection(), hidden_features=hidden)
driver.start(replace(vm, network=driver.open_network(mode, [80]) if mode else None))
print("started", flush=True)
driver.wait(vm.name, 600)
"""


def start_elsewhere(
    vm: VmConfig,
    kind: HypervisorKind,
    mode: NetworkMode | None = None,
    hidden_features: Sequence[str] = (),
) -> subprocess.Popen[bytes]:
    """Start a VM, with a network or without, in another process; return that process."""
    starter = subprocess.Popen(
        [sys.executable, "-c", _STARTER], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert starter.stdin
    assert starter.stdout
    with starter.stdin as data:
        pickle.dump((vm, kind, mode, hidden_features), data)
    with starter.stdout as words:
        assert words.readline() == b"started\n"
    return starter


def ancestors(pid: int) -> list[int]:
    """The process ids of a process's parent, its parent's, and so on."""
    found = []
    while pid > 1:
        stat = Path(f"/proc/{pid}/stat").read_text("utf-8", "replace")
        pid = int(stat.rpartition(")")[2].split()[1])
        found.append(pid)
    return found


def mentioning(words: str) -> list[int]:
    """All processes on the host whose command line contains these words."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if words.encode() in path.read_bytes():
                found.append(int(path.parent.name))
        except OSError:
            continue
    return found


def kill_all(words: str, number: signal.Signals = signal.SIGKILL) -> None:
    """Send a signal to the processes of a VM, and fail if there are none."""
    alive = mentioning(words)
    assert alive
    for pid in alive:
        with suppress(ProcessLookupError):  # the end of its sandbox kills it, too
            os.kill(pid, number)


def host_addresses() -> list[str]:
    """Addresses of this host, without its loopback's."""
    listed = subprocess.run(["ip", "-j", "-4", "addr"], capture_output=True, check=True).stdout
    found = [entry["local"] for link in json.loads(listed) for entry in link["addr_info"]]
    return [address for address in found if not address.startswith("127.")]


class Endpoint(socketserver.ThreadingTCPServer):
    """An HTTP service in a guest's network; records its requests."""

    daemon_threads = True
    small = b"small=hello\n"
    large = bytes(range(256)) * (40 * 1024 * 1024 // 256)

    def __init__(self, network: Network) -> None:
        self.requests: list[tuple[str, int]] = []
        listening = network.listening[ENDPOINT_PORT]
        super().__init__(listening.getsockname(), _Handler, bind_and_activate=False)
        self.socket.close()
        self.socket = listening


class _Handler(http.server.BaseHTTPRequestHandler):
    server: Endpoint

    def do_GET(self) -> None:
        self._answer(self.server.large if self.path == "/large" else self.server.small)

    def do_POST(self) -> None:
        left = size = int(self.headers["Content-Length"])
        while left and (data := self.rfile.read(min(left, 65536))):
            left -= len(data)
        self._answer(b"uploaded=%d\n" % size)

    def _answer(self, body: bytes) -> None:
        self.server.requests.append((self.path, len(body)))
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing."""


@contextmanager
def endpoint(network: Network) -> Iterator[Endpoint]:
    with Endpoint(network) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
