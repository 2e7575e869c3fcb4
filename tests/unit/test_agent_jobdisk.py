"""What a guest finds on its job disk."""

from __future__ import annotations

import json
import subprocess
import tarfile
from pathlib import Path

from vmjobs.agent.jobdisk import BLOCK, Briefing, blank_disk, write_job_disk
from vmjobs.model import InputFile, JobSpec, JobTicket

NASTY = 'it\'s $HOME `id` "x"\n\\end'


def ticket(**fields: object) -> JobTicket:
    spec = JobSpec.model_validate({"image": "generic", "script": "#!/bin/sh\necho hi\n", **fields})
    return JobTicket(
        job_id="j1", attempt="a" * 32, index=2, count=5, image_digest="sha256:" + "0" * 64, spec=spec
    )


def briefing(of: JobTicket, endpoint: str = "") -> Briefing:
    return Briefing(ticket=of, endpoint=endpoint, token="secret", sentinel="5e", epoch=1700000000)


def test_the_disk_is_a_plain_tar_from_its_first_byte(tmp_path: Path) -> None:
    (tmp_path / "in" / "sub").mkdir(parents=True)
    (tmp_path / "in" / "sub" / "card").write_bytes(b"12345")
    inputs = [InputFile(name="sub/card", digest="sha256:" + "1" * 64, size=5)]
    write_job_disk(tmp_path / "disk", briefing(ticket(inputs=inputs)), tmp_path / "in")
    assert (tmp_path / "disk").stat().st_size % BLOCK == 0
    with tarfile.open(tmp_path / "disk") as tar:
        names = tar.getnames()
        assert json.load(tar.extractfile("job.json"))["index"] == 2  # type: ignore[arg-type]
        assert tar.extractfile("inputs/sub/card").read() == b"12345"  # type: ignore[union-attr]
        assert tar.getmember("script").mode == 0o755
    assert names == ["job.json", "job.env", "environment", "outputs", "script", "inputs/sub/card"]


def test_where_the_guest_can_fetch_nothing_is_embedded(tmp_path: Path) -> None:
    write_job_disk(tmp_path / "disk", briefing(ticket(), "http://10.0.2.100"), None)
    with tarfile.open(tmp_path / "disk") as tar:
        assert "script" not in tar.getnames()


def test_a_shell_reads_back_exactly_what_was_given(tmp_path: Path) -> None:
    job = ticket(arguments=[NASTY, "", "b c"], environment={"A": NASTY})
    write_job_disk(tmp_path / "disk", briefing(job), tmp_path)
    subprocess.run(["tar", "xf", "disk", "job.env", "environment"], cwd=tmp_path, check=True)
    program = (
        '. ./job.env; . ./environment; eval "set -- $VMJOBS_ARGUMENTS"; '
        'printf "%s|" "$#" "$1" "$2" "$3" "$A"'
    )
    for shell in (["dash"], ["busybox", "ash"]):
        shown = subprocess.run([*shell, "-c", program], cwd=tmp_path, check=True, capture_output=True)
        assert shown.stdout.decode() == f"3|{NASTY}||b c|{NASTY}|"


def test_blank_disks_take_no_room(tmp_path: Path) -> None:
    blank_disk(tmp_path / "disk", 10 * BLOCK + 1)
    found = (tmp_path / "disk").stat()
    assert found.st_size == 11 * BLOCK
    assert found.st_blocks == 0
