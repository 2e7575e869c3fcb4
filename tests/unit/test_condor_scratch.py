"""The ads in a job's directory, and the message to the agent made from them."""

from __future__ import annotations

from pathlib import Path

import pytest

from condor.node import scratch
from vmjobs.agent import protocol
from vmjobs.agent.protocol import SubmitMessage
from vmjobs.errors import InvalidRequest, NotFound
from vmjobs.model import HypervisorKind, NetworkMode

MACHINE = "Cpus = 2\nMemory = 2048\nDisk = 4194304.5\n"
ACCOUNT = ("alice", "users")


def ad(folder: Path, text: str) -> scratch.TextAd:
    (folder / "ad").write_text(text)
    return scratch.read(str(folder / "ad"))


def handed(folder: Path, said: str, slot: str = MACHINE) -> SubmitMessage:
    """The agent's view of a job whose ad has these lines too, and of its slot's ad."""
    job = ad(folder, f'ClusterId = 12\nProcId = 3\nVMJobImage = "x"\n{said}\n')
    found = protocol.parse_message(scratch.submit_message(job, ad(folder, slot), "/x/dir_1", ACCOUNT))
    assert isinstance(found, SubmitMessage)
    return found


def test_a_whole_wish(tmp_path: Path) -> None:
    image = 'VMJobImage = "alice/hep:1"\n'
    wish = 'vmjobhypervisor = "QEMU"\nVMJobNetwork = "outbound"\nVMJobBootTimeout = 300'
    found = handed(tmp_path, image + wish)
    assert (found.job, found.image, found.directory) == ("12.3", "alice/hep:1", "/x/dir_1")
    assert (found.user, found.group) == ACCOUNT
    assert (found.cpus, found.memory, found.disk) == (2, 2048, 4096)
    assert (found.hypervisor, found.network) == (HypervisorKind.QEMU, NetworkMode.OUTBOUND)
    assert found.boot_seconds == 300


def test_a_slot_of_a_fixed_size_gives_no_more_processors_than_the_job_asks_for(tmp_path: Path) -> None:
    asks = 'VMJobHypervisor = "uml"\nRequestCpus = '
    assert handed(tmp_path, f"{asks}1", "Cpus = 4\n").cpus == 1
    with pytest.raises(
        InvalidRequest, match="a uml VM has at most 64 processors, but 65 are requested"
    ):
        handed(tmp_path, f"{asks}65", "Cpus = 99\n")


def test_what_is_not_said(tmp_path: Path) -> None:
    found = handed(tmp_path, "VMJobNetwork = undefined", "Cpus = 1\n")
    assert found.memory == scratch.MIN_MEMORY
    assert found.disk == scratch.MIN_DISK
    assert found.hypervisor is None


@pytest.mark.parametrize(("said", "wanted"), [("true", True), ("FALSE", False), ("undefined", False)])
def test_whether_it_is_to_be_saved(tmp_path: Path, said: str, *, wanted: bool) -> None:
    assert handed(tmp_path, f"vmjobcheckpoint = {said}").checkpoint is wanted


@pytest.mark.parametrize(
    ("state", "anew"),
    [
        ('"PREEMPTED"', False),
        ('"COMPLETED"', True),
        ('"FAILED"', True),
        ('ifThenElse(JobStatus == 2, "RUNNING", "PREEMPTED")', False),
        ("undefined", False),
    ],
)
def test_one_that_has_ended_before_begins_anew(tmp_path: Path, state: str, *, anew: bool) -> None:
    """Its own policy runs it again, or it was released: no earlier VM is resumed."""
    assert handed(tmp_path, f"ChirpVMState = {state}").anew is anew


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ("VMJobCheckpoint = 1", "VMJobCheckpoint of the job is 1, but must be true or false"),
        (
            'VMJobCheckpoint = true\nVMJobHypervisor = "uml"',
            "checkpoint: checkpoint is for kvm, xen and qemu: uml VMs cannot be saved",
        ),
    ],
)
def test_what_cannot_be_saved(tmp_path: Path, said: str, why: str) -> None:
    with pytest.raises(InvalidRequest, match=why):
        handed(tmp_path, said)


def test_all_that_cannot_be_is_told_at_once(tmp_path: Path) -> None:
    wrong = 'VMJobImage = "UP/../x"\nVMJobHypervisor = "abacus"\nVMJobBootTimeout = 0'
    with pytest.raises(InvalidRequest) as told:
        handed(tmp_path, wrong)
    assert {scratch.ATTRIBUTE_OF_FIELD[fault.field] for fault in told.value.faults} == {
        *("VMJobImage", "VMJobHypervisor", "VMJobBootTimeout")
    }


@pytest.mark.parametrize(
    "text", ["VMJobImage = 5", "VMJobImage = strcat(A, B)", 'VMJobImage = "a" + "b"']
)
def test_expressions_are_no_strings(tmp_path: Path, text: str) -> None:
    with pytest.raises(InvalidRequest, match="VMJobImage"):
        ad(tmp_path, text).string("VMJobImage")


def test_a_word_without_quotes_is_told_to_have_some(tmp_path: Path) -> None:
    """HTCondor reads it as the name of another attribute."""
    with pytest.raises(InvalidRequest) as told:
        ad(tmp_path, "VMJobImage = generic").string("VMJobImage")
    said = 'VMJobImage of the job is generic, but must be a string; write +VMJobImage = "generic"'
    assert told.value.message == said


def test_quotes_in_strings(tmp_path: Path) -> None:
    assert ad(tmp_path, r'A = "a \"b\" \\ c"').string("a") == r'a "b" \ c'


def test_no_ad(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match=r"cannot read .*none"):
        scratch.read(str(tmp_path / "none"))


def test_outputs_that_are_missing_are_laid_out_inside_alone(tmp_path: Path) -> None:
    folder = tmp_path / "scratch"
    folder.mkdir()
    (folder / "there").write_text("as it was")
    (folder / ".job.ad").write_text('TransferOutput = "there, a/b,dir/,../out,/abs, c"\n')
    scratch.create_missing_outputs(str(folder))
    assert (folder / "there").read_text() == "as it was"
    assert sorted(path.name for path in folder.iterdir()) == [".job.ad", "a", "c", "dir", "there"]
    assert (folder / "a/b").read_bytes() == b""
    assert [path.name for path in tmp_path.iterdir()] == ["scratch"]


def test_a_directory_that_is_not_the_jobs_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    own = str(tmp_path).encode()
    assert scratch.scratch_directory({b"_CONDOR_SCRATCH_DIR": own}) == str(tmp_path)
    for said in ({b"_CONDOR_SCRATCH_DIR": b"/"}, {}):
        with pytest.raises(InvalidRequest, match="should_transfer_files"):
            scratch.scratch_directory(said)
