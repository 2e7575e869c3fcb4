"""Builds by a service of the test's own: API, builder and broker as processes, real VMs.

None of them is root: if the tests are, the service runs as the user ``nobody``.
"""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import select

from images.store.image_store import ImageStore
from repository.builds.requests import BUILDER_LOST
from repository.db.database import Database
from repository.db.models import BuildRow
from tests.kit.cli import VMJOBS, Done, vmjobs
from tests.kit.image_builds import WORK, need
from tests.kit.sockets import free_port
from tests.kit.waiting import wait_until
from vmjobs.client.images import Images
from vmjobs.hypervisor import procs
from vmjobs.wire import Build, BuildState

#: For a build from a local package archive, its boot and its publishing, on a busy host.
SECONDS = 400.0
#: For a builder to learn that a build is canceled, and to end what it has started.
STOP_SECONDS = 120.0
NOBODY = "nobody"
#: Subordinate user ids are in a file of this host; only these processes see another file.
AS_NOBODY = """
mount --bind "$0" /etc/subuid && mount --bind "$0" /etc/subgid &&
exec setpriv --reuid=nobody --regid=nogroup --clear-groups -- "$@"
"""


@dataclass
class Service:
    """An API and a builder, in one directory."""

    folder: Path
    port: int
    builder: subprocess.Popen[bytes] | None = None
    api: int = 0
    settings: dict[str, str] = field(default_factory=dict)

    @property
    def environment(self) -> dict[str, str]:
        """For the service's processes, and its user."""
        mine = {k: v for k, v in os.environ.items() if not k.startswith("VMJOBS_")}
        url = f"http://127.0.0.1:{self.port}"
        return {
            **mine,
            "HOME": str(self.folder),
            "VMJOBS_CONFIG": "/dev/null",
            "VMJOBS_DATA_DIR": str(self.folder / "data"),
            "VMJOBS_STATE_DIR": str(self.folder / "state"),
            "VMJOBS_IMAGE_DIR": str(self.folder / "builder" / "images"),
            "VMJOBS_LISTEN": f"127.0.0.1:{self.port}",
            "VMJOBS_API_WORKERS": "1",
            "VMJOBS_API_URL": url,
            "VMJOBS_ISSUER": url,
            "VMJOBS_TOKEN_FILE": str(self.folder / "token"),
            "VMJOBS_HYPERVISORS": "uml",
            **self.settings,
        }

    @property
    def command(self) -> list[str | Path]:
        """Starts ``vmjobs`` as the service's user, who has subordinate ids for namespaces."""
        if os.geteuid() != 0:
            return [VMJOBS]
        private = ["unshare", "--mount", "--propagation", "private"]
        return [*private, "sh", "-ec", AS_NOBODY, self.folder / "ids", VMJOBS]

    def start(self, name: str, *words: str) -> subprocess.Popen[bytes]:
        """Start a process group of the service."""
        with (self.folder / f"{name}.log").open("ab") as log:
            return subprocess.Popen(
                [*self.command, *words],
                stdout=log,
                stderr=log,
                env=self.environment,
                cwd=self.folder,
                start_new_session=True,
            )

    def start_builder(self) -> None:
        self.builder = self.start("builder", "worker", "--builds")

    def kill_builder(self) -> None:
        """Kill the builder, its child and what that started, as a power cut would."""
        if self.builder is not None:
            os.killpg(self.builder.pid, signal.SIGKILL)
            self.builder.wait()
            self.builder = None

    def user(self, *words: str | Path, **more: Any) -> Done:
        """Run the command as a user would."""
        how = {"environ": self.environment, "cwd": self.folder, "timeout": SECONDS, **more}
        return vmjobs(*words, program=self.command, **how)

    def images(self) -> Images:
        return Images(
            f"http://127.0.0.1:{self.port}", (self.folder / "token").read_text("ascii").strip()
        )

    def built(self, *words: str | Path) -> str:
        """Have an image built; return what was printed."""
        return self.user("image", "build", "--remote", *words, code=0).out

    def fails(self, recipe: Path, *words: str) -> None:
        """Check that a build fails, and that these words are printed."""
        done = self.user("image", "build", "--remote", recipe, code=70)
        assert [word for word in words if word not in done.err] == []

    def build(self, recipe: Path) -> str:
        """Request a build; return its id."""
        return self.user("image", "build", "--remote", "--detach", recipe, code=0).out.strip()

    def until(self, build: str, look: Callable[[Build], bool]) -> Build:
        """Wait until ``look`` accepts a build's state."""
        end = time.monotonic() + SECONDS
        with self.images() as images:
            while not look(found := images.build_state(build)):
                log = (self.folder / "builder.log").read_text("utf-8", "replace")
                assert time.monotonic() < end, f"{found}\n{log[-3000:]}"
                time.sleep(0.05)
        return found

    def packages_root(self) -> Path:
        """The directory into which packages are being installed, once it has some."""
        pattern = "builder/work/builds/*/mmdebstrap.*/var/lib/dpkg/info"
        return wait_until(lambda: [*self.folder.glob(pattern)], SECONDS)[0]

    def workplaces(self) -> list[Path]:
        """Directories of builds and of their boot tests, without what is kept on purpose."""
        places = ("builder/work/builds/*/", "state/local/runs/*/")
        return [path for place in places for path in self.folder.glob(place)]

    def programs(self) -> list[str]:
        """Command lines of what the builder has started, including its VMs."""
        mine = {os.getpgrp(), self.api, self.builder.pid if self.builder else 0}
        place = str(self.folder)
        found = []
        for process in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):  # it has exited
                words = (process / "cmdline").read_text("utf-8", "replace").replace("\0", " ")
                links = [process / "root", *(process / "fd").iterdir()]
                told = [words, *(str(link.readlink()) for link in links)]
                if any(place in text for text in told) and os.getpgid(int(process.name)) not in mine:
                    found.append(words)
        return found

    def nothing_is_left(self) -> None:
        """Wait until the builder has ended all that it started, and removed all that it made."""
        wait_until(lambda: not self.programs() and not self.workplaces(), STOP_SECONDS, self.programs)

    def attempts(self, build: str) -> int:
        """How often a builder has started the build."""
        database = Database(f"sqlite:///{self.folder / 'data' / 'vmjobs.db'}")
        try:
            with database.read() as session:
                query = select(BuildRow.attempts).where(BuildRow.id == build)
                return int(session.scalars(query).one())
        finally:
            database.close()


