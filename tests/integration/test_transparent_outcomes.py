"""Each row of the table of outcomes, forced, and checked where the job was submitted.

`condor_q -hold` shows the outcome at the origin, a hop of Condor-C away. If a row requeues the job,
the test allows the job one start only, so that it is held. All other rows hold the job at once,
without a second start. Jobs that do not disturb other tests are submitted together, and each test
checks one of them.
"""

from __future__ import annotations

import base64
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from condor.events import outcomes
from condor.events.outcomes import OUTCOMES
from images.manifest import ImageManifest
from tests.kit import ROOT
from tests.kit.faults import AGENT, fill, small_disk, without_agent, without_objects
from tests.kit.grid import NODES, Grid, blank_disk, odd_images, publish, wait_for
from tests.kit.submit_host import BY_CONDOR_C, PATIENT, Desk, kill_machine, where
from vmjobs.model import BootMethod

#: HoldReasonCode of transparent jobs: JobPolicy, as the job's own expression was true.
JOB_POLICY = 3
#: Expected HoldReasonSubCodes of outcomes that hold the job at once,
HELD = {
    "NOT_FOUND": 101,
    "IMAGE_REJECTED": 102,
    "IMAGE_UNSUITABLE": 103,
    "INVALID_REQUEST": 104,
    "TOO_LARGE": 105,
    "OUTPUT_TOO_LARGE": 106,
    "CONSOLE_FLOODED": 107,
    "KERNEL_PANIC": 108,
    "BOOT_TIMED_OUT": 109,
    "NO_EXIT_REPORT": 110,
    "TIMED_OUT": 111,
}
#: and of outcomes that requeue it.
AGAIN = {
    "FORBIDDEN": 120,
    "UNAVAILABLE": 121,
    "BOOT_FAILED": 122,
    "GUEST_LOST": 123,
    "IMAGE_UNAVAILABLE": 124,
    "NO_HYPERVISOR": 126,
    "NODE_FAILED": 127,
    "OUTPUT_MISSING": 128,
    "SCRIPT_FAILED": 129,
    "SCRIPT_KILLED": 130,
    "INTERNAL": 131,
    "EXEC_LOST": 132,
    "STORAGE_FULL": 133,
    "UNAUTHENTICATED": 134,
    "NOT_RESUMED": 135,
}

# --------------------------------------------------------------------------- without disturbance

#: Commands that an image's init runs before it becomes the guest program.
INITS = {
    "test-panics": "exit 1",
    "test-never-ready": "while :; do sleep 60; done",
    "test-powers-off": "busybox poweroff -f",
    "test-bare": "rm /usr/bin/setpriv; exec /sbin/vmjobs-init",
    # When the job starts, root runs the job's script as-root: a guest in which anything can go wrong.
    "test-obeys": """[ -c /dev/null ] || busybox mount -t devtmpfs devtmpfs /dev
(until [ -e /job/work/now ]; do sleep 0.1; done; sh /job/work/tree/as-root) &
exec /sbin/vmjobs-init""",
}
#: Users look at these lines first.
LAST_LINES = r"; the console's last lines:\s+\S"
#: Waits until root's script is done.
WAIT = "until [ -e obeyed ]; do sleep 0.1; done"
OBEYED = "; touch /job/work/tree/obeyed"


def _no_more(_desk: Desk, _cluster: str) -> None:
    """Do nothing: the job ends by itself."""


@dataclass(frozen=True)
class Way:
    """How a test forces a row.

    said: pattern that the hold reason must match. root: script that root runs in the guest.
    lines: more lines of the submit file. large: MiB of an extra input file.
    deed: action on the job after submission.
    """

    said: str
    script: str = "sleep 1000"
    image: str = "generic"
    root: str = ""
    lines: Mapping[str, str] = field(default_factory=dict)
    large: int = 0
    deed: Callable[[Desk, str], None] = _no_more


def at_site(desk: Desk, cluster: str) -> tuple[Desk, str]:
    """The same job in the site's queue, once it runs there."""
    desk.running(cluster)
    return Desk(desk.grid, "site"), desk.ad(cluster)["GridJobId"].split()[-1].split(".")[0]


def kill_the_machine(desk: Desk, cluster: str) -> None:
    kill_machine(*at_site(desk, cluster))


