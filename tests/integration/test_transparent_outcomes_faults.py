"""Rows of the table of outcomes that take a fault of a node or of the service, forced."""

from __future__ import annotations

import base64
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from condor.events.outcomes import OUTCOMES
from images.manifest import ImageManifest
from tests.kit import ROOT
from tests.kit.faults import AGENT, fill, small_disk, without_agent, without_objects
from tests.kit.grid import NODES, Grid, publish
from tests.kit.outcome_rows import AGAIN, HELD, WAYS, Way, assert_row, held, submit
from tests.kit.submit_host import Desk
from vmjobs.model import BootMethod


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
    grid.on(node, "sh", "-c", f"mkdir -p {keys} && echo {key} >{keys}/another.pub")
    try:
        with configured(grid, node, "image_trust_dir", f'"{keys}"'):
            yield
    finally:
        grid.on(node, "rm", "-r", keys)


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
                "sleep 40; head -c 1000000 /dev/urandom >made",
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
    desk, cluster = submit(grid, "UNAVAILABLE", Way(""), NODES[1])
    with desk:
        desk.running(cluster)
        with without_agent(grid, NODES[1]):
            yield desk, cluster


@pytest.mark.soak_for("FORBIDDEN", "NODE_FAILED0", "NODE_FAILED1")
@pytest.mark.disruptive
@pytest.mark.parametrize(("code", "fault"), [pytest.param(*row, id=row[0]) for row in FAULTS])
def test_row_of_a_fault(
    grid: Grid, fresh: None, left_alone: tuple[Desk, str], code: str, fault: Fault
) -> None:
    with fault.context(grid, NODES[0]):
        desk, cluster = submit(grid, code, fault.way, NODES[0])
        with desk:
            fault.way.deed(desk, cluster)
            assert_row(code, fault.way.said, held(desk, cluster))


@pytest.mark.disruptive
def test_row_of_an_agent_that_is_away(left_alone: tuple[Desk, str]) -> None:
    assert_row("UNAVAILABLE", "no agent at", held(*left_alone))


def test_all_rows_are_forced() -> None:
    """All rows are forced: here, by WAYS, or in ``test_transparent_checkpoint.py``, except three.

    UNAUTHENTICATED takes a race: a node whose token is refused gets no jobs. A job may run for 30 days
    (TIMED_OUT), and nothing outside of the agent makes the agent itself fail (INTERNAL).
    """
    apart = {"UNAVAILABLE", "NOT_RESUMED", "UNAUTHENTICATED", "TIMED_OUT", "INTERNAL"}
    assert {*WAYS, *dict(FAULTS), *apart} == {*OUTCOMES}
    assert sorted([*HELD, *AGAIN]) == sorted(OUTCOMES)
