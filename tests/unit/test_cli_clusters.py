"""``vmjobs cluster`` commands, against a fake of the service's API."""

from __future__ import annotations

import json
import os
import sys
import time
import tty
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import click
import pytest

from tests.kit.cli import Done, Run
from tests.kit.http_server import Handler, Scripted
from vmjobs.cli.cluster import wait, watch
from vmjobs.cli.cluster.common import changed_fields, complete_cluster, complete_vm_name
from vmjobs.cli.cluster.wait import has_settled
from vmjobs.cli.main import main
from vmjobs.cluster.failure_backoff import BackoffState
from vmjobs.cluster.spec import ClusterSpec, SizeRange
from vmjobs.cluster.vm_state import ClusterVmCode, ClusterVmState, Goal
from vmjobs.cluster.wire import (
    ApplyOutcome,
    Assessment,
    Cluster,
    ClusterBackoff,
    ClusterVm,
    FailedGeneration,
)
from vmjobs.errors import Conflict
from vmjobs.model import Node
from vmjobs.wire import ImageDetail, Visibility

IMAGE = f"sha256:{'1' * 64}"
NEW_IMAGE = f"sha256:{'2' * 64}"
NOW = datetime.now(UTC)
DECLARED = "name: workers\nimage: worker\nsize: 2\n"
TRIXIE = "Debian GNU/Linux 13 (trixie)"
TAKES_JOBS = "a probe job ran in the VM; it accepts jobs"
SPEC = ClusterSpec(name="workers", image="worker", size=2)
FINE = Assessment(placed={"node1": 2}, pending=0)


FAILED = FailedGeneration(
    generation=4,
    spec=SPEC.model_copy(update={"image": "broken"}),
    image=NEW_IMAGE,
    message="generation 4 failed (workers-2 failed 3 times: KERNEL_PANIC): back to generation 3",
    since=NOW,
)


def vm(number: int, state: ClusterVmState = ClusterVmState.UP, **fields: Any) -> ClusterVm:
    made: dict[str, Any] = {
        "id": f"{number:032x}",
        "name": f"workers-{number}",
        "node": "node1",
        "goal": Goal.RUN,
        "image": IMAGE,
        "generation": 1,
        "incarnation": 1,
        "since": datetime.now(UTC) - timedelta(minutes=5),
    }
    return ClusterVm(**{**made, "state": state, **fields})


def cluster(*vms: ClusterVm, spec: ClusterSpec = SPEC, **fields: Any) -> Cluster:
    made: dict[str, Any] = {
        "name": spec.name,
        "owner": "root",
        "spec": spec,
        "image": IMAGE,
        "generation": 1,
        "target": spec.range.min,
        "up": sum(m.state is ClusterVmState.UP for m in vms),
        "members": vms,
        "created": NOW,
        "updated": NOW,
    }
    return Cluster(**{**made, **fields})


Answer = tuple[int, Any]


@dataclass
class Service:
    """Fake API: gives each request's answers in turn, then repeats the last one."""

    answers: dict[str, list[Answer]] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)
    bodies: list[Any] = field(default_factory=list)

    def says(self, request: str, *bodies: Any, status: int = 200) -> None:
        self.answers[request] = [(status, body) for body in bodies]

    def has(self, *clusters: Cluster) -> None:
        """Have a cluster ``workers``; more: as it is later."""
        self.says("GET /v1/clusters/workers", *clusters)

    def applies(self, outcome: ApplyOutcome, **fields: Any) -> None:
        self.says("PUT /v1/clusters/workers", {"outcome": outcome, "cluster": cluster(**fields)})

    def refuses(
        self, request: str, status: int, code: str, text: str, *faults: tuple[str, str]
    ) -> None:
        errors = [{"field": name, "code": "x", "message": said} for name, said in faults]
        problem = {"title": "no", "status": status, "code": code, "detail": text, "errors": errors}
        self.answers[request] = [(status, problem)]

    def answer(self, request: str) -> Answer:
        self.asked.append(request)
        given = self.answers.get(request)
        if given is None:
            return 404, {"title": "no", "status": 404, "code": "NOT_FOUND", "detail": "not here"}
        return given.pop(0) if len(given) > 1 else given[0]

    def serve(self, handler: Handler, _: int) -> None:
        if handler.body:
            self.bodies.append(json.loads(handler.body))
        status, body = self.answer(f"{handler.command} {handler.path}")
        first = int(handler.headers.get("Range", "bytes=0-")[6:-1])
        if first and isinstance(body, bytes):
            status, body = (206, body[first:]) if first < len(body) else (416, b"")
        handler.document(status, body)