def kill_what_runs_it(desk: Desk, cluster: str) -> None:
    node, name = where(*at_site(desk, cluster))
    starter = name.partition(".")[2]
    desk.grid.on(node, "pkill", "-9", "-P", starter, "-f", "exec-unchanged")


WAYS: dict[str, Way] = {
    "NOT_FOUND": Way("no-such-image", image="no-such-image"),
    "IMAGE_UNSUITABLE": Way("the image has no setpriv", image="test-bare"),
    "INVALID_REQUEST": Way("VMJobHypervisor.*kvm", lines={"__VMJobHypervisor": '"abacus"'}),
    "TOO_LARGE": Way("larger than its disk; .*request_disk", large=1100),
    "OUTPUT_TOO_LARGE": Way("more than its disk; .*request_disk", "fallocate -l 1900M big"),
    "CONSOLE_FLOODED": Way(
        rf"beyond \d+ bytes{LAST_LINES}(?s:.*)more and more",
        image="test-obeys",
        root="busybox yes more and more | tr '\\n' ' ' >/dev/console",
    ),
    "KERNEL_PANIC": Way(f"Attempted to kill init.*{LAST_LINES}", image="test-panics"),
    "BOOT_TIMED_OUT": Way(
        f"not ready within 4 s.*{LAST_LINES}",
        image="test-never-ready",
        lines={"__VMJobBootTimeout": "4"},
    ),
    "NO_EXIT_REPORT": Way(
        f"powered off without.*{LAST_LINES}", image="test-obeys", root="busybox poweroff -f"
    ),
    "BOOT_FAILED": Way(
        f"powered off before the guest was ready.*{LAST_LINES}", image="test-powers-off"
    ),
    "GUEST_LOST": Way("killed from outside", deed=kill_the_machine),
    "NO_HYPERVISOR": Way(
        "demands the hypervisor uml.*boots by", image="test-bios", lines={"__VMJobHypervisor": '"uml"'}
    ),
    "OUTPUT_MISSING": Way(
        "not transferred", WAIT, "test-obeys", root=f"ln -s /dev/null /job/work/left{OBEYED}"
    ),
    "SCRIPT_FAILED": Way(
        "could not run the job.*status 1", WAIT, "test-obeys", f"cp /bin/false /bin/tar{OBEYED}"
    ),
    "SCRIPT_KILLED": Way(
        "could not run the job.*signal 9", image="test-obeys", root="busybox killall -9 script"
    ),
    "EXEC_LOST": Way("was killed", deed=kill_what_runs_it),
}


def submit(grid: Grid, code: str, way: Way, node: str = "") -> tuple[Desk, str]:
    """Submit a job at the origin; return its desk and cluster. node: the node to run it."""
    desk = Desk(grid, "submit", BY_CONDOR_C)
    lines = {"transfer_input_files": "data", **way.lines}
    if code in AGAIN:
        lines["__VMJobMaxStarts"] = "1"
    desk("mkdir", "-p", desk.folder)
    if way.root:
        desk.write("as-root", way.root)
        lines["transfer_input_files"] += ",as-root"
    if way.large:
        desk("truncate", "-s", f"{way.large}M", f"{desk.folder}/large")
        lines["transfer_input_files"] += ",large"
    if node:
        lines["__remote_Requirements"] = f'TARGET.Machine == "{node}.grid"'
    return desk, desk.submit(way.script, image=way.image, **lines)


def remove(desk: Desk) -> None:
    for cluster in desk.clusters:
        desk("condor_rm", cluster, check=False)
    desk("rm", "-rf", desk.folder, check=False)


def held(desk: Desk, cluster: str) -> dict[str, Any]:
    """The job's ad from `condor_q -hold`, once it is held."""

    def look() -> dict[str, Any] | None:
        found: list[dict[str, Any]] = json.loads(desk("condor_q", "-hold", cluster, "-json") or "[]")
        return found[0] if found else None

    try:
        return wait_for(look, f"job {cluster} to be held at {desk.host}", PATIENT)
    except AssertionError as late:
        raise AssertionError(f"{late}: {desk.ad(cluster) or desk.ad(cluster, ended=True)}") from late


