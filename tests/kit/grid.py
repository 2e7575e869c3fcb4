"""Handles on a running grid: its API, its containers, its nodes."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from images.build.builder import build
from images.manifest import ImageManifest
from images.store.image_store import ImageStore
from tests.kit import ROOT
from tests.kit.cli import vmjobs
from tests.kit.waiting import PATIENCE, wait_until
from vmjobs.client import Client
from vmjobs.model import BootMethod, Job, JobSpec, JobState, StreamName

T = TypeVar("T")

NODES = ("node1", "node2")
#: The owner of ordinary HTCondor jobs. The service's jobs belong to "vmjobs".
PHYSICIST = "physicist"
#: Time limit of VMs to become ready: the default is for hosts that are less busy.
BOOT_SECONDS = round(180 * PATIENCE)


#: First process and its start time, by project and service. Process numbers are not reused soon.
_first_processes: dict[tuple[str, str], tuple[int, str]] = {}


@dataclass(frozen=True)
class Grid:
    api: Client
    url: str
    project: str
    images: ImageStore
    #: The file with an operator's token.
    admin_token: Path

    def container(self, service: str) -> str:
        """The container of a service, independent of the name that compose gives it."""
        label = f"label=com.docker.compose.project={self.project}"
        name = f"label=com.docker.compose.service={service}"
        found = run("docker", "ps", "-aq", "--filter", label, "--filter", name).split()
        assert found, f"the grid {self.project} has no {service}"
        return found[0]

    def on(self, service: str, *command: str, user: str = "root", check: bool = True) -> str:
        """Run a command in a service's container.

        It enters the namespaces itself: `docker exec` takes twenty times the processor time.
        """
        pid = self._first_process(service)
        if pid == 0:
            return run("docker", "exec", "-u", user, self.container(service), *command, check=check)
        here = Path(f"/proc/{pid}")
        accounts = [
            line.split(":") for line in (here / "root/etc/passwd").read_text("utf-8").splitlines()
        ]
        _, _, uid, gid, _, home, *_ = next(account for account in accounts if account[0] == user)
        variables = dict(
            item.split("=", 1) for item in (here / "environ").read_text("utf-8").split("\0") if item
        )
        become = ("setpriv", f"--reuid={uid}", f"--regid={gid}", "--init-groups") if uid != "0" else ()
        enter = ("nsenter", f"--target={pid}", "--all", "--wd")
        return run(*enter, *become, *command, check=check, environment={**variables, "HOME": home})

    def _first_process(self, service: str) -> int:
        """Process number of a container's first process; 0 if the container does not run."""
        pid, begun = _first_processes.get((self.project, service), (0, ""))
        if not pid or _begun(pid) != begun:  # it ended, and another process may have its number
            state = run("docker", "inspect", "-f", "{{.State.Pid}}", self.container(service))
            pid = int(state)
            _first_processes[self.project, service] = pid, _begun(pid)
        return pid

    def submit(self, script: str, count: int = 1, **fields: Any) -> list[Job]:
        """Submit a script; defaults make a small, quick job."""
        spec: dict[str, Any] = {"image": "generic", "memory": 128, "disk": 64}
        spec |= {"boot_seconds": BOOT_SECONDS, "run_seconds": round(120 * PATIENCE), **fields}
        return list(self.api.submit(JobSpec(script=script, **spec), count).jobs)

    def wait(self, *jobs: Job, timeout: float = 300) -> list[Job]:
        """Wait until jobs are final; fail if they are not in time."""
        timeout *= PATIENCE
        ended = self.api.wait([job.id for job in jobs], timeout=timeout)
        late = [f"{job.id} {job.state} {job.reason}" for job in ended if not job.state.final]
        assert not late, f"not final after {timeout} s: {late}"
        return ended

    def until(self, job: Job, *states: JobState, timeout: float = 120) -> Job:
        return wait_for(
            lambda: found if (found := self.api.job(job.id)).state in states else None,
            f"job {job.id} to be {' or '.join(states)}",
            timeout,
        )

    def out(self, job: Job) -> str:
        return b"".join(self.api.stream(job.id, StreamName.OUT)).decode()

    def leftovers(self, *jobs: Job) -> list[str]:
        """VMs and run directories of these jobs, on all nodes."""
        attempts = {e.attempt for job in jobs for e in self.api.events(job.id) if e.attempt}
        found = []
        for node in NODES:
            runs = self.on(
                node, "find", "/var/lib/vmjobs/agent/runs", "-mindepth", "1", "-maxdepth", "1"
            )
            machines = self.on(
                node, "pgrep", "-fa", "umid=vmjobs-|guest=vmjobs-|vmjobs-outside", check=False
            )
            found += [f"{node}: {line}" for line in runs.splitlines() + machines.splitlines()]
        return [line for line in found if any(attempt in line for attempt in attempts)]

    def assert_clean(self, *jobs: Job) -> None:
        """Assert that within a minute nothing of these jobs is left on any node."""
        wait_for(lambda: not self.leftovers(*jobs) or None, f"nothing to be left of {jobs}", 60)


#: Init programs of test images, by image name: one panics, one never gets ready.
ODD = {"test-panics": "exit 1", "test-never-ready": "while :; do sleep 60; done"}


def odd_images(grid: Grid, programs: Mapping[str, str]) -> None:
    """Publish variants of `generic` whose init is one of these shell scripts."""
    recipe = (ROOT / "images" / "recipes" / "generic.toml").read_text("utf-8")
    for name, program in programs.items():
        text = recipe.replace('name = "generic"', f'name = "{name}"')
        text = text.replace("init=/sbin/vmjobs-init", "init=/sbin/odd-init")
        text += f'''
[[files]]
path = "/sbin/odd-init"
executable = true
text = """#!/bin/sh
{program}
"""
'''
        file = ROOT / "build" / "work" / f"{name}.toml"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, "utf-8")
        build(str(file), grid.images, ROOT / "build" / "work")
    publish(grid)


def blank_disk(grid: Grid) -> str:
    """Add an image with BIOS boot and nothing bootable to the local store; return its name."""
    path = ROOT / "build" / "work" / "test-bios"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"no boot sector at all".ljust(1024 * 1024, b"."))
    disk = ImageManifest(boot=BootMethod.BIOS, root=grid.images.folder.add_file(path))
    grid.images.tag(path.name, "latest", grid.images.put_manifest(disk))
    return path.name


def _begun(pid: int) -> str:
    """Start time of a process in ticks (proc_pid_stat(5)); "" if it has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text("utf-8", "replace").rpartition(")")[2].split()[19]
    except OSError:
        return ""


def publish(grid: Grid) -> None:
    """Push all images of the local store to the grid's library, as `make grid` does."""
    words = ("image", "push", "--all-local", "--namespace", "library", "--public")
    vmjobs(*words, code=0, token_file=grid.admin_token, image_dir=grid.images.root)


def healthy(container: str) -> None:
    test = json.loads(run("docker", "inspect", "-f", "{{json .Config.Healthcheck.Test}}", container))

    def look() -> bool:
        check = ["docker", "exec", container, *test[1:]]
        return subprocess.run(check, check=False, capture_output=True, timeout=60).returncode == 0

    wait_for(look, f"{container} to be healthy", 120)


def run(*command: str, check: bool = True, environment: Mapping[str, str] | None = None) -> str:
    done = subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env=environment,
    )
    assert not check or done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
    return done.stdout


def wait_for(look: Callable[[], T | None], what: str, timeout: float) -> T:
    """Poll `look` until it returns something true; return that."""
    # Most looks are commands in containers, which also cost processor time.
    return wait_until(look, timeout, what, pause=0.5)
