"""The agent's socket, with `vmjobs exec` as its client, over a real Unix socket."""

from __future__ import annotations

import errno
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.kit.reports import ended, report
from tests.kit.waiting import wait_until
from vmjobs import errors
from vmjobs.agent import job_runner, protocol, server
from vmjobs.agent.checks import MIN_FREE_BYTES
from vmjobs.agent.condor_job import services as condor_services
from vmjobs.agent.condor_job.services import CondorJobServices
from vmjobs.agent.job_runner import JobRunner
from vmjobs.agent.journal import InterruptedRun, RunRecord
from vmjobs.agent.listener import listening
from vmjobs.agent.run.outcome import RunOutcome, run_stopped
from vmjobs.agent.run.state import RunRequest
from vmjobs.agent.server import Agent
from vmjobs.agent.vm.events import LeaseLost, RunEvent, SaveRequested, SignalSent
from vmjobs.execute import JobRefused, NodeFailure, run_job
from vmjobs.model import HypervisorKind, JobState, Node, ReasonCode, Report, now

TOKEN = "token"
RECORD = RunRecord("ab" * 16, "job1", "vmjobs-x", HypervisorKind.UML)
RUN = protocol.RunMessage(job="job1", token=TOKEN)


@dataclass
class Script:
    """What the runs of a test do, and what they saw."""

    end: JobState = JobState.COMPLETED
    code: ReasonCode = ReasonCode.SCRIPT_FAILED
    node_at_fault: bool = False
    unbooted: bool = False
    rechecked: list[HypervisorKind] = field(default_factory=list)
    resumed: Exception = field(default_factory=lambda: errors.Conflict("it is known"))
    hold: bool = False
    checkpointable: bool = False
    fault: Exception | None = None
    started: threading.Event = field(default_factory=threading.Event)
    seen: list[RunEvent] = field(default_factory=list)
    runs: int = 0


@pytest.fixture
def script() -> Script:
    return Script()


@dataclass
class Served:
    """An agent, and the path of its socket."""

    agent: Agent
    path: Path

    def run(self, patience: float = 5, tell: Callable[[Any], object] = lambda _message: None) -> int:
        """Request a job as ``vmjobs exec`` does; return its exit status."""
        return run_job(self.path, "job1", TOKEN, tell, patience=patience)

    def begin(self, script: Script) -> None:
        """Request a job that does not end, and stay connected."""
        script.hold = True
        threading.Thread(target=lambda: next(self.said(RUN), None), daemon=True).start()
        assert script.started.wait(10)

    def said(self, message: protocol.Message) -> Generator[protocol.Message]:
        """Yield the agent's answers to a message, on a separate connection."""
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(str(self.path))
            protocol.send(connection, message)
            yield from protocol.receive(connection)


