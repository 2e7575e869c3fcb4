"""What runs on the execute node: chirp, progress, machine ad, and the job of a slot."""

from __future__ import annotations

import json
import re
import socket
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import classad2
import pytest
from pydantic import BaseModel

from condor import names
from condor.events import progress
from condor.node import chirp
from condor.node.chirp import ChirpReporter
from condor.node.slot import SlotJob, job_of_starter, slot_name
from condor.pool import machine_ad
from tests.kit.hostile_strings import HOSTILE
from tests.kit.reports import ended, report
from vmjobs.agent.condor_job.starter import StarterProcess
from vmjobs.agent.protocol import EndMessage, ImageRequirements, ProgressMessage
from vmjobs.errors import Unavailable
from vmjobs.model import BYTE_COUNTERS, HypervisorInfo, HypervisorKind, JobState, Node, ReasonCode, now

if TYPE_CHECKING:
    from condor.node.chirp import AttributeValue


def sent(model: BaseModel) -> dict[str, Any]:
    """The message as it comes over the agent's socket."""
    found: dict[str, Any] = json.loads(model.model_dump_json(exclude_none=True))
    return found


class Starter:
    """Fake of the starter's chirp proxy, which gives scripted answers."""

    def __init__(self, tmp_path: Path, answers: list[bytes]) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        port = self.listener.getsockname()[1]
        self.config = tmp_path / ".chirp.config"
        self.config.write_text(f"127.0.0.1 {port} secret\n")
        self.lines: list[bytes] = []
        self.thread = threading.Thread(target=self._serve, args=(answers,))
        self.thread.start()

    def _serve(self, answers: list[bytes]) -> None:
        connection, _ = self.listener.accept()
        with connection, connection.makefile("rb") as lines:
            for answer in answers:
                line = lines.readline()
                if not line:
                    return
                self.lines.append(line)
                connection.sendall(answer)

    def close(self) -> None:
        self.listener.close()
        self.thread.join(10)


def test_attributes_are_sent_one_a_line_and_again_when_they_change(tmp_path: Path) -> None:
    starter = Starter(tmp_path, [b"0\n"] * 3)
    reporter = ChirpReporter(starter.config)
    reporter.publish({names.VM_STATE: "a b", names.VM_BOOT_SECONDS: 1.5})
    starter.close()
    assert starter.lines == [
        b"cookie secret\n",
        b'set_job_attr ChirpVMState "a\\ b"\n',
        b"set_job_attr ChirpVMBootSeconds 1.5\n",
    ]
    starter = Starter(tmp_path, [b"0\n"] * 2)
    reporter.publish({names.VM_STATE: "a b", names.VM_BOOT_SECONDS: 1.5})
    reporter.publish({names.VM_STATE: "b", names.VM_BOOT_SECONDS: 1.5})
    starter.close()
    assert starter.lines[1:] == [b'set_job_attr ChirpVMState "b"\n']


def test_what_did_not_arrive_is_sent_again(tmp_path: Path) -> None:
    starter = Starter(tmp_path, [b"0\n", b"-1\n"])
    reporter = ChirpReporter(starter.config)
    reporter.publish({names.VM_STATE: "a"})
    starter.close()
    starter = Starter(tmp_path, [b"0\n"] * 2)
    reporter.publish({names.VM_STATE: "a"})
    starter.close()
    assert starter.lines[1:] == [b'set_job_attr ChirpVMState "a"\n']


@pytest.mark.parametrize("answers", [[b"-1\n"], [b"0\n", b"-8\n"], [b"0\n"], [b"what\n"], [b""], []])
def test_failures_are_told_and_not_raised(tmp_path: Path, answers: list[bytes]) -> None:
    starter, told = Starter(tmp_path, answers), list[str]()
    ChirpReporter(starter.config, told.append, 1.0).publish({names.VM_STATE: "secret value"})
    starter.close()
    (why,) = told
    assert "did not get into the job ad" in why
    assert "secret" not in why


def test_a_starter_that_is_gone_and_a_broken_file_raise_nothing(path: Path) -> None:
    told: list[str] = []
    for text in ("127.0.0.1 1 cookie\n", "", "a b\n", "127.0.0.1 x cookie\n", "\xff\xff"):
        path.write_text(text, "latin-1")
        ChirpReporter(path, told.append, 1.0).publish({names.VM_STATE: "x"})
    assert len(told) == 5