@contextmanager
def running(service: Service) -> Iterator[Service]:
    service.user("token", "user", "ada", "--file", service.folder / "token", code=0)
    api = service.start("api", "serve")
    service.api = api.pid
    try:
        service.start_builder()
        with service.images() as images:
            assert images.builds() == ()  # retried until it answers
        yield service
    finally:
        service.kill_builder()
        os.killpg(api.pid, signal.SIGKILL)
        api.wait()


@pytest.fixture
def folder() -> Iterator[Path]:
    """A directory of the service and its users; no other user can enter pytest's own."""
    made = Path(tempfile.mkdtemp(prefix="vmjobs-builds-")).resolve()
    made.chmod(0o755)
    if os.geteuid() == 0:
        (made / "ids").write_text(f"{NOBODY}:200000:65536\n")
        shutil.chown(made, NOBODY, "nogroup")
    try:
        yield made
    finally:
        shutil.rmtree(made, ignore_errors=True)


@pytest.fixture
def service(folder: Path) -> Iterator[Service]:
    """A service whose builder has the package archives that other tests have fetched."""
    need("mmdebstrap", "newuidmap", "linux.uml")
    packages = folder / "builder" / "work" / "packages"
    packages.mkdir(parents=True)
    for archive in (WORK / "packages").glob("*.tar"):
        (packages / archive.name).symlink_to(archive)
    if os.geteuid() == 0:
        for path in (packages, *list(packages.parents)[:2]):
            shutil.chown(path, NOBODY, "nogroup")
    with running(Service(folder, free_port())) as found:
        yield found


def recipe(folder: Path, text: str = "") -> tuple[Path, str]:
    """Write a recipe that was never built; return it and its image's word in /etc/nonce."""
    nonce = secrets.token_hex(8)
    file = folder / "tiny.toml"
    file.write_text(
        f'name = "tiny"\nversion = "1"\nlayers = ["generic"]\n{text}\n'
        f'[[files]]\npath = "/etc/nonce"\ntext = "{nonce}"\n'
    )
    return file, nonce


def test_an_image_is_built_booted_published_and_runs_elsewhere(service: Service, folder: Path) -> None:
    mine, nonce = recipe(folder, 'probe = "grep -q . /etc/nonce"')
    printed = service.built(mine, "--public")
    name, digest = printed.split()
    assert name == "ada/tiny:1"
    with service.images() as images:
        found = images.detail("tiny:1")
        assert (found.digest, found.owner, found.visibility) == (digest, "ada", "public")
        assert sorted(tag.tag for tag in found.tags) == ["1", "latest"]
        assert found.origin.source == "recipe tiny 1"
    # The builder tags nothing in its own store: only the owner gives the image a name.
    assert ImageStore(folder / "builder" / "images").list() == []
    elsewhere = {"image_dir": folder / "laptop", "state_dir": folder / "s"}
    service.user("image", "pull", "ada/tiny:1", code=0, **elsewhere)
    script = folder / "script"
    script.write_text("#!/bin/sh\ncat /etc/nonce\n")
    ran = service.user("run", "--image", "ada/tiny:1", "--memory", "128", script, **elsewhere)
    assert (ran.code, ran.out) == (0, nonce), ran.err
    assert service.built(mine) == printed


