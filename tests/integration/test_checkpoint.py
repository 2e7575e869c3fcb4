"""Jobs whose VMs are saved on eviction and resume on another node; nodes share no files."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest

from tests.kit.faults import cut_off, fill, lost, small_disk
from tests.kit.grid import NODES, Grid, wait_for
from tests.kit.steps import closed
from tests.kit.submit_host import LOG
from vmjobs.model import Job, JobEvent, JobState, ReasonCode

pytestmark = pytest.mark.disruptive

LAST = 120
#: Counts on stdout and in a file on its disk; records its clock at the end.
COUNTS = f"""#!/bin/sh
token=$RANDOM$$
n=0
while [ $n -lt {LAST} ]; do
    n=$((n + 1))
    echo $n
    echo "$n $token" >>numbers
    sleep 0.3
done
date +%s >clock
"""


def saved(grid: Grid, job: Job) -> list[JobEvent]:
    return [e for e in grid.api.events(job.id) if e.reason.code is ReasonCode.CHECKPOINTED]


def counted(grid: Grid, job: Job) -> int:
    """The last number that the job has counted to, as far as its node has reported."""
    lines = grid.out(job).split()
    return int(lines[-1]) if lines else 0


def elsewhere(grid: Grid, job: Job, node: str) -> bool:
    found = grid.api.job(job.id)
    return found.state is JobState.RUNNING and found.node.split(".")[0] != node


def at_site(grid: Grid, tool: str, job: Job) -> None:
    """Have a tool of HTCondor's act on the job at the site."""
    grid.on("site", tool, "-constraint", f'VMJobsId == "{job.id}"')


def counts_on(grid: Grid, job: Job, after: int = 3) -> str:
    """Wait until the job has counted beyond a number; return its node."""
    grid.until(job, JobState.RUNNING, timeout=180)
    wait_for(lambda: counted(grid, job) > after or None, f"the job to count beyond {after}", 180)
    return grid.api.job(job.id).node.split(".")[0]


def begun(grid: Grid, after: int = 3) -> tuple[Job, str]:
    """Submit a job that counts, and wait until it has; return it and its node."""
    (job,) = grid.submit(COUNTS, hypervisor="qemu", memory=192, checkpoint=True)
    return job, counts_on(grid, job, after)


def vacated(grid: Grid, job: Job, after: int) -> str:
    """Have HTCondor vacate the job once it has counted beyond a number; return its old node."""
    node = counts_on(grid, job, after)
    before = len(saved(grid, job))
    with closed(grid, node):
        at_site(grid, "condor_vacate_job", job)
        wait_for(lambda: len(saved(grid, job)) > before or None, "its VM to be saved", 120)
        wait_for(lambda: elsewhere(grid, job, node) or None, "it to run on the other node", 180)
    return node


def test_a_job_that_counts_and_is_vacated_twice_counts_nothing_twice(
    grid: Grid, tmp_path: Path
) -> None:
    (job,) = grid.submit(
        COUNTS, hypervisor="qemu", memory=192, checkpoint=True, outputs=["numbers", "clock"]
    )
    first = vacated(grid, job, after=3)
    second = vacated(grid, job, after=counted(grid, job) + 3)
    assert {first, second} == set(NODES)
    ended = assert_counted_to_the_end(grid, job)
    assert ended.attempts == 3
    numbers = output(grid, job, "numbers", tmp_path).splitlines()
    assert [line.split()[0] for line in numbers] == [str(n) for n in range(1, LAST + 1)]
    assert len({line.split()[1] for line in numbers}) == 1, "it is one and the same process"
    over = [event.time for event in grid.api.events(job.id) if event.state is JobState.COLLECTING]
    assert abs(int(output(grid, job, "clock", tmp_path)) - over[-1].timestamp()) < 60
    # The second checkpoint does not send again the data that the service has from the first.
    sent = [re.search(r"([0-9.]+) MiB were sent", event.reason.message) for event in saved(grid, job)]
    once, again = (float(found[1]) for found in sent if found)
    assert 0 < again < once
    assert ended.bytes["checkpoint"] > 0


@pytest.mark.soak
def test_a_job_that_is_canceled_is_not_saved(grid: Grid) -> None:
    job, _ = begun(grid, after=1)
    grid.api.cancel(job.id)
    (ended,) = grid.wait(job, timeout=120)
    assert (ended.state, ended.bytes.get("checkpoint", 0)) == (JobState.CANCELED, 0)
    assert saved(grid, job) == []
    grid.assert_clean(job)


#: Injects a fault while a VM of this node is being saved.
Loss = Callable[[Grid, str], AbstractContextManager[None]]


def killing(pattern: str, service: str = "") -> Loss:
    """kill -9 processes of a host, by default the node; their supervisors restart them."""

    @contextmanager
    def killed(grid: Grid, node: str) -> Iterator[None]:
        grid.on(service or node, "pkill", "-KILL", "-f", pattern)
        yield

    return killed


