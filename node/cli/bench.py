"""``vmjobs bench``: measures what VMs cost on this host."""

from __future__ import annotations

import os
import platform
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from itertools import count
from pathlib import Path
from typing import Any, Final

import click

import vmjobs
from images.store.image_store import ImageStore
from node.bench import report
from node.bench.copies import Copy, NativeCopy, VmCopy, missing_programs, served, unpack_tree
from node.bench.measure import measure
from node.bench.plan import NATIVE, NEIGHBOURS, Plan, Suite, Turn, load_suite, neighbour, shipped_suites
from node.bench.results import Results, load, load_or_begin
from node.parts import make_hypervisors, make_run_parts
from vmjobs.agent.hypervisor_registry import HypervisorRegistry
from vmjobs.agent.node import memory_mib
from vmjobs.agent.run.services import RunServices
from vmjobs.cli.common import config, echo, json_option, print_json, print_table
from vmjobs.cli.progress import step_bars
from vmjobs.config import Config
from vmjobs.errors import InvalidRequest, NoHypervisor
from vmjobs.hypervisor.network.outbound import OutboundPolicy, node_addresses
from vmjobs.hypervisor.uml import kernel_boot
from vmjobs.hypervisor.uml.driver import UserModeLinux
from vmjobs.model import HypervisorKind

#: UML in its other modes: its kernel, and how that catches a guest's system calls.
_UML_MODES: Final = {
    "uml-ptrace": ("", "ptrace"),
    "uml-seccomp": ("", "seccomp"),
    "uml-debian": (kernel_boot.DEBIAN_KERNEL, kernel_boot.AUTO),
}
_ALL: Final = "all"
_SIDES: Final = (_ALL, *(kind.value for kind in HypervisorKind), *_UML_MODES)
#: Seconds and sizes of a test: as its suite needs them for good figures, and as short as possible.
_FULL: Final = {"BENCH_SECONDS": "10", "BENCH_SCALE": "10"}
_QUICK: Final = {"BENCH_SECONDS": "1", "BENCH_SCALE": "1"}
_RESULTS: Final = "results.json"


@click.command("list")
@json_option
def list_suites(as_json: bool) -> None:
    """List the suites and their tests."""
    suites = [load_suite(name) for name in shipped_suites()]
    if as_json:
        print_json([suite.model_dump(exclude={"script", "server"}) for suite in suites])
        return
    lines = [
        (suite.name, name, test.what, test.unit)
        for suite in suites
        for name, test in suite.tests.items()
    ]
    print_table(("SUITE", "TEST", "WHAT", "UNIT"), lines)


