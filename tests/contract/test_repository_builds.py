"""Builds in the repository: who may ask for what, and that each is worked on once."""

from __future__ import annotations

import json
from datetime import timedelta
from typing import Any

import pytest
from repository_kit import Ledger, dispatcher
from sqlalchemy import update

from images import recipe as recipes
from repository.broker import BUILD_QUEUE, Publisher
from repository.builds import AGAIN, CANCELED, LOST, MAX_ACTIVE, Superseded, lock_name, patience
from repository.images import LIBRARY, Viewer
from repository.models import BuildRow
from repository.service import Repository
from repository.tasks import make_celery
from vmjobs.config import Config
from vmjobs.errors import (
    BuildError,
    Conflict,
    Forbidden,
    IdempotencyConflict,
    InvalidRequest,
    NotFound,
    PayloadTooLarge,
    Unavailable,
)
from vmjobs.model import now
from vmjobs.wire import Build, BuildRequest, BuildState, Visibility

pytestmark = pytest.mark.in_process

ADA = Viewer("ada")
DIGEST = "sha256:" + "1" * 64
RECIPE = recipes.load("generic").model_dump(mode="json")


def wish(recipe: dict[str, Any] | None = None, **changes: Any) -> BuildRequest:
    return BuildRequest.model_validate({"recipe": {**RECIPE, **(recipe or {})}, **changes})


def create(repository: Repository, viewer: Viewer = ADA, **changes: Any) -> Build:
    return repository.builds.create(viewer, wish(**changes))


def test_from_beginning_to_end(repository: Repository) -> None:
    builds = repository.builds
    sent: list[str] = []
    made = builds.create(ADA, wish(visibility="public", force=True), publish=sent.append)
    assert (made.state, made.owner, made.name, made.progress) == (
        BuildState.QUEUED,
        "ada",
        "ada/generic:1",
        0,
    )
    assert sent == [made.id]
    work = builds.begin(made.id)
    assert work is not None
    assert (work.owner, work.name, work.tags) == (ADA, "generic", ("1", "latest"))
    assert work.recipe == recipes.load("generic")
    assert (work.visibility, work.force) == (Visibility.PUBLIC, True)
    builds.progress(work, BuildState.TESTING, "boot test on uml", 0.7251)
    shown = builds.get(made.id, "ada")
    assert (shown.state, shown.step) == (BuildState.TESTING, "boot test on uml")
    assert shown.progress == pytest.approx(0.725)
    for _ in range(2):
        builds.finish(work, DIGEST)
    done = builds.get(made.id)
    assert (done.state, done.digest, done.progress) == (BuildState.DONE, DIGEST, 1)
    assert done.updated >= done.created
    assert builds.begin(made.id) is None
    with pytest.raises(Superseded):
        builds.fail(work, BuildError("too late"))
    assert builds.get(made.id) == done


def test_the_same_key_is_the_same_build(repository: Repository) -> None:
    builds = repository.builds
    sent: list[str] = []
    first = builds.create(ADA, wish(), "key", sent.append)
    assert builds.create(ADA, wish(), "key", sent.append) == first
    assert builds.create(Viewer("bob"), wish(), "key", sent.append).id != first.id
    with pytest.raises(IdempotencyConflict):
        builds.create(ADA, wish(force=True), "key", sent.append)
    assert len(sent) == 2


def test_nothing_is_stored_where_the_broker_is_down(repository: Repository) -> None:
    def down(_build: str) -> None:
        raise Unavailable("broker", "the broker does not answer")

    with pytest.raises(Unavailable):
        repository.builds.create(ADA, wish(), publish=down)
    assert repository.builds.list("ada") == []


def test_everybody_sees_his_own(repository: Repository) -> None:
    builds = repository.builds
    mine = [create(repository).id for _ in range(3)]
    theirs = create(repository, Viewer("bob"))
    assert [b.id for b in builds.list("ada")] == sorted(mine, reverse=True)
    assert [b.id for b in builds.list("ada", 1)] == [max(mine)]
    for who in ("ada", "eve"):
        with pytest.raises(NotFound):
            builds.get(theirs.id, who)
        with pytest.raises(NotFound):
            builds.cancel(theirs.id, Viewer(who))
    for strange in ("0" * 32, "../..", "\0", ""):
        with pytest.raises(NotFound):
            builds.get(strange)
        with pytest.raises(NotFound):
            builds.begin(strange)


def test_names(repository: Repository) -> None:
    assert create(repository, name="muons", tag="v2").name == "ada/muons:v2"
    assert create(repository, name="muons").name == "ada/muons:1"
    with pytest.raises(Forbidden):
        create(repository, namespace="bob")
    with pytest.raises(Forbidden):
        create(repository, namespace=LIBRARY)
    admin = Viewer("root", admin=True)
    made = create(repository, admin, namespace=LIBRARY)
    work = repository.builds.begin(made.id)
    assert work is not None
    assert (made.name, work.owner) == ("library/generic:1", admin)
    # A recipe may be of a version that can be no tag.
    with pytest.raises(InvalidRequest):
        create(repository, recipe={"version": "-1"})
    assert create(repository, recipe={"version": "-1"}, tag="one").name == "ada/generic:one"


