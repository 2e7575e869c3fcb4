"""Builds over the REST interface, the client library and the command line."""

from __future__ import annotations

import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import select

from repository.db.models import BuildRow
from tests.kit.api_site import Site
from tests.kit.builds import RECIPE
from tests.kit.cli import Run
from vmjobs.client.images import Images
from vmjobs.errors import BuildError, ImageRejected, VMJobsError
from vmjobs.wire import Build, BuildRequest, BuildState

pytestmark = pytest.mark.in_process

DIGEST = "sha256:" + "1" * 64


def body(recipe: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    return {"recipe": {**RECIPE, **(recipe or {})}, **more}


def test_asking_looking_and_canceling(site: Site) -> None:
    ada, eve = site.user(), site.user("eve")
    answer = ada("POST", "/v1/builds", json=body(name="muons"))
    assert answer.status_code == 202, answer.text
    made = answer.get_json()
    assert (made["state"], made["name"]) == ("QUEUED", "ada/muons:1")
    assert site.queue.builds == [made["id"]]
    assert ada("GET", answer.headers["Location"]).get_json() == made
    assert ada("GET", "/v1/builds").get_json() == {"builds": [made]}
    assert eve("GET", "/v1/builds").get_json() == {"builds": []}
    for method in ("GET", "DELETE"):
        eve.problem(404, method, f"/v1/builds/{made['id']}")
        eve.problem(404, method, f"/v1/builds/{made['id'][:8]}")
    assert site.admin()("GET", f"/v1/builds/{made['id'][:8]}").get_json() == made
    canceled = ada("DELETE", f"/v1/builds/{made['id'][:8]}")
    assert (canceled.status_code, canceled.get_json()["code"]) == (200, "CANCELED")
    other = ada("POST", "/v1/builds", json=body()).get_json()["id"]
    assert site.admin()("DELETE", f"/v1/builds/{other}").get_json()["code"] == "CANCELED"


def test_repeating_a_request(site: Site) -> None:
    ada = site.user()
    key = {"Idempotency-Key": "one"}
    first = ada("POST", "/v1/builds", json=body(), headers=key).get_json()
    assert ada("POST", "/v1/builds", json=body(), headers=key).get_json() == first
    problem = ada.problem(409, "POST", "/v1/builds", json=body(force=True), headers=key)
    assert problem["code"] == "IDEMPOTENCY_CONFLICT"
    assert site.queue.builds == [first["id"]]


def test_what_is_refused(site: Site) -> None:
    ada = site.user()
    problem = ada.problem(422, "POST", "/v1/builds", json=body({"epoch": -1, "suite": "A", "x": 1}))
    assert {e["field"] for e in problem["errors"]} == {"recipe.epoch", "recipe.suite", "recipe.x"}
    more: list[dict[str, Any]] = [{}, {"recipe": []}]
    for bad in (*more, body(visibility="secret"), body(surprise=1), body(name="A")):
        ada.problem(422, "POST", "/v1/builds", json=bad)
    deep: Any = []
    for _ in range(100):
        deep = [deep]
    ada.problem(422, "POST", "/v1/builds", json=body({"environment": deep}))
    needs = ada.problem(422, "POST", "/v1/builds", json=body({"needs_repository": True}))
    assert "site's own repository" in needs["detail"]
    ada.problem(403, "POST", "/v1/builds", json=body(namespace="library"))
    assert site.admin()("POST", "/v1/builds", json=body(namespace="library")).status_code == 202
    site.queue.down = True
    assert ada.problem(503, "POST", "/v1/builds", json=body())["service"] == "broker"
    site.agent("0" * 32).problem(403, "POST", "/v1/builds", json=body())
    site.agent("0" * 32).problem(403, "GET", "/v1/builds")
    for query in ("limit=0", "limit=x", "owner=eve"):
        ada.problem(422, "GET", f"/v1/builds?{query}")


@pytest.fixture
def shell(site: Site, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, typed: Run) -> Run:
    """``vmjobs image`` with ada's token."""
    token = tmp_path / "token"
    token.write_text(site.issuer.user_token("ada"))
    monkeypatch.setenv("VMJOBS_API_URL", url)
    monkeypatch.setenv("VMJOBS_TOKEN_FILE", str(token))
    monkeypatch.setenv("VMJOBS_CONFIG", "/dev/null")
    return partial(typed, "image")


def end(site: Site, build: str, error: VMJobsError | None = None) -> None:
    """Store the result of a build as a builder does."""
    work = site.repository.builds.begin(build)
    assert work is not None
    if error:
        site.repository.builds.fail(work, error)
    else:
        site.repository.builds.finish(work, DIGEST)


def test_following(site: Site, url: str) -> None:
    seen: list[Build] = []

    def look(build: Build) -> None:
        seen.append(build)
        if len(seen) == 1:
            end(site, build.id)

    with Images(url, site.issuer.user_token("ada")) as images:
        made = images.build(BuildRequest(recipe=RECIPE))
        done = images.follow_build(made.id, look)
        assert [b.state for b in seen] == [BuildState.QUEUED, BuildState.DONE]
        assert done == images.build_state(made.id) == images.builds()[0]


class Builder(threading.Thread):
    """Ends every requested build in the same way."""

    def __init__(self, site: Site, error: VMJobsError | None = None) -> None:
        super().__init__(daemon=True)
        self._site, self._error, self._over = site, error, threading.Event()

    def __enter__(self) -> None:
        self.start()

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self.join()

    def run(self) -> None:
        done = 0
        while not self._over.wait(0.05):
            for build in self._site.queue.builds[done:]:
                end(self._site, build, self._error)
                done += 1


def test_the_command_line_waits_and_prints_as_it_does_of_a_local_build(site: Site, shell: Run) -> None:
    with Builder(site):
        done = shell("build", "--remote", "generic", "python", "--public")
    assert done.code == 0, done.err
    assert done.lines == [f"ada/generic:1 {DIGEST}", f"ada/python:1 {DIGEST}"]
    assert {r.request["visibility"] for r in _rows(site)} == {"public"}


def _rows(site: Site) -> list[Any]:
    with site.repository.database.read() as session:
        return list(session.scalars(select(BuildRow)))


def test_a_failure_is_the_same_error_as_of_a_local_build(site: Site, shell: Run) -> None:
    for error in (BuildError("no boot; its output:\nalas"), ImageRejected("no", hint="yes")):
        with Builder(site, error):
            done = shell("build", "--remote", "generic")
        hint = f"  hint: {error.hint}\n" if error.hint else ""
        assert done.code == error.exit_code
        assert done.err.endswith(f"vmjobs: {error.message} [{error.code}]\n{hint}")
        site.queue.builds.clear()


def test_detached(site: Site, shell: Run, tmp_path: Path) -> None:
    mine = tmp_path / "muons.toml"
    mine.write_text('name = "muons"\nversion = "3"\nlayers = ["generic"]\n')
    done = shell("build", mine, "--remote", "--detach", "--name", "best", "--tag", "now")
    assert done.code == 0, done.err
    (build,) = site.queue.builds
    assert done.out == f"{build}\n"
    assert site.repository.builds.get(build).name == "ada/best:now"
    work = site.repository.builds.begin(build)
    assert work is not None
    assert (work.recipe.name, work.recipe.layers) == ("muons", ("generic", "muons"))
    site.repository.builds.finish(work, DIGEST)
    (shown,) = shell("builds", build, "--wait", "--json").json
    assert (shown["state"], shown["digest"]) == ("DONE", DIGEST)
    assert build in shell("builds").out


def test_canceling_on_the_command_line(site: Site, shell: Run) -> None:
    (build,) = shell("build", "--remote", "--detach", "--json", "generic").json
    canceled = shell("builds", "--cancel", build["id"])
    assert canceled.code == 0, canceled.err
    assert site.repository.builds.get(build["id"]).code == "CANCELED"


def test_options_that_do_not_go_together(shell: Run, site: Site) -> None:
    for options in (
        ["--remote", "--no-boot-test"],
        ["--remote", "--work-dir", "work"],
        ["--detach"],
        ["--public"],
        ["--name", "x"],
        ["--remote", "--name", "x:1", "--tag", "2"],
        ["--remote", "--name", "x", "python"],
    ):
        assert shell("build", "generic", *options).code == 2, options
    assert site.queue.builds == []
