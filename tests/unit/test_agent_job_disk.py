"""Contents of a guest's job disk."""

from __future__ import annotations

import json
import subprocess
import tarfile
from pathlib import Path
from typing import BinaryIO

import pytest

from vmjobs.agent.vm.job_disk import SIZE_UNIT, JobDescription, create_blank_disk, write_job_disk
from vmjobs.model import InputFile, JobSpec, JobTicket

CARD = InputFile(name="card", digest="sha256:" + "1" * 64, size=5)
NASTY = 'it\'s $HOME `id` "x"\n\\end'


def ticket(**fields: object) -> JobTicket:
    spec = JobSpec.model_validate({"image": "generic", "script": "#!/bin/sh\necho hi\n", **fields})
    return JobTicket(
        job_id="j1", attempt="a" * 32, index=2, count=5, image_digest="sha256:" + "0" * 64, spec=spec
    )


def job_description(of: JobTicket) -> JobDescription:
    return JobDescription(ticket=of, endpoint="", token="secret", sentinel="5e")


def test_the_disk_is_a_plain_tar_from_its_first_byte(tmp_path: Path) -> None:
    inputs = [CARD.model_copy(update={"name": name}) for name in ("sub/card", "other")]

    def fetch(_: InputFile, disk: BinaryIO) -> None:
        disk.write(b"12345")

    write_job_disk(tmp_path / "disk", job_description(ticket(inputs=inputs)), fetch)
    assert (tmp_path / "disk").stat().st_size % SIZE_UNIT == 0
    with tarfile.open(tmp_path / "disk") as tar:
        names = tar.getnames()
        assert json.load(tar.extractfile("job.json"))["index"] == 2  # type: ignore[arg-type]
        assert tar.extractfile("inputs/sub/card").read() == b"12345"  # type: ignore[union-attr]
        assert tar.getmember("script").mode == 0o755
    told = ["job.json", "job.env", "environment", "outputs"]
    assert names == [*told, "script", "inputs/sub/card", "inputs/other"]


def test_the_time_on_the_disk_is_that_of_a_complete_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Inputs may take an hour, and the guest sets its clock by this time."""
    clock = [1_700_000_000.0]
    monkeypatch.setattr("time.time", lambda: clock[0])

    def fetch(_: InputFile, disk: BinaryIO) -> None:
        disk.write(b"12345")
        clock[0] += 3600

    write_job_disk(tmp_path / "disk", job_description(ticket(inputs=[CARD])), fetch)
    with tarfile.open(tmp_path / "disk") as tar:
        assert b"VMJOBS_EPOCH='1700003600'\n" in tar.extractfile("job.env").read()  # type: ignore[union-attr]


def test_an_input_of_another_size_is_refused(tmp_path: Path) -> None:
    job = job_description(ticket(inputs=[CARD]))
    with pytest.raises(OSError, match="4 bytes of 5"):
        write_job_disk(tmp_path / "disk", job, lambda _, disk: disk.write(b"1234"))


def test_a_shell_reads_back_exactly_what_was_given(tmp_path: Path) -> None:
    job = ticket(arguments=[NASTY, "", "b c"], environment={"A": NASTY})
    write_job_disk(tmp_path / "disk", job_description(job), lambda *_: None)
    subprocess.run(["tar", "xf", "disk", "job.env", "environment"], cwd=tmp_path, check=True)
    program = (
        '. ./job.env; . ./environment; eval "set -- $VMJOBS_ARGUMENTS"; '
        'printf "%s|" "$#" "$1" "$2" "$3" "$A"'
    )
    for shell in (["dash"], ["busybox", "ash"]):
        shown = subprocess.run([*shell, "-c", program], cwd=tmp_path, check=True, capture_output=True)
        assert shown.stdout.decode() == f"3|{NASTY}||b c|{NASTY}|"


def test_blank_disks_take_no_room(tmp_path: Path) -> None:
    create_blank_disk(tmp_path / "disk", 10 * SIZE_UNIT + 1)
    found = (tmp_path / "disk").stat()
    assert found.st_size == 11 * SIZE_UNIT
    assert found.st_blocks == 0