def test_a_builder_that_is_killed_in_its_boot_test(service: Service, folder: Path) -> None:
    mine, _ = recipe(folder, 'probe = "sleep 10"')  # long enough to be killed
    build = service.build(mine)
    service.until(build, lambda b: b.state is BuildState.TESTING and b.step != "boot test")
    service.kill_builder()
    with service.images() as images:
        assert not images.build_state(build).state.final
        assert list(images.list()) == []
    service.start_builder()
    done = service.until(build, lambda b: b.state.final)
    assert done.state is BuildState.DONE, done
    assert service.attempts(build) == 2
    with service.images() as images:
        assert {entry.digest for entry in images.list()} == {done.digest}
        assert [b.id for b in images.builds()] == [build]


@pytest.mark.soak
def test_a_builder_that_is_killed_while_packages_are_installed(service: Service, folder: Path) -> None:
    mine, _ = recipe(folder, 'packages = ["hello"]')
    build = service.build(mine)
    root = service.packages_root()
    service.kill_builder()
    assert root.is_dir()
    assert any("mmdebstrap" in words for words in service.programs())
    service.start_builder()
    wait_until(lambda: not root.exists(), STOP_SECONDS)
    done = service.until(build, lambda b: b.state.final)
    assert done.state is BuildState.DONE, done
    service.nothing_is_left()


@pytest.mark.soak
def test_a_build_is_canceled_while_packages_are_installed(service: Service, folder: Path) -> None:
    mine, _ = recipe(folder, 'packages = ["hello"]')
    build = service.build(mine)
    service.packages_root()
    check_canceling(service, build)
    assert not [*(folder / "builder" / "work" / "packages").glob("*.part.tar")]
    other, _ = recipe(folder)
    service.built(other)


def test_an_image_whose_boot_test_fails_or_is_canceled_is_not_published(
    service: Service, folder: Path
) -> None:
    failing, _ = recipe(folder, 'probe = "echo the cause; exit 3"')
    service.fails(failing, "fails its boot test", "the cause", "status 3", "BUILD_FAILED")
    with service.images() as images:
        (failed,) = images.builds()
        assert (failed.state, failed.code, failed.digest) == (BuildState.FAILED, "BUILD_FAILED", "")
    endless, _ = recipe(folder, 'probe = "sleep 900"')
    build = service.build(endless)
    service.until(build, lambda b: b.state is BuildState.TESTING)
    wait_until(lambda: any("linux" in words for words in service.programs()), SECONDS)
    check_canceling(service, build)


def check_canceling(service: Service, build: str) -> None:
    """Cancel a build as its owner does; only its record is left."""
    canceled = service.user("image", "builds", build, "--cancel", code=0)
    assert "CANCELED: canceled by ada while it was" in canceled.out
    service.nothing_is_left()
    with service.images() as images:
        ended = images.build_state(build)
        assert (ended.state, ended.code, ended.digest) == (BuildState.FAILED, "CANCELED", "")
        assert list(images.list()) == []
    waited = service.user("image", "builds", build, "--wait", code=70)
    assert "canceled by ada" in waited.err


@pytest.mark.soak
def test_a_build_whose_time_is_over(service: Service, folder: Path) -> None:
    service.kill_builder()
    service.settings["VMJOBS_BUILD_SECONDS"] = "60"
    service.start_builder()
    mine, _ = recipe(folder, 'probe = "sleep 900"')
    service.fails(mine, "the build was not done after 60 s", "BUILD_TIMED_OUT")
    service.nothing_is_left()
    with service.images() as images:
        assert list(images.list()) == []


@pytest.mark.soak  # a single kill is tested above
def test_a_builder_whose_child_is_killed_each_time(service: Service, folder: Path) -> None:
    mine, _ = recipe(folder)
    build = service.build(mine)
    kills = 0

    def kill(found: Build) -> bool:
        """Kill the working process, once for each attempt; return whether the build is over."""
        nonlocal kills
        if found.state is BuildState.BUILDING and service.attempts(build) > kills:
            assert service.builder is not None
            for child in procs.children(service.builder.pid):
                os.kill(child, signal.SIGKILL)
            kills += 1
        return found.state.final

    failed = service.until(build, kill)
    assert (failed.state, failed.code) == (BuildState.FAILED, BUILDER_LOST)
    assert kills == 4
    assert "4 times" in failed.message
    # The builder itself works, and this build does not hold up the next one.
    other, _ = recipe(folder)
    service.built(other)