@pytest.fixture
def service(server: Scripted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Service:
    service = Service()
    service.says("POST /v1/cluster-assessments", FINE)
    server.script = service.serve
    (tmp_path / "token").write_text("secret")
    (tmp_path / "c.yaml").write_text(DECLARED)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("VMJOBS_API_URL", server.url)
    monkeypatch.setenv("VMJOBS_TOKEN_FILE", str(tmp_path / "token"))
    monkeypatch.setattr(wait, "FIRST_POLL_SECONDS", 0.01)
    monkeypatch.setattr(wait, "LAST_POLL_SECONDS", 0.01)
    monkeypatch.setattr(watch, "LAST_POLL_SECONDS", 0.01)
    return service


@pytest.fixture
def vmjobs(service: Service, typed: Run) -> Run:
    def run(*words: str, noun: str = "cluster", stdin: str = "") -> Done:
        return typed(noun, *words, stdin=stdin)

    return run


def test_changes_are_told_field_by_field() -> None:
    old = SPEC.model_copy(update={"attributes": {"A": 1, "B": "x"}})
    new = ClusterSpec(
        name="workers", image="worker:2", size=SizeRange(min=1, max=2), attributes={"A": True, "C": 2.5}
    )
    assert [str(change) for change in changed_fields(cluster(spec=old), new, IMAGE)] == [
        "image: worker -> worker:2",
        'size: 2 -> {"min": 1, "max": 2}',
        "attributes.A: 1 -> true",
        "attributes.C: none -> 2.5",
        "attributes.B: x -> none",
    ]


def test_a_name_that_means_another_image_by_now_is_a_change() -> None:
    broken = FAILED.spec
    assert changed_fields(cluster(failed=FAILED), broken, NEW_IMAGE) == []
    assert [c.field for c in changed_fields(cluster(failed=FAILED), SPEC, IMAGE)] == ["image"]
    (change,) = changed_fields(cluster(), SPEC, NEW_IMAGE)
    assert str(change) == "image: worker (111111111111) -> worker (222222222222)"
    assert changed_fields(cluster(), SPEC, IMAGE) == []


def test_apply_creates(service: Service, vmjobs: Run) -> None:
    service.applies(ApplyOutcome.CREATED)
    done = vmjobs("apply", "c.yaml")
    assert (done.code, done.out) == (0, "workers created, 2 VMs of worker\n")
    assert service.bodies[-1]["size"] == 2


def test_apply_says_what_it_changed(service: Service, vmjobs: Run) -> None:
    service.has(cluster(spec=SPEC.model_copy(update={"memory": 512})))
    service.applies(ApplyOutcome.CHANGED)
    assert vmjobs("apply", "c.yaml").out == "workers changed\n  memory: 512 -> 1024\n"
    service.applies(ApplyOutcome.UNCHANGED)
    assert vmjobs("apply", "c.yaml").out == "workers unchanged\n"
    (found,) = json.loads(vmjobs("apply", "--json", "c.yaml").out)
    assert (found["outcome"], found["changes"]) == ("unchanged", [])
    assert found["cluster"]["name"] == "workers"


def test_nothing_is_applied_if_the_service_finds_a_fault(service: Service, vmjobs: Run) -> None:
    Path("d.yaml").write_text("image: worker\nname: other\nsize: 1\n")
    faults = (("spec.image", "there is no image 'worker'"), ("pool", "there is no pool"))
    service.refuses("POST /v1/cluster-assessments", 422, "INVALID_SPEC", "has faults", *faults)
    done = vmjobs("apply", "c.yaml", "d.yaml")
    assert done.code == 64
    assert "c.yaml:2:1: image: there is no image 'worker'" in done.err
    assert "c.yaml:1:1: pool: there is no pool" in done.err
    assert "d.yaml:1:1: image: there is no image 'worker'" in done.err
    assert not any(request.startswith("PUT") for request in service.asked)


def test_apply_waits_until_all_are_up(service: Service, vmjobs: Run) -> None:
    service.applies(ApplyOutcome.CREATED)
    service.has(
        cluster(),
        cluster(vm(0, ClusterVmState.BOOTING), vm(1, ClusterVmState.STAGING)),
        cluster(vm(0), vm(1, ClusterVmState.PROBING)),
        cluster(vm(0), vm(1)),
    )
    done = vmjobs("apply", "--wait", "c.yaml")
    assert done.code == 0
    assert "workers-0 BOOTING on node1\nworkers-1 STAGING on node1\nworkers-0 UP on node1" in done.err


def test_apply_says_why_not_all_are_up_in_time(service: Service, vmjobs: Run) -> None:
    failed = {"code": ClusterVmCode.BOOT_FAILED, "message": "no init found\nmore of it"}
    service.applies(ApplyOutcome.CREATED)
    waiting = cluster(vm(0), vm(1, ClusterVmState.BACKOFF, **failed))
    service.has(waiting)
    done = vmjobs("apply", "--wait", "--timeout", "0.2", "c.yaml")
    assert done.code == 124
    assert "workers: 1 of 2 UP (1 BACKOFF)" in done.err
    assert "  workers-1 BACKOFF on node1: BOOT_FAILED: no init found\n" in done.err


@pytest.mark.parametrize(
    "words",
    [
        ("apply", "c.yaml"),
        ("scale", "workers", "2"),
        ("upgrade", "workers", "worker"),
        ("retry", "workers"),
        ("drain", "workers"),
        ("delete", "--now", "workers"),
    ],
    ids=lambda words: words[0],
)
def test_nobody_is_waited_for_for_ever_unasked(
    service: Service, vmjobs: Run, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]
) -> None:
    over = words[0] in {"drain", "delete"}
    state = ClusterVmState.DRAINING if over else ClusterVmState.PENDING
    why = {"code": ClusterVmCode.NO_ROOM, "message": "no node has room", "busy": over}
    there = cluster(vm(0, state, **why), draining=over)
    service.applies(ApplyOutcome.CHANGED)
    for request in ("GET", "DELETE"):
        service.says(f"{request} /v1/clusters/workers{'?mode=now' * (request == 'DELETE')}", there)
    for verb in ("scale", "retry", "drain"):
        service.says(f"POST /v1/clusters/workers/{verb}", there)
    clock = iter(range(0, 10_000, 100))
    monkeypatch.setattr(time, "monotonic", lambda: float(next(clock)))
    done = vmjobs(*words, "--wait")
    assert done.code == 124
    assert "after 1800 s: workers: " in done.err
    assert f"  workers-0 {state} on node1: NO_ROOM: no node has room" in done.err
    assert "`vmjobs cluster show workers`" in done.err
    assert len([request for request in service.asked if request == "GET /v1/clusters/workers"]) > 2