def test_every_fault_of_a_recipe_is_told(repository: Repository) -> None:
    bad = {
        "suite": "Bookworm; rm -rf /",
        "packages": ["-o=Dir::Etc=x"],
        "epoch": -1,
        "slack": 10**9,
        "version": "../1",
        "files": [{"path": p, "text": ""} for p in ("/etc/../x", "/a\0b", "/" + "ä" * 128)],
        "surprise": 1,
    }
    with pytest.raises(InvalidRequest) as caught:
        create(repository, recipe=bad)
    assert {fault.field for fault in caught.value.faults} >= {
        "recipe.suite",
        "recipe.packages.0",
        "recipe.epoch",
        "recipe.slack",
        "recipe.version",
        "recipe.files.0.path",
        "recipe.files.1.path",
        "recipe.files.2.path",
        "recipe.surprise",
    }
    with pytest.raises(InvalidRequest, match="site's own repository"):
        create(repository, recipe={"needs_repository": True})
    assert repository.builds.list("ada") == []


def test_one_owner_does_not_fill_the_queue(repository: Repository) -> None:
    made = [create(repository) for _ in range(MAX_ACTIVE)]
    with pytest.raises(Conflict):
        create(repository)
    create(repository, Viewer("bob"))
    repository.builds.cancel(made[0].id, ADA)
    create(repository)