def assert_row(code: str, said: str, ad: Mapping[str, Any]) -> None:
    """Assert the row's codes, outcome and code prefix, and that the reason is helpful."""
    told = (ad["HoldReasonCode"], ad["HoldReasonSubCode"], ad["HoldReason"])
    assert told[:2] == (JOB_POLICY, {**HELD, **AGAIN}[code]), told
    # A job that may start only once is held either way. (The policy reads this attribute.)
    assert ad["ChirpVMOutcome"] == ("hold" if code in HELD else "again"), told
    assert told[2].startswith(f"{code}: "), told
    assert re.search(said, told[2]), told
    assert ad["NumJobStarts"] == 1, ad["NumJobStarts"]


@pytest.fixture(scope="module")
def images(grid: Grid) -> Grid:
    """The grid, with images that misbehave; one needs hypervisors that a node may lack."""
    blank_disk(grid)
    odd_images(grid, INITS)
    return grid


@pytest.fixture(scope="module")
def jobs(images: Grid, request: pytest.FixtureRequest) -> Iterator[dict[str, tuple[Desk, str]]]:
    """A job for each selected row; all are submitted before the tests check them."""
    asked = {
        item.callspec.params.get("code") for item in request.session.items if hasattr(item, "callspec")
    }
    found = {code: submit(images, code, way) for code, way in WAYS.items() if code in asked}
    yield found
    for desk, _ in found.values():
        remove(desk)


@pytest.mark.parametrize("code", WAYS)
def test_row(jobs: dict[str, tuple[Desk, str]], code: str) -> None:
    way = WAYS[code]
    way.deed(*jobs[code])
    assert_row(code, way.said, held(*jobs[code]))


@pytest.mark.flaky(reason="jobs of other tests may fill the other node just then", since="2026-11-23")
def test_what_did_not_fail_by_itself_goes_on_elsewhere(grid: Grid) -> None:
    """Checked at the origin, a hop of Condor-C away."""
    desk = Desk(grid, "submit", BY_CONDOR_C)
    cluster = desk.submit("echo begun; sleep 20; echo ended")
    try:
        there = at_site(desk, cluster)
        first = where(*there)[0]
        kill_machine(*there)
        ad = desk.ended(cluster)
        assert (ad["JobStatus"], ad["ExitCode"], ad["NumJobStarts"]) == (4, 0, 2), ad.get("HoldReason")
        assert ad["ChirpVMNode"].split(".")[0] != first
        assert desk.read("out") == "begun\nended\n"
    finally:
        remove(desk)


def test_what_is_tried_again_waits_for_longer_each_time_and_not_for_ever(images: Grid) -> None:
    """Checked in the job log that HTCondor writes for the submitter."""
    desk = Desk(images, "site")
    cluster = desk.submit("true", image="test-powers-off", __VMJobMaxStarts="3")
    try:
        ad = held(desk, cluster)
        assert (ad["HoldReasonSubCode"], ad["NumJobStarts"]) == (122, 3), ad["HoldReason"]
        begun = re.findall(r"(?m)^001 \([0-9.]+\) (\S+ \S+) ", desk.read("log"))
        first, second, third = map(datetime.fromisoformat, begun)
        assert (second - first).total_seconds() >= outcomes.retry_delay_seconds(1)
        assert (third - second).total_seconds() >= outcomes.retry_delay_seconds(2)
    finally:
        remove(desk)


# --------------------------------------------------------------------------- the job's record


@pytest.mark.parametrize(
    ("script", "told"),
    [
        ("exit 0", ("COMPLETED", "SUCCEEDED: the job exited with status 0")),
        ("exit 1", ("FAILED", "JOB_FAILED: the job exited with status 1")),
        ("kill -9 $$", ("FAILED", "JOB_KILLED: the job was killed by signal 9")),
    ],
)
def test_a_job_that_is_over_says_how_it_ended(grid: Grid, script: str, told: tuple[str, str]) -> None:
    """Checked at the origin, a hop of Condor-C away."""
    desk = Desk(grid, "submit", BY_CONDOR_C)
    cluster = desk.submit(script)
    try:
        assert desk.ended(cluster)["JobStatus"] == 4
        assert desk.shown(cluster) == told
    finally:
        remove(desk)


TOLD_TO_LEAVE = "EVICTED: HTCondor told the job to leave its node (signal 15)"