def test_drain_and_delete_wait_until_vms_have_ended(service: Service, vmjobs: Run) -> None:
    draining = cluster(vm(0, ClusterVmState.DRAINING, busy=True), draining=True)
    service.says("POST /v1/clusters/workers/drain", draining)
    service.has(draining, cluster(vm(0, ClusterVmState.GONE), draining=True))
    done = vmjobs("drain", "workers", "--wait")
    assert (done.code, done.out) == (0, "workers is draining: 1 VM up, 1 of them with jobs\n")
    assert "workers-0 GONE on node1" in done.err
    service.has(draining, cluster(vm(0)))
    done = vmjobs("drain", "workers", "--wait")
    assert done.code == Conflict.exit_code
    assert "workers was resumed" in done.err
    deleting = cluster(vm(0, ClusterVmState.STOPPING), deleting=True)
    service.says("DELETE /v1/clusters/workers?mode=now", deleting)
    another = cluster(vm(0), created=NOW + timedelta(seconds=1))
    service.has(deleting, deleting, another)
    assert vmjobs("delete", "--now", "workers", "--wait", "--timeout", "5").code == 0


def test_a_command_waits_for_ever_where_it_is_told_to(service: Service, vmjobs: Run) -> None:
    service.has(cluster(), cluster(), cluster(vm(0), vm(1)))
    service.says("POST /v1/clusters/workers/retry", cluster())
    assert vmjobs("retry", "workers", "--wait", "--timeout", "inf").code == 0


