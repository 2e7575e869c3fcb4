"""The agent's socket and `vmjobs exec` at its other end, over a real Unix socket."""

from __future__ import annotations

import errno
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from vmjobs.agent import protocol, server
from vmjobs.agent.checks import LEAST_ROOM
from vmjobs.agent.inbox import Inbox, LeaseLost, Observation, SaveWanted, SignalSent
from vmjobs.agent.journal import Leftover, RunRecord
from vmjobs.agent.server import Agent, Hands, listening
from vmjobs.agent.verdict import Verdict, stopped
from vmjobs.errors import (
    AttemptSuperseded,
    ConfigError,
    Conflict,
    Forbidden,
    JobFinal,
    StorageFull,
    Unavailable,
)
from vmjobs.execute import Failed, Refused, run_job
from vmjobs.model import (
    ExitChannel,
    ExitStatus,
    HypervisorKind,
    JobState,
    Node,
    ReasonCode,
    Report,
    now,
    reason,
)

TOKEN = "token"


@dataclass
class Script:
    """What the runs of a test do, and what they saw."""

    end: JobState = JobState.COMPLETED
    code: ReasonCode = ReasonCode.SCRIPT_FAILED
    unfit: bool = False
    unbooted: bool = False
    rechecked: list[HypervisorKind] = field(default_factory=list)
    resumed: Exception = field(default_factory=lambda: Conflict("it is known"))
    hold: bool = False
    savable: bool = False
    fault: Exception | None = None
    started: threading.Event = field(default_factory=threading.Event)
    seen: list[Observation] = field(default_factory=list)
    runs: int = 0


@pytest.fixture
def script() -> Script:
    return Script()


@pytest.fixture
def agent(
    tmp_path: Path, script: Script, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[Agent, Path]]:
    class Run:
        """Stands for a run in a VM: waits where the test says so, then ends."""

        def __init__(self, source: Any, lease: Any, parts: Any, job: str, attempt: str, inbox: Inbox):
            self.lease, self.inbox, self.savable = lease, inbox, script.savable

        def execute(self) -> Verdict:
            script.runs += 1
            script.started.set()
            if script.fault:
                raise script.fault
            if script.hold:
                seen = self.inbox.next(time.monotonic() + 20)
                assert seen is not None
                script.seen.append(seen)
                if isinstance(seen, LeaseLost):
                    raise stopped("gone")
            status = ExitStatus(code=7, channel=ExitChannel.ENDPOINT)
            why = reason(script.code, "exit 7")
            self.lease.progress(Report(state=script.end, reason=why, time=now(), exit=status))
            return Verdict(
                script.end, why, None if script.unfit or script.unbooted else status, script.unfit
            )

        driver = SimpleNamespace(kind=HypervisorKind.UML)

    monkeypatch.setattr(server, "Run", Run)
    parts: Any = SimpleNamespace(settings=SimpleNamespace(node="n1"), recheck=script.rechecked.append)

    def describe(running: tuple[str, ...]) -> Node:
        return Node(name="n1", cpus=1, memory=1, disk=1, running=running, updated=now())

    class Source:
        """A job that another attempt of has ended, if anybody asks."""

        def resume(self, attempt: str) -> None:
            raise script.resumed

        def end(self) -> Report:
            status = ExitStatus(code=3, channel=ExitChannel.ENDPOINT)
            why = reason(ReasonCode.SCRIPT_FAILED, "exit 3")
            return Report(state=JobState.FAILED, reason=why, time=now(), exit=status)

    serving = Agent(parts, lambda job, token: Source(), describe)  # type: ignore[arg-type, return-value]
    with listening(tmp_path / "s", serving.serve):
        yield serving, tmp_path / "s"


def said(stack: ExitStack, path: Path, message: protocol.Message) -> Iterator[protocol.Message]:
    """What the agent answers to a message, on a connection that is open for as long as the stack is."""
    connection = stack.enter_context(socket.socket(socket.AF_UNIX))
    connection.connect(str(path))
    protocol.send(connection, message)
    return protocol.receive(connection)


