"""Foreign images end to end: pushed in other formats, run by HTCondor, outputs fetched."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import requests

from tests.kit.cli import vmjobs
from tests.kit.foreign_images import (
    FIT,
    LIFETIME,
    as_format,
    disk,
    kernel_options,
    push,
    submit,
    tiny,
    wait,
)
from tests.kit.grid import NODES, Grid, healthy, run, wait_for
from tests.kit.grid_clusters import Submitter
from vmjobs.model import ExitChannel, HypervisorKind, Job, JobState, ReasonCode

UML = ("--hypervisor", "uml")
TINY = ("--boot", "kernel", "--append", "init=/init quiet")
MIB = 1024 * 1024


@dataclass(frozen=True)
class Case:
    """A job in an image, and how it must end."""

    image: str
    options: tuple[str, ...]
    code: ReasonCode
    channel: ExitChannel | None = None


CASES = {
    "bios": Case(
        "foreign-bios",
        ("--exit", "poweroff", "--network", "none"),
        ReasonCode.SUCCEEDED,
        ExitChannel.POWEROFF,
    ),
    "release": Case(
        "foreign-trixie", ("--exit", "poweroff", *UML), ReasonCode.SUCCEEDED, ExitChannel.POWEROFF
    ),
    "line": Case(
        "foreign-hangs",
        ("--exit", "console:^odd: hang", *UML),
        ReasonCode.SUCCEEDED,
        ExitChannel.CONSOLE,
    ),
    "hangs": Case(
        "foreign-hangs", ("--exit", "poweroff", "--run-seconds", "10", *UML), ReasonCode.TIMED_OUT
    ),
    "panics": Case("foreign-panics", ("--exit", "poweroff", *UML), ReasonCode.KERNEL_PANIC),
    "resets": Case("foreign-resets", ("--exit", "poweroff", *UML), ReasonCode.NO_EXIT_REPORT),
    "report": Case("foreign-trixie", ("--exit", "report", *UML), ReasonCode.BOOT_FAILED),
}  # fmt: skip


@pytest.fixture(scope="module")
def pushed(grid: Grid, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Images pushed to the user's own namespace, from four disk formats."""
    folder = tmp_path_factory.mktemp("disks")
    trixie = disk("trixie")
    vmdk = as_format(trixie, "vmdk", folder)
    return {
        "bios": push(as_format(disk("bios"), "qcow2", folder), "foreign-bios"),
        "trixie": push(vmdk, "foreign-trixie", *kernel_options("odd-poweroff")),
        "hangs": push(vmdk, "foreign-hangs", *kernel_options("odd-hang")),
        "panics": push(trixie, "foreign-panics", *kernel_options("odd-panic")),
        "resets": push(
            as_format(trixie, "vdi", folder), "foreign-resets", *kernel_options("odd-reset")
        ),
    }


@pytest.fixture(scope="module")
def ended(pushed: dict[str, Any]) -> dict[str, Job]:
    jobs = {
        name: submit(case.image, "--output", "*.csv", *case.options)[0] for name, case in CASES.items()
    }
    found = wait(*jobs.values())
    return {name: found[job] for name, job in jobs.items()}


def test_the_same_disk_in_any_format_is_stored_once(pushed: dict[str, Any]) -> None:
    roots = {name: answer["image"]["manifest"]["root"]["digest"] for name, answer in pushed.items()}
    assert len({roots[name] for name in ("trixie", "hangs", "panics", "resets")}) == 1
    assert len({answer["image"]["digest"] for answer in pushed.values()}) == 5
    for name in ("hangs", "panics", "resets"):
        assert pushed[name]["sent"] < MIB, name
    assert pushed["bios"]["image"]["manifest"]["boot"] == "bios"
    assert pushed["trixie"]["image"]["origin"]["format"] == "vmdk"


@pytest.mark.parametrize("name", CASES)
def test_outcome(ended: dict[str, Job], name: str) -> None:
    job, case = ended[name], CASES[name]
    assert job.reason.code is case.code, job.reason.message
    succeeded = case.code is ReasonCode.SUCCEEDED
    assert job.state is (JobState.COMPLETED if succeeded else JobState.FAILED)
    assert (job.exit.channel if job.exit else None) is case.channel