def test_what_failed_is_said_and_not_waited_for(service: Service, vmjobs: Run) -> None:
    service.applies(ApplyOutcome.UNCHANGED, failed=FAILED)
    service.has(cluster(vm(0), vm(1), failed=FAILED))
    hint = "fix the declaration, or retry it: `vmjobs cluster retry workers`"
    assert vmjobs("apply", "c.yaml").out == f"workers unchanged\n  {FAILED.message}; {hint}\n"
    done = vmjobs("apply", "--wait", "c.yaml")
    assert done.code == Conflict.exit_code
    assert FAILED.message in done.err
    service.says("POST /v1/clusters/workers/scale", cluster(failed=FAILED))
    assert vmjobs("scale", "workers", "2", "--wait").code == 0


def test_apply_does_not_wait_for_a_cluster_that_is_drained(service: Service, vmjobs: Run) -> None:
    service.applies(ApplyOutcome.UNCHANGED)
    service.has(cluster(draining=True))
    done = vmjobs("apply", "--wait", "c.yaml")
    assert done.code == 65
    assert "vmjobs cluster resume workers" in done.err


@pytest.mark.parametrize(
    ("vms", "is_settled"),
    [
        ((vm(0), vm(1)), True),
        ((vm(0),), False),
        ((vm(0), vm(1, generation=2)), False),
        ((vm(0, goal=Goal.DRAIN), vm(1)), False),
        ((vm(0), vm(1), vm(2, ClusterVmState.LOST)), True),
        ((vm(0), vm(1), vm(2, ClusterVmState.DRAINING, goal=Goal.DRAIN)), True),
        ((vm(0), vm(1, ClusterVmState.JOINING)), False),
    ],
)
def test_settled_is_as_many_up_as_wanted_as_they_are_declared(
    vms: tuple[ClusterVm, ...], is_settled: bool
) -> None:
    assert has_settled(cluster(*vms)) is is_settled


def test_diff_exits_as_diff_does(service: Service, vmjobs: Run) -> None:
    service.says("GET /v1/images/worker", image_detail(IMAGE))
    done = vmjobs("diff", "c.yaml")
    assert (done.code, done.out) == (1, "workers would be created\n")
    service.has(cluster())
    done = vmjobs("diff", "c.yaml")
    assert (done.code, done.out) == (0, "")
    service.says("GET /v1/images/worker", image_detail(NEW_IMAGE))
    Path("c.yaml").write_text(f"{DECLARED}site: grid\n")
    done = vmjobs("diff", "c.yaml")
    assert done.code == 1
    assert done.out.splitlines() == [
        "workers would be changed",
        "  image: worker (111111111111) -> worker (222222222222)",
        '  site: "" -> grid',
    ]
    (found,) = json.loads(vmjobs("diff", "--json", "c.yaml").out)
    assert found["changes"][1] == {"field": "site", "old": "", "new": "grid"}
    assert not any(not request.startswith("GET") for request in service.asked)


def image_detail(digest: str) -> ImageDetail:
    about = {"owner": "root", "created": NOW, "size": 1, "stored": 1, "manifest": {}}
    return ImageDetail(digest=digest, visibility=Visibility.PUBLIC, **about)


def test_validate_tells_where_there_is_room(service: Service, vmjobs: Run) -> None:
    done = vmjobs("validate", "c.yaml")
    assert done.out == "c.yaml: workers: valid; there is room for 2 VMs (2 on node1)\n"
    scarce = Assessment(placed={"node1": 1}, pending=1, why="no node has room")
    service.says("POST /v1/cluster-assessments", scarce)
    done = vmjobs("validate", "c.yaml")
    assert done.code == 0
    assert "room for 1 VM (1 on node1); 1 would be PENDING: no node has room" in done.out
    done = vmjobs("validate", "--capacity", "c.yaml")
    assert done.code == 64
    assert "c.yaml:3:1: size: 1 VM would be PENDING: no node has room" in done.err


def test_validate_as_json_has_the_places(service: Service, vmjobs: Run) -> None:
    service.refuses("POST /v1/cluster-assessments", 422, "INVALID_SPEC", "no", ("image", "no such"))
    done = vmjobs("validate", "--json", "c.yaml")
    assert done.code == 64
    (finding,) = json.loads(done.out)["findings"]
    assert (finding["line"], finding["column"], finding["field"]) == (2, 1, "image")