def test_old_builds_are_forgotten(repository: Repository, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("repository.builds.KEPT", 3)
    builds = repository.builds
    made = [create(repository).id for _ in range(6)]
    for build in made[:5]:
        builds.cancel(build, ADA)
    other = create(repository, Viewer("bob"))
    newest = create(repository)
    left = {b.id for b in builds.list("ada")}
    gone = sorted(made[:5])[:2]
    assert left == {*made, newest.id} - set(gone)
    assert builds.list("bob") == [other]


def test_a_recipe_has_bounds(repository: Repository) -> None:
    with pytest.raises((PayloadTooLarge, InvalidRequest)):
        files = [{"path": f"/file{number}", "text": "x" * 60_000} for number in range(20)]
        create(repository, recipe={"files": files})


def test_canceling(repository: Repository) -> None:
    builds = repository.builds
    made = create(repository)
    for _ in range(2):
        canceled = builds.cancel(made.id, ADA)
        assert (canceled.state, canceled.code) == (BuildState.FAILED, CANCELED)
        assert canceled.message == "canceled by ada while it was QUEUED"
    assert builds.begin(made.id) is None


def test_canceling_one_that_runs(repository: Repository) -> None:
    builds = repository.builds
    work = builds.begin(create(repository).id)
    assert work is not None
    builds.progress(work, BuildState.TESTING, "boot test", 0.8)
    builds.wanted(work)
    canceled = builds.cancel(work.id, Viewer("the operator", admin=True))
    assert (canceled.state, canceled.code) == (BuildState.FAILED, CANCELED)
    assert canceled.message == "canceled by the operator while it was TESTING"
    for late in (
        lambda: builds.wanted(work),
        lambda: builds.progress(work, BuildState.TESTING, "", 0.9),
        lambda: builds.name(work),
        lambda: builds.finish(work, DIGEST),
        lambda: builds.fail(work, BuildError("too late")),
        lambda: builds.postpone(work, "too late"),
    ):
        with pytest.raises(Superseded):
            late()
    assert builds.get(work.id) == canceled
    assert builds.unattended(now() + timedelta(days=1)) == []


def test_canceling_too_late(repository: Repository) -> None:
    builds = repository.builds
    work = builds.begin(create(repository).id)
    assert work is not None
    builds.name(work)
    with pytest.raises(Conflict, match="being published"):
        builds.cancel(work.id, ADA)
    builds.finish(work, DIGEST)
    with pytest.raises(Conflict, match="DONE"):
        builds.cancel(work.id, ADA)
    # A builder that dies there, or cannot go on, leaves a build that is begun anew.
    for leave in (lambda _work: None, lambda work: builds.postpone(work, "no storage")):
        work = builds.begin(create(repository).id)
        assert work is not None
        builds.name(work)
        leave(work)
        builds.begin(work.id)
        assert builds.cancel(work.id, ADA).code == CANCELED


def test_a_reason_is_kept_at_both_ends(repository: Repository) -> None:
    builds = repository.builds
    made = create(repository)
    work = builds.begin(made.id)
    assert work is not None
    builds.fail(work, BuildError("it fails:\0\ud800" + "x" * 1_000_000 + "the end", hint="look"))
    failed = builds.get(made.id)
    assert (failed.state, failed.code, failed.hint) == (BuildState.FAILED, "BUILD_FAILED", "look")
    assert failed.message.startswith("it fails:")
    assert failed.message.endswith("the end")
    assert len(failed.message) < 10_000


def test_a_builder_that_dies_again_and_again(repository: Repository) -> None:
    builds = repository.builds
    made = create(repository)
    works = [builds.begin(made.id) for _ in range(AGAIN + 1)]
    assert None not in works
    for old in works[:-1]:
        assert old is not None
        with pytest.raises(Superseded):
            builds.progress(old, BuildState.TESTING, "", 0.5)
        with pytest.raises(Superseded):
            builds.finish(old, DIGEST)
    assert builds.begin(made.id) is None
    failed = builds.get(made.id)
    assert (failed.state, failed.code) == (BuildState.FAILED, LOST)
    assert f"{AGAIN + 1} times" in failed.message


def test_waiting_for_a_service_is_no_attempt(repository: Repository) -> None:
    builds = repository.builds
    made = create(repository)
    for _ in range(2 * AGAIN):
        work = builds.begin(made.id)
        assert work is not None
        builds.postpone(work, "the storage does not answer")
        with pytest.raises(Superseded):
            builds.postpone(work, "twice")
    shown = builds.get(made.id)
    assert (shown.state, shown.step) == (BuildState.QUEUED, "waiting: the storage does not answer")


def test_a_builder_of_earlier_days_has_no_say(repository: Repository) -> None:
    """An attempt that was given back counts for nothing, but whoever made it stays outdated."""
    builds = repository.builds
    made = create(repository)
    known = []
    for _ in range(3):
        work = builds.begin(made.id)
        assert work is not None
        known.append(work)
        builds.postpone(work, "the storage does not answer")
    newest = builds.begin(made.id)
    assert newest is not None
    assert [work.generation for work in known] == sorted({work.generation for work in known})
    for old in known:
        for say in (
            lambda old=old: builds.progress(old, BuildState.TESTING, "", 0.5),
            lambda old=old: builds.wanted(old),
            lambda old=old: builds.name(old),
            lambda old=old: builds.fail(old, BuildError("no")),
            lambda old=old: builds.postpone(old, "again"),
            lambda old=old: builds.finish(old, DIGEST),
        ):
            with pytest.raises(Superseded):
                say()
    builds.wanted(newest)
    builds.finish(newest, DIGEST)


def test_builds_without_a_message_are_found(repository: Repository) -> None:
    builds = repository.builds
    made = create(repository)
    present = now()
    assert builds.unattended(present) == []
    later = present + timedelta(seconds=61)
    assert builds.unattended(later) == [made.id]
    # It may stand in a long queue: no flood of messages for it.
    assert builds.unattended(later + timedelta(seconds=61)) == []
    assert builds.unattended(later + timedelta(seconds=121)) == [made.id]
    assert builds.unattended(later + timedelta(seconds=121 + 121)) == []
    assert patience(100) < timedelta(hours=2)
    with repository.database.exclusive(lock_name(made.id)):
        assert builds.unattended(later + timedelta(days=1)) == []
    builds.cancel(made.id, ADA)
    assert builds.unattended(later + timedelta(days=1)) == []


def test_builds_whose_builder_is_gone_are_found_at_once(repository: Repository) -> None:
    builds = repository.builds
    waiting, begun = create(repository), create(repository)
    work = builds.begin(begun.id)
    assert work is not None
    with repository.database.exclusive(lock_name(begun.id)):
        assert builds.abandoned() == []
    assert builds.abandoned() == [begun.id]
    builds.finish(work, DIGEST)
    assert builds.abandoned() == []
    assert builds.get(waiting.id).state is BuildState.QUEUED


def test_the_sweep_sends_what_the_broker_lost(repository: Repository, config: Config) -> None:
    made = create(repository)
    app = make_celery(config, lambda: dispatcher(repository, Ledger()))
    publisher = Publisher(config)

    def messages() -> list[str]:
        found = (config.data_dir / "broker").glob(f"*.{BUILD_QUEUE}.msg")
        return [json.loads(path.read_text())["headers"]["argsrepr"] for path in found]

    publisher.build_image(made.id)
    assert messages() == [f"('{made.id}',)"]
    for path in (config.data_dir / "broker").glob("*.msg"):
        path.unlink()
    app.tasks["vmjobs.sweep"]()
    assert messages() == []  # it may be with a builder yet
    with repository.database.write() as session:
        session.execute(update(BuildRow).values(sent=now() - timedelta(seconds=61)))
    app.tasks["vmjobs.sweep"]()
    app.tasks["vmjobs.sweep"]()
    assert messages() == [f"('{made.id}',)"]
    publisher.close()
    app.close()