@pytest.mark.parametrize("name", ["bios", "release", "line"])
def test_outputs_and_console_are_fetched(ended: dict[str, Job], tmp_path: Path, name: str) -> None:
    job = ended[name]
    vmjobs("job", "outputs", job.id, "--fetch", tmp_path, code=0)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["decays.csv", "fit.csv"]
    assert (tmp_path / "fit.csv").read_text() == FIT
    assert LIFETIME in vmjobs("job", "console", job.id).out


def test_a_disk_that_boots_by_itself_needs_a_vm(ended: dict[str, Job]) -> None:
    """UML, which the nodes otherwise prefer, cannot boot it."""
    assert ended["bios"].hypervisor in {HypervisorKind.KVM, HypervisorKind.QEMU}


def test_nothing_is_left_on_the_nodes(grid: Grid, ended: dict[str, Job]) -> None:
    grid.assert_clean(*ended.values())


# --------------------------------------------------------------------------- ownership of images


def test_an_image_that_a_job_needs_is_not_removed(grid: Grid, tmp_path: Path) -> None:
    ours = push(tiny(tmp_path, 1, "sleep 1000"), "foreign-needed", *TINY)
    (job,) = submit("foreign-needed", "--exit", "poweroff", *UML)
    refused = vmjobs("image", "rm", "foreign-needed")
    assert refused.code != 0
    assert job in refused.err
    assert vmjobs("image", "show", "--json", "foreign-needed").json["digest"] == ours["image"]["digest"]
    vmjobs("job", "cancel", job)
    wait(job)
    assert vmjobs("image", "rm", "foreign-needed").code == 0
    assert vmjobs("image", "show", ours["image"]["digest"]).code == 66


def test_somebody_elses_private_image_does_not_exist(
    grid: Grid, pushed: dict[str, Any], tmp_path: Path
) -> None:
    token = tmp_path / "token"
    token.write_text(grid.on("api", "vmjobs", "token", "create", "user", "mallory"))
    digest = pushed["trixie"]["image"]["digest"]
    tag = pushed["trixie"]["image"]["tags"][0]
    name = f"{tag['namespace']}/foreign-trixie"
    for ref in (digest, name):
        shown = vmjobs("image", "show", ref, token_file=token)
        assert (shown.code, "there is no image" in shown.err) == (66, True), shown.err
        job = vmjobs("job", "submit", "--image", ref, "--exit", "poweroff", token_file=token)
        assert (job.code, "there is no image" in job.err) == (64, True), job.err
    bearer = {"Authorization": f"Bearer {token.read_text().strip()}"}
    for path in (digest, name, f"{digest}/manifest"):
        assert (
            requests.get(f"{grid.url}/v1/images/{path}", headers=bearer, timeout=30).status_code == 404
        )
    listed = vmjobs("image", "list", "--json", token_file=token).json
    assert all(image["name"] != "foreign-trixie" for image in listed)


# --------------------------------------------------------------------------- transfer to the nodes


def received(grid: Grid, node: str) -> int:
    """Bytes that a node has received over its network so far."""
    return int(grid.on(node, "cat", "/sys/class/net/eth0/statistics/rx_bytes"))


@pytest.mark.disruptive  # other jobs on the nodes would add to the received bytes
def test_a_node_fetches_an_image_once_for_all_of_its_jobs(grid: Grid, tmp_path: Path) -> None:
    push(tiny(tmp_path, 64), "foreign-once", *TINY)
    before = {node: received(grid, node) for node in NODES}
    jobs = submit("foreign-once", "--exit", "poweroff", "--memory", "128", *UML, count=4)
    ended = wait(*jobs).values()
    assert {job.state for job in ended} == {JobState.COMPLETED}
    came = {node: received(grid, node) - before[node] for node in NODES}
    ran = [str(job.node).partition(".")[0] for job in ended]
    assert max(ran.count(node) for node in NODES) >= 2
    assert vmjobs("image", "rm", "foreign-once").code == 0
    for node in set(ran):
        assert came[node] < 2 * 64 * MIB, f"{ran.count(node)} jobs on {node}"
        assert came[node] > 64 * MIB


