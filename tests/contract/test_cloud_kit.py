"""The kit of cloud images with the agent's own endpoint and disks, in namespaces in place of a VM."""

from __future__ import annotations

import os
import subprocess
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from images.guest import cloud_kit
from tests.kit.sockets import guest_network
from vmjobs.agent.guest.endpoint import serving
from vmjobs.agent.guest.guest_session import GuestSession
from vmjobs.agent.run.outputs import DiskContents, OutputCollector, read_output_disk
from vmjobs.agent.vm.events import EventQueue, ExitReported, GuestReady, RunEvent, ScriptEnded
from vmjobs.agent.vm.job_disk import JobDescription, create_blank_disk, write_job_disk
from vmjobs.hypervisor.base import ENDPOINT_PORT
from vmjobs.local import describe_inputs
from vmjobs.model import MIB, ExitChannel, ExitStatus, JobSpec, JobTicket

TOKEN = "secret-of-this-guest"
SCRIPT = """#!/bin/sh
cat data/in.txt
echo "$1 $WHO" >&2
seq 1 200000
mkdir sub; echo 1 > 'sub/a b%.csv'; echo 2 > other.txt
[ "$1" != odd ] || {
    truncate -s 2T sub/large.csv; touch 'sub/new
line.csv'
    ln -s none.csv sub/link.csv; mkfifo 'sub/a fifo.csv'; mkdir sub/directory.csv
    touch "$(printf 'sub/\\377.csv')" sub/.hidden.csv
    mkdir ../beside; echo secret >../beside/secret.csv; ln -s ../../beside sub/out
}
[ "$1" != wait ] || sleep 1000
exit 7
"""
OUTPUTS = ("sub/*.csv", "sub/out/*.csv", "none")
DISKS = {"job": "vda", "scratch": "vdb", "output": "vdc"}


@dataclass
class Guest:
    """The kit's environment: a directory instead of a VM."""

    place: Path
    link: GuestSession
    endpoint: str
    output_collector: OutputCollector

    def job_description(self, argument: str, script: str, *, online: bool) -> JobDescription:
        files = {"data/in.txt": self.place / "in.txt"}
        spec = JobSpec.model_validate(
            {
                "strategy": "image",
                "image": "cloud",
                "script": script,
                "arguments": (argument,),
                "environment": {"WHO": "ada"},
                "inputs": describe_inputs(files),
                "outputs": OUTPUTS,
            }
        )
        ticket = JobTicket(
            job_id="j", attempt="a" * 32, index=0, count=1, image_digest="sha256:" + "0" * 64, spec=spec
        )
        endpoint, token = (self.endpoint, TOKEN) if online else ("", "")
        return JobDescription(ticket, endpoint, token, "abc")

    def give(self, argument: str, *, online: bool, keep: bool = False, script: str = SCRIPT) -> None:
        """Create the disks, with the script's argument on the job disk."""
        job_description = replace(self.job_description(argument, script, online=online), keep=keep)
        write_job_disk(self.place / "job.disk", job_description, lambda _, disk: disk.write(b"input\n"))
        create_blank_disk(self.place / "output.disk", 4 * MIB)

    def run(self, *settings: str, fails: str = "") -> list[str]:
        """Run the kit; return the lines of the console. fails: with these words."""
        console = self.place / "console"
        console.unlink(missing_ok=True)
        os.mkfifo(console)
        devices = {console: "console"} | {self.place / f"{n}.disk": dev for n, dev in DISKS.items()}
        argv = ["bwrap", "--unshare-user", "--unshare-pid", "--die-with-parent"]
        argv += ["--clearenv", "--setenv", "PATH", "/usr/sbin:/usr/bin:/sbin:/bin"]
        argv += ["--setenv", "PYTHONPATH", str(Path(cloud_kit.__file__).parent), "--ro-bind", "/", "/"]
        argv += ["--dev", "/dev", "--tmpfs", "/var/lib", "--bind", str(self.home), str(cloud_kit.HOME)]
        for path, device in devices.items():
            argv += ["--bind-try", str(path), f"/dev/{device}"]
        program = "; ".join(("import cloud_kit", *settings, "cloud_kit.main()"))
        with open(os.open(console, os.O_RDWR | os.O_NONBLOCK), "rb", buffering=0) as told:  # noqa: PTH123
            done = subprocess.run(
                [*argv, "python3", "-c", program], stderr=subprocess.PIPE, text=True, check=False
            )
            lines = (told.read(65536) or b"").decode().split("\r\n")
        assert (done.returncode, fails in done.stderr) == (bool(fails), True), done.stderr
        return [line for line in lines if line]

    def disk(self, **streams: Path) -> DiskContents:
        """Read the output disk; outputs go to the collector."""
        return read_output_disk(self.place / "output.disk", self.output_collector, streams, 16 * MIB)

    @property
    def home(self) -> Path:
        """The guest's ``/var/lib/vmjobs``."""
        home = self.place / "home"
        home.mkdir(exist_ok=True)
        return home

    def seen(self) -> RunEvent | None:
        assert isinstance(self.link.event_queue, EventQueue)
        return self.link.event_queue.next(time.monotonic() + 60)


