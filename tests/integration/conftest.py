"""Provides a real grid: containers with HTCondor, the API, the worker, and two nodes.

`make test` brings it up and passes its addresses in the variables that `make env` prints. Without
them these tests fail: a missing grid is no reason to skip them.
"""

from __future__ import annotations

import os
import re
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from images.store.image_store import ImageStore
from tests.kit import ROOT
from tests.kit.grid import NODES, Grid, wait_for
from tests.kit.grid_clusters import delete
from tests.kit.waiting import PATIENCE
from vmjobs.client import Client
from vmjobs.client.transport import Retries

#: Tests that inject a fault and have a line in the report.
FAULTS = re.compile("test_cluster_faults|test_every_step|test_crash|test_vacate|test_node_health")
#: The report file (besides the terminal): True for a soak, False otherwise.
REPORTS = {True: ROOT / "build" / "soak.txt", False: ROOT / "build" / "faults.txt"}


#: For a service whose disk or database others keep busy.
PATIENT = Retries(deadline=60.0 * PATIENCE)


@pytest.fixture(scope="session")
def grid() -> Iterator[Grid]:
    """The grid, once both nodes have announced themselves."""
    missing = [v for v in ("VMJOBS_API_URL", "VMJOBS_TOKEN_FILE", "VMJOBS_GRID") if v not in os.environ]
    if missing:
        pytest.fail(f"no grid to test: {', '.join(missing)} not set; run `make test`")
    url = os.environ["VMJOBS_API_URL"]
    token = Path(os.environ["VMJOBS_TOKEN_FILE"])
    store = ImageStore(Path(os.environ.get("VMJOBS_IMAGE_DIR", ROOT / "build" / "images")))
    with Client(url, token.read_text("ascii").strip(), retries=PATIENT) as api:
        up = Grid(api, url, os.environ["VMJOBS_GRID"], store, token.with_name("admin-token"))
        wait_for(
            lambda: len(api.nodes()) >= len(NODES) or None, "both nodes to announce themselves", 120
        )
        yield up


@pytest.fixture(scope="session")
def operator(grid: Grid) -> Iterator[Client]:
    token = grid.admin_token.read_text("ascii").strip()
    with Client(grid.url, token, retries=PATIENT) as api:
        yield api


@pytest.fixture
def name(grid: Grid, operator: Client) -> Iterator[str]:
    """A cluster name; the cluster is deleted afterwards if it exists."""
    name = f"t{uuid.uuid4().hex[:8]}"
    yield name
    delete(operator, name)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print a line per fault (result, seconds until the job was back, starts), and a summary."""
    reports = [
        report
        for outcome in ("passed", "failed")
        for report in terminalreporter.stats.get(outcome, ())
        if report.when == "call" and FAULTS.search(report.nodeid)
    ]
    if not reports:
        return
    lines = [f"{'fault':58} {'result':7} {'job back after':>14} {'begun':>6}"]
    for report in reports:
        told = dict(report.user_properties)
        fault = report.nodeid.rpartition("::")[2].removeprefix("test_").replace("_", " ")
        seconds, begun = told.get("job", ("-", "-"))
        after = f"{seconds} s" if begun != "-" else "-"
        line = f"{fault:58} {report.outcome:7} {after:>14} {begun:>6}  {told.get('note', '')}"
        lines.append(line.rstrip())
    well = sum(report.passed for report in reports)
    lines.append(f"{well} of {len(reports)} went well, in {sum(r.duration for r in reports):.0f} s")
    terminalreporter.section("faults")
    for line in lines:
        terminalreporter.line(line)
    report_file = REPORTS["not soak" not in terminalreporter.config.option.markexpr]
    report_file.parent.mkdir(exist_ok=True)
    report_file.write_text("\n".join(lines) + "\n", "utf-8")
