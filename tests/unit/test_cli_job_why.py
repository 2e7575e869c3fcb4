"""What ``vmjobs job why`` prints, with scripted daemons and a scripted service."""

from __future__ import annotations

import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import click
import pytest

from condor.cli import why as job_why
from tests.kit.cli import Run
from tests.kit.cluster_service import IMAGE, Service, image_detail, service
from tests.kit.condor_daemons import Daemons, Schedd, daemons, node, queued
from vmjobs.errors import ConfigError, NotFound, Unavailable
from vmjobs.model import CondorRef, Job, JobEvent, JobSpec, JobState, ReasonCode, now, reason
from vmjobs.wire import EventList, JobPage, Visibility

__all__ = ["service"]

ID = "01a1f81eb7e8ea63d2bb0afdf929c0d1"


def has_job(service: Service, job: Job) -> None:
    event = JobEvent(seq=1, time=job.created, state=job.state, reason=job.reason)
    service.says(f"GET /v1/jobs/{job.id}", job)
    service.says(f"GET /v1/jobs/{job.id}/events?after=0", EventList(events=(event,)))


@pytest.fixture(autouse=True)
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Configure no service; the fixture ``service`` adds one."""
    monkeypatch.setenv("VMJOBS_CONFIG", str(tmp_path / "config.toml"))
    (tmp_path / "config.toml").touch()
    monkeypatch.setenv("VMJOBS_TOKEN_FILE", str(tmp_path / "token"))


@pytest.fixture
def have(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Replace HTCondor's daemons with scripted ones."""

    def have(said: Daemons) -> None:
        monkeypatch.setattr("condor.diagnose.explainer.call", said)

    return have


@pytest.fixture
def why(typed: Run) -> Run:
    return partial(typed, "job", "why")


def test_a_job_that_is_too_large(have: Any, why: Run) -> None:
    have(daemons(queued(RequestMemory="8192"), nodes=[node("n1"), node("n2")]))
    assert why("3.0", code=0).lines == [
        "3.0 is idle: it asks for 8192 MiB of memory, and no node has more than 4096 (n1) [TOO_LARGE]",
        "also: its image hep was not checked: this host has no token for the service; the "
        "node checks it [IMAGE_UNCHECKED]",
        "",
        "CLAUSE SIDE FAILS ON VALUES",
        "TARGET.Memory >= RequestMemory job 2 of 2: n1, n2 job: RequestMemory = 8192; "
        "node: Memory = 4096",
        "TARGET.RequestMemory <= MY.Memory node 2 of 2: n1, n2 job: RequestMemory = 8192; "
        "node: Memory = 4096",
        "",
        "what to do:",
        "- ask for less with request_memory: condor_qedit 3.0 RequestMemory NUMBER",
    ]


def test_the_same_for_programs(have: Any, why: Run) -> None:
    have(daemons(queued(RequestMemory="8192"), nodes=[node("n1")]))
    found = why("3.0", "--json").json
    assert (found["id"], found["state"], found["way"]) == ("3.0", "idle", ["3.0 at site.grid"])
    assert [finding["code"] for finding in found["findings"]] == ["TOO_LARGE", "IMAGE_UNCHECKED"]
    assert set(found["findings"][0]) == {"code", "message", "remedy"}
    assert found["nodes"]["refuses"] == {"count": 1, "names": ["n1"]}
    assert set(found["clauses"][0]) == {"side", "text", "nodes", "job", "node"}


def test_a_cluster_and_a_site(have: Any, why: Run) -> None:
    copied = {"JobUniverse": "9", "GridResource": '"condor site.grid cm"', "JobStatus": "1"}
    said = daemons(
        queued(3, 0, **copied, GridJobId='"condor site.grid cm 7.0"', GlobalJobId='"here#3.0#1"'),
        queued(3, 1, JobStatus="2"),
    )
    said.schedds["site.grid"] = Schedd([queued(7, 0, JobStatus="7")])
    said.collectors["cm"] = said.collectors[""]
    have(said)
    shown = why("3", code=0).lines
    assert shown[0].startswith("3.0 is idle, and as 7.0 at site.grid: it is suspended")
    assert shown[1] == "its cluster has 1 idle, 1 running"


def test_other_daemons_are_asked(have: Any, why: Run) -> None:
    said = daemons()
    said.schedds["far"] = Schedd([queued(JobStatus="2", GlobalJobId="")])
    said.collectors["cm"] = said.collectors[""]
    have(said)
    found = why("3.0", "--schedd", "far", "--pool", "cm", code=0)
    assert found.lines == ["3.0 is running: it runs [RUNNING]"]
    assert why("3.0").code == NotFound.exit_code
    assert why("3.0", "--pool", "nowhere").code == Unavailable.exit_code


def test_hostile_words_reach_no_terminal(have: Any, why: Run) -> None:
    odd = '"\\033]0;yours\\007\\n"'
    hostile = node("n\\0331", Site=odd, Requirements='Site == "\\033" && TARGET.X =?= "\\007"')
    have(daemons(queued(VMJobImage=odd, VMJobHypervisor=odd), nodes=[hostile]))
    for words in (("3.0",), ("3.0", "--json")):
        shown = why(*words).out
        assert "yours" in shown
        assert all(c.isprintable() or c == "\n" for c in shown)
        assert "\\u001b" not in shown


