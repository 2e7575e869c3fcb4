"""A node that keeps cluster VMs running, and the service that it talks to: a directory.

As a program this is such a node, to be killed. Arguments: its directory and the service's.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cache, partial
from pathlib import Path

import pytest

from images.build.builder import build
from images.store.image_store import ImageStore
from tests.kit import ROOT
from tests.kit.agent_runs import Images
from tests.kit.cluster_vm_orders import cluster_vm_order
from tests.kit.hypervisors import chooser
from tests.kit.waiting import wait_until
from vmjobs.agent.cluster_vms.assignment_source import AssignmentSource
from vmjobs.agent.cluster_vms.journal import ClusterVmJournal
from vmjobs.agent.cluster_vms.reconciler import running_reconciler
from vmjobs.agent.cluster_vms.services import ClusterVmServices, ClusterVmSettings
from vmjobs.agent.cluster_vms.status_reporter import ConsoleUploader, StatusReporter
from vmjobs.agent.image_source import ImageSource
from vmjobs.agent.journal import vm_name_prefix
from vmjobs.cluster.vm_state import Phase
from vmjobs.cluster.wire import (
    Assignment,
    ClusterVmOrder,
    ClusterVmReport,
    ClusterVmReports,
    PoolToken,
)
from vmjobs.errors import Unavailable, VMJobsError
from vmjobs.hypervisor import procs
from vmjobs.hypervisor.base import BootImage
from vmjobs.hypervisor.sandbox import bubblewrap, helper_processes
from vmjobs.hypervisor.uml.driver import UserModeLinux
from vmjobs.model import MIB, HypervisorKind, now

UML = UserModeLinux()
SECONDS = 240.0

#: Keeps running, prints the signals that it gets, and exits with 0 when it has to drain.
SCRIPT = rb"""#!/bin/sh
trap 'echo admitted' USR1
trap 'token=$(ask); echo "renewed $token"' USR2
trap 'echo drained; exit 0' TERM
. /run/vmjobs/job/job.env
run=/run/member
mkdir $run
. /usr/lib/vmjobs/base.sh
. /usr/lib/vmjobs/http.sh
ask() { http main GET /v1/token; }
echo "I am $(cat who) with $(ask)"
. ./more
while :; do
    sleep 1000 &
    wait
done
"""


@cache
def cluster_vm_guest(image: str = "generic") -> BootImage:
    """A guest image that comes with the product, built here if it does not exist."""
    store = ImageStore(ROOT / "build" / "images")
    return store.prepare(build(image, store, ROOT / "build" / "work").digest)


def order(number: int = 0, **fields: object) -> ClusterVmOrder:
    """An order for a VM of the cluster ``tiny`` that has to run."""
    values = {"cluster": "tiny", "name": f"tiny-{number}", "network": "repository"}
    seconds = {"boot_seconds": 240, "drain_seconds": 60}
    return cluster_vm_order(number, **{**values, **seconds, **fields})


@dataclass
class Kit:
    """A kit with a script that keeps running; ``more``: what else it does."""

    more: str = ""

    def files(self, order: ClusterVmOrder, incarnation: int) -> Mapping[str, bytes]:
        who = f"{order.name} ({incarnation})\n"
        return {"script": SCRIPT, "who": who.encode(), "more": self.more.encode()}


@dataclass
class Service:
    """The service, as files: its assignments and the reports to it. ``away`` makes it fail.

    refusal: the error for requests for tokens.
    """

    folder: Path
    token_seconds: float = 600.0
    refusal: VMJobsError | None = None
    _changed: threading.Event = field(default_factory=threading.Event)

    def wants(self, revision: int, *orders: ClusterVmOrder) -> None:
        """Assign these VMs to the node."""
        assignment = Assignment(revision=revision, members=orders)
        (self.folder / "new").write_text(assignment.model_dump_json())
        (self.folder / "new").rename(self.folder / "share")

    def go_away(self) -> None:
        (self.folder / "away").touch()

    def come_back(self) -> None:
        (self.folder / "away").unlink()

    @property
    def reports(self) -> list[ClusterVmReport]:
        told = self.folder / "reports"
        text = told.read_text() if told.exists() else ""
        lines = text.splitlines()[: text.count("\n")]  # a node may be writing another one
        bodies = (ClusterVmReports.model_validate_json(line) for line in lines)
        return [report for body in bodies for report in body.reports]

    def told(self, number: int = 0) -> list[ClusterVmReport]:
        """All reports of a cluster VM, the last first."""
        return [report for report in reversed(self.reports) if report.id == f"{number:032x}"]

    def last(self, number: int = 0) -> ClusterVmReport:
        return self.told(number)[0]

    def ended(self, incarnation: int = 1) -> ClusterVmReport:
        """The first report of the end of a cluster VM's incarnation."""
        ends = [r for r in self.reports if r.phase is Phase.WAITING and r.incarnation == incarnation]
        return ends[0]

    def wait_running(self, incarnation: int, number: int = 0) -> None:
        """Wait until the last report says that this incarnation of a cluster VM runs."""
        wanted = (Phase.RUNNING, incarnation)
        self.wait(lambda last: (last.phase, last.incarnation) == wanted, f"{wanted}", number)

    def wait_phase(self, phase: Phase, number: int = 0) -> None:
        self.wait(lambda last: last.phase is phase, f"it is {phase}", number)

    def wait(self, fits: Callable[[ClusterVmReport], bool], what: str, number: int = 0) -> None:
        """Wait until the last report of a cluster VM satisfies ``fits``."""
        wait_until(lambda: any(map(fits, self.told(number)[:1])), SECONDS, what)

    def console(self, incarnation: int = 1, number: int = 0) -> bytes:
        path = self.folder / f"console-{number:032x}-{incarnation}"
        return path.read_bytes() if path.exists() else b""

    # a node's requests

    def assignment(self, seen: int, wait: float) -> Assignment:
        deadline = time.monotonic() + min(wait, 2.0)
        while True:
            self._here()
            assignment = Assignment.model_validate_json((self.folder / "share").read_bytes())
            if assignment.revision != seen or time.monotonic() > deadline:
                return assignment
            self._changed.wait(0.05)

    def report(self, reports: ClusterVmReports) -> None:
        self._here()
        with (self.folder / "reports").open("a") as file:
            file.write(reports.model_dump_json() + "\n")

    def token(self, vm: str, incarnation: int) -> PoolToken:
        self._here()
        if self.refusal is not None:
            raise self.refusal
        with (self.folder / "tokens").open("a") as file:
            file.write("t")
            number = file.tell()
        expires = now() + timedelta(seconds=self.token_seconds)
        return PoolToken(token=f"token-{number}", identity="it", expires=expires)

    def append_console(self, vm: str, incarnation: int, offset: int, data: bytes) -> None:
        self._here()
        path = self.folder / f"console-{vm}-{incarnation}"
        path.touch()
        with path.open("r+b") as file:
            file.seek(offset)
            file.write(data)

    def _here(self) -> None:
        if (self.folder / "away").exists():
            raise Unavailable("api", "the service is away")


