"""Gateways on this host, and the commands for them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from images.store.image_store import ImageStore
from tests.kit import KIT, ROOT
from tests.kit.cli import Done, vmjobs
from tests.kit.cluster_vm_node import clear, cluster_vm_guest
from tests.kit.waiting import wait_until
from vmjobs.agent.journal import vm_name_prefix
from vmjobs.errors import Unavailable
from vmjobs.gateway.control import SupervisorClient
from vmjobs.gateway.directory import GatewayDirectory

PROGRAM = (sys.executable, str(KIT / "gateway_node.py"), "gateway")
TWO = """\
gateway: {name}
domain: test.example
network: 10.77.0.0/24
machines:
  ce: {{role: computing-element, image: generic, address: 10.77.0.10, memory: 128, disk: 64{ce}}}
  wn: {{role: worker, image: generic, address: 10.77.0.20, memory: 128, disk: 64}}
"""
IMAGES = ROOT / "build" / "images"
SECONDS = 120.0


def declaration(name: str, ce: str = "") -> str:
    """A gateway with two VMs. ce: further fields of the first."""
    return TWO.format(name=name, ce=ce)


@dataclass
class Site:
    """A folder with gateways, and the commands for them."""

    folder: Path
    supervisors: list[subprocess.Popen[bytes]]
    images: Path = IMAGES
    program: tuple[str, ...] = PROGRAM

    @property
    def environment(self) -> dict[str, str]:
        return {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "VMJOBS_IMAGE_DIR": str(self.images),
            "VMJOBS_STATE_DIR": str(self.folder / "state"),
        }

    def run(self, *words: str) -> Done:
        return vmjobs(*words, program=self.program, environ=self.environment, cwd=self.folder)

    def do(self, *words: str) -> str:
        ended = self.run(*words)
        assert ended.code == 0, ended.err
        return ended.out

    def refused(self, *words: str) -> str:
        ended = self.run(*words)
        assert ended.code != 0, ended.out
        return ended.err

    def place(self, name: str) -> GatewayDirectory:
        return GatewayDirectory(self.folder / "state" / "gateways" / name)

    def install(self, name: str, ce: str = "") -> None:
        (self.folder / f"{name}.yaml").write_text(declaration(name, ce))
        self.do("install", f"{name}.yaml")

    def supervise(self, name: str) -> subprocess.Popen[bytes]:
        """Start a supervisor as a service manager does; commands then start none."""
        log = (self.folder / f"{name}.log").open("ab")
        argv = [*PROGRAM, "run", "--gateway", name]
        process = subprocess.Popen(argv, env=self.environment, stdout=log, stderr=log)
        log.close()
        self.supervisors.append(process)

        def answers() -> bool:
            with suppress(Unavailable), SupervisorClient(self.place(name).control):
                return True
            return False

        wait_until(answers, SECONDS, "a supervisor")
        return process

    def kill_at(self, sign: Path, *words: str) -> None:
        """Run a command, and kill it midway: once the file ``sign`` exists."""
        argv = [*PROGRAM, *words]
        with subprocess.Popen(
            argv, env=self.environment, cwd=self.folder, stderr=subprocess.DEVNULL
        ) as victim:
            wait_until(lambda: sign.exists() or victim.poll() is not None, SECONDS, "it has begun")
            victim.kill()
        assert victim.returncode == -signal.SIGKILL, "it had ended"

    def shown(self, name: str) -> dict[str, Any]:
        found = json.loads(self.do("show", "--json", "--gateway", name))
        return {vm["name"]: vm for vm in found["machines"]}

    def states(self, name: str) -> list[str]:
        return [vm["state"] for vm in self.shown(name).values()]

    def image_tags(self, name: str) -> list[str]:
        """Return the tags by which the gateway keeps its VMs' images."""
        return sorted(
            entry.tag for entry in ImageStore(self.images).list() if entry.name == f"gateway-{name}"
        )

    def said(self, name: str, vm: str) -> str:
        return self.do("console", vm, "--gateway", name)


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    cluster_vm_guest()
    made = Site(tmp_path, [])
    yield made
    for process in made.supervisors:
        process.kill()
        process.wait()
    for path in tmp_path.glob("**/state/gateways/*"):
        place = GatewayDirectory(path)
        # One in the background would boot the VMs again.
        with suppress(Unavailable), SupervisorClient(place.control) as control:
            control.ask("quit")
        clear(vm_name_prefix(place.vms))