@pytest.mark.parametrize(
    ("images", "code"),
    [
        ({"hep": Visibility.PUBLIC}, None),
        ({"hep": Visibility.PRIVATE, "library/hep": Visibility.PUBLIC}, None),
        ({"hep": Visibility.PRIVATE}, "IMAGE_NOT_SHARED"),
        ({}, "IMAGE_MISSING"),
    ],
)
def test_the_service_is_asked_about_the_image(
    images: dict[str, Visibility], code: str | None, have: Any, service: Service, why: Run
) -> None:
    for name, visibility in images.items():
        service.says(f"GET /v1/images/{name}", image_detail(visibility=visibility))
    have(daemons(queued(), nodes=[node()]))
    found = why("3.0", "--json").json["findings"]
    assert [finding["code"] for finding in found] == ["WAITING", *([code] if code else [])]


def test_an_installation_without_htcondor(monkeypatch: pytest.MonkeyPatch, why: Run) -> None:
    monkeypatch.setattr("condor.cli.why_service.find_spec", lambda _: None)
    done = why("3.0")
    assert (done.code, "htcondor2 is missing" in done.err) == (ConfigError.exit_code, True)


def a_job(state: JobState, code: ReasonCode, message: str = "", **more: Any) -> Job:
    spec = JobSpec(image="hep", script="true", route="grid")
    own = {"id": ID, "array": ID, "index": 0, "count": 1, "owner": "alice", "image_digest": IMAGE}
    when = {"created": now(), "updated": now()}
    return Job(spec=spec, state=state, reason=reason(code, message), **own, **when, **more)


REF = CondorRef(schedd="submit.grid", cluster=3, proc=0, grid_job_id="condor site.grid cm 7.0")


def test_a_job_of_the_service_that_does_not_wait(service: Service, why: Run) -> None:
    message = "it panicked\nlast words"
    job = a_job(JobState.FAILED, ReasonCode.KERNEL_PANIC, message, condor=REF, attempts=2)
    has_job(service, job)
    shown = why(ID, code=0).lines
    assert shown[0] == f"{ID} is FAILED: it panicked [KERNEL_PANIC]"
    assert "route: grid" in shown
    assert "in HTCondor: 3.0 at submit.grid, at its site condor site.grid cm 7.0" in shown
    assert "attempts: 2" in shown
    assert any(line.endswith(" FAILED KERNEL_PANIC it panicked") for line in shown)
    found = why(ID, "--json").json
    assert set(found["facts"]) == {"route", "in HTCondor", "attempts", "event 1"}
    assert shown[-1] == "- action needed by: user; docs/troubleshooting.md explains the code"


def test_a_job_of_the_service_that_waits_in_htcondor(service: Service, have: Any, why: Run) -> None:
    has_job(service, a_job(JobState.QUEUED, ReasonCode.SCHEDULED, "queued as 3.0", condor=REF))
    said = daemons(nodes=[node(HasVMJobs="false")])
    said.schedds["submit.grid"] = Schedd([queued(VMJobImage="", VMJobPolicy="", VMJobsId=f'"{ID}"')])
    have(said)
    shown = why(ID, code=0).lines
    assert shown[0].startswith(f"{ID} is QUEUED: vmjobs works on no node: on node1.grid the agent")
    assert shown[1] == "also: queued as 3.0 [SCHEDULED]"
    assert "TARGET.HasVMJobs =?= true job 1 of 1: node1.grid node: HasVMJobs = false" in shown


def test_a_job_of_the_service_whose_schedd_cannot_be_asked(
    service: Service, have: Any, why: Run
) -> None:
    has_job(service, a_job(JobState.HELD, ReasonCode.SCHEDULER_HELD, "policy", condor=REF))
    have(daemons())
    shown = why(ID, code=0).lines
    assert shown[0] == f"{ID} is HELD: policy [SCHEDULER_HELD]"
    assert shown[1].startswith("also: HTCondor cannot be asked from this host: ")
    assert "- on a host of the pool: vmjobs job why 3.0 --schedd submit.grid" in shown


def test_a_job_that_the_service_has_not_queued(service: Service, why: Run) -> None:
    has_job(service, a_job(JobState.QUEUED, ReasonCode.SUBMITTED, "accepted"))
    shown = why(ID, code=0).lines
    assert shown[0].endswith("has not submitted it to its schedd yet [NOT_DISPATCHED]")
    assert why("0" * 32).code == NotFound.exit_code


def test_ids_are_completed(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = JobPage(jobs=(a_job(JobState.QUEUED, ReasonCode.SUBMITTED),))
    service.says("GET /v1/jobs?state=QUEUED%2CHELD&limit=256", jobs)
    monkeypatch.setattr(
        "condor.cli.why.Schedd.query",
        lambda *_: [{"ClusterId": 3, "ProcId": 1}, {"ClusterId": 4, "ProcId": 0}],
    )
    context = click.Context(job_why.why)
    (parameter, *_) = job_why.why.params
    assert job_why.complete_job(context, parameter, "") == [ID, "3.1", "4.0"]
    assert job_why.complete_job(context, parameter, "3") == ["3.1"]


def test_where_nobody_answers_nothing_is_completed(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise Unavailable("schedd", "no")

    monkeypatch.setattr("condor.cli.why.Schedd.query", fail)
    assert job_why.complete_job(click.Context(job_why.why), job_why.why.params[0], "") == []


def test_bindings_are_not_imported() -> None:
    """Their import takes longer than the command; their calls block while a daemon hangs."""
    names = "{'htcondor2', 'classad2'}"
    code = f"import sys, condor.cli.why; sys.exit(bool({names} & sys.modules.keys()))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