def test_exec_exits_as_the_script_did(agent: tuple[Agent, Path], script: Script) -> None:
    script.end = JobState.FAILED
    told: list[JobState] = []
    assert run_job(agent[1], "job1", TOKEN, lambda m: told.append(m.report.state)) == 7
    assert told == [JobState.FAILED, JobState.FAILED]


def test_a_signal_reaches_the_run(agent: tuple[Agent, Path], script: Script) -> None:
    script.hold = True
    script.end = JobState.PREEMPTED
    killer = threading.Thread(
        target=lambda: (script.started.wait(10), os.kill(os.getpid(), signal.SIGTERM))
    )
    killer.start()
    run_job(agent[1], "job1", TOKEN, lambda m: None, patience=5)
    killer.join()
    assert script.seen == [SignalSent(signal.SIGTERM)]


@pytest.mark.parametrize(
    "last_words", [b"", b"[" * 5000 + b"\n", b"nonsense\n", b'{"type": "signal", "number": 999}\n']
)
def test_whatever_a_client_does_its_going_is_noticed(
    agent: tuple[Agent, Path], script: Script, last_words: bytes
) -> None:
    script.hold = True
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        client.connect(str(agent[1]))
        protocol.send(client, protocol.RunMessage(job="job1", token=TOKEN))
        assert script.started.wait(10)
        client.sendall(last_words)
        if not last_words:
            client.close()
        deadline = time.monotonic() + 10
        while not script.seen and time.monotonic() < deadline:
            threading.Event().wait(0.01)
    assert script.seen == [LeaseLost()]


def test_the_same_job_is_not_run_twice_at_once(agent: tuple[Agent, Path], script: Script) -> None:
    script.hold = True
    first = threading.Thread(target=lambda: socket_run(agent[1]), daemon=True)
    first.start()
    assert script.started.wait(10)
    with pytest.raises(Unavailable):
        run_job(agent[1], "job1", TOKEN, lambda m: None, patience=0.5)
    assert script.runs == 1
    assert agent[0].states() == {None: 1}
    agent[0].stop(10)
    assert agent[0].jobs() == ()
    assert agent[0].states() == {}


def test_a_machine_that_can_be_saved_is_saved_before_the_agent_ends(
    agent: tuple[Agent, Path], script: Script
) -> None:
    script.hold, script.savable = True, True
    script.end = JobState.PREEMPTED
    threading.Thread(target=lambda: socket_run(agent[1]), daemon=True).start()
    assert script.started.wait(10)
    agent[0].stop(0.0, saving=10)
    assert script.seen == [SaveWanted()]
    assert agent[0].jobs() == ()


def test_a_job_that_has_ended_before_ends_alike(agent: tuple[Agent, Path], script: Script) -> None:
    script.fault = JobFinal("job job1 has ended: it is FAILED")
    told: list[JobState] = []
    assert run_job(agent[1], "job1", TOKEN, lambda m: told.append(m.report.state)) == 3
    assert told == [JobState.FAILED, JobState.FAILED]


def test_a_fault_of_the_agent_is_told_and_not_asked_for_again(
    agent: tuple[Agent, Path], script: Script
) -> None:
    script.fault = RuntimeError("boom")
    with pytest.raises(Failed, match="the agent failed: RuntimeError"):
        run_job(agent[1], "job1", TOKEN, lambda m: None, patience=5)
    assert script.runs == 1


def test_a_fault_of_the_node_is_told_as_such(agent: tuple[Agent, Path], script: Script) -> None:
    script.fault = OSError(errno.ENOSPC, "No space left on device")
    with pytest.raises(Failed, match="the node failed: "):
        run_job(agent[1], "job1", TOKEN, lambda m: None, patience=5)
    assert script.runs == 1


def test_a_fault_of_the_jobs_is_told_and_would_be_the_same_elsewhere(
    agent: tuple[Agent, Path], script: Script
) -> None:
    script.fault = Forbidden("that token is another job's")
    with pytest.raises(Refused, match="another job's"):
        run_job(agent[1], "job1", TOKEN, lambda m: None, patience=5)


