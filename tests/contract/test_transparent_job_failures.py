"""Transparent jobs that a node cannot run, or whose output it cannot keep."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest

from condor.events import outcomes
from tests.kit.agent_node import AgentNode
from tests.kit.chirp_service import ChirpService
from tests.kit.full_disk import small_disk
from vmjobs.agent.image_source import ImageSource
from vmjobs.agent.node_health import NodeHealth
from vmjobs.errors import Unauthenticated
from vmjobs.hypervisor.base import BootImage, Hypervisor, ProbeResult, VmNeeds
from vmjobs.hypervisor.select import choose
from vmjobs.model import CHECKPOINTABLE_KINDS, MIB, HypervisorKind

pytest_plugins = ["tests.kit.agent_node"]


@pytest.mark.parametrize(
    "ad",
    [
        'VMJobImage = "no-such-image"',
        'VMJobImage = "../etc"',
        "VMJobImage = strcat(1, 2)",
        'VMJobImage = "generic"\nVMJobHypervisor = "abacus"',
        'VMJobImage = "generic"\nVMJobBootTimeout = -5',
    ],
)
def test_what_cannot_be_is_no_end_of_the_job(node: AgentNode, ad: str) -> None:
    began = time.monotonic()
    job = node.run("/bin/true", ad=ad)
    assert job.status == -signal.SIGKILL
    assert time.monotonic() - began < 60
    assert job.out == job.err == ""


def test_more_than_the_disk_holds(node: AgentNode) -> None:
    job = node.run("/bin/sh", "-c", "fallocate -l 1900M big && echo there")
    assert job.out == "there\n"
    assert job.status == -signal.SIGKILL
    assert not (job.place / "big").exists()


def test_more_memory_than_the_node_has(node: AgentNode) -> None:
    def large(place: Path) -> None:
        (place / ".machine.ad").write_text("Cpus = 1\nMemory = 4096\nDisk = 1\n")

    job = node.run("/bin/true", prepare=large)
    assert job.status == -signal.SIGKILL


def test_root_has_no_jobs(node: AgentNode) -> None:
    import socket

    from vmjobs.agent import protocol

    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        client.connect(str(node.socket))
        message = protocol.SubmitMessage(
            job="1.0",
            image="generic",
            directory="/x",
            user="root",
            group="root",
            cpus=1,
            memory=64,
            disk=64,
        )
        protocol.send(client, message)
        (answer,) = protocol.receive(client)
    assert isinstance(answer, protocol.ErrorMessage)
    assert "root" in answer.message


def test_a_node_whose_disk_is_full_says_so(node: AgentNode, chirp: ChirpService) -> None:
    """There is no space to record the outcome, either."""
    with small_disk(node.folder / "runs", 2):
        files = {"large": bytes(4 * MIB), ".chirp.config": chirp.config}
        job = node.run("/bin/true", files=files)
    assert job.status == -signal.SIGKILL
    said = chirp.attributes["ChirpVMReason"]
    assert said.startswith('"NODE_FAILED: the node failed: ')
    assert "No space left" in said
    assert "Errno" not in said


def test_a_job_for_which_its_vm_has_not_the_memory(node: AgentNode, chirp: ChirpService) -> None:
    """It is killed as on any host, and its ad gives the probable cause."""
    job = node.run("/bin/sh", "-c", "exec tail /dev/zero", files={".chirp.config": chirp.config})
    assert job.status == -signal.SIGKILL
    assert chirp.attributes["ChirpVMOutcome"] == '"own"'
    state, reason = chirp.shown()
    assert state == "FAILED"
    assert reason.startswith("OUT_OF_MEMORY: the job was killed by signal 9; ")
    assert reason.endswith(outcomes.OUT_OF_MEMORY_ADVICE)


def test_no_room_for_what_the_job_left(node: AgentNode, chirp: ChirpService) -> None:
    full = "until condor_chirp get_job_attr_delayed ChirpFull >/dev/null 2>&1; do sleep 0.2; done"
    script = f"echo up; {full}; head -c 1000000 /dev/urandom >made"
    with small_disk(node.folder / "handed", 1026):
        job = node.resident(script, files={".chirp.config": chirp.config})
        with (node.folder / "handed" / "filler").open("wb") as filler:
            room = os.statvfs(node.folder / "handed")
            os.posix_fallocate(filler.fileno(), 0, room.f_bavail * room.f_frsize)
        chirp.attributes["ChirpFull"] = "1"
        assert job.process.wait(60) == -signal.SIGKILL
    said = chirp.attributes["ChirpVMReason"]
    assert said.startswith('"NODE_FAILED: output ')
    assert "No space left" in said
    assert "Errno" not in said


def test_a_node_that_the_repository_does_not_know_rests(node: AgentNode) -> None:
    """Otherwise it would fail each job at once, and then get the next one."""

    def refuse(_name: str) -> str:
        raise Unauthenticated("the token is not valid")

    runner = node.agent.runner
    assert runner.condor_jobs is not None
    condor_jobs, health = runner.condor_jobs, runner.health
    runner.condor_jobs, runner.health = replace(condor_jobs, resolve=refuse), NodeHealth()
    try:
        for _ in range(3):
            assert not node.agent.node().fault
            assert node.run("/bin/true").status == -signal.SIGKILL
        assert "3 jobs in a row failed" in node.agent.node().fault
    finally:
        runner.condor_jobs, runner.health = condor_jobs, health


class Changed:
    """The node's images, with changed fields of ``BootImage``."""

    def __init__(self, images: ImageSource, **fields: Any) -> None:
        self._images, self._fields = images, fields

    def __getattr__(self, name: str) -> Any:
        return getattr(self._images, name)

    @contextmanager
    def lease(self, *arguments: Any) -> Iterator[BootImage]:
        with self._images.lease(*arguments) as image:
            yield replace(image, **self._fields)


