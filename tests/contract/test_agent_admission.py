"""Authorization of run requests to the agent, with real processes at the real socket."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from werkzeug.wrappers import Response

from tests.kit.api_site import serving
from tests.kit.cli import VMJOBS
from vmjobs.agent.condor_job.services import CondorJobServices
from vmjobs.agent.condor_job.starter import find_starter
from vmjobs.agent.job_runner import JobRunner
from vmjobs.agent.listener import listening
from vmjobs.agent.server import Agent
from vmjobs.client import JobAgentClient, Retries
from vmjobs.errors import JobFinal, Unauthenticated, VMJobsError
from vmjobs.model import ExitChannel, ExitStatus, JobState, Node, ReasonCode, Report, now, reason

UID = 4242
GOOD, FORGED = "good", "forged"
#: Seconds that the service takes to check a token, like a busy one.
THINKS = 0.1
#: Asks for the job from 12 threads, and prints one line for each kind of answer.
FORGER = """
import json, socket, sys, threading
said = set()
def ask():
    while True:
        with socket.socket(socket.AF_UNIX) as end:
            end.connect(sys.argv[1])
            end.sendall(json.dumps({"type": "run", "job": "job1", "token": "forged"}).encode() + b"\\n")
            answer = json.loads(end.makefile().readline() or "{}")
            words = (answer.get("code"), answer.get("retry"))
            if words not in said:
                said.add(words)
                print(*words, flush=True)
for _ in range(12):
    threading.Thread(target=ask).start()
"""


@dataclass
class Service:
    """A repository with one job, which has ended with status 3. asked: requests by token."""

    url: str = ""
    asked: Counter[str] = field(default_factory=Counter)

    def __call__(self, environ: dict[str, Any], start: Any) -> Iterable[bytes]:
        token = environ["HTTP_AUTHORIZATION"].removeprefix("Bearer ")
        self.asked[token] += 1
        return self._answer(token, environ["PATH_INFO"])(environ, start)

    def _answer(self, token: str, path: str) -> Response:
        if token != GOOD:
            time.sleep(THINKS)
            fault: VMJobsError = Unauthenticated("that is no token of ours")
        elif path.endswith("/end"):
            told = reason(ReasonCode.SCRIPT_FAILED, "exit 3")
            exit = ExitStatus(code=3, channel=ExitChannel.ENDPOINT)
            report = Report(state=JobState.FAILED, reason=told, time=now(), exit=exit)
            return Response(report.model_dump_json(), mimetype="application/json")
        else:
            fault = JobFinal("it has ended")
        status = fault.http_status
        body = {"title": "", "status": status, "code": fault.code, "detail": fault.message}
        return Response(json.dumps(body), status, mimetype="application/problem+json")


@pytest.fixture
def service() -> Iterator[Service]:
    made = Service()
    with serving(made) as made.url:
        yield made


@dataclass
class Place:
    """A node with an agent, and a stand-in for HTCondor's starter."""

    folder: Path

    @property
    def socket(self) -> Path:
        return self.folder / "s"

    @contextmanager
    def started(self, *command: str, starter: bool) -> Iterator[subprocess.Popen[str]]:
        """Start a process as an ordinary user; starter: as a descendant of a starter."""
        argv = ["setpriv", f"--reuid={UID}", f"--regid={UID}", "--clear-groups", *command]
        if starter:
            shell = '"$@"; exit "$?"'  # keeps the shell running as the parent
            argv = [str(self.folder / "condor_starter"), "-c", shell, "starter", *argv]
        environ = {"PATH": "/usr/bin:/bin", "HOME": "/", "VMJOBS_CONFIG": "/dev/null"}
        environ |= {"VMJOBS_SOCKET": str(self.socket)}
        with subprocess.Popen(
            argv,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environ,
            cwd="/",
            process_group=0,
        ) as process:
            try:
                yield process
            finally:
                subprocess.run(["kill", "-9", "--", f"-{process.pid}"], check=False)

    def forgers(self, *, starter: bool) -> Any:
        """Start a process that asks for the job from many threads with a forged token."""
        return self.started(sys.executable, "-c", FORGER, str(self.socket), starter=starter)

    def run(self, *, starter: bool) -> tuple[int, str]:
        """Run the job as its owner does; return its exit status and output."""
        argv = (VMJOBS, "exec", "--job", "job1", "--token-file", str(self.folder / "token"))
        with self.started(*argv, starter=starter) as process:
            out, _ = process.communicate(timeout=240)
            return process.returncode, out


@pytest.fixture
def place(service: Service) -> Iterator[Place]:
    with tempfile.TemporaryDirectory(prefix="admission-") as name:
        folder = Path(name)
        folder.chmod(0o755)
        shell = Path("/bin/sh").resolve()
        shutil.copy(shell, folder / "condor_starter")
        (folder / "token").write_text(GOOD)

        def open_job(job: str, token: str) -> JobAgentClient:
            return JobAgentClient(service.url, token, job, retries=Retries(deadline=60.0))

        def describe(running: tuple[str, ...]) -> Node:
            return Node(name="here", cpus=1, memory=1, disk=1, running=running, updated=now())

        parts: Any = SimpleNamespace(settings=SimpleNamespace(node="here"))
        condor_jobs = CondorJobServices(
            folder / "handed", 1024, str, partial(find_starter, trusted={0})
        )
        with listening(folder / "s", Agent(JobRunner(parts, open_job, condor_jobs), describe).serve):
            yield Place(folder)


def test_forged_tokens_keep_no_job_from_running(place: Place, service: Service) -> None:
    """The forged requests come from another HTCondor job on the node."""
    with place.forgers(starter=True) as forgers:
        assert forgers.stdout is not None
        assert forgers.stdout.readline() == "UNAUTHENTICATED False\n"
        status, said = place.run(starter=True)
    assert (status, "asking again" in said) == (3, False), said


def test_who_is_no_job_of_htcondors_is_refused_before_the_service_is_asked(
    place: Place, service: Service
) -> None:
    with place.forgers(starter=False) as forgers:
        assert forgers.stdout is not None
        assert forgers.stdout.readline() == "NODE_FAILED False\n"
        assert place.run(starter=True)[0] == 3
    assert service.asked[FORGED] == 0


def test_a_node_that_takes_nobody_for_a_starter_gives_its_jobs_back(place: Place) -> None:
    """A missing setting is not the job's fault; the message names the setting to check."""
    status, said = place.run(starter=False)
    assert status == -9, said
    assert "condor_user" in said
