"""A connection to libvirt; the only module that imports it.

Domains are transient: libvirt forgets a VM when it ends. No privilege is needed: an ordinary
user's daemon (``qemu:///session``) starts by itself. A session daemon does not serve root, so for
root the driver runs inside this process (``qemu:///embed``).
"""

from __future__ import annotations

import functools
import json
import os
import threading
import time
import xml.etree.ElementTree as ET
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

from vmjobs.errors import HypervisorError
from vmjobs.hypervisor import procs
from vmjobs.hypervisor.base import NAME_PREFIX, ShutdownCause, VmState, VmUsage
from vmjobs.hypervisor.libvirt.embedded import EmbeddedRoot
from vmjobs.hypervisor.shutdown_causes import ShutdownCauses, cause_from_qemu

# libvirt's errors are raised here; an embedded driver would also print them on the terminal, and a
# warning for every VM. The library reads this variable once, while it is loaded.
os.environ.setdefault("LIBVIRT_LOG_OUTPUTS", f"4:file:{os.devnull}")
try:
    import libvirt
    import libvirt_qemu
except ImportError:  # a node without libvirt: probes report it
    libvirt = None

T = TypeVar("T")

#: Seconds that a daemon may take to come back after it went away.
RECONNECT_SECONDS = 15.0
RETRY_SECONDS = 0.1


@functools.cache
def _event_loop() -> None:
    """Run libvirt's event loop in a thread; a process can have only one."""
    libvirt.registerErrorHandler(lambda _context, _error: None, None)  # errors are raised as well
    libvirt.virEventRegisterDefaultImpl()

    def loop() -> None:
        while True:
            libvirt.virEventRunDefaultImpl()

    threading.Thread(target=loop, name="libvirt-events", daemon=True).start()


def node_connection() -> Connection:
    """Return the connection to this user's VMs on this node, one for the whole process.

    Each opening of an embedded driver registers it again, and libvirt has room for 21 (``MAX_DRIVERS``
    in its src/libvirt.c): a process that opened it more often could neither start nor end VMs.
    """
    return _connection_of(os.getpid())


@functools.cache
def _connection_of(_process: int) -> Connection:
    """One per process: a fork of this process cannot use its parent's connection."""
    return Connection("qemu:///session" if os.geteuid() else "qemu:///embed")


class Watch:
    """Notices that something has changed since it was made, or last looked at."""

    def __init__(self) -> None:
        #: Readable after a change.
        self.handle = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)

    def notify(self) -> None:
        os.eventfd_write(self.handle, 1)

    def wait(self, timeout: float, beside: Sequence[int] = ()) -> bool:
        """Block until something changes, one of these handles is readable, or the time is over.

        Returns:
            Whether one of the handles is readable.
        """
        found = procs.readable([self.handle, *beside], timeout)
        if self.handle in found:
            os.eventfd_read(self.handle)
        return not set(beside).isdisjoint(found)

    def close(self) -> None:
        os.close(self.handle)


