"""Builds by a service of the test's own: the API, a builder and its broker as processes, real VMs."""

from __future__ import annotations

import os
import secrets
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from images_kit import ROOT, WORK, need
from sqlalchemy import select

from images.store import ImageStore
from repository.builds import LOST
from repository.database import Database
from repository.models import BuildRow
from vmjobs.client.images import Images
from vmjobs.wire import Build, BuildState

VMJOBS = ROOT / ".venv" / "bin" / "vmjobs"
#: A build from a package archive that is here, its boot and its publishing, on a busy machine.
SECONDS = 400.0


@dataclass
class Service:
    """An API and a builder, in one directory."""

    folder: Path
    port: int
    builder: subprocess.Popen[bytes] | None = None

    @property
    def environment(self) -> dict[str, str]:
        """Of the service's processes, and of its user's."""
        mine = {k: v for k, v in os.environ.items() if not k.startswith("VMJOBS_")}
        url = f"http://127.0.0.1:{self.port}"
        return {
            **mine,
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
        }

    def start(self, name: str, *words: str) -> subprocess.Popen[bytes]:
        """A process group of the service."""
        with (self.folder / f"{name}.log").open("ab") as log:
            return subprocess.Popen(
                [VMJOBS, *words],
                env=self.environment,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def start_builder(self) -> None:
        self.builder = self.start("builder", "worker", "--builds")

    def kill_builder(self) -> None:
        """As a power cut would: the builder, its child, and what that started."""
        if self.builder is not None:
            os.killpg(self.builder.pid, signal.SIGKILL)
            self.builder.wait()
            self.builder = None

    def user(self, *words: str | Path, **changes: str) -> subprocess.CompletedProcess[str]:
        """Run the command as a user would."""
        return subprocess.run(
            [VMJOBS, *words],
            env={**self.environment, **changes},
            capture_output=True,
            text=True,
            timeout=SECONDS,
            check=False,
        )

    def images(self) -> Images:
        return Images(
            f"http://127.0.0.1:{self.port}", (self.folder / "token").read_text("ascii").strip()
        )

    def build(self, recipe: Path) -> str:
        """Ask for a build; its id."""
        done = self.user("image", "build", "--remote", "--detach", recipe)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def until(self, build: str, look: Callable[[Build], bool]) -> Build:
        """Wait for a build to be in some state."""
        end = time.monotonic() + SECONDS
        with self.images() as images:
            while not look(found := images.build_state(build)):
                log = (self.folder / "builder.log").read_text("utf-8", "replace")
                assert time.monotonic() < end, f"{found}\n{log[-3000:]}"
                time.sleep(0.05)
        return found

    def attempts(self, build: str) -> int:
        """How often a builder began it."""
        database = Database(f"sqlite:///{self.folder / 'data' / 'vmjobs.db'}")
        try:
            with database.read() as session:
                query = select(BuildRow.attempts).where(BuildRow.id == build)
                return int(session.scalars(query).one())
        finally:
            database.close()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def running(service: Service) -> Iterator[Service]:
    made = service.user("token", "user", "ada", "--file", str(service.folder / "token"))
    assert made.returncode == 0, made.stderr
    api = service.start("api", "serve")
    try:
        service.start_builder()
        with service.images() as images:
            assert images.builds() == ()  # as soon as it answers
        yield service
    finally:
        service.kill_builder()
        os.killpg(api.pid, signal.SIGKILL)
        api.wait()


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    """A service whose builder has the package archives that other tests have fetched."""
    need("mmdebstrap", "linux.uml")
    packages = tmp_path / "builder" / "work" / "packages"
    packages.mkdir(parents=True)
    for archive in (WORK / "packages").glob("*.tar"):
        (packages / archive.name).symlink_to(archive)
    with running(Service(tmp_path, free_port())) as found:
        yield found


def recipe(folder: Path, text: str = "") -> tuple[Path, str]:
    """A recipe that was never built, and the word that its image has in /etc/nonce."""
    nonce = secrets.token_hex(8)
    file = folder / "tiny.toml"
    file.write_text(
        f'name = "tiny"\nversion = "1"\nlayers = ["generic"]\n{text}\n'
        f'[[files]]\npath = "/etc/nonce"\ntext = "{nonce}"\n'
    )
    return file, nonce


def test_an_image_is_built_booted_published_and_runs_elsewhere(
    service: Service, tmp_path: Path
) -> None:
    mine, nonce = recipe(tmp_path, 'probe = "grep -q . /etc/nonce"')
    done = service.user("image", "build", "--remote", mine, "--public")
    assert done.returncode == 0, done.stderr
    name, digest = done.stdout.split()
    assert name == "ada/tiny:1"
    with service.images() as images:
        found = images.detail("tiny:1")
        assert (found.digest, found.owner, found.visibility) == (digest, "ada", "public")
        assert sorted(tag.tag for tag in found.tags) == ["1", "latest"]
        assert found.origin.source == "recipe tiny 1"
    # The builder names nothing in its own store: a recipe's name is its owner's to give, not ours.
    assert ImageStore(tmp_path / "builder" / "images").list() == []
    elsewhere = {"VMJOBS_IMAGE_DIR": str(tmp_path / "laptop"), "VMJOBS_STATE_DIR": str(tmp_path / "s")}
    pulled = service.user("image", "pull", "ada/tiny:1", **elsewhere)
    assert pulled.returncode == 0, pulled.stderr
    script = tmp_path / "script"
    script.write_text("#!/bin/sh\ncat /etc/nonce\n")
    ran = service.user("run", "--image", "ada/tiny:1", "--memory", "128", script, **elsewhere)
    assert (ran.returncode, ran.stdout) == (0, nonce), ran.stderr
    again = service.user("image", "build", "--remote", mine)
    assert again.stdout == done.stdout


@pytest.mark.parametrize("state", [BuildState.BUILDING, BuildState.TESTING])
def test_a_builder_that_is_killed_in_the_middle(
    service: Service, tmp_path: Path, state: BuildState
) -> None:
    mine, _ = recipe(tmp_path)
    build = service.build(mine)
    service.until(build, lambda b: b.state is state and b.step not in {"starting", "boot test"})
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


def test_a_builder_whose_child_is_killed_each_time(service: Service, tmp_path: Path) -> None:
    mine, _ = recipe(tmp_path)
    build = service.build(mine)
    kills = 0

    def kill(found: Build) -> bool:
        """End the process that is at work, once for each attempt; whether the build is over."""
        nonlocal kills
        if found.state is BuildState.BUILDING and service.attempts(build) > kills:
            assert service.builder is not None
            for child in _children(service.builder.pid):
                os.kill(child, signal.SIGKILL)
            kills += 1
        return found.state.final

    failed = service.until(build, kill)
    assert (failed.state, failed.code) == (BuildState.FAILED, LOST)
    assert kills == 4
    assert "4 times" in failed.message
    # The builder itself is well, and the next build is not held up by this one.
    other, _ = recipe(tmp_path)
    done = service.user("image", "build", "--remote", other)
    assert done.returncode == 0, done.stderr


def _children(pid: int) -> set[int]:
    """A process' children, whichever of its threads started them."""
    lists = Path(f"/proc/{pid}/task").glob("*/children")
    return {int(word) for path in lists for word in path.read_text().split()}


def test_an_image_that_fails_its_probe_is_not_published(service: Service, tmp_path: Path) -> None:
    mine, _ = recipe(tmp_path, 'probe = "echo the cause; exit 3"')
    done = service.user("image", "build", "--remote", mine)
    assert done.returncode == 70
    for word in ("fails its boot test", "the cause", "status 3", "BUILD_FAILED"):
        assert word in done.stderr
    with service.images() as images:
        (build,) = images.builds()
        assert (build.state, build.code, build.digest) == (BuildState.FAILED, "BUILD_FAILED", "")
        assert list(images.list()) == []


def test_recipes_that_cannot_be_built(service: Service, tmp_path: Path) -> None:
    for text, word in {
        '[[files]]\npath = "/etc/passwd/x"\ntext = ""\n': "/etc/passwd, which is no directory",
        '[[files]]\npath = "/etc"\ntext = ""\n': "is a directory",
        'packages = ["there-is-no-such-package"]': "there-is-no-such-package",
    }.items():
        mine, _ = recipe(tmp_path, text)
        done = service.user("image", "build", "--remote", mine)
        assert done.returncode == 70, done.stderr
        assert word in done.stderr