@pytest.mark.parametrize(
    ("deed", "status", "told"),
    [
        (("condor_rm",), 3, TOLD_TO_LEAVE),
        (("condor_hold",), 5, TOLD_TO_LEAVE),
        (("condor_vacate_job",), 1, TOLD_TO_LEAVE),
        # The program has no time to report more; its last report must not count as current.
        (("condor_vacate_job", "-fast"), 1, "EXEC_LOST: the program that runs the job was killed"),
    ],
)
def test_a_job_that_was_stopped_says_so(
    grid: Grid, deed: tuple[str, ...], status: int, told: str
) -> None:
    desk = Desk(grid, "site")
    cluster = desk.submit("exec sleep 1000")
    try:
        desk.running(cluster)
        desk("condor_qedit", cluster, "VMJobOwnRequirements", "false")  # no node accepts it again
        desk(*deed, cluster)

        def look() -> str | None:
            state, reason = desk.shown(cluster)
            ad = desk.ad(cluster) or desk.ad(cluster, ended=True)
            there = ad.get("JobStatus") == status and reason.startswith(told)
            return state if there else None

        assert wait_for(look, f"job {cluster} to say how it left", PATIENT) == "PREEMPTED"
        changes = desk.changes()
        assert set(changes) == {"ChirpVMState"}
        assert len(changes) <= 4, "STAGING, BOOTING, RUNNING, and COLLECTING where there was time"
    finally:
        remove(desk)


# --------------------------------------------------------------------------- faults of a node


@contextmanager
def configured(grid: Grid, node: str, setting: str, value: str) -> Iterator[None]:
    """Run the agent of a node with another value of a setting."""
    file = "/etc/vmjobs/config.toml"
    drop, add = f"sed -i '/^{setting} =/d' {file}", f"echo '{setting} = {value}' >>{file}"
    try:
        with without_agent(grid, node):
            grid.on(node, "sh", "-ec", f"cp -p {file} {file}.kept; {drop}; {add}")
        yield
    finally:
        with without_agent(grid, node):
            grid.on(node, "mv", f"{file}.kept", file)


@contextmanager
def trusting_others(grid: Grid, node: str) -> Iterator[None]:
    """Have a node accept only images signed with a key that signed none."""
    keys = "/etc/vmjobs/trusted"
    key = base64.b64encode(Ed25519PrivateKey.generate().public_key().public_bytes_raw()).decode()
    grid.on(node, "sh", "-c", f"mkdir -p {keys} && echo {key} >{keys}/somebody.pub")
    try:
        with configured(grid, node, "image_trust_dir", f'"{keys}"'):
            yield
    finally:
        grid.on(node, "rm", "-r", keys)


@contextmanager
def with_a_dead_token(grid: Grid, node: str) -> Iterator[None]:
    """Give a node a token that the repository rejects."""
    file = "/etc/vmjobs/dead-token"
    grid.on(node, "sh", "-c", f"echo dead >{file} && chmod 644 {file}")
    try:
        with configured(grid, node, "agent_token_file", f'"{file}"'):
            yield
    finally:
        grid.on(node, "rm", file)


@contextmanager
def with_a_strange_starter(grid: Grid, node: str) -> Iterator[None]:
    """Run a node's jobs with a starter that the agent does not accept as HTCondor's."""
    starter, file = "/usr/sbin/strange_starter", "/etc/condor/config.d/99-strange.conf"
    try:
        grid.on(node, "cp", "-p", "/usr/sbin/condor_starter", starter)
        grid.on(node, "sh", "-c", f"echo STARTER = {starter} >{file} && condor_reconfig")
        yield
    finally:
        grid.on(node, "sh", "-c", f"rm -f {file} {starter}; condor_reconfig")


@contextmanager
def without_its_program(grid: Grid, node: str) -> Iterator[None]:
    """Remove the program that runs transparent jobs on a node; its agent keeps running."""
    program = "/usr/libexec/vmjobs/exec-unchanged"
    grid.on(node, "mv", program, f"{program}.away")
    try:
        yield
    finally:
        grid.on(node, "mv", f"{program}.away", program)


def fill_disk(desk: Desk, cluster: str) -> None:
    """Fill the disk that takes the job's output files."""
    desk.running(cluster)
    fill(desk.grid, NODES[0], f"{AGENT}/handed")