def test_validate_without_a_service(vmjobs: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VMJOBS_TOKEN_FILE", "/nowhere")
    done = vmjobs("validate", "c.yaml")
    assert done.code == 77
    assert vmjobs("validate", "--offline", "c.yaml").code == 0
    Path("c.yaml").write_text(f"{DECLARED}cpu: 2\n")
    done = vmjobs("validate", "c.yaml")
    assert done.code == 64
    assert "c.yaml:4:1: cpu: there is no such field; did you mean cpus?" in done.err
    assert "the service was not asked" in done.err


def running(**fields: Any) -> ClusterVm:
    since = NOW - timedelta(hours=2)
    return vm(0, up_since=since, busy=True, jobs=7, hypervisor="uml", system=TRIXIE, **fields)


def test_show_has_a_line_for_each_vm(service: Service, vmjobs: Run) -> None:
    retry = datetime.now(UTC) + timedelta(seconds=99)
    failed = {"code": ClusterVmCode.KERNEL_PANIC, "message": "no root", "retry": retry}
    old = vm(1, ClusterVmState.BACKOFF, **failed)
    service.has(cluster(running(), old, generation=2))
    done = vmjobs("show", "workers")
    assert done.code == 0
    lines = done.lines
    assert "VMs 1 UP of 2 (size 2)" in lines
    assert {"image worker", f"sha256 {'1' * 64}"} <= set(lines)
    short = "111111111111 (generation 1)"
    assert f"workers-0 node1 UP 2 h 7, busy uml {short} {TRIXIE}" in lines
    (second,) = [line for line in lines if line.startswith("workers-1")]
    assert second.startswith(
        f"workers-1 node1 BACKOFF 5 min 0 - {short} - KERNEL_PANIC: no root (again in 9"
    )
    assert json.loads(vmjobs("show", "--json", "workers").out)["generation"] == 2


@pytest.mark.parametrize(
    ("columns", "lines"),
    [
        (80, ["", f"    {TRIXIE}; {TAKES_JOBS}"]),
        (110, [f"  {TRIXIE}", f"    {TAKES_JOBS}"]),
        (160, [f"  {TRIXIE}  {TAKES_JOBS}"]),
    ],
)
def test_show_fits_a_terminal(
    service: Service, vmjobs: Run, monkeypatch: pytest.MonkeyPatch, columns: int, lines: list[str]
) -> None:
    service.has(cluster(running(message=TAKES_JOBS)))
    monkeypatch.setenv("FORCE_COLOR", "1")  # as on a terminal
    monkeypatch.setenv("COLUMNS", str(columns))
    out = click.unstyle(vmjobs("show", "workers").out).splitlines()
    assert max(map(len, out)) <= columns
    lines[0] = f"workers-0  node1  UP     2 h  7, busy  uml  111111111111{lines[0]}"
    assert [line.rstrip() for line in out][-len(lines) :] == lines


def test_show_says_what_failed_and_where_nothing_is_tried(service: Service, vmjobs: Run) -> None:
    guard = ClusterBackoff(
        image=IMAGE,
        node="node1",
        state=BackoffState.CLOSED,
        failures=3,
        code=ClusterVmCode.BOOT_TIMED_OUT,
        message="node1: 3 machines failed there; next try at 12:34:56 UTC",
    )
    failed = FAILED.model_copy(update={"since": datetime.now(UTC) - timedelta(minutes=5)})
    service.has(cluster(vm(0), failed=failed, guards=(guard,)))
    lines = vmjobs("show", "workers").lines
    assert "cluster workers (generation 4 failed)" in lines
    assert f"failed {FAILED.message}; 5 min ago, broken" in lines
    assert f"guard {guard.message}" in lines


ESCAPE = "\x1b]0;yours\x07\x9b2J\u202e[/red]"
JOB = {
    "id": "1" * 32,
    "array": "2" * 32,
    "index": 0,
    "count": 1,
    "owner": "ada",
    "spec": {"image": "own", "strategy": "image", "name": ESCAPE},
    "image_digest": IMAGE,
    "state": "FAILED",
    "reason": {"code": "SCRIPT_FAILED", "message": ESCAPE, "actor": "user"},
    "created": NOW.isoformat(),
    "updated": NOW.isoformat(),
    "node": ESCAPE,
    "outputs": [{"path": "[/red]", "size": 1, "digest": IMAGE}],
    "rejected": [{"path": ESCAPE, "why": ESCAPE}],
}


@pytest.mark.parametrize(
    ("noun", "words"),
    [
        *(("job", [verb, JOB["id"]]) for verb in ("status", "wait", "outputs", "log", "why")),
        ("job", ["list"]),
        ("node", ["list"]),
        ("image", ["builds", "--wait", "3" * 32]),
        ("cluster", ["scale", "workers", "2", "--wait", "--timeout", "0.1"]),
    ],
)
def test_what_others_say_is_shown_and_not_obeyed(
    service: Service, vmjobs: Run, noun: str, words: list[str]
) -> None:
    job, why = f"/v1/jobs/{JOB['id']}", JOB["reason"]
    event = {"seq": 1, "time": NOW.isoformat(), "state": "FAILED", "reason": why}
    build = {
        **{"id": "3" * 32, "name": ESCAPE, "step": ESCAPE, "state": "FAILED", "message": ESCAPE},
        **{"owner": "ada", "created": NOW.isoformat(), "updated": NOW.isoformat(), "code": "X"},
    }
    service.says(f"GET {job}", JOB)
    service.says(f"GET {job}/events?after=0", {"events": [event]})
    service.says("GET /v1/jobs?limit=256", {"jobs": [JOB], "next": ""})
    service.says("GET /v1/nodes", {"detail": ESCAPE, "title": "", "status": 403}, status=403)
    service.says(f"GET /v1/builds/{'3' * 32}", build)
    up = vm(0, ClusterVmState.BACKOFF, message=ESCAPE, system=ESCAPE, node=ESCAPE)
    service.has(cluster(up))
    service.says("POST /v1/clusters/workers/scale", cluster(up))
    done = vmjobs(*words, noun=noun)
    said = done.out + done.err
    assert "yours" in said, said
    assert all(char.isprintable() or char in "\n\t" for char in said)


@pytest.mark.parametrize("command", [["job", "out"], ["cluster", "console"]])
def test_a_terminal_obeys_nothing_of_what_a_guest_prints_and_a_file_has_all_of_it(
    service: Service, monkeypatch: pytest.MonkeyPatch, command: list[str]
) -> None:
    noun, verb = command
    printed = f"50%\r100%\t\N{GREEK SMALL LETTER MU}\r\n{ESCAPE}\n".encode() + b"\xff\n"
    service.says(f"GET /v1/jobs/{JOB['id']}/{verb}", printed)
    service.has(cluster(vm(0)))
    service.says("GET /v1/clusters/workers/members/workers-0/console?incarnation=1", printed)
    whose = [str(JOB["id"])] if noun == "job" else ["workers", "workers-0"]
    said = {}
    for kind, (reader, writer) in {"pipe": os.pipe(), "terminal": os.openpty()}.items():
        os.set_blocking(reader, False)
        if kind == "terminal":
            tty.setraw(writer)
        with os.fdopen(writer, "w") as stdout, monkeypatch.context() as patch:
            patch.setattr(sys, "stdout", stdout)
            with pytest.raises(SystemExit):
                main([noun, verb, *whose])
            stdout.flush()
            said[kind] = os.read(reader, 4096)
        os.close(reader)
    assert said["pipe"] == printed
    shown = said["terminal"].decode()
    assert shown.startswith("50%\r100%\t\N{GREEK SMALL LETTER MU}\r\n")
    assert "yours" in shown
    assert all(char.isprintable() or char in "\n\t\r" for char in shown)


def test_list_has_a_line_for_each_cluster(service: Service, vmjobs: Run) -> None:
    other = ClusterSpec(name="other", image="hep", size=SizeRange(min=1, max=4))
    rows = [cluster(vm(0)), cluster(spec=other, draining=True)]
    service.says("GET /v1/clusters", {"clusters": rows})
    lines = vmjobs("list").lines
    assert lines[1].startswith("workers worker 2 2 1 root")
    assert lines[2].startswith("other hep 1 to 4 1 0 draining root")


def event(seq: int, text: str) -> dict[str, Any]:
    return {"member": "workers-0", "state": "UP", "code": "PROGRESS", "seq": seq, "message": text} | {
        "time": NOW.isoformat()
    }


def test_events_are_followed_until_the_cluster_has_gone(service: Service, vmjobs: Run) -> None:
    service.says("GET /v1/clusters/workers/events?after=0", {"events": [event(1, "one")]})
    assert "one" in vmjobs("events", "workers").out
    service.says(
        "GET /v1/clusters/workers/events?after=1", {"events": []}, {"events": [event(2, "two")]}
    )
    done = vmjobs("events", "-f", "--json", "workers")
    assert done.code == 0
    assert [json.loads(line)["message"] for line in done.out.splitlines()] == ["one", "two"]


CONSOLE = "GET /v1/clusters/workers/members/workers-0/console?incarnation="


def test_console_is_followed_over_a_restart(service: Service, vmjobs: Run) -> None:
    service.has(cluster(vm(0)))
    service.says(f"{CONSOLE}1", b"first boot\n")
    assert vmjobs("console", "workers", "0").out == "first boot\n"
    service.has(
        cluster(vm(0)),
        cluster(vm(0, ClusterVmState.BOOTING, incarnation=2)),
        cluster(),
    )
    service.says(f"{CONSOLE}1", b"first\n", b"first\npanic\n")
    service.says(f"{CONSOLE}2", b"second\n")
    done = vmjobs("console", "-f", "workers", "workers-0")
    assert (done.code, done.out) == (0, "first\npanic\nsecond\n")
    assert "was restarted" in done.err


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        ("diff c.yaml", 64, "c.yaml:2:1: image: not here"),
        ("show others", 66, "not here"),
        ("console workers 7", 66, "workers has no VM workers-7"),
        ("upgrade workers image!", 64, "image"),
        ("scale workers 1001", 2, "1001"),
        ("retry workers --wait --timeout -1", 2, "-1"),
        ("validate --offline --capacity c.yaml", 2, "--offline"),
    ],
)
def test_what_cannot_be_changes_nothing(
    service: Service, vmjobs: Run, words: str, code: int, said: str
) -> None:
    service.has(cluster(vm(0)))
    done = vmjobs(*words.split())
    assert (done.code, said in done.err) == (code, True), done.err
    assert all(request.startswith("GET") for request in service.asked)