def test_outside_of_a_job_nothing_happens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("_CONDOR_CHIRP_CONFIG", raising=False)
    ChirpReporter(warn=told.append).publish({names.VM_STATE: "x"})
    assert not told


@pytest.mark.parametrize("text", [*HOSTILE[:-2], "$$(Machine)", "a\tb", "\\" * 9, "x" * 9999])
def test_a_string_stays_one_string_in_both_syntaxes(text: str) -> None:
    line = chirp.set_command(names.VM_REASON, text)
    assert line.count(b"\n") == 1
    assert len(line) < chirp.LINE_MAX
    literal = chirp.literal(text)
    new = classad2.ExprTree(literal).eval()
    old = classad2.parseOne(f"A = 1\nX = {literal}\nB = 2\n")
    assert isinstance(new, str)
    assert len(literal.encode()) <= chirp.VALUE_MAX
    assert old["X"] == new
    assert (old["A"], old["B"]) == (1, 2)
    assert "$$" not in new


@pytest.mark.parametrize(
    "name", ["Requirements", "ChirpVM State", "Chirp", "Chirp\nX", 'ChirpX"', "chirpVMState"]
)
def test_only_attributes_that_travel_back_are_set(name: str) -> None:
    with pytest.raises(ValueError, match="not sent back"):
        chirp.set_command(name, 1)


def test_literals_of_other_types() -> None:
    values = [True, False, 7, -1.5, 1e300, float("nan"), float("inf")]
    literals = ["true", "false", "7", "-1.5", "1e+300", "undefined", "undefined"]
    assert [chirp.literal(value) for value in values] == literals


def test_progress_says_what_is_known() -> None:
    assert progress.attributes("n1", sent(report(JobState.BOOTING))) == {
        "ChirpVMState": "BOOTING",
        "ChirpVMNode": "n1",
        "ChirpVMReason": "PROGRESS",
    }
    seconds = {"staging": 0.12345, "booting": 1.5, "running": 9.0, "collecting": 0.25}
    how = {"hypervisor": HypervisorKind.UML, "exit": ended(3), "seconds": seconds}
    end = report(JobState.FAILED, ReasonCode.SCRIPT_FAILED, "exit code 3", **how)
    found = progress.attributes("n1", sent(end))
    assert found["ChirpVMReason"] == "SCRIPT_FAILED: exit code 3"
    assert found["ChirpVMHypervisor"] == "uml"
    assert found["ChirpVMExitChannel"] == "endpoint"
    assert (found["ChirpVMStageSeconds"], found["ChirpVMBootSeconds"]) == (0.123, 1.5)
    assert (found["ChirpVMRunSeconds"], found["ChirpVMCollectSeconds"]) == (9.0, 0.25)
    assert all(chirp.set_command(name, value) for name, value in found.items())


class Noting(ChirpReporter):
    """Records the names of published attributes."""

    def __init__(self) -> None:
        self.at_once: list[str] = []
        self.later: list[str] = []

    def publish(self, attributes: Mapping[str, AttributeValue]) -> bool:
        self.at_once += attributes
        return True

    def publish_later(self, attributes: Mapping[str, AttributeValue], *, last: bool = False) -> bool:
        self.later += attributes
        return True


def test_the_state_alone_is_told_at_once() -> None:
    """An attribute that is sent at once is an event in the job's log."""
    moved = {"memory": 2**33, "output": 0, "of_the_future": 1}
    told = report(JobState.RUNNING, bytes=moved, cpu_seconds=1.5)
    used = progress.usage_attributes(sent(told))
    assert used == {"ChirpVMMemoryBytes": 2**33, "ChirpVMOutputBytes": 0, "ChirpVMCpuSeconds": 1.5}
    assert all(chirp.set_command(name, value) for name, value in used.items())
    for message in (
        ProgressMessage(node="n1", report=told),
        EndMessage(node="n1", report=told, exit_code=0),
    ):
        reporter = Noting()
        progress.publish_progress(reporter, sent(message))
        assert reporter.at_once == ["ChirpVMState"]
        assert set(used) | {"ChirpVMNode", "ChirpVMReason"} == set(reporter.later)