@dataclass(frozen=True)
class Fault:
    """A fault of a node or of the service, and the job that it hits."""

    context: Callable[[Grid, str], AbstractContextManager[object]]
    way: Way


FAULTS: list[tuple[str, Fault]] = [
    ("IMAGE_REJECTED", Fault(trusting_others, Way("only images signed by .*has no signature"))),
    ("FORBIDDEN", Fault(with_a_strange_starter, Way("only an HTCondor job"))),
    ("EXEC_LOST", Fault(without_its_program, Way("did not begin on its node"))),
    (
        "IMAGE_UNAVAILABLE",
        Fault(lambda grid, _node: without_objects(grid), Way("segment|content", image="test-fresh")),
    ),
    ("NODE_FAILED", Fault(partial(small_disk, name="runs", kib=2048), Way("No space left", large=4))),
    (
        "NODE_FAILED",
        Fault(
            partial(small_disk, name="handed", kib=1100 * 1024),
            Way(
                "could not be delivered.*No space left",
                "sleep 15; head -c 1000000 /dev/urandom >made",
                deed=fill_disk,
            ),
        ),
    ),
    (
        "STORAGE_FULL",
        Fault(
            partial(small_disk, name="handed", kib=100 * 1024),
            # The job's request, or more by one of the shares into which a startd divides its disk.
            Way(r"disk needs 102[45] MiB, and this node has 100 MiB free"),
        ),
    ),
]


@pytest.fixture(scope="module")
def fresh(grid: Grid) -> None:
    """Publish an image that no node has cached."""
    disk = ROOT / "build" / "work" / "test-fresh"
    disk.parent.mkdir(parents=True, exist_ok=True)
    disk.write_bytes(os.urandom(1024 * 1024))
    manifest = ImageManifest(boot=BootMethod.BIOS, root=grid.images.folder.add_file(disk))
    grid.images.tag("test-fresh", "latest", grid.images.put_manifest(manifest))
    publish(grid)


@pytest.fixture(scope="module")
def left_alone(grid: Grid) -> Iterator[tuple[Desk, str]]:
    """A job whose node stops its agent once it runs; detection takes two minutes."""
    job = submit(grid, "UNAVAILABLE", Way(""), NODES[1])
    try:
        job[0].running(job[1])
        with without_agent(grid, NODES[1]):
            yield job
    finally:
        remove(job[0])


@pytest.mark.soak_for("FORBIDDEN", "NODE_FAILED1")
@pytest.mark.disruptive
@pytest.mark.parametrize(("code", "fault"), [pytest.param(*row, id=row[0]) for row in FAULTS])
def test_row_of_a_fault(
    grid: Grid, fresh: None, left_alone: tuple[Desk, str], code: str, fault: Fault
) -> None:
    with fault.context(grid, NODES[0]):
        job = submit(grid, code, fault.way, NODES[0])
        try:
            fault.way.deed(*job)
            assert_row(code, fault.way.said, held(*job))
        finally:
            remove(job[0])


@pytest.mark.disruptive
def test_a_node_whose_token_is_refused_takes_no_jobs(grid: Grid) -> None:
    """So only jobs that were already on their way can become UNAUTHENTICATED."""
    node = f'Machine == "{NODES[0]}.grid" && HasVMJobs =!= true'
    asked = ("condor_status", "-constraint", node, "-af", "VMJobsFault")
    with with_a_dead_token(grid, NODES[0]):
        wait_for(lambda: "token" in grid.on("site", *asked) or None, "the node to say why", 120)


@pytest.mark.disruptive
def test_row_of_an_agent_that_is_away(left_alone: tuple[Desk, str]) -> None:
    assert_row("UNAVAILABLE", "no agent at", held(*left_alone))


def test_all_rows_are_forced() -> None:
    """All rows are forced here or in ``test_transparent_checkpoint.py``, except three.

    UNAUTHENTICATED takes a race: a node whose token is refused gets no jobs. A job may run for 30 days
    (TIMED_OUT), and nothing outside of the agent makes the agent itself fail (INTERNAL).
    """
    apart = {"UNAVAILABLE", "NOT_RESUMED", "UNAUTHENTICATED", "TIMED_OUT", "INTERNAL"}
    assert {*WAYS, *dict(FAULTS), *apart} == {*OUTCOMES}
    assert sorted([*HELD, *AGAIN]) == sorted(OUTCOMES)
