"""Builds in the repository: permissions; one builder at a time for each build."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import update

from images import recipe as recipes
from repository.broker import BUILD_QUEUE, TaskPublisher
from repository.builds.requests import (
    BUILDER_LOST,
    CANCELED,
    MAX_ACTIVE,
    MAX_RESTARTS,
    BuildSuperseded,
    lock_name,
    resend_interval,
)
from repository.builds.rows import BuildTask
from repository.db.models import BuildRow
from repository.images import LIBRARY, Viewer
from repository.service import Repository
from repository.tasks import make_celery
from tests.kit.builds import ADA, create, wish
from tests.kit.repository_jobs import Ledger, dispatch_context, refused
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
from vmjobs.wire import Build, BuildState, Visibility

pytestmark = pytest.mark.in_process

DIGEST = "sha256:" + "1" * 64


def begun(repository: Repository, made: Build | None = None, **changes: Any) -> BuildTask:
    """Return a build that a builder has begun."""
    work = repository.builds.begin((made or create(repository, **changes)).id)
    assert work is not None
    return work


@pytest.mark.both_databases
def test_from_beginning_to_end(repository: Repository) -> None:
    builds = repository.builds
    sent: list[str] = []
    made = builds.create(ADA, wish(visibility="public", force=True), publish=sent.append)
    assert (made.state, made.owner) == (BuildState.QUEUED, "ada")
    assert (made.name, made.progress) == ("ada/generic:1", 0)
    assert sent == [made.id]
    work = begun(repository, made)
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
    refused(BuildSuperseded, lambda: builds.fail(work, BuildError("too late")))
    assert builds.get(made.id) == done


def test_the_same_key_is_the_same_build(repository: Repository) -> None:
    builds = repository.builds
    sent: list[str] = []
    first = builds.create(ADA, wish(), "key", sent.append)
    assert builds.create(ADA, wish(), "key", sent.append) == first
    assert builds.create(Viewer("bob"), wish(), "key", sent.append).id != first.id
    refused(IdempotencyConflict, lambda: builds.create(ADA, wish(force=True), "key", sent.append))
    assert len(sent) == 2


def test_nothing_is_stored_where_the_broker_is_down(repository: Repository) -> None:
    def down(_build: str) -> None:
        raise Unavailable("broker", "the broker does not answer")

    refused(Unavailable, lambda: repository.builds.create(ADA, wish(), publish=down))
    assert repository.builds.list("ada") == []


def test_everybody_sees_his_own(repository: Repository) -> None:
    builds = repository.builds
    mine = [create(repository).id for _ in range(3)]
    theirs = create(repository, Viewer("bob"))
    assert [b.id for b in builds.list("ada")] == sorted(mine, reverse=True)
    assert [b.id for b in builds.list("ada", 1)] == [max(mine)]
    for who in ("ada", "eve"):
        refused(
            NotFound,
            lambda who=who: builds.get(theirs.id, who),
            lambda who=who: builds.cancel(theirs.id, Viewer(who)),
        )
    for strange in ("0" * 32, "../..", "\0", ""):
        refused(NotFound, lambda s=strange: builds.get(s), lambda s=strange: builds.begin(s))


def test_names(repository: Repository) -> None:
    assert create(repository, name="muons", tag="v2").name == "ada/muons:v2"
    assert create(repository, name="muons").name == "ada/muons:1"
    for namespace in ("bob", LIBRARY):
        refused(Forbidden, lambda n=namespace: create(repository, namespace=n))
    admin = Viewer("root", admin=True)
    made = create(repository, admin, namespace=LIBRARY)
    assert (made.name, begun(repository, made).owner) == ("library/generic:1", admin)
    # A recipe's version need not be a valid tag.
    refused(InvalidRequest, lambda: create(repository, recipe={"version": "-1"}))
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
    fields = {fault.field.removeprefix("recipe.") for fault in caught.value.faults}
    assert fields >= {"suite", "packages.0", "epoch", "slack", "version", "surprise"}
    assert fields >= {"files.0.path", "files.1.path", "files.2.path"}
    needy = {"needs_repository": True}
    refused(InvalidRequest, lambda: create(repository, recipe=needy), match="site's own repository")
    foreign = {"architecture": "s390x"}
    refused(InvalidRequest, lambda: create(repository, recipe=foreign), match="for x86_64 alone")
    assert repository.builds.list("ada") == []


@pytest.mark.both_databases
def test_one_owner_does_not_fill_the_queue(repository: Repository) -> None:
    made = [create(repository) for _ in range(MAX_ACTIVE)]
    refused(Conflict, lambda: create(repository))
    create(repository, Viewer("bob"))
    repository.builds.cancel(made[0].id, ADA)
    create(repository)


@pytest.mark.both_databases
def test_old_builds_are_forgotten(repository: Repository, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("repository.builds.requests.MAX_ENDED", 3)
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


def has_no_say(repository: Repository, work: BuildTask) -> None:
    """Check that the repository refuses all this builder's calls."""
    builds = repository.builds
    refused(
        BuildSuperseded,
        lambda: builds.check_current(work),
        lambda: builds.progress(work, BuildState.TESTING, "", 0.9),
        lambda: builds.name(work),
        lambda: builds.finish(work, DIGEST),
        lambda: builds.fail(work, BuildError("too late")),
        lambda: builds.postpone(work, "too late"),
    )


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
    work = begun(repository)
    builds.progress(work, BuildState.TESTING, "boot test", 0.8)
    builds.check_current(work)
    canceled = builds.cancel(work.id, Viewer("the operator", admin=True))
    assert (canceled.state, canceled.code) == (BuildState.FAILED, CANCELED)
    assert canceled.message == "canceled by the operator while it was TESTING"
    has_no_say(repository, work)
    assert builds.get(work.id) == canceled
    assert builds.mark_overdue_as_sent(now() + timedelta(days=1)) == []