@click.command()
@click.option(
    "--suite",
    "suites",
    multiple=True,
    metavar="NAME|FILE",
    help="A suite, or a file ./mine.toml beside its script ./mine.sh. May be repeated. Default: all.",
)
@click.option(
    "--hypervisor",
    "hypervisors",
    multiple=True,
    type=click.Choice(_SIDES),
    help="May be repeated. Default: all that work here.",
)
@click.option(
    "--image", default="bench", show_default=True, help="An image of this host with the programs."
)
@click.option(
    "--guests", default="1", show_default=True, metavar="N,N…", help="Copies at the same time."
)
@click.option(
    "--neighbour",
    "neighbours",
    multiple=True,
    type=click.Choice(list(NEIGHBOURS)),
    help="Measure once more beside another VM that misbehaves in this way. May be repeated.",
)
@click.option(
    "--rounds", type=click.IntRange(1, 1000), help="Turns of each side. Default: 5, or 1 with --quick."
)
@click.option("--quick", is_flag=True, help="See that all works: the figures are worth little.")
@click.option(
    "--output-dir",
    type=click.Path(path_type=Path, file_okay=False),
    help="Directory for results and reports. Default: vmjobs-bench-TIME.",
)
def run(
    suites: tuple[str, ...],
    hypervisors: tuple[str, ...],
    image: str,
    guests: str,
    neighbours: tuple[str, ...],
    rounds: int | None,
    quick: bool,
    output_dir: Path | None,
) -> None:
    """Measure the same programs in VMs and on this host itself.

    Both sides take turns. On the host itself the programs come from the same image, and run in a
    container with as many processors as a VM has; so use an image that you trust. Results are written
    after each turn: run an interrupted command again, with its --output-dir, to continue it.
    """
    settings = config()
    loaded = tuple(load_suite(name) for name in suites or shipped_suites())
    address = _server_address() if any(suite.server for suite in loaded) else ""
    if address:  # VMs of this measurement may reach the servers
        allow = (*settings.network_allow, address)
        settings = settings.model_copy(update={"network_allow": allow})
    images = ImageStore(settings.images)
    state = settings.state_dir / "local"
    registry = make_hypervisors(settings, images, state / "probes.json")
    services = make_run_parts(settings, images, registry, state / "runs")
    services.journal.recover(registry.drivers)  # of earlier runs that were killed
    plan = Plan(
        image=images.resolve(image),
        suites=loaded,
        sides=(NATIVE, *_chosen(hypervisors, registry)),
        guests=_numbers(guests),
        neighbours=("", *dict.fromkeys(neighbours)),
        rounds=rounds or (1 if quick else 5),
        quick=quick,
    )
    folder = output_dir or Path(f"vmjobs-bench-{datetime.now(UTC):%Y%m%dT%H%M%SZ}")
    folder.mkdir(parents=True, exist_ok=True)
    results = load_or_begin(folder / _RESULTS, plan, _about(registry))
    copies = _Copies(settings, images, services, plan, address)
    with step_bars() as bars:
        total = len(list(plan.turns()))
        task, done = bars.add_task("bench", total=total), count()

        def on_turn(turn: Turn) -> None:
            text = f"{turn.case} on {turn.side}, turn {turn.number + 1} of {plan.rounds}"
            bars.update(task, description=text, completed=next(done))

        results = measure(folder / _RESULTS, results, copies, on_turn)
        bars.update(task, completed=total)
    _write_reports(folder, results)
    echo(report.markdown(results).rstrip())
    echo(f"vmjobs: {folder}/{_RESULTS}, report.md and report.html", err=True)
    if failed := [result for result in results.turns if result.error]:
        echo(
            f"vmjobs: {len(failed)} of {total} turns failed; the same command tries them again",
            err=True,
        )
        sys.exit(1)


@click.command("report")
@click.argument("folder", type=click.Path(path_type=Path, file_okay=False))
def write_report(folder: Path) -> None:
    """Write the reports of a measurement again, even of an unfinished one.

    FOLDER is the directory of `vmjobs bench run`. The report is printed, too.
    """
    results = load(folder / _RESULTS)
    _write_reports(folder, results)
    echo(report.markdown(results).rstrip())


@click.command()
@click.argument("before", type=click.Path(path_type=Path))
@click.argument("after", type=click.Path(path_type=Path))
@json_option
def compare(before: Path, after: Path, as_json: bool) -> None:
    """Compare two measurements: directories of `vmjobs bench run`, or their files.

    The last column is the speed of AFTER in percent of BEFORE's; `~` marks differences within the
    standard deviations.
    """
    first, second = (load(path / _RESULTS if path.is_dir() else path) for path in (before, after))
    table = report.compared(first, second)
    columns = ("TEST", "SIDE", "BEFORE", "AFTER", "SPEED")
    if as_json:
        print_json([dict(zip(map(str.lower, columns), line, strict=True)) for line in table])
    else:
        print_table(columns, table)