def test_scale_and_drain_and_resume(service: Service, vmjobs: Run) -> None:
    service.has(cluster())
    service.says("POST /v1/clusters/workers/scale", cluster(target=5))
    assert vmjobs("scale", "workers", "5").out == "workers: 2 -> 5 VMs\n"
    assert service.bodies == [{"size": 5}]
    service.says("POST /v1/clusters/workers/drain", cluster(vm(0, busy=True), vm(1)))
    assert vmjobs("drain", "workers").out == "workers is draining: 2 VMs up, 1 of them with jobs\n"
    service.says("POST /v1/clusters/workers/resume", cluster(vm(0)))
    assert vmjobs("resume", "workers").out == "workers is resumed: 2 VMs wanted, 1 UP\n"


def test_upgrade_declares_another_image_and_nothing_else(service: Service, vmjobs: Run) -> None:
    spec = SPEC.model_copy(update={"attributes": {"A": True}, "memory": 512})
    service.has(cluster(spec=spec))
    new = spec.model_copy(update={"image": "worker:2"})
    service.applies(ApplyOutcome.CHANGED, spec=new, image=NEW_IMAGE)
    done = vmjobs("upgrade", "workers", "worker:2")
    assert done.out == ("workers changed\n  image: worker (111111111111) -> worker:2 (222222222222)\n")
    assert service.bodies == [new.model_dump(mode="json")]