@contextmanager
def unreachable(grid: Grid, node: str) -> Iterator[None]:
    """Cut the node's network before its checkpoint has reached the repository."""
    with cut_off(grid, node):
        assert saving(grid, node)
        yield


#: What dies while a VM is saved, and how many checkpoints succeed, where that is certain. HTCondor's
#: grace period is how long the service can be away. (test_agent_checkpoint.py kills the VM.)
LOSSES: dict[str, tuple[Loss, int | None]] = {
    "the agent": (killing("vmjobs agent"), 0),
    "the API": (killing("vmjobs serve", "api"), 1),
    "the database": (lambda grid, _: lost(grid, "postgres"), 1),
    "the node's network": (unreachable, 1),
    "the site's schedd": (killing("^condor_schedd", "site"), 1),
    "what waits for it": (killing("vmjobs exec"), None),
    "the starter": (killing("^condor_starter"), None),
    "libvirt's daemon": (killing("bin/libvirtd"), None),
}


@pytest.mark.soak
@pytest.mark.parametrize("what", LOSSES)
def test_what_dies_while_a_vm_is_saved_costs_what_was_done_and_no_more(grid: Grid, what: str) -> None:
    loss, checkpoints = LOSSES[what]
    job, node = begun(grid)
    with closed(grid, node):
        at_site(grid, "condor_vacate_job", job)
        wait_for(lambda: saving(grid, node) or None, "its VM to be saved", 60)
        with loss(grid, node):
            pass
        wait_for(lambda: elsewhere(grid, job, node) or None, "it to run on the other node", 240)
    assert_counted_to_the_end(grid, job)
    assert checkpoints is None or len(saved(grid, job)) == checkpoints


#: Free bytes on the disk: more than the counting job writes, less than the memory of its VM.
LITTLE = 24 << 20


@pytest.mark.soak
def test_a_disk_without_room_for_a_saved_vm_costs_what_was_done_and_no_more(grid: Grid) -> None:
    (first, other) = NODES
    with closed(grid, other), small_disk(grid, first, "runs", 2 * 1024 * 1024) as place:
        job, _ = begun(grid)
        grid.on(first, "truncate", "-s", f"-{LITTLE}", fill(grid, first, place))
        with closed(grid, first):
            at_site(grid, "condor_vacate_job", job)
            wait_for(lambda: not runs(grid, first) or None, "it to leave", 120)
        grid.on(first, "rm", f"{place}/filler")
        assert_counted_to_the_end(grid, job)
    assert saved(grid, job) == []
    assert "is not saved: " in grid.on(first, "grep", "-F", job.id, LOG)


def assert_counted_to_the_end(grid: Grid, job: Job) -> Job:
    """Assert that the job ended well, printed each number once, and left nothing behind."""
    (ended,) = grid.wait(job, timeout=300)
    assert (ended.state, ended.reason.code) == (JobState.COMPLETED, ReasonCode.SUCCEEDED), ended.reason
    assert grid.out(job).split() == [str(n) for n in range(1, LAST + 1)]
    grid.assert_clean(job)
    return ended


@pytest.mark.soak
@pytest.mark.parametrize("what", ["vmjobs agent", "vmjobs exec"])
def test_what_dies_while_a_saved_vm_is_fetched_costs_nothing(grid: Grid, what: str) -> None:
    job, node = begun(grid)
    (other,) = set(NODES) - {node}
    with closed(grid, node):
        at_site(grid, "condor_vacate_job", job)
        wait_for(lambda: saving(grid, other) or None, "its VM to come to the other node", 240)
        grid.on(other, "pkill", "-KILL", "-f", what)
        ended = assert_counted_to_the_end(grid, job)
    assert ended.attempts == 3


@pytest.mark.soak  # tests/contract/test_agent_checkpoint.py tests the agent's part
def test_an_agent_that_is_stopped_saves_its_vms_first(grid: Grid) -> None:
    """As in an upgrade: the next agent resumes the VMs, since HTCondor has noticed nothing."""
    job, node = begun(grid)
    grid.on(node, "pkill", "-TERM", "-f", "vmjobs agent")  # condor_master starts it again
    assert assert_counted_to_the_end(grid, job).attempts == 2
    assert len(saved(grid, job)) == 1


def runs(grid: Grid, node: str) -> str:
    """Files of a node's runs."""
    return grid.on(node, "find", "/var/lib/vmjobs/agent/runs", "-mindepth", "2")


def saving(grid: Grid, node: str) -> bool:
    """Whether a VM's memory is being written, sent or fetched."""
    return "machine.memory" in runs(grid, node)


def output(grid: Grid, job: Job, name: str, folder: Path) -> str:
    (found,) = (one for one in grid.api.outputs(job.id).outputs if one.path == name)
    return grid.api.download_output(job.id, found, folder).read_text("ascii")