def test_canceling_too_late(repository: Repository) -> None:
    builds = repository.builds
    work = begun(repository)
    builds.name(work)
    refused(Conflict, lambda: builds.cancel(work.id, ADA), match="being published")
    builds.finish(work, DIGEST)
    refused(Conflict, lambda: builds.cancel(work.id, ADA), match="DONE")
    # If a builder dies there, or postpones the build, the build starts again.
    leaving: list[Callable[[BuildTask], object]] = [
        lambda _work: None,
        lambda work: builds.postpone(work, "no storage"),
    ]
    for leave in leaving:
        again = begun(repository)
        builds.name(again)
        leave(again)
        builds.begin(again.id)
        assert builds.cancel(again.id, ADA).code == CANCELED


@pytest.mark.both_databases
def test_a_reason_is_kept_at_both_ends(repository: Repository) -> None:
    builds = repository.builds
    work = begun(repository)
    builds.fail(work, BuildError("it fails:\0\ud800" + "x" * 1_000_000 + "the end", hint="look"))
    failed = builds.get(work.id)
    assert (failed.state, failed.code, failed.hint) == (BuildState.FAILED, "BUILD_FAILED", "look")
    assert failed.message.startswith("it fails:")
    assert failed.message.endswith("the end")
    assert len(failed.message) < 10_000


def test_a_builder_that_dies_again_and_again(repository: Repository) -> None:
    builds = repository.builds
    made = create(repository)
    for old in [begun(repository, made) for _ in range(MAX_RESTARTS + 1)][:-1]:
        has_no_say(repository, old)
    assert builds.begin(made.id) is None
    failed = builds.get(made.id)
    assert (failed.state, failed.code) == (BuildState.FAILED, BUILDER_LOST)
    assert f"{MAX_RESTARTS + 1} times" in failed.message


def test_waiting_for_a_service_is_no_attempt(repository: Repository) -> None:
    """A postponed attempt does not count, but its builder stays superseded."""
    builds = repository.builds
    made = create(repository)
    known = []
    for _ in range(2 * MAX_RESTARTS):
        known.append(begun(repository, made))
        builds.postpone(known[-1], "the storage does not answer")
    shown = builds.get(made.id)
    assert (shown.state, shown.step) == (BuildState.QUEUED, "waiting: the storage does not answer")
    has_no_say(repository, known[-1])
    newest = begun(repository, made)
    assert [work.generation for work in known] == sorted({work.generation for work in known})
    for old in known:
        has_no_say(repository, old)
    builds.check_current(newest)
    builds.finish(newest, DIGEST)


@pytest.mark.both_databases
def test_builds_without_a_message_are_found(repository: Repository) -> None:
    builds = repository.builds
    made = create(repository)
    present = now()
    assert builds.mark_overdue_as_sent(present) == []
    later = present + timedelta(seconds=61)
    assert builds.mark_overdue_as_sent(later) == [made.id]
    # It may wait in a long queue: no flood of messages for it.
    assert builds.mark_overdue_as_sent(later + timedelta(seconds=61)) == []
    assert builds.mark_overdue_as_sent(later + timedelta(seconds=121)) == [made.id]
    assert builds.mark_overdue_as_sent(later + timedelta(seconds=121 + 121)) == []
    assert resend_interval(100) < timedelta(hours=2)
    with repository.database.exclusive(lock_name(made.id)):
        assert builds.mark_overdue_as_sent(later + timedelta(days=1)) == []
    builds.cancel(made.id, ADA)
    assert builds.mark_overdue_as_sent(later + timedelta(days=1)) == []


@pytest.mark.both_databases
def test_builds_whose_builder_is_gone_are_found_at_once(repository: Repository) -> None:
    builds = repository.builds
    waiting, work = create(repository), begun(repository)
    with repository.database.exclusive(lock_name(work.id)):
        assert builds.mark_abandoned_as_sent() == []
    assert builds.mark_abandoned_as_sent() == [work.id]
    builds.finish(work, DIGEST)
    assert builds.mark_abandoned_as_sent() == []
    assert builds.get(waiting.id).state is BuildState.QUEUED


def test_the_sweep_sends_what_the_broker_lost(repository: Repository, config: Config) -> None:
    made = create(repository)
    app = make_celery(config, lambda: dispatch_context(repository, Ledger()))
    publisher = TaskPublisher(config)

    def messages() -> list[str]:
        found = (config.data_dir / "broker").glob(f"*.{BUILD_QUEUE}.msg")
        return [json.loads(path.read_text())["headers"]["argsrepr"] for path in found]

    publisher.build_image(made.id)
    assert messages() == [f"('{made.id}',)"]
    for path in (config.data_dir / "broker").glob("*.msg"):
        path.unlink()
    app.tasks["vmjobs.sweep"]()
    assert messages() == []  # a builder may still have it
    with repository.database.write() as session:
        session.execute(update(BuildRow).values(sent=now() - timedelta(seconds=61)))
    app.tasks["vmjobs.sweep"]()
    app.tasks["vmjobs.sweep"]()
    assert messages() == [f"('{made.id}',)"]
    publisher.close()
    app.close()