@pytest.fixture
def guest(tmp_path: Path) -> Iterator[Guest]:
    (tmp_path / "in.txt").write_text("input\n")
    link = GuestSession(
        token=TOKEN,
        event_queue=EventQueue(),
        logs={"out": tmp_path / "out", "err": tmp_path / "err"},
        max_log=16 * MIB,
        on_log=lambda: None,
    )
    network = guest_network()
    host, port = network.listening[ENDPOINT_PORT].getsockname()
    with serving(link, network):
        yield Guest(tmp_path, link, f"http://{host}:{port}", OutputCollector(OUTPUTS, MIB))


def test_with_a_network(guest: Guest) -> None:
    guest.give("go", online=True)
    said = guest.run()
    ended = ExitStatus(code=7, channel=ExitChannel.ENDPOINT)
    assert [guest.seen() for _ in range(3)] == [GuestReady(), ScriptEnded(ended), ExitReported(ended)]
    out = (guest.place / "out").read_text().splitlines()
    assert out == ["input", *map(str, range(1, 200001))]
    assert (guest.place / "err").read_text() == "go ada\n"
    assert guest.disk().complete
    (collected,) = guest.output_collector.collected.values()
    with collected.open() as content:
        assert (collected.path, content.read(collected.size)) == ("sub/a b%.csv", b"1\n")
    assert said == [f"vmjobs:abc:{word}" for word in ("ready", "collecting code=7", "exit code=7")]


@pytest.mark.parametrize("keep", [True, False])
def test_a_kept_disk_is_never_formatted(guest: Guest, keep: bool) -> None:
    guest.give("go", online=True, keep=keep)
    scratch, before = guest.place / "scratch.disk", b"no file system at all".ljust(4 * MIB)
    scratch.write_bytes(before)
    guest.run(fails="is left unchanged" if keep else "")
    assert (scratch.read_bytes() == before) is keep


def test_what_is_neither_taken_nor_refused_is_told(guest: Guest) -> None:
    guest.give("go", online=True)
    guest.link.logs["out"] = guest.place / "none" / "out"
    said = guest.run("cloud_kit.RETRY_PAUSES = 0, 0")
    ended = ExitStatus(code=7, channel=ExitChannel.ENDPOINT)
    told = [guest.seen() for _ in range(3)]
    assert told == [GuestReady(), ScriptEnded(ended), ExitReported(ended, undelivered=True)]
    assert said[-1] == "vmjobs:abc:exit code=7 undelivered=yes"


@pytest.mark.soak
def test_what_is_not_sent_in_time_is_told(guest: Guest) -> None:
    guest.give("go", online=True)
    over = threading.Event()
    guest.link.on_log = lambda: over.wait(10)
    try:
        said = guest.run("cloud_kit.FLUSH_SECONDS = 1.0")
    finally:
        over.set()
    assert said[-1] == "vmjobs:abc:exit code=7 undelivered=yes"


def test_signals_reach_the_script(guest: Guest) -> None:
    guest.give("wait", online=True)
    guest.link.send_signal(15)
    guest.run()
    assert guest.seen() == GuestReady()
    assert guest.seen() == ScriptEnded(ExitStatus(signal=15, channel=ExitChannel.ENDPOINT))


def test_without_a_network(guest: Guest) -> None:
    guest.give("go", online=False)
    guest.run()
    streams = {name: guest.place / f"from-{name}" for name in ("stdout", "stderr")}
    found = guest.disk(**streams)
    assert found.complete
    assert found.exit == ExitStatus(code=7, channel=ExitChannel.OUTPUT_DISK)
    assert streams["stdout"].read_text().endswith("\n200000\n")
    assert list(guest.output_collector.collected) == ["sub/a b%.csv"]


def test_what_cannot_be_taken_is_named_and_the_rest_is(guest: Guest) -> None:
    guest.give("odd", online=True)
    said = guest.run()
    assert guest.disk().complete
    output_collector = guest.output_collector
    assert list(output_collector.collected) == ["sub/a b%.csv"]
    assert output_collector.too_large
    other = {"sub/link.csv": "symbolic link", "sub/a fifo.csv": "FIFO"}
    assert set(output_collector.lacking) == {
        "sub/large.csv",
        "sub/new\nline.csv",
        "sub/\\udcff.csv",
        "sub/out/secret.csv",
        *other,
    }
    assert "outside" in output_collector.lacking["sub/out/secret.csv"]
    assert all(f"but a {what}" in output_collector.lacking[name] for name, what in other.items())
    assert not any("error" in line for line in said)


def test_an_output_disk_that_cannot_be_written_is_told(guest: Guest) -> None:
    guest.give("go", online=False)
    (guest.place / "output.disk").unlink()
    said = guest.run()
    assert any("the output disk" in line for line in said)
    assert said[-1] == "vmjobs:abc:exit code=7 undelivered=yes"


def test_a_script_without_a_line_that_names_its_program(guest: Guest) -> None:
    guest.give("hello world", online=False, script='echo "$1 $WHO $VMJOBS_ARRAY_INDEX"; exit 3')
    guest.run()
    assert guest.disk(stdout=guest.place / "out").exit == ExitStatus(
        code=3, channel=ExitChannel.OUTPUT_DISK
    )
    assert (guest.place / "out").read_text() == "hello world ada 0\n"


def test_a_job_disk_that_is_none(guest: Guest) -> None:
    guest.run(fails="there is no job disk")
    (guest.place / "job.disk").write_bytes(b"\0" * MIB)
    guest.run(fails="there is no job disk")