def test_how_the_run_of_an_unchanged_job_ended_is_not_how_the_job_did() -> None:
    told = {"node": "n1", "report": report(JobState.COMPLETED, ReasonCode.SUCCEEDED)}
    reporter = Noting()
    for message in (ProgressMessage(**told), EndMessage(**told, exit_code=0)):
        progress.publish_progress(reporter, sent(message), unchanged=True)
    assert (reporter.at_once, set(reporter.later)) == ([], {"ChirpVMNode"})


def test_what_an_image_demands_of_nodes_is_told_where_this_one_does_not_have_it() -> None:
    told = report(JobState.FAILED, ReasonCode.NO_HYPERVISOR)
    needs = ImageRequirements(named="disk:1", kinds=(HypervisorKind.KVM, HypervisorKind.QEMU))
    end = EndMessage(node="n1", report=told, exit_code=71)
    assert progress.image_requirement_attributes(sent(end).get("needs")) == {}
    attributes = progress.image_requirement_attributes(sent(needs))
    assert list(attributes.items()) == [
        ("ChirpVMImageKinds", "kvm,qemu"),
        ("ChirpVMImageArch", ""),
        ("ChirpVMImageNamed", "disk:1"),
    ]
    elsewhere = needs.model_copy(update={"architecture": "aarch64"})
    attributes = progress.image_requirement_attributes(sent(elsewhere))
    assert attributes["ChirpVMImageArch"] == "aarch64"


def test_every_amount_has_an_attribute() -> None:
    everything = dict.fromkeys(BYTE_COUNTERS, 1)
    used = progress.usage_attributes(sent(report(JobState.RUNNING, bytes=everything)))
    assert [name.lower() for name in used] == [f"chirpvm{a}bytes" for a in BYTE_COUNTERS]


def test_what_is_told_later_is_told_once_and_again_at_the_end(tmp_path: Path) -> None:
    starter = Starter(tmp_path, [b"0\n"] * 2)
    reporter = ChirpReporter(starter.config)
    assert reporter.publish_later({names.VM_MEMORY_BYTES: 5})
    assert reporter.publish_later({names.VM_MEMORY_BYTES: 5})
    starter.close()
    assert starter.lines[1:] == [b"set_job_attr_delayed ChirpVMMemoryBytes 5\n"]
    starter = Starter(tmp_path, [b"0\n"] * 2)
    assert reporter.publish_later({names.VM_MEMORY_BYTES: 5}, last=True)
    starter.close()
    assert starter.lines[1:] == [b"set_job_attr_delayed ChirpVMMemoryBytes 5\n"]


def test_where_nothing_is_taken_for_later_it_is_told_at_once(tmp_path: Path) -> None:
    """The node's settings refuse delayed updates, or the job has sent a hundred of its own."""

    starter = Starter(tmp_path, [b"0\n", b"-1\n"])

    class Refused(ChirpReporter):
        def publish(self, attributes: Mapping[str, AttributeValue]) -> bool:
            return attributes == {names.VM_NODE: "n1"}

    assert Refused(starter.config).publish_later({names.VM_NODE: "n1"})
    starter.close()


def a_node(*hypervisors: HypervisorInfo, **told: Any) -> dict[str, Any]:
    size = {"cpus": 2, "memory": 2048, "lent": 200, "disk": 10, "updated": now()}
    return sent(Node(name="n1", version='1.0" + x', hypervisors=hypervisors, **size, **told))


def test_the_machine_ad_tells_what_boots() -> None:
    uml = HypervisorInfo(kind=HypervisorKind.UML, works=True)
    kvm = HypervisorInfo(kind=HypervisorKind.KVM, works=False)
    qemu = HypervisorInfo(kind=HypervisorKind.QEMU, works=True)
    digests = tuple(f"sha256:{i:064x}" for i in range(300))
    called = ("hep:1", "library/worker")
    text = machine_ad.lines(a_node(kvm, uml, qemu, images=digests, image_names=called))
    *body, last = text.splitlines()
    assert last == "- update:true"
    ad = classad2.parseOne("\n".join(body))
    assert ad["HasVMJobs"] is True
    assert ad["VMJobsHypervisors"] == "uml,qemu"
    assert ad["VMJobsImageDigests"].split(",") == list(digests[: machine_ad.MAX_DIGESTS])
    assert ad["VMJobsImageNames"].split(",") == list(called)
    assert (ad["VMJobsMemory"], ad["VMJobsMemoryFree"]) == (2048, 1848)
    assert ad["VMJobsVersion"] == '1.0" + x'