def test_a_node_that_fails_its_jobs_says_so(agent: tuple[Agent, Path], script: Script) -> None:
    script.end, script.code, script.unfit = JobState.PREEMPTED, ReasonCode.NODE_FAILED, True
    faults = []
    for _ in range(3):
        faults.append(agent[0].node().fault)
        with pytest.raises(Failed):
            run_job(agent[1], "job1", TOKEN, lambda m: None, patience=5)
    assert faults == ["", "", ""]
    assert "3 jobs in a row failed" in agent[0].node().fault


def test_a_user_has_no_more_connections_than_leave_others_theirs(
    agent: tuple[Agent, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "MOST_OF_A_USER", 3)
    with ExitStack() as stack:
        for _ in range(3):
            assert isinstance(
                next(said(stack, agent[1], protocol.StatusMessage())), protocol.StatusMessage
            )
        with pytest.raises(Unavailable):
            run_job(agent[1], "job1", TOKEN, lambda m: None, patience=0.5)
    assert run_job(agent[1], "job1", TOKEN, lambda m: None, patience=5) == 0  # as soon as they are gone


def test_an_agent_without_a_thread_left_goes_on_once_there_is_one(
    agent: tuple[Agent, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    start, asked = threading.Thread.start, [0]

    def may_fail(thread: threading.Thread) -> None:
        asked[0] += thread.name == "run"
        if thread.name == "run" and asked[0] <= 2:
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", may_fail)
    assert run_job(agent[1], "job1", TOKEN, lambda m: None, patience=5) == 0
    assert asked[0] == 3


def test_nobody_is_taken_for_whose_process_id_is_theirs_by_now(
    agent: tuple[Agent, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who has connected may have gone, and left the connection to another process."""
    agent[0].hands = Hands(agent[1], 100, str, lambda pid: pid)
    for owner, why in ((os.getuid(), "no machine of this job's"), (65534, "is gone"), (-1, "is gone")):
        monkeypatch.setattr(server, "owner_of", lambda _pid, owner=owner: owner)
        with ExitStack() as stack:
            (refused,) = said(stack, agent[1], protocol.ConsoleMessage())
            assert isinstance(refused, protocol.ErrorMessage)
            assert (refused.code, why in refused.message) == ("FORBIDDEN", True), refused


@pytest.mark.parametrize(("free", "rests"), [(LEAST_ROOM - 1, True), (LEAST_ROOM, False)])
def test_a_node_without_any_room_says_so(
    agent: tuple[Agent, Path],
    script: Script,
    monkeypatch: pytest.MonkeyPatch,
    free: int,
    *,
    rests: bool,
) -> None:
    """However much it was that a job has asked for."""
    monkeypatch.setattr(server, "disk_usage", lambda _path: SimpleNamespace(free=free))
    agent[0].hands = Hands(agent[1], 100, str, int)
    for error in (StorageFull("no room"), OSError(errno.ENOSPC, "full"), OSError(errno.ENOSPC, "full")):
        script.fault = error
        with pytest.raises((Failed, Refused)):
            run_job(agent[1], "job1", TOKEN, lambda m: None, patience=5)
    assert bool(agent[0].node().fault) is rests


def test_a_hypervisor_by_which_nothing_boots_is_looked_at(
    agent: tuple[Agent, Path], script: Script
) -> None:
    script.end, script.code, script.unbooted = JobState.FAILED, ReasonCode.BOOT_FAILED, True
    for _ in range(3):
        assert not script.rechecked
        run_job(agent[1], "job1", TOKEN, lambda m: None, patience=5)
    deadline = time.monotonic() + 10
    while not script.rechecked and time.monotonic() < deadline:
        threading.Event().wait(0.01)
    assert script.rechecked == [HypervisorKind.UML]
    assert agent[0].node().fault == ""


def test_what_an_earlier_agent_gave_back_is_not_run_here(
    agent: tuple[Agent, Path], script: Script
) -> None:
    """It could not tell the repository, or whoever asked. A job that was stopped is."""
    record = RunRecord("ab" * 16, "job1", "vmjobs-x", HypervisorKind.UML)
    for code, runs in ((ReasonCode.NODE_FAILED, 0), (ReasonCode.EVICTED, 1)):
        why = reason(code, "before")
        left = Report(state=JobState.PREEMPTED, reason=why, time=now())
        agent[0].remember([Leftover(record, left.model_dump_json())])
        if runs:
            assert run_job(agent[1], "job1", TOKEN, lambda m: None, patience=5) == 0
        else:
            with pytest.raises(Failed, match="before"):
                run_job(agent[1], "job1", TOKEN, lambda m: None, patience=5)
        assert script.runs == runs


@pytest.mark.parametrize(
    ("resumed", "exits"),
    [
        (Conflict("that is known"), 4),
        (AttemptSuperseded("it was begun elsewhere"), 7),
        (JobFinal("it has another end"), 3),
    ],
)
def test_an_end_that_an_earlier_agent_could_not_tell(
    agent: tuple[Agent, Path], script: Script, resumed: Exception, exits: int
) -> None:
    """It counts unless the repository knows better: 7 is the end of another run, here."""
    script.end, script.resumed = JobState.FAILED, resumed
    record = RunRecord("ab" * 16, "job1", "vmjobs-x", HypervisorKind.UML)
    told = reason(ReasonCode.SCRIPT_FAILED, "exit 4")
    exit = ExitStatus(code=4, channel=ExitChannel.ENDPOINT)
    left = Report(state=JobState.FAILED, reason=told, time=now(), exit=exit)
    agent[0].remember([Leftover(record, left.model_dump_json())])
    assert run_job(agent[1], "job1", TOKEN, lambda m: None, patience=5) == exits


def test_a_job_that_its_node_gives_back_is_not_asked_for_again_there(
    agent: tuple[Agent, Path], script: Script
) -> None:
    """Nor is that its end: whoever waits has to have it run elsewhere."""
    script.end = JobState.PREEMPTED
    for code in (ReasonCode.NODE_FAILED, ReasonCode.IMAGE_UNAVAILABLE, ReasonCode.NOT_RESUMED):
        script.code, script.runs = code, 0
        with pytest.raises(Failed, match="exit 7"):
            run_job(agent[1], "job1", TOKEN, lambda m: None, patience=5)
        assert script.runs == 1


def test_no_agent_is_unavailable_after_a_while(tmp_path: Path) -> None:
    begun = time.monotonic()
    with pytest.raises(Unavailable, match="no agent"):
        run_job(tmp_path / "none", "job1", TOKEN, lambda m: None, patience=0.5)
    assert 0.4 < time.monotonic() - begun < 5


def test_a_stopping_signal_ends_the_waiting_at_once(tmp_path: Path) -> None:
    threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGTERM)).start()
    begun = time.monotonic()
    assert (
        run_job(tmp_path / "none", "job1", TOKEN, lambda m: None, patience=60) == 128 + signal.SIGTERM
    )
    assert time.monotonic() - begun < 4


def test_the_node_tells_about_itself(agent: tuple[Agent, Path]) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        client.connect(str(agent[1]))
        protocol.send(client, protocol.StatusMessage())
        answer = next(protocol.receive(client))
    assert isinstance(answer, protocol.StatusMessage)
    assert answer.node is not None
    assert answer.node.name == "n1"


def test_who_has_asked_hears_at_once_of_what_changes(agent: tuple[Agent, Path]) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        client.connect(str(agent[1]))
        protocol.send(client, protocol.StatusMessage())
        messages = protocol.receive(client)
        assert isinstance(next(messages), protocol.StatusMessage)
        agent[0].announce()
        unasked = next(messages)
    assert isinstance(unasked, protocol.StatusMessage)
    assert unasked.node is not None


def test_an_agent_that_is_about_to_stop_says_nothing_of_the_node(agent: tuple[Agent, Path]) -> None:
    """Or it would go on to attract jobs, which it then refuses."""
    agent[0].stop(0.0)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        client.connect(str(agent[1]))
        protocol.send(client, protocol.StatusMessage())
        answer = next(protocol.receive(client))
    assert isinstance(answer, protocol.ErrorMessage)
    assert "about to stop" in answer.message


def test_a_second_agent_is_refused(agent: tuple[Agent, Path]) -> None:
    with pytest.raises(ConfigError, match="another agent"), listening(agent[1], agent[0].serve):
        pass


def socket_run(path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        client.connect(str(path))
        protocol.send(client, protocol.RunMessage(job="job1", token=TOKEN))
        client.recv(1)
