"""A fake of the service's API, for ``vmjobs cluster`` commands, and the clusters that it has."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from tests.kit.cli import Done, Run
from tests.kit.http_server import Handler, Scripted
from vmjobs.cli.cluster import wait, watch
from vmjobs.cluster.spec import ClusterSpec
from vmjobs.cluster.vm_state import ClusterVmState, Goal
from vmjobs.cluster.wire import ApplyOutcome, Assessment, Cluster, ClusterVm, FailedGeneration
from vmjobs.wire import ImageDetail, Visibility

IMAGE = f"sha256:{'1' * 64}"
NEW_IMAGE = f"sha256:{'2' * 64}"
NOW = datetime.now(UTC)
DECLARED = "name: workers\nimage: worker\nsize: 2\n"
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


def image_detail(digest: str = IMAGE, visibility: Visibility = Visibility.PUBLIC) -> ImageDetail:
    about = {"owner": "root", "created": NOW, "size": 1, "stored": 1, "manifest": {}}
    return ImageDetail(digest=digest, visibility=visibility, **about)


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
    def run(*words: str, noun: str = "cluster", **how: Any) -> Done:
        return typed(noun, *words, **how)

    return run
