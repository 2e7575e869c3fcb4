"""Transparent jobs whose VMs are saved when HTCondor vacates them, and resume elsewhere."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from typing import Any

import pytest

from tests.kit.grid import NODES, Grid, wait_for
from tests.kit.steps import closed
from tests.kit.submit_host import BY_CONDOR_C, PATIENT, Desk, site

__all__ = ["site"]

pytestmark = pytest.mark.disruptive

LAST = 100
#: Counts on stdout and in a file; reports its count to HTCondor from any node.
COUNTS = f"""
token=$RANDOM$$
n=0
while [ $n -lt {LAST} ]; do
    n=$((n + 1))
    echo $n
    echo "$n $token" >>numbers
    [ $((n % 5)) -ne 0 ] || timeout 10 /usr/libexec/condor/condor_chirp set_job_attr ChirpCounted $n
    sleep 0.3
done
date +%s >clock
cat data
exit 3
"""
ALL = [str(n) for n in range(1, LAST + 1)]
#: The service's checkpoints of transparent jobs.
SAVED = "SELECT c.job_id, c.created FROM checkpoints c JOIN condor_jobs j ON j.id = c.job_id ORDER BY 1"
#: Hold reason sub-code of a job whose VM was not resumed (NOT_RESUMED).
NOT_RESUMED = 135
#: Makes all checkpoints of transparent jobs unusable.
LOST = "DELETE FROM checkpoint_contents WHERE job_id IN (SELECT id FROM condor_jobs)"


@pytest.fixture
def desk(grid: Grid) -> Iterator[Desk]:
    with Desk(grid, "submit", BY_CONDOR_C) as made:
        yield made


def submitted(desk: Desk, **more: str) -> tuple[str, str]:
    """Submit a job that counts; return its cluster and a constraint for it at the site.

    more: lines of its submit file.
    """
    mark = uuid.uuid4().hex
    more |= {"__Mark": f'"{mark}"', "__VMJobCheckpoint": "true", "__WantIOProxy": "true"}
    cluster = desk.submit(COUNTS, "generic", request_memory="192", **more)
    return cluster, f'Mark == "{mark}"'


def asked(grid: Grid, those: str, name: str) -> str:
    """An attribute of the job at the site."""
    return grid.on("site", "condor_q", "-allusers", "-constraint", those, "-af", name).strip()


def counted(grid: Grid, those: str) -> int:
    """The last number that the job has reported."""
    text = asked(grid, those, "ChirpCounted")
    return int(text) if text.isdigit() else 0


def completed(grid: Grid, those: str) -> int:
    """When the job ended at the site, which may keep it in its queue for a while, in seconds (Unix)."""
    last = ("-limit", "1", "-constraint", those, "-af", "CompletionDate")
    return int(asked(grid, those, "CompletionDate") or grid.on("site", "condor_history", *last))


def node_of(grid: Grid, those: str) -> str:
    """The node on which the job's VM runs; empty if it runs on none now."""
    state, host = asked(grid, those, "ChirpVMState"), asked(grid, those, "RemoteHost")
    return host.partition("@")[2].split(".")[0] if state == "RUNNING" else ""


def goes_on(grid: Grid, those: str, but: str = "") -> str:
    """Wait until the job runs, on a node other than `but`; return the node."""

    def look() -> str | None:
        node = node_of(grid, those)
        return node if node and node != but else None

    return wait_for(look, "the job to run" + " elsewhere" * bool(but), PATIENT)


def vacated(grid: Grid, those: str) -> str:
    """Have HTCondor vacate the job once it counts; return the node where it continues."""
    node, before = goes_on(grid, those), counted(grid, those)
    wait_for(lambda: counted(grid, those) > before or None, f"it to count on {node}", PATIENT)
    with closed(grid, node):
        grid.on("site", "condor_vacate_job", "-constraint", those)
        return goes_on(grid, those, but=node)


