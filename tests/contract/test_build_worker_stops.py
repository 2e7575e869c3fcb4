"""A builder stops within seconds if a build is canceled or late, and leaves nothing.

The test's own program installs the packages, and never ends; all else is real.
"""

from __future__ import annotations

import os
import signal
import tempfile
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from images.build.scratch_dir import BUILDS_FOLDER, ScratchDir
from images.recipe import Recipe
from images.store.image_store import ImageStore
from repository.builds.build_worker import BuildContext, build_image
from repository.service import Repository
from tests.kit.builds import ADA, create
from tests.kit.waiting import wait_until
from vmjobs.wire import Build, BuildState

#: Leaves a directory in TMPDIR, starts a program of its own, and never ends.
MMDEBSTRAP = """#!/bin/sh
mkdir "$TMPDIR/mmdebstrap.root"
sleep 1000 &
echo $! >{note}.part && mv {note}.part {note}
wait
"""
SECONDS = 60.0


def _no_boot(_digest: str, _recipe: Recipe, _place: ScratchDir) -> None:
    raise AssertionError("nothing is there to be booted")


class Builder:
    """A builder with a build in progress."""

    def __init__(self, repository: Repository, folder: Path, seconds: float = 1000) -> None:
        self.folder = folder
        self.builds = repository.builds
        self.build = create(repository)
        parts = BuildContext(
            repository, ImageStore(folder / "images"), folder / "work", lambda _: _no_boot, seconds
        )
        self.failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(parts,))
        self._thread.start()

    def _run(self, parts: BuildContext) -> None:
        try:
            build_image(parts, self.build.id)
        except BaseException as error:
            self.failure = error
            raise

    def child(self) -> Path:
        """The /proc directory of the process that mmdebstrap starts, once it has."""
        note = self.folder / "note"
        wait_until(note.exists)
        return Path("/proc") / note.read_text().strip()

    def end(self) -> Build:
        """Wait for the builder to leave the build, long before its program ends; return the build."""
        self._thread.join(SECONDS)
        assert not self._thread.is_alive()
        return self.builds.get(self.build.id)

    def assert_nothing_left(self, child: Path) -> None:
        wait_until(lambda: _dead(child))
        assert self.leftovers() == []

    def leftovers(self) -> list[Path]:
        return [p for p in (self.folder / "work" / BUILDS_FOLDER).iterdir() if p.is_dir()]


def _dead(process: Path) -> bool:
    try:
        return (process / "stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A builder's directory, which every user can enter, unlike pytest's own."""
    with tempfile.TemporaryDirectory() as name:
        place = Path(name).resolve()
        place.chmod(0o755)
        program = place / "bin" / "mmdebstrap"
        program.parent.mkdir()
        program.write_text(MMDEBSTRAP.format(note=place / "note"))
        program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{program.parent}:/usr/bin:/bin")
        yield place


def test_a_build_is_canceled_while_packages_are_installed(repository: Repository, folder: Path) -> None:
    builder = Builder(repository, folder)
    child = builder.child()
    (mine,) = builder.leftovers()
    assert (mine / "mmdebstrap.root").is_dir()
    canceled = builder.builds.cancel(builder.build.id, ADA)
    assert builder.end() == canceled
    assert (canceled.state, canceled.code) == (BuildState.FAILED, "CANCELED")
    builder.assert_nothing_left(child)
    assert list((folder / "work").rglob("*.tar")) == []


def test_a_build_has_a_deadline(repository: Repository, folder: Path) -> None:
    builder = Builder(repository, folder, seconds=10)
    child = builder.child()
    late = builder.end()
    assert (late.state, late.code) == (BuildState.FAILED, "BUILD_TIMED_OUT")
    assert late.message == "the build was not done after 10 s"
    builder.assert_nothing_left(child)


def test_a_builder_whose_build_another_has_taken_up_ends_its_programs(
    repository: Repository, folder: Path
) -> None:
    builder = Builder(repository, folder)
    child = builder.child()
    work = builder.builds.begin(builder.build.id)
    assert work is not None
    assert builder.end().state is BuildState.BUILDING
    builder.assert_nothing_left(child)
    builder.builds.check_current(work)


def test_a_builder_whose_program_fails_once_the_build_is_canceled(
    repository: Repository, folder: Path
) -> None:
    """Whichever comes first, the build stays canceled, and the builder goes on to the next."""
    builder = Builder(repository, folder)
    child = builder.child()
    canceled = builder.builds.cancel(builder.build.id, ADA)
    with suppress(ProcessLookupError):  # the builder was faster
        os.kill(int(child.name), signal.SIGKILL)
    assert builder.end() == canceled
    assert builder.failure is None
    assert builder.leftovers() == []
