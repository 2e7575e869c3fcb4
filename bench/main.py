"""``make bench``: runs docs/benchmarks.md's benchmarks, prints a table, writes JSON."""

from __future__ import annotations

import argparse
import logging
import os
import platform
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import click

import vmjobs
from bench.beside import beside
from bench.cached_start import cached_start
from bench.cluster_idle import cluster_idle
from bench.cluster_start import cluster_start
from bench.cluster_wake import cluster_wake
from bench.crash import crash
from bench.data import data
from bench.density import density
from bench.figures import Finding, save, table
from bench.image_download import image_download
from bench.image_upload import image_changed, image_upload
from bench.lazy_start import lazy_start
from bench.much_output import much_output
from bench.network import guest_network
from bench.short_jobs import short_jobs
from bench.start_overhead import start_overhead
from bench.submit_to_result import submit_to_result
from bench.uml_kernel import uml_kernel
from bench.unchanged import unchanged
from bench.vm_universe import vm_universe
from images.store.image_store import ImageStore
from node.cli.bench import processor_name
from node.parts import make_hypervisors, make_run_parts
from tests.kit import ROOT
from tests.kit.grid import NODES, Grid, wait_for
from vmjobs.agent.node import memory_mib
from vmjobs.client import Client
from vmjobs.config import load
from vmjobs.hypervisor.base import ProbeResult
from vmjobs.hypervisor.network.outbound import node_addresses

RESULTS = ROOT / "build" / "bench"
IMAGE = "generic"
#: An image with Pythia, large enough to take a while to fetch.
LAZY_IMAGE = "hep"
#: Jobs whose end is watched, in addition to those of pairs: enough for a 95th percentile.
ENDS = 30

Bench = Callable[[], Iterator[Finding]]
#: The benchmarks that need a grid, and those that do not.
ON_THE_GRID: dict[str, Callable[[Grid, argparse.Namespace], Iterator[Finding]]] = {
    "result": lambda grid, options: submit_to_result(grid, options.few, ENDS),
    "unchanged": lambda grid, options: unchanged(grid, options.few),
    "short": lambda grid, options: short_jobs(grid, options.few),
    "output": lambda grid, options: much_output(grid, options.pairs),
    "density": lambda grid, options: density(grid, options.vms),
    "crash": lambda grid, _: crash(grid),
    "peer": lambda grid, options: vm_universe(grid, options.peer_pairs),
    "cluster-start": lambda grid, options: cluster_start(grid, options.few),
    "cluster-wake": lambda grid, options: cluster_wake(grid, options.few),
    "cluster-idle": lambda grid, options: cluster_idle(grid, options.minutes),
}
ALONE = (
    "kernel",
    "beside",
    "start",
    "data",
    "network",
    "cached",
    "changed",
    "upload",
    "download",
    "lazy",
)