def test_a_node_that_boots_nothing_or_rests_or_has_no_agent_takes_no_jobs() -> None:
    uml = HypervisorInfo(kind=HypervisorKind.UML, works=True)
    rests = machine_ad.lines(a_node(uml, fault="3 jobs failed"))
    assert 'VMJobsFault = "3 jobs failed"\n' in rests
    for text in (machine_ad.lines(a_node()), rests, machine_ad.lines_without_agent()):
        assert "HasVMJobs = false\n" in text
        assert text.endswith("- update:true\n")


STARTER = StarterProcess(42, 22)
#: As condor_status of HTCondor 23.9.6 prints it.
ANSWER = """[
{
  "Name": "slot1@node2.grid"
}
,
{
  "GlobalJobId": "site.grid#29.0#1795314046",
  "Name": "slot1_1@node2.grid",
  "RemoteUser": "ada@grid"
}
]
"""


@pytest.fixture
def proc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A starter of slot1_1 with PID 42, and a fake of HTCondor's tools."""
    (tmp_path / "42").mkdir()
    words = ("condor_starter", "-f", "-local-name", "slot_type_1", "-a", "slot1_1", "172.18.0.2")
    (tmp_path / "42/cmdline").write_bytes(b"".join(word.encode() + b"\0" for word in words))
    (tmp_path / "42/stat").write_text(f"42 (condor_starter) S {' '.join(map(str, range(4, 30)))}\n")
    tool(tmp_path, "condor_config_val", '[ "$1" = FULL_HOSTNAME ] && echo node2.grid')
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    return tmp_path


def tool(folder: Path, name: str, script: str) -> None:
    (folder / name).write_text(f"#!/bin/sh\n{script}\n")
    (folder / name).chmod(0o755)


def test_the_job_of_the_starters_slot(proc: Path) -> None:
    (proc / "answer").write_text(ANSWER)
    tool(proc, "condor_status", f'[ "$1 $2" = "-direct node2.grid" ] && cat {proc}/answer')
    found = job_of_starter(STARTER, proc)
    assert found == SlotJob("site.grid#29.0#1795314046", "ada@grid")
    assert re.fullmatch("htc[0-9a-f]{29}", found.key)


def test_no_two_jobs_are_called_the_same() -> None:
    """Two users' jobs differ too: users cannot change their identity in a job's ad."""
    found = SlotJob("site.grid#29.0#1795314046", "ada@grid")
    assert found.key != SlotJob("site.grid#29.1#1795314046", "ada@grid").key
    assert found.key != SlotJob("site.grid#29.0#1795314046", "bob@grid").key


def test_a_starter_that_has_gone_meanwhile(proc: Path) -> None:
    """Its PID and its slot may belong to another user by now."""
    (proc / "answer").write_text(ANSWER)
    tool(proc, "condor_status", f"cat {proc}/answer")
    with pytest.raises(Unavailable, match="has gone"):
        job_of_starter(StarterProcess(42, STARTER.birth - 1), proc)
    with pytest.raises(Unavailable, match="has gone"):
        job_of_starter(StarterProcess(43, 1), proc)


@pytest.mark.parametrize(
    ("script", "why"),
    [
        ("exit 1", "does not answer"),
        ("true", "has no job in slot1_1"),
        ('echo \'[{"Name": "slot1_1@node2.grid"}]\'', "has no job in slot1_1"),
        ("echo oops", "no list of ads"),
    ],
)
def test_a_startd_that_does_not_say(proc: Path, script: str, why: str) -> None:
    tool(proc, "condor_status", script)
    with pytest.raises(Unavailable, match=why):
        job_of_starter(STARTER, proc)


def test_a_starter_that_names_no_slot() -> None:
    assert slot_name(b"condor_starter\0-a\0slot2@node\0host\0") == "slot2"
    for words in (b"condor_starter\0-f\0", b"condor_starter\0-a\0"):
        with pytest.raises(Unavailable, match="no slot name"):
            slot_name(words)