def queried(grid: Grid, statement: str) -> str:
    """Result of an SQL statement in the service's database."""
    command = ("psql", "-U", "vmjobs", "-At", "-c", statement)
    return grid.on("postgres", *command, user="postgres").strip()


def kept(grid: Grid) -> int:
    """Number of transparent jobs whose checkpoints the service keeps or accepts."""
    return int(queried(grid, "SELECT count(*) FROM condor_jobs"))


def not_resumed(desk: Desk, cluster: str) -> dict[str, Any] | None:
    """The job's ad once its policy holds it; else None."""
    ad = desk.ad(cluster)
    return ad if ad.get("JobStatus") == 5 and ad.get("HoldReasonCode") == 3 else None


def test_it_counts_nothing_twice(desk: Desk, grid: Grid) -> None:
    before = kept(grid)
    cluster, those = submitted(desk)
    first = goes_on(grid, those)
    second = vacated(grid, those)
    assert {first, second} == set(NODES)
    assert vacated(grid, those) == first
    ad = desk.ended(cluster)
    assert ad.get("ExitCode") == 3, ad.get("HoldReason")
    assert desk("cat", f"{desk.folder}/out").splitlines() == [*ALL, "from a file"]
    numbers = desk("cat", f"{desk.folder}/numbers").splitlines()
    assert [line.split()[0] for line in numbers] == ALL
    assert len({line.split()[1] for line in numbers}) == 1, "it is one and the same process"
    assert abs(int(desk("cat", f"{desk.folder}/clock")) - completed(grid, those)) < 60
    assert ad["ChirpCounted"] == LAST, "HTCondor heard of it to its end"
    assert ad["ChirpVMCheckpointBytes"] > 0
    assert (ad["NumJobStarts"], ad["ChirpVMVacated"]) == (3, 2), "it was tried once"
    wait_for(lambda: kept(grid) <= before or None, "the service to forget what was saved", 120)


@pytest.mark.soak
def test_one_that_is_held_goes_on_when_it_is_released(site: Desk, grid: Grid) -> None:
    """After the release, condor_ssh_to_job works as well."""
    cluster, those = submitted(site)
    goes_on(grid, those)
    wait_for(lambda: counted(grid, those) > 3 or None, "it to count", PATIENT)
    before = queried(grid, SAVED)
    site("condor_hold", cluster)
    wait_for(lambda: queried(grid, SAVED) != before or None, "its VM to be saved", PATIENT)
    site("condor_release", cluster)
    goes_on(grid, those)
    shown = site.tool("condor_ssh_to_job", f"{cluster}.0", "tail", "-n", "1", "numbers")
    assert 3 < int(shown.split()[0]) <= LAST
    assert site.ended(cluster).get("ExitCode") == 3
    assert site.read("out").split()[:LAST] == ALL


def test_row_of_one_that_does_not_go_on(desk: Desk, grid: Grid) -> None:
    """The row's hold is checked at the origin, as in `test_transparent_outcomes.py`."""
    cluster, those = submitted(desk, __VMJobMaxStarts="1")
    node = goes_on(grid, those)
    wait_for(lambda: counted(grid, those) > 3 or None, "it to count", PATIENT)
    before = queried(grid, SAVED)
    with closed(grid, NODES[0]), closed(grid, NODES[1]):
        grid.on("site", "condor_vacate_job", "-constraint", those)
        wait_for(lambda: queried(grid, SAVED) != before or None, f"{node} to save it", PATIENT)
        queried(grid, LOST)
    ad = wait_for(lambda: not_resumed(desk, cluster), "it to be held at its origin", PATIENT)
    told = (ad["HoldReasonSubCode"], ad["ChirpVMOutcome"])
    assert told == (NOT_RESUMED, "again"), ad["HoldReason"]
    assert ad["HoldReason"].startswith("NOT_RESUMED: the saved VM was not resumed: ")