class Connection:
    """A connection that opens on first use, and again after the daemon went away.

    Its methods raise HypervisorError if libvirt fails, or is not installed.

    uri: libvirt's; ``qemu:///embed`` stands for an embedded driver below ``embedded``, of which a
        process has one (:func:`node_connection`).
    """

    def __init__(self, uri: str, embedded: Path = Path("/run/vmjobs")) -> None:
        self.uri = uri
        self._embedded = EmbeddedRoot(embedded)
        self._lock = threading.Lock()
        # A lock of their own: libvirt's events must not wait for the opening of a connection.
        self._watches: set[Watch] = set()
        self._watches_lock = threading.Lock()
        self._open: Any = None
        self._has_qemu_events = False
        #: Why this connection's VMs ended.
        self.shutdown_causes = ShutdownCauses()

    def versions(self) -> tuple[str, str]:
        def ask(connection: Any) -> tuple[str, str]:
            return _dotted(connection.getVersion()), _dotted(connection.getLibVersion())

        return self._call("ask libvirt's version", ask)

    def names(self, domain_type: str) -> list[str]:
        """Return the names of our VMs of a type that are active."""

        def ask(connection: Any) -> list[str]:
            names = []
            for domain in connection.listAllDomains(libvirt.VIR_CONNECT_LIST_DOMAINS_ACTIVE):
                if domain.name().startswith(NAME_PREFIX):
                    with suppress(libvirt.libvirtError):  # gone since
                        if ET.fromstring(domain.XMLDesc()).get("type") == domain_type:  # noqa: S314
                            names.append(domain.name())
            return names

        return self._call("list VMs", ask)

    def state(self, name: str) -> VmState | None:
        """Return a VM's state; None: libvirt does not know the VM."""
        found = self._call_on_domain(name, "look at", lambda domain: domain.state()[0])
        if found is None:
            return None
        if found in {libvirt.VIR_DOMAIN_PAUSED, libvirt.VIR_DOMAIN_PMSUSPENDED}:
            return VmState.PAUSED
        ended = {libvirt.VIR_DOMAIN_SHUTOFF, libvirt.VIR_DOMAIN_CRASHED}
        return VmState.GONE if found in ended else VmState.RUNNING

    def start(self, name: str, text: str, saved: Path | None) -> None:
        """Start or resume a VM. text: domain XML, with the files and sockets of now."""

        def begin(connection: Any) -> object:
            if saved is None:
                return connection.createXML(text)
            return connection.restoreFlags(str(saved), text, libvirt.VIR_DOMAIN_SAVE_RUNNING)

        self.shutdown_causes.expect(name)
        self._call(f"start {name}", begin)

    def restore(self, name: str, saved: Path) -> None:
        """Resume a VM of libxl's, whose file has its domain XML."""
        self.shutdown_causes.expect(name)
        self._call(f"resume {name}", lambda connection: connection.restore(str(saved)))

    def shutdown(self, name: str) -> None:
        """Press the power button of a VM, if it runs."""
        self._call_on_domain(name, "stop", lambda domain: domain.shutdown())

    def destroy(self, name: str) -> None:
        """End a VM at once, if it runs."""
        self._call_on_domain(name, "destroy", lambda domain: domain.destroy())

    def suspend(self, name: str) -> None:
        """Pause a VM.  Raises HypervisorError, also if it does not run."""
        self._call_on_active(name, "pause", lambda domain: domain.suspend())

    def resume(self, name: str) -> None:
        """Continue a VM, paused or not.  Raises as :meth:`suspend`."""
        self._call_on_active(name, "resume", _resume)

    def save(self, name: str, path: Path) -> None:
        """Save a VM, and end it; it runs once it is resumed.  Raises as :meth:`suspend`."""

        def save(domain: Any) -> object:
            if domain.OSType() == "hvm":
                return domain.saveFlags(str(path), None, libvirt.VIR_DOMAIN_SAVE_RUNNING)
            return domain.save(str(path))  # libxl has no other flag than for a paused one

        self._call_on_active(name, "save", save)

    def usage(self, name: str) -> VmUsage:
        """Return a VM's processor time and memory as its hypervisor counts them; zero: it is gone."""
        found = self._call_on_domain(name, "look at", lambda domain: domain.info())
        return VmUsage() if found is None else VmUsage(found[4] / 1e9, found[2] * 1024)

    def scheduler(self) -> str:
        """Return the name of the hypervisor's scheduler, which shares out the processors."""
        ask = "ask for the scheduler"
        return str(self._call(ask, lambda connection: connection.lookupByID(0).schedulerType()[0]))

    def schedule(self, name: str, parameters: Mapping[str, int]) -> None:
        """Set a VM's share of the processors.  Raises as :meth:`suspend`."""
        self._call_on_active(
            name, "limit", lambda domain: domain.setSchedulerParameters(dict(parameters))
        )

    @contextmanager
    def watch(self) -> Iterator[Watch]:
        """Watch for changes of VMs' states, and for the connection's end."""
        watch = Watch()
        with self._watches_lock:
            self._watches.add(watch)
        try:
            yield watch
        finally:
            with self._watches_lock:
                self._watches.remove(watch)
            watch.close()

    def logs(self, name: str) -> list[Path]:
        """libvirt's logs of a VM's QEMU output; libvirt never removes them."""
        if self.uri == "qemu:///embed":
            return self._embedded.logs(name)
        cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        return list(Path(cache, "libvirt", "qemu", "log").glob(f"{name}.log*"))

    def _call(self, what: str, action: Callable[[Any], T]) -> T:
        """Call ``action`` with the open connection; retry once if that was broken."""
        if libvirt is None:
            raise HypervisorError("libvirt's Python module is not installed")
        try:
            connection = self._connect()
            try:
                return action(connection)
            except libvirt.libvirtError:
                if connection.isAlive():
                    raise
            self._drop(connection)
            return action(self._reconnect())
        except libvirt.libvirtError as error:
            raise HypervisorError(f"cannot {what}: {error}") from error

    def _call_on_domain(self, name: str, verb: str, action: Callable[[Any], T]) -> T | None:
        """Return ``action``'s result for the domain; None: there is no active one."""

        def found(connection: Any) -> T | None:
            try:
                return action(connection.lookupByName(name))
            except libvirt.libvirtError as error:
                code = error.get_error_code()
                ended = code == libvirt.VIR_ERR_OPERATION_INVALID and not _active(connection, name)
                if ended or code == libvirt.VIR_ERR_NO_DOMAIN:
                    return None
                raise

        return self._call(f"{verb} {name}", found)

    def _call_on_active(self, name: str, verb: str, action: Callable[[Any], object]) -> None:
        if self._call_on_domain(name, verb, lambda domain: (action(domain), True)) is None:
            raise HypervisorError(f"{name} does not run")

    def _connect(self) -> Any:
        with self._lock:
            if self._open is None:
                _event_loop()
                uri = self._embedded.uri() if self.uri == "qemu:///embed" else self.uri
                fresh = libvirt.open(uri)
                kind = libvirt.VIR_DOMAIN_EVENT_ID_LIFECYCLE
                fresh.domainEventRegisterAny(None, kind, self._on_lifecycle, None)
                with suppress(libvirt.libvirtError):  # libvirt itself reports a reset as a power-off
                    libvirt_qemu.qemuMonitorEventRegister(fresh, None, None, self._on_monitor, None, 0)
                    self._has_qemu_events = True
                with suppress(libvirt.libvirtError):  # drivers without a daemon have neither
                    fresh.setKeepAlive(5, 3)
                with suppress(libvirt.libvirtError):
                    fresh.registerCloseCallback(self._on_event, None)
                self._open = fresh
            return self._open

    def _reconnect(self) -> Any:
        """Connect again after a daemon went away; its successor may take a moment."""
        deadline = time.monotonic() + RECONNECT_SECONDS
        while True:
            try:
                return self._connect()
            except libvirt.libvirtError:
                if time.monotonic() > deadline:
                    raise
            time.sleep(RETRY_SECONDS)  # no event tells when its socket is there

    def _drop(self, connection: Any) -> None:
        with self._lock:
            if self._open is connection:
                self._open = None

    def _on_event(self, *_about: object) -> None:
        with self._watches_lock:
            for watch in self._watches:
                watch.notify()

    def _on_lifecycle(
        self, connection: Any, domain: Any, event: int, detail: int, _opaque: object
    ) -> None:
        if event == libvirt.VIR_DOMAIN_EVENT_STOPPED:
            # Without QEMU's causes, libvirt does not tell a power-off from a restart.
            is_reliable = self._has_qemu_events or connection.getType().lower() in {"test", "xen"}
            self.shutdown_causes.ended(
                domain.name(), _cause_from_libvirt(detail) if is_reliable else ShutdownCause.UNKNOWN
            )
        self._on_event()

    def _on_monitor(
        self, _connection: Any, domain: Any, event: str, _s: int, _us: int, details: str, _o: object
    ) -> None:
        if event == "GUEST_PANICKED":
            self.shutdown_causes.record_cause(domain.name(), ShutdownCause.PANICKED)
        elif event == "SHUTDOWN":
            self.shutdown_causes.record_cause(
                domain.name(), cause_from_qemu(json.loads(details or "{}").get("reason", ""))
            )


def _cause_from_libvirt(detail: int) -> ShutdownCause:
    return {
        libvirt.VIR_DOMAIN_EVENT_STOPPED_SHUTDOWN: ShutdownCause.POWEROFF,
        libvirt.VIR_DOMAIN_EVENT_STOPPED_DESTROYED: ShutdownCause.KILLED,
        libvirt.VIR_DOMAIN_EVENT_STOPPED_CRASHED: ShutdownCause.PANICKED,
        libvirt.VIR_DOMAIN_EVENT_STOPPED_FAILED: ShutdownCause.CRASHED,
    }.get(detail, ShutdownCause.UNKNOWN)


def _resume(domain: Any) -> None:
    if domain.state()[0] != libvirt.VIR_DOMAIN_RUNNING:  # else libvirt raises an error
        domain.resume()


def _active(connection: Any, name: str) -> bool:
    try:
        return bool(connection.lookupByName(name).isActive())
    except libvirt.libvirtError:
        return False


def _dotted(number: int) -> str:
    return f"{number // 1_000_000}.{number // 1000 % 1000}.{number % 1000}"