def main() -> None:
    logging.basicConfig(level=logging.ERROR)
    options = _options()
    images = ImageStore(Path(os.environ.get("VMJOBS_IMAGE_DIR", ROOT / "build" / "images")))
    with tempfile.TemporaryDirectory(prefix="vmjobs-bench-") as directory:
        reached = tuple(map(str, node_addresses()))  # guests load bytes from this host
        places = {"state_dir": Path(directory), "image_dir": images.root}
        settings = load().model_copy(update={**places, "network_allow": reached})
        hypervisors = make_hypervisors(settings, images)
        made = make_run_parts(settings, images, hypervisors, Path(directory) / "runs")
        probes = hypervisors.probe()
        kinds = [probe.kind for probe in probes if probe.works]
        about: dict[str, Any] = _about(probes)
        digest, pairs, few = images.resolve(IMAGE), options.pairs, options.few
        benches: dict[str, Bench] = {
            "kernel": lambda: uml_kernel(made, images.resolve(LAZY_IMAGE), few),
            "beside": lambda: beside(2 * pairs),
            "start": lambda: start_overhead(made, digest, kinds, pairs, few),
            "data": lambda: data(made, digest, few),
            "network": lambda: guest_network(made, digest, pairs),
            "cached": lambda: cached_start(made, images, IMAGE, kinds, pairs),
            "changed": lambda: image_changed(pairs),
            "upload": lambda: image_upload(pairs),
            "download": lambda: image_download(pairs),
            "lazy": lambda: lazy_start(made, images, LAZY_IMAGE, kinds, few),
        }
        wanted = options.only or [*benches, *ON_THE_GRID]
        with ExitStack() as stack:
            if not benches.keys() >= set(wanted):
                grid = stack.enter_context(_grid(images))
                about |= _about_grid(grid)
                benches |= {n: partial(bench, grid, options) for n, bench in ON_THE_GRID.items()}
            findings = _go([benches[name] for name in wanted], about)
    click.echo()
    click.echo(_heading(about))
    click.echo(table(findings))
    click.echo("Times are medians with quartiles; so is a ratio, of the pairs' ratios.")
    # Other targets depend on this host's speed: for them the table is the result.
    if some := [finding.what for finding in findings if finding.target == 0 and not finding.met]:
        sys.exit(f"there should have been none: {'; '.join(some)}")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Benchmarks; see docs/benchmarks.md.")
    parser.add_argument(
        "--pairs", type=int, default=10, help="pairs of a comparison; two fifths of that for slow ones"
    )
    parser.add_argument("--peer-pairs", type=int, default=2, help="pairs with the VM universe")
    parser.add_argument("--vms", type=int, default=128, help="at once on one node, for density")
    parser.add_argument("--minutes", type=int, default=2, help="that idle VMs are measured")
    parser.add_argument("--only", nargs="*", choices=(*ALONE, *ON_THE_GRID), help="not all")
    options = parser.parse_args()
    # Pairs of benchmarks that take ten seconds or more for one: all of them together take an hour.
    options.few = max(1, options.pairs * 2 // 5)
    return options


def _go(benches: list[Bench], about: dict[str, Any]) -> list[Finding]:
    """Run the benchmarks, print findings as they come, and save those so far."""
    began = datetime.now(UTC)
    path = RESULTS / f"{began:%Y%m%dT%H%M%SZ}.json"
    findings: list[Finding] = []
    for bench in benches:
        for finding in bench():
            findings.append(finding)
            seconds = (datetime.now(UTC) - began).total_seconds()
            click.echo(f"[{seconds:4.0f} s] {'  '.join(finding.row())}")
            about |= {"began": began, "seconds": seconds, "load average after": os.getloadavg()}
            save(path, findings, about)
    click.echo(f"all of it, pair by pair: {path.relative_to(ROOT)}")
    return findings


@contextmanager
def _grid(images: ImageStore) -> Iterator[Grid]:
    """Yield the grid that is up, with both nodes announced."""
    missing = [v for v in ("VMJOBS_API_URL", "VMJOBS_TOKEN_FILE", "VMJOBS_GRID") if v not in os.environ]
    if missing:
        sys.exit(f"no grid: {', '.join(missing)} not set; run `make bench`")
    url = os.environ["VMJOBS_API_URL"]
    token = Path(os.environ["VMJOBS_TOKEN_FILE"])
    with Client(url, token.read_text("ascii").strip()) as api:
        wait_for(lambda: len(api.nodes()) == len(NODES) or None, "both nodes", 120)
        yield Grid(api, url, os.environ["VMJOBS_GRID"], images, token.with_name("admin-token"))


def _about(probes: tuple[ProbeResult, ...]) -> dict[str, Any]:
    return {
        "vmjobs": vmjobs.__version__,
        "python": platform.python_version(),
        "kernel": platform.release(),
        "processor": processor_name(),
        "processors": os.cpu_count(),
        "memory MiB": memory_mib(),
        "load average before": os.getloadavg(),
        "accelerators": {
            probe.kind.value: probe.version if probe.works else f"does not work: {probe.detail}"
            for probe in probes
        },
    }


def _about_grid(grid: Grid) -> dict[str, Any]:
    nodes = {
        node.name: {h.kind.value: h.version for h in node.hypervisors if h.works}
        for node in grid.api.nodes()
    }
    condor = grid.on("site", "condor_version").splitlines()[0].strip("$ ")
    return {"nodes": nodes, "condor": condor, "image": grid.images.resolve(IMAGE)}


def _heading(about: dict[str, Any]) -> str:
    working = [
        f"{kind}: {text}"
        for kind, text in about["accelerators"].items()
        if not text.startswith("does not work")
    ]
    load = " -> ".join(f"{about[f'load average {when}'][0]:.1f}" for when in ("before", "after"))
    return (
        f"{about['processors']} x {about['processor']}, Linux {about['kernel']}, load {load}\n"
        f"here {'; '.join(working)}\n"
        + (f"nodes {about['nodes']}\n{about['condor']}\n" if "nodes" in about else "")
    )


if __name__ == "__main__":
    main()