def only_uml(driver: Hypervisor, needs: VmNeeds) -> Hypervisor:
    """Choose as a node that has only UML."""
    works = ProbeResult(HypervisorKind.UML, works=True, detail="", seconds=0.0)
    choose((HypervisorKind.UML,), needs, [works])
    return driver


@pytest.mark.parametrize(
    ("fields", "wish", "told"),
    [
        (
            {"kinds": CHECKPOINTABLE_KINDS, "architecture": ""},
            "",
            {"Kinds": ",".join(CHECKPOINTABLE_KINDS), "Arch": ""},
        ),
        ({"architecture": "riscv64"}, "", {"Kinds": ",".join(HypervisorKind), "Arch": "riscv64"}),
        # No hypervisor both boots the image and is the one that the job demands.
        ({"kinds": CHECKPOINTABLE_KINDS}, 'VMJobHypervisor = "uml"', {}),
    ],
)
def test_what_an_image_wants_of_a_node_is_told_where_this_one_has_it_not(
    node: AgentNode, chirp: ChirpService, fields: dict[str, Any], wish: str, told: dict[str, str]
) -> None:
    runner = node.agent.runner
    services = runner.services
    changed = cast("ImageSource", Changed(services.images, **fields))
    runner.services = replace(services, images=changed, choose=partial(only_uml, node.driver))
    try:
        ad = f'VMJobImage = "generic"\n{wish}'
        job = node.run("/bin/true", ad=ad, files={".chirp.config": chirp.config})
    finally:
        runner.services = services
    assert job.status == -signal.SIGKILL
    assert chirp.attributes["ChirpVMReason"].startswith('"NO_HYPERVISOR: ')
    found = {n: v for n, v in chirp.attributes.items() if n.startswith("ChirpVMImage")}
    found.pop("ChirpVMImageBytes", None)
    told |= {"Named": "generic"} if told else {}
    assert found == {f"ChirpVMImage{name}": f'"{value}"' for name, value in told.items()}