def cluster_vm_services(
    folder: Path,
    service: AssignmentSource,
    images: ImageSource | None = None,
    silence: float = 120.0,
    more: str = "",
) -> ClusterVmServices:
    """Make a node's services. images: only the guest's by default."""
    reporter = StatusReporter(service, heartbeat=1.0)
    return ClusterVmServices(
        images=images or Images(cluster_vm_guest()),
        choose=chooser({HypervisorKind.UML: UML}),
        drivers={HypervisorKind.UML: UML},
        journal=ClusterVmJournal(folder),
        source=service,
        reporter=reporter,
        console_uploader=ConsoleUploader(service, reporter),
        kit=Kit(more),
        settings=ClusterVmSettings(max_console=MIB, silence_seconds=silence),
    )


def clear(prefix: str) -> None:
    """Destroy all VMs whose names begin with this prefix, which are those of one journal."""
    for name in UML.list():
        if name.startswith(prefix):
            UML.destroy(name)


@pytest.fixture
def service(tmp_path: Path) -> Service:
    (tmp_path / "service").mkdir()
    return Service(tmp_path / "service")


@pytest.fixture
def new_parts(tmp_path: Path, service: Service) -> Iterator[Callable[..., ClusterVmServices]]:
    """Makes the services of the node, for one agent after the other."""
    yield partial(cluster_vm_services, tmp_path / "members", service)
    clear(vm_name_prefix(tmp_path / "members"))


@pytest.fixture
def parts(new_parts: Callable[..., ClusterVmServices]) -> ClusterVmServices:
    return new_parts()


#: Runs the node's reconciler until the context ends.
kept = running_reconciler


def machine_pids(parts: ClusterVmServices) -> list[int]:
    umid = f"umid={parts.journal.prefix}"
    return [
        process.pid
        for process in procs.scan()
        if process.is_leader and any(word.startswith(umid) for word in process.argv)
    ]


def machine_pid(parts: ClusterVmServices) -> int | None:
    """The process of the node's only VM."""
    return next(iter(machine_pids(parts)), None)


def kernel_pid(parts: ClusterVmServices) -> int:
    """The process of the guest's kernel in the node's only VM."""
    first = procs.read(machine_pid(parts) or 0)
    assert first is not None
    return bubblewrap.inner_processes(first)[0].pid if bubblewrap.is_leader(first) else first.pid


def remains(parts: ClusterVmServices) -> list[str]:
    """Processes and directories of cluster VMs."""
    prefix = parts.journal.prefix
    names = [name for name in UML.list() if name.startswith(prefix)]
    helped = [helper_processes.vm_of(process) for process in procs.scan()]
    folders = [path.name for path in parts.journal.root.iterdir() if path.is_dir()]
    return [*names, *(name for name in helped if name.startswith(prefix)), *folders]


def assert_forgotten(parts: ClusterVmServices, service: Service, revision: int) -> None:
    """Verify that nothing remains of any VM once the service wants none."""
    service.wants(revision)
    wait_until(lambda: remains(parts) == [], SECONDS, "nothing is left")


def main() -> None:
    """Reconcile a node's assignment until the process is killed."""
    folder, service = map(Path, sys.argv[1:])
    parts = cluster_vm_services(folder, Service(service))
    with kept(parts):
        threading.Event().wait()


if __name__ == "__main__":
    main()
