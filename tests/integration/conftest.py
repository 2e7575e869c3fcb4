"""Provides a real grid: containers with HTCondor, the API, the worker, and two nodes.

`make test` brings it up and passes its addresses in the variables that `make env` prints. Without
them these tests fail: a missing grid is no reason to skip them.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from grid_kit import NODES, ROOT, Grid, wait_for

from images.store.image_store import ImageStore
from vmjobs.client import Client

#: Tests that inject a fault and have a line in the report.
FAULTS = re.compile("test_cluster_faults|test_every_step|test_crash|test_vacate|test_node_health")
#: The report file (besides the terminal): True for a soak, False otherwise.
REPORTS = {True: ROOT / "build" / "soak.txt", False: ROOT / "build" / "faults.txt"}


@pytest.fixture(scope="session")
def grid() -> Iterator[Grid]:
    """The grid, once both nodes have announced themselves."""
    missing = [v for v in ("VMJOBS_API_URL", "VMJOBS_TOKEN_FILE", "VMJOBS_GRID") if v not in os.environ]
    if missing:
        pytest.fail(f"no grid to test: {', '.join(missing)} not set; run `make test`")
    url = os.environ["VMJOBS_API_URL"]
    token = Path(os.environ["VMJOBS_TOKEN_FILE"])
    store = ImageStore(Path(os.environ.get("VMJOBS_IMAGE_DIR", ROOT / "build" / "images")))
    with Client(url, token.read_text("ascii").strip()) as api:
        up = Grid(api, url, os.environ["VMJOBS_GRID"], store, token.with_name("admin-token"))
        wait_for(
            lambda: len(api.nodes()) >= len(NODES) or None, "both nodes to announce themselves", 120
        )
        yield up


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
    report_file = REPORTS[terminalreporter.config.option.markexpr == "soak"]
    report_file.parent.mkdir(exist_ok=True)
    report_file.write_text("\n".join(lines) + "\n", "utf-8")