def test_an_image_is_there_before_the_job_where_it_was_asked_for(grid: Grid, tmp_path: Path) -> None:
    answer = push(tiny(tmp_path, 16), "foreign-early", *TINY)
    digest = answer["image"]["digest"]
    names = [f"{node}.grid" for node in NODES]
    state = vmjobs(
        "image", "prefetch", "--json", "foreign-early", "--wait", "--timeout", "150",
        *(word for name in names for word in ("--node", name)),
    ).json  # fmt: skip
    assert sorted(state["cached"]) == names
    nodes = vmjobs("node", "list", "--json").json
    assert all(digest in node["images"] for node in nodes)
    (job,) = submit("foreign-early", "--exit", "poweroff", *UML)
    assert wait(job)[job].state is JobState.COMPLETED
    assert vmjobs("image", "rm", "foreign-early").code == 0


@pytest.mark.disruptive  # jobs of other tests may fill the node that has the image
def test_a_job_goes_where_its_image_is(grid: Grid, tmp_path: Path) -> None:
    """HTCondor by itself fills the fullest node first."""
    has, fuller = (f"{node}.grid" for node in NODES)
    digest = push(tiny(tmp_path, 16), "foreign-there", *TINY)["image"]["digest"]
    vmjobs("image", "prefetch", "foreign-there", "--wait", "--timeout", "150", "--node", has)
    user = Submitter(grid)
    filler = user.submit_where(f'TARGET.Machine == "{fuller}"', "sleep 300", memory=1024)
    try:
        told(grid, f'stringListMember("{digest}", VMJobsImageDigests)')
        told(grid, f'Machine == "{fuller}" && PartitionableSlot && Memory <= TotalSlotMemory - 1024')
        (job,) = submit("foreign-there", "--exit", "poweroff", *UML)
        ended = wait(job)[job]
        assert (ended.state, ended.node) == (JobState.COMPLETED, has)
    finally:
        user("condor_rm", filler)
    assert vmjobs("image", "rm", "foreign-there").code == 0


def told(grid: Grid, what: str) -> None:
    """Wait until an ad in the pool matches a constraint."""
    pool = ("condor_status", "-constraint", what, "-af", "Name")
    wait_for(lambda: grid.on("site", *pool).strip() or None, f"the pool to know: {what}", 120)


@contextlib.contextmanager
def killed(grid: Grid, service: str) -> Iterator[None]:
    """Kill a service's container; start it afterwards and wait until it is healthy."""
    run("docker", "kill", grid.container(service))
    try:
        yield
    finally:
        run("docker", "start", grid.container(service))
        healthy(grid.container(service))


def slow(grid: Grid, service: str, rate: str) -> None:
    """Limit a service's send rate (tc-tbf(8)) until its container restarts."""
    pid = run("docker", "inspect", "-f", "{{.State.Pid}}", grid.container(service)).strip()
    limit = ("root", "tbf", "rate", rate, "burst", "256kb", "latency", "400ms")
    run("nsenter", "-t", pid, "-n", "tc", "qdisc", "add", "dev", "eth0", *limit)


@pytest.mark.disruptive
@pytest.mark.soak  # tests/contract/test_node_cache.py tests the node's part
def test_a_fetch_that_was_cut_off_goes_on(grid: Grid, tmp_path: Path) -> None:
    """The repository dies while a node fetches an image from it."""
    push(tiny(tmp_path, 256), "foreign-cut", *TINY)
    slow(grid, "api", "240mbit")  # otherwise the whole image arrives before the test sees the transfer
    before = {node: received(grid, node) for node in NODES}
    (job,) = submit("foreign-cut", "--exit", "poweroff", *UML)

    def under_way() -> str | None:
        came = {node: received(grid, node) - before[node] for node in NODES}
        return next((node for node, size in came.items() if size > 24 * MIB), None)

    node = wait_for(under_way, "the image to be on its way", 120)
    with killed(grid, "api"):
        partial = received(grid, node) - before[node]
    ended = wait(job)[job]
    assert ended.state is JobState.COMPLETED, ended.reason.message
    assert vmjobs("image", "rm", "foreign-cut").code == 0
    whole = received(grid, node) - before[node]
    assert partial < 250 * MIB, "the fetch was over before the repository went"
    assert whole < (256 + 48) * MIB, "what had come was fetched again"