def test_delete_asks_where_vms_are_up(service: Service, vmjobs: Run) -> None:
    there = cluster(vm(0, busy=True), vm(1))
    service.has(there)
    service.says("DELETE /v1/clusters/workers?mode=drain", there)
    service.says("DELETE /v1/clusters/workers?mode=now", there)
    done = vmjobs("delete", "workers", stdin="n\n")
    assert done.code == 1
    assert "workers: 2 VMs up, 1 of them with jobs. Delete it once its jobs have ended?" in done.err
    assert not any(request.startswith("DELETE") for request in service.asked)
    assert vmjobs("delete", "workers").code == 1  # no answer
    done = vmjobs("delete", "workers", stdin="y\n")
    assert done.out.endswith("workers is deleted; 2 VMs will stop once their jobs have ended\n")
    assert service.asked[-1].endswith("mode=drain")
    assert vmjobs("delete", "--now", "workers").out.endswith("2 VMs will stop at once\n")
    assert vmjobs("delete", "--yes", "workers").code == 0
    assert service.asked[-1].endswith("mode=drain")
    service.has(cluster())  # no question if no VM is up
    service.says("DELETE /v1/clusters/workers?mode=drain", cluster(deleting=True))
    assert vmjobs("delete", "workers").out == "workers is deleted\n"


def node(name: str, **offered: int) -> Node:
    return Node(name=name, cpus=8, memory=8192, disk=1, updated=NOW, **offered)


