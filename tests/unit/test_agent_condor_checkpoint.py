"""Start of a transparent job whose VM is to be saved, and what the service learns of it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from tests.kit.reports import report
from vmjobs.agent.condor_job import checkpoints
from vmjobs.agent.condor_job.starter import StarterProcess
from vmjobs.agent.protocol import SubmitMessage
from vmjobs.errors import InvalidRequest, NotFound, Unavailable
from vmjobs.model import (
    AttemptClaim,
    Checkpoint,
    HypervisorKind,
    JobSpec,
    JobState,
    NetworkMode,
    ReasonCode,
    Report,
    VmSpec,
)

IMAGE, OTHER = "sha256:" + "a" * 64, "sha256:" + "b" * 64
SIZE = {"cpus": 2, "memory": 512, "disk": 2048}
WHO = {"job": "7.0", "user": "ada", "group": "ada"}
MESSAGE = SubmitMessage(image="hep:1", directory="/scratch", checkpoint=True, **WHO, **SIZE)
MAKING = VmSpec(named="hep:1", image=IMAGE, door="d" * 32, network=NetworkMode.REPOSITORY, **SIZE)


def checkpoint(making: VmSpec | None) -> Checkpoint:
    return Checkpoint(
        machine="vmjobs-0123abcd-" + "e" * 32,
        hypervisor=HypervisorKind.QEMU,
        platform="qemu 10.0.13, q35, tcg",
        sentinel="5" * 32,
        guest="6" * 64,
        ran=12.5,
        files=(),
        making=making,
    )


@dataclass
class Place:
    """The checkpoint store of one job, and the ``CheckpointStores`` that open it."""

    found: Checkpoint | None = None
    cannot: str = ""
    gone: str = ""
    away: bool = False
    old: bool = False
    calls: list[str] = field(default_factory=list)

    def open(self, slot: StarterProcess) -> Place:
        self.calls.append(f"open {slot.pid}")
        return self

    def save_obstacle(self, image: str, network: NetworkMode) -> str:
        self.calls.append(f"unfit {image} {network}")
        if image == self.gone:
            raise NotFound(f"there is no image {image}")
        return self.cannot

    def begin(self, attempt: str) -> Checkpoint | None:
        self.calls.append(f"begin {attempt}")
        if self.old:
            raise NotFound("there is nothing at this URL")
        return self.found

    def report_not_resumed(self) -> None:
        self.calls.append("not resumed")
        if self.away:
            raise Unavailable("api", "it is away")

    def close(self) -> None:
        self.calls.append("close")

    def delete_checkpoints(self) -> None:
        self.calls.append("over")
        self.found = None
        if self.away:
            raise Unavailable("api", "it is away")


def begun(place: Place, message: SubmitMessage = MESSAGE) -> checkpoints.StartPoint:
    return checkpoints.find_start_point(
        message, "f" * 32, lambda _ref: OTHER, place, StarterProcess(42, 1)
    )


def test_one_that_was_not_saved_begins_at_the_beginning() -> None:
    place = Place()
    found = begun(place)
    assert (found.image, found.found, found.relay_token, found.remark) == (OTHER, None, "", "")
    assert place.calls == ["open 42", "begin " + "f" * 32, f"unfit {OTHER} repository"]


def test_one_that_was_goes_on_with_what_its_vm_was_made_of() -> None:
    """Its image's name may mean another image now; a larger slot gives the VM no more."""
    place = Place(checkpoint(MAKING))
    larger = MESSAGE.model_copy(update={"memory": 1024, "cpus": 4, "disk": 4096})
    found = begun(place, larger)
    assert (found.image, found.found, found.relay_token) == (IMAGE, place.found, "d" * 32)
    assert found.message == MESSAGE
    assert found.vm_spec("d" * 32) == MAKING
    # HTCondor adds to the requested disk, by the size of the node's disk.
    less = begun(place, MESSAGE.model_copy(update={"disk": 2046}))
    assert (less.found, less.message.disk) == (place.found, 2048)


def test_one_that_has_ended_meanwhile_begins_anew() -> None:
    """A `max_retries` retry is a new try; the checkpoint of the try before is removed."""
    place = Place(checkpoint(MAKING))
    found = begun(place, MESSAGE.model_copy(update={"anew": True}))
    assert (found.image, found.found) == (OTHER, None)
    assert place.calls[:4] == ["open 42", "begin " + "f" * 32, "over", "begin " + "f" * 32]


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({}, "the image of the saved VM was removed"),
        ({"image": "hep:2"}, "has another image or network"),
        ({"network": NetworkMode.NONE}, "has another image or network"),
        ({"memory": 256}, "has 512 MiB of memory, and the slot has 256"),
        ({"cpus": 1}, "has 2 processors, and the slot has 1"),
    ],
)
def test_one_whose_vm_does_not_fit_begins_anew_and_says_so(change: dict[str, object], why: str) -> None:
    place = Place(checkpoint(MAKING), gone="" if change else IMAGE)
    found = begun(place, MESSAGE.model_copy(update=change))
    assert (found.image, found.found) == (OTHER, None)
    assert found.remark.startswith("the job starts again: ")
    assert why in found.remark


def test_one_whose_image_cannot_be_saved_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="it cannot"):
        begun(Place(cannot="it cannot"))


def test_a_service_of_another_release_is_no_word_about_the_image() -> None:
    """Otherwise the schedd would hold the job for a missing image."""
    place = Place(old=True)
    with pytest.raises(Unavailable, match="does not store checkpoints"):
        begun(place)
    assert place.calls[-1] == "close"


def test_what_was_saved_is_forgotten_even_where_the_service_is_away() -> None:
    place = Place(away=True)
    found = begun(place)
    found.remove_checkpoint()
    found.close()
    assert place.calls[-2:] == ["over", "close"]
    plain = replace(found, store=None)
    plain.remove_checkpoint()
    plain.close()
    assert place.calls[-2:] == ["over", "close"]


def test_the_store_hears_that_a_vm_did_not_go_on(tmp_path: Path) -> None:
    """If the service does not answer, the job's end does not wait for it."""
    for away in (False, True):
        place, told = Place(checkpoint(MAKING), away=away), list[Report]()
        job = checkpoints.CheckpointedJob(
            job_id="7.0",
            spec=JobSpec(image="hep:1", script="x", checkpoint=True),
            image_digest=IMAGE,
            files={},
            output_directory=tmp_path,
            on_report=told.append,
            sinks={},
            store=place,
            vm_spec=MAKING,
            found=place.found,
        )
        claim = AttemptClaim(attempt="f" * 32, node="n1")
        assert job.claim(claim).checkpoint == place.found
        for code in (ReasonCode.EVICTED, ReasonCode.NOT_RESUMED):
            job.report(report(JobState.PREEMPTED, code))
        assert place.calls == ["not resumed"]
        assert len(told) == 2