@pytest.fixture
def agent(tmp_path: Path, script: Script, monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    class Run:
        """Stands for a run in a VM: waits where the test says so, then ends."""

        def __init__(self, request: RunRequest) -> None:
            self.request = request
            self.control = SimpleNamespace(checkpointable=script.checkpointable)

        claimed = False
        choice = SimpleNamespace(driver=SimpleNamespace(kind=HypervisorKind.UML))

    def execute(run: Run) -> RunOutcome:
        script.runs += 1
        script.started.set()
        if script.fault:
            raise script.fault
        if script.hold:
            seen = run.request.event_queue.next(time.monotonic() + 20)
            assert seen is not None
            script.seen.append(seen)
            if isinstance(seen, LeaseLost):
                raise run_stopped("gone")
        told = report(script.end, script.code, "exit 7", exit=ended(7))
        run.request.on_report(told)
        exit = None if script.node_at_fault or script.unbooted else told.exit
        return RunOutcome(script.end, told.reason, exit, script.node_at_fault)

    monkeypatch.setattr(job_runner, "Run", Run)
    monkeypatch.setattr(job_runner, "execute", execute)
    services: Any = SimpleNamespace(
        settings=SimpleNamespace(node="n1"), reprobe=script.rechecked.append
    )

    def describe(running: tuple[str, ...]) -> Node:
        return Node(name="n1", cpus=1, memory=1, disk=1, running=running, updated=now())

    class Source:
        """The repository's view of a job; ``end`` returns the end of another attempt."""

        def resume(self, attempt: str) -> None:
            raise script.resumed

        def end(self) -> Report:
            return report(JobState.FAILED, ReasonCode.SCRIPT_FAILED, "exit 3", exit=ended(3))

    runner = JobRunner(services, lambda job, token: Source())  # type: ignore[arg-type, return-value]
    serving = Agent(runner, describe)
    with listening(tmp_path / "s", serving.serve):
        yield Served(serving, tmp_path / "s")


def test_exec_exits_as_the_script_did(agent: Served, script: Script) -> None:
    script.end = JobState.FAILED
    told: list[JobState] = []
    assert agent.run(tell=lambda m: told.append(m.report.state)) == 7
    assert told == [JobState.FAILED, JobState.FAILED]


def test_a_signal_reaches_the_run(agent: Served, script: Script) -> None:
    script.hold = True
    script.end = JobState.PREEMPTED
    killer = threading.Thread(
        target=lambda: (script.started.wait(10), os.kill(os.getpid(), signal.SIGTERM))
    )
    killer.start()
    agent.run()
    killer.join()
    assert script.seen == [SignalSent(signal.SIGTERM)]


@pytest.mark.parametrize(
    "last_words", [b"", b"[" * 5000 + b"\n", b"nonsense\n", b'{"type": "signal", "number": 999}\n']
)
def test_whatever_a_client_does_its_going_is_noticed(
    agent: Served, script: Script, last_words: bytes
) -> None:
    script.hold = True
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        client.connect(str(agent.path))
        protocol.send(client, RUN)
        assert script.started.wait(10)
        client.sendall(last_words)
        if not last_words:
            client.close()
        wait_until(lambda: script.seen)
    assert script.seen == [LeaseLost()]


def test_the_same_job_is_not_run_twice_at_once(agent: Served, script: Script) -> None:
    agent.begin(script)
    with pytest.raises(errors.Unavailable):
        agent.run(0.5)
    assert script.runs == 1
    assert agent.agent.runner.active.states() == {None: 1}
    agent.agent.stop(10)
    assert agent.agent.runner.active.names() == ()
    assert agent.agent.runner.active.states() == {}


def test_a_vm_that_can_be_saved_is_saved_before_the_agent_ends(agent: Served, script: Script) -> None:
    script.checkpointable, script.end = True, JobState.PREEMPTED
    agent.begin(script)
    agent.agent.stop(0.0, saving=10)
    assert script.seen == [SaveRequested()]
    assert agent.agent.runner.active.names() == ()


def test_a_job_that_has_ended_before_ends_alike(agent: Served, script: Script) -> None:
    script.fault = errors.JobFinal("job job1 has ended: it is FAILED")
    told: list[JobState] = []
    assert agent.run(tell=lambda m: told.append(m.report.state)) == 3
    assert told == [JobState.FAILED, JobState.FAILED]


@pytest.mark.parametrize(
    ("fault", "kind", "told"),
    [
        (RuntimeError("boom"), NodeFailure, "the agent failed: RuntimeError"),
        (OSError(errno.ENOSPC, "No space left on device"), NodeFailure, "the node failed: "),
        # another node would refuse it too
        (errors.Forbidden("that token is another job's"), JobRefused, "another job's"),
    ],
)
def test_whose_fault_it_was_is_told_and_nobody_asks_again(
    agent: Served, script: Script, fault: Exception, kind: type[Exception], told: str
) -> None:
    script.fault = fault
    with pytest.raises(kind, match=told):
        agent.run()
    assert script.runs == 1


def test_a_node_that_fails_its_jobs_says_so(agent: Served, script: Script) -> None:
    script.end, script.code, script.node_at_fault = JobState.PREEMPTED, ReasonCode.NODE_FAILED, True
    faults = []
    for _ in range(3):
        faults.append(agent.agent.node().fault)
        with pytest.raises(NodeFailure):
            agent.run()
    assert faults == ["", "", ""]
    assert "3 jobs in a row failed" in agent.agent.node().fault


def test_a_user_has_no_more_connections_than_leave_others_theirs(
    agent: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "MAX_USER_CONNECTIONS", 3)
    connections = [agent.said(protocol.StatusMessage()) for _ in range(3)]
    for messages in connections:
        assert isinstance(next(messages), protocol.StatusMessage)
    with pytest.raises(errors.Unavailable):
        agent.run(0.5)
    for messages in connections:
        messages.close()
    assert agent.run() == 0  # as soon as the connections are gone


def test_an_agent_without_a_thread_left_goes_on_once_there_is_one(
    agent: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    start, asked = threading.Thread.start, [0]

    def may_fail(thread: threading.Thread) -> None:
        asked[0] += thread.name == "run"
        if thread.name == "run" and asked[0] <= 2:
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", may_fail)
    assert agent.run() == 0
    assert asked[0] == 3


def test_nobody_is_taken_for_whose_process_id_is_theirs_by_now(
    agent: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The peer process may have exited and left the connection to another process."""
    agent.agent.runner.condor_jobs = CondorJobServices(agent.path, 100, str, lambda pid: pid)
    for owner, why in ((os.getuid(), "no running VM"), (65534, "has exited"), (-1, "has exited")):
        monkeypatch.setattr(condor_services, "effective_uid", lambda _pid, owner=owner: owner)
        (refused,) = agent.said(protocol.ConsoleMessage())
        assert isinstance(refused, protocol.ErrorMessage)
        assert (refused.code, why in refused.message) == ("FORBIDDEN", True), refused


@pytest.mark.parametrize(("free", "rests"), [(MIN_FREE_BYTES - 1, True), (MIN_FREE_BYTES, False)])
def test_a_node_without_any_room_says_so(
    agent: Served, script: Script, monkeypatch: pytest.MonkeyPatch, free: int, *, rests: bool
) -> None:
    """The free space decides, not the space that a job requested."""
    monkeypatch.setattr(job_runner, "disk_usage", lambda _path: SimpleNamespace(free=free))
    agent.agent.runner.condor_jobs = CondorJobServices(agent.path, 100, str, int)
    for error in (
        errors.StorageFull("no room"),
        OSError(errno.ENOSPC, "full"),
        OSError(errno.ENOSPC, "full"),
    ):
        script.fault = error
        with pytest.raises((NodeFailure, JobRefused)):
            agent.run()
    assert bool(agent.agent.node().fault) is rests


def test_a_hypervisor_by_which_nothing_boots_is_looked_at(agent: Served, script: Script) -> None:
    script.end, script.code, script.unbooted = JobState.FAILED, ReasonCode.BOOT_FAILED, True
    for _ in range(3):
        assert not script.rechecked
        agent.run()
    wait_until(lambda: script.rechecked)
    assert script.rechecked == [HypervisorKind.UML]
    assert agent.agent.node().fault == ""


def test_what_an_earlier_agent_gave_back_is_not_run_here(agent: Served, script: Script) -> None:
    """It could not report to the repository or the client. A stopped job does run again."""
    for code, runs in ((ReasonCode.NODE_FAILED, 0), (ReasonCode.EVICTED, 1)):
        left = report(JobState.PREEMPTED, code, "before")
        agent.agent.runner.keep_interrupted_runs([InterruptedRun(RECORD, left.model_dump_json())])
        if runs:
            assert agent.run() == 0
        else:
            with pytest.raises(NodeFailure, match="before"):
                agent.run()
        assert script.runs == runs


@pytest.mark.parametrize(
    ("resumed", "exits"),
    [
        (errors.Conflict("known"), 4),
        (errors.AttemptSuperseded("begun elsewhere"), 7),
        (errors.JobFinal("another end"), 3),
    ],
)
def test_an_end_that_an_earlier_agent_could_not_tell(
    agent: Served, script: Script, resumed: Exception, exits: int
) -> None:
    """It counts unless the repository overrides it. 7 is the exit status of another run."""
    script.end, script.resumed = JobState.FAILED, resumed
    left = report(JobState.FAILED, ReasonCode.SCRIPT_FAILED, "exit 4", exit=ended(4))
    agent.agent.runner.keep_interrupted_runs([InterruptedRun(RECORD, left.model_dump_json())])
    assert agent.run() == exits


def test_a_job_that_its_node_gives_back_is_not_asked_for_again_there(
    agent: Served, script: Script
) -> None:
    """This does not end the job: the client has to have it run elsewhere."""
    script.end = JobState.PREEMPTED
    for code in (ReasonCode.NODE_FAILED, ReasonCode.IMAGE_UNAVAILABLE, ReasonCode.NOT_RESUMED):
        script.code, script.runs = code, 0
        with pytest.raises(NodeFailure, match="exit 7"):
            agent.run()
        assert script.runs == 1


def test_no_agent_is_unavailable_after_a_while(tmp_path: Path) -> None:
    begun = time.monotonic()
    with pytest.raises(errors.Unavailable, match="no agent"):
        run_job(tmp_path / "none", "job1", TOKEN, lambda m: None, patience=0.5)
    assert 0.4 < time.monotonic() - begun < 5


def test_a_stopping_signal_ends_the_waiting_at_once(tmp_path: Path) -> None:
    threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGTERM)).start()
    begun = time.monotonic()
    assert (
        run_job(tmp_path / "none", "job1", TOKEN, lambda m: None, patience=60) == 128 + signal.SIGTERM
    )
    assert time.monotonic() - begun < 4


def test_the_node_tells_about_itself_and_at_once_of_what_changes(agent: Served) -> None:
    messages = agent.said(protocol.StatusMessage())
    for _ in range(2):
        told = next(messages)
        assert isinstance(told, protocol.StatusMessage)
        assert told.node.name == "n1"
        agent.agent.notify_subscribers()


def test_an_agent_that_is_about_to_stop_says_nothing_of_the_node(agent: Served) -> None:
    """Otherwise the node would go on to attract jobs, which the agent then refuses."""
    agent.agent.stop(0.0)
    answer = next(agent.said(protocol.StatusMessage()))
    assert isinstance(answer, protocol.ErrorMessage)
    assert "is stopping" in answer.message


def test_a_second_agent_is_refused(agent: Served) -> None:
    with (
        pytest.raises(errors.ConfigError, match="another agent"),
        listening(agent.path, agent.agent.serve),
    ):
        pass