class _Copies:
    """Makes the copies of each turn. Unpacks the image before the first one on the host."""

    def __init__(
        self,
        settings: Config,
        images: ImageStore,
        services: RunServices,
        plan: Plan,
        address: str,
    ) -> None:
        self._services, self._plan = services, plan
        self._policy = OutboundPolicy(settings.network_allow, settings.network_deny)
        self._work = settings.state_dir / "local" / "bench"
        self._environment = {**(_QUICK if plan.quick else _FULL), "BENCH_ADDRESS": address}
        image = images.prepare(plan.image)
        if image.architecture not in {"", platform.machine()}:
            raise InvalidRequest(
                f"the image is for {image.architecture}, which this host itself does not run",
                hint="measure an image for this host's own processors",
            )
        self._tree = unpack_tree(image, self._work / "trees")
        needed = (*plan.suites, *map(neighbour, filter(None, plan.neighbours)))
        lacking = {suite.name: missing_programs(self._tree, suite) for suite in needed}
        if texts := [
            f"{name} needs {', '.join(missing)}" for name, missing in lacking.items() if missing
        ]:
            raise InvalidRequest(
                f"the image lacks programs: {'; '.join(texts)}",
                hint="vmjobs image build bench; or name an image that has them, with --image",
            )

    @contextmanager
    def __call__(self, suite: Suite, turn: Turn) -> Iterator[tuple[list[Copy], list[Copy]]]:
        """Yield the copies of a turn, and its neighbours; the suite's server runs meanwhile."""
        guests, kind = turn.case.guests, turn.case.neighbour
        with ExitStack() as stack:
            copies, beside = [], []
            for number in range(guests):  # a server each: iperf3 serves one client at a time
                serving = served(self._tree, self._work, suite, self._environment)
                environment = stack.enter_context(serving)
                copies.append(self._copy(suite, turn.side, number * suite.cpus, environment))
            if kind:
                first = guests * suite.cpus
                beside = [self._copy(neighbour(kind), turn.side, first, self._environment)]
            yield copies, beside

    def _copy(self, suite: Suite, side: str, first_cpu: int, environment: dict[str, str]) -> Copy:
        if side == NATIVE:
            return NativeCopy(self._tree, self._work, suite, _cpus(suite, first_cpu), environment)
        services, kind = self._services, HypervisorKind(side.partition("-")[0])
        if side in _UML_MODES:
            program, system_calls = _UML_MODES[side]
            driver = UserModeLinux(program, system_calls=system_calls, policy=self._policy)
            services = replace(services, choose=lambda _needs: driver)
        return VmCopy(services, kind, self._plan.image, suite, environment)


def _cpus(suite: Suite, first: int) -> tuple[int, ...]:
    """Return the processors of a copy on the host itself: as many as its VM has, others for each."""
    usable = sorted(os.sched_getaffinity(0))
    return tuple(sorted({usable[place % len(usable)] for place in range(first, first + suite.cpus)}))


def _chosen(names: Sequence[str], registry: HypervisorRegistry) -> tuple[str, ...]:
    """Return the hypervisors to measure.

    Raises:
        NoHypervisor: one that was named does not work here, or none does.
    """
    probes = registry.probe()
    working = [str(probe.kind) for probe in probes if probe.works]
    wanted = list(dict.fromkeys(names or (_ALL,)))
    if _ALL in wanted:
        wanted = [*working, *(name for name in wanted if name in _UML_MODES)]
    if "uml-debian" in wanted and not shutil.which(kernel_boot.DEBIAN_KERNEL):
        raise NoHypervisor(
            "uml-debian needs Debian's kernel for User-mode Linux, which is not installed here",
            hint="apt install user-mode-linux",
        )
    for name in wanted:
        if name.partition("-")[0] not in working:
            details = "; ".join(f"{probe.kind}: {probe.detail}" for probe in probes if not probe.works)
            raise NoHypervisor(f"{name} does not work on this host: {details}")
    if not wanted:
        raise NoHypervisor(
            "no hypervisor works on this host", hint="`vmjobs doctor` shows what is wrong"
        )
    return tuple(wanted)


def _server_address() -> str:
    """Return an address of this host that its VMs can reach.

    Raises:
        InvalidRequest: it has none but the loopback's.
    """
    for network in node_addresses():
        if not network.is_loopback:
            return str(network.network_address)
    raise InvalidRequest(
        "this host has no IPv4 address for the servers of its suites",
        hint="connect it to a network, or choose suites without a server with --suite",
    )


def _numbers(text: str) -> tuple[int, ...]:
    words = [word.strip() for word in text.split(",")]
    if not all(word.isascii() and word.isdigit() and 0 < int(word) <= 1024 for word in words):
        raise click.BadParameter(f"{text!r} is not a list of numbers like 1,2,4", param_hint="--guests")
    return tuple(dict.fromkeys(int(word) for word in words))


def processor_name() -> str:
    lines = Path("/proc/cpuinfo").read_text("utf-8", "replace").splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _about(registry: HypervisorRegistry) -> dict[str, Any]:
    return {
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
        "vmjobs": vmjobs.__version__,
        "host": f"{os.cpu_count()} x {processor_name()}, {memory_mib()} MiB, "
        f"Linux {platform.release()}",
        "hypervisors": {str(probe.kind): probe.version for probe in registry.results if probe.works},
        "load before": round(os.getloadavg()[0], 2),
    }


def _write_reports(folder: Path, results: Results) -> None:
    (folder / "report.md").write_text(report.markdown(results), "utf-8")
    (folder / "report.html").write_text(report.page(results), "utf-8")