OFFER = node("node1", cluster_cpus=4, cluster_memory=4096)


def test_nodes_show_what_they_have_for_clusters(service: Service, vmjobs: Run) -> None:
    service.says("GET /v1/nodes", {"nodes": [OFFER, node("node2")]})
    service.says("GET /v1/nodes/node1", OFFER)
    service.says("GET /v1/clusters", {"clusters": [cluster()]})
    there = [
        vm(0),
        vm(1),
        vm(2, ClusterVmState.GONE),
        vm(3, ClusterVmState.PENDING, node=""),
    ]
    service.has(cluster(*there))
    done = vmjobs("list", noun="node")
    assert "2 of 4 cpus, 2048 of 4096 MiB" in done.lines[1]
    assert done.lines[2].startswith("node2 none 8 8192 MiB 0 0 - ")
    lines = vmjobs("show", "node1", noun="node").lines
    assert {"cluster VM workers-0", "cluster VM workers-1"} <= set(lines)
    assert "cluster VM workers-2" not in lines


def test_nodes_are_shown_to_those_who_may_not_see_clusters(service: Service, vmjobs: Run) -> None:
    service.says("GET /v1/nodes", {"nodes": [OFFER]})
    service.refuses("GET /v1/clusters", 403, "FORBIDDEN", "not for you")
    done = vmjobs("list", noun="node")
    assert done.code == 0
    assert "0       4 cpus, 4096 MiB  " in done.out


def test_names_are_completed(service: Service) -> None:
    context = click.Context(click.Command("show"))
    parameter = click.Argument(["name"])
    rows = [cluster(), cluster(spec=ClusterSpec(name="other", image="hep", size=1))]
    service.says("GET /v1/clusters", {"clusters": rows})
    assert complete_cluster(context, parameter, "w") == ["workers"]
    service.has(cluster(vm(0), vm(1)))
    context.params["name"] = "workers"
    assert complete_vm_name(context, parameter, "") == ["workers-0", "workers-1"]
    service.answers.clear()
    assert complete_cluster(context, parameter, "w") == []
    assert complete_vm_name(context, parameter, "") == []


def test_the_service_is_asked_where_it_is(service: Service, vmjobs: Run) -> None:
    vmjobs("show", "a/../b")
    assert [urlsplit(line.split()[1]).path for line in service.asked] == ["/v1/clusters/a%2F..%2Fb"]


AD = """MyType = "Machine"
Name = "slot1@workers.offline.vc"
vmjobscluster = "workers"
Start = (TARGET.VMJobsCluster = "others")
Said = "VMJobsCluster = \\"others\\""
Offline = true
"""


def test_wake_takes_the_clusters_name_from_a_machines_ad(service: Service, vmjobs: Run) -> None:
    service.says("POST /v1/clusters/workers/wake", b"", status=204)
    done = vmjobs("wake", stdin=AD)
    assert (done.code, done.out, done.err) == (0, "", "")
    assert service.asked == ["POST /v1/clusters/workers/wake"]
    service.refuses("POST /v1/clusters/workers/wake", 403, "FORBIDDEN", "the token is too narrow")
    done = vmjobs("wake", stdin=AD)
    assert (done.code, "the token is too narrow" in done.err) == (77, True)


@pytest.mark.parametrize(
    ("ad", "said"),
    [
        ("", "has VMJobsCluster 0 times, not once"),
        ("\0\xff" * 1000, "has VMJobsCluster 0 times, not once"),
        ("VMJobsCluster = workers\n", "has VMJobsCluster 0 times, not once"),
        ('XVMJobsCluster = "workers"\n', "has VMJobsCluster 0 times, not once"),
        (AD + 'VMJobsCluster = "others"\n', "has VMJobsCluster 2 times, not once"),
        ('VMJobsCluster = "../jobs"\n', "has a VMJobsCluster that is not a cluster's name"),
        (f'VMJobsCluster = "{"a" * 33}"\n', "has a VMJobsCluster that is not a cluster's name"),
        (AD + "x" * (1 << 20), "has more than 1048576 bytes"),
    ],
)
def test_wake_takes_nothing_else_from_it(service: Service, vmjobs: Run, ad: str, said: str) -> None:
    done = vmjobs("wake", stdin=ad)
    assert done.code == 64
    assert f"the machine's ad on standard input {said}" in " ".join(done.err.split())
    assert service.asked == []
