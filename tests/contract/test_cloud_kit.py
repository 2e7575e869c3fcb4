"""The kit of cloud images with the agent's own endpoint and disks; only the VM is missing."""

from __future__ import annotations

import http.client
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import nullcontext
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
    touch "$(printf 'sub/\\377.csv')"
}
[ "$1" != wait ] || sleep 1000
exit 7
"""


@dataclass
class Guest:
    """The kit's environment: a directory instead of a VM."""

    place: Path
    link: GuestSession
    output_collector: OutputCollector
    said: list[str]

    def job_description(self, argument: str, *, online: bool) -> JobDescription:
        files = {"data/in.txt": self.place / "in.txt"}
        spec = JobSpec.model_validate(
            {
                "strategy": "image",
                "image": "cloud",
                "script": SCRIPT,
                "arguments": (argument,),
                "environment": {"WHO": "ada"},
                "inputs": describe_inputs(files),
                "outputs": ("sub/*.csv", "none"),
            }
        )
        ticket = JobTicket(
            job_id="j", attempt="a" * 32, index=0, count=1, image_digest="sha256:" + "0" * 64, spec=spec
        )
        endpoint = "http://127.0.0.1" if online else ""
        return JobDescription(ticket, endpoint, TOKEN if online else "", "abc")

    def give(self, argument: str, *, online: bool, keep: bool = False) -> None:
        """Create the disks, with the script's argument on the job disk."""
        job_description = replace(self.job_description(argument, online=online), keep=keep)
        write_job_disk(self.place / "job.disk", job_description, lambda _, disk: disk.write(b"input\n"))
        create_blank_disk(self.place / "output.disk", 4 * MIB)

    def disk(self, **streams: Path) -> DiskContents:
        """Read the output disk; outputs go to the collector."""
        return read_output_disk(self.place / "output.disk", self.output_collector, streams, 16 * MIB)

    def seen(self) -> RunEvent | None:
        assert isinstance(self.link.event_queue, EventQueue)
        return self.link.event_queue.next(time.monotonic() + 10)


@pytest.fixture
def guest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Guest]:
    home = tmp_path / "home"
    (tmp_path / "in.txt").write_text("input\n")
    link = GuestSession(
        token=TOKEN,
        event_queue=EventQueue(),
        logs={"out": tmp_path / "out", "err": tmp_path / "err"},
        max_log=16 * MIB,
        on_log=lambda: None,
    )
    said: list[str] = []
    disks = tuple(tmp_path / f"{name}.disk" for name in ("job", "scratch", "output"))
    for name, value in {"HOME": home, "WORK": home / "work", "SCRIPT": home / "script"}.items():
        monkeypatch.setattr(cloud_kit, name, value)
    monkeypatch.setattr(cloud_kit, "say", said.append)
    monkeypatch.setattr(cloud_kit, "run_program", lambda *_: False)  # creates no file system
    monkeypatch.setattr(cloud_kit, "find_disks", lambda: disks)
    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.chdir(tmp_path)

    network = guest_network()
    address = network.listening[ENDPOINT_PORT].getsockname()

    def connect(self: http.client.HTTPConnection) -> None:
        self.sock = socket.create_connection(address)

    monkeypatch.setattr(http.client.HTTPConnection, "connect", connect)
    with serving(link, network):
        yield Guest(tmp_path, link, OutputCollector(["sub/*.csv"], MIB), said)
    signal.signal(signal.SIGTERM, before)


def test_with_a_network(guest: Guest) -> None:
    guest.give("go", online=True)
    assert cloud_kit.is_job_disk(guest.place / "job.disk")
    cloud_kit.main()
    ended = ExitStatus(code=7, channel=ExitChannel.ENDPOINT)
    assert [guest.seen() for _ in range(3)] == [GuestReady(), ScriptEnded(ended), ExitReported(ended)]
    out = (guest.place / "out").read_text().splitlines()
    assert out == ["input", *map(str, range(1, 200001))]
    assert (guest.place / "err").read_text() == "go ada\n"
    assert guest.disk().complete
    (collected,) = guest.output_collector.collected.values()
    with collected.open() as content:
        assert (collected.path, content.read(collected.size)) == ("sub/a b%.csv", b"1\n")
    assert guest.said == [
        f"vmjobs:abc:{word}" for word in ("ready", "collecting code=7", "exit code=7")
    ]


@pytest.mark.parametrize("keep", [True, False])
def test_a_kept_disk_is_never_formatted(
    guest: Guest, monkeypatch: pytest.MonkeyPatch, keep: bool
) -> None:
    guest.give("go", online=True, keep=keep)
    scratch = guest.place / "scratch.disk"
    scratch.write_bytes(b"no file system at all" * 1000)
    ran: list[str] = []
    monkeypatch.setattr(cloud_kit, "run_program", lambda *argv: bool(ran.append(argv[0])))
    with pytest.raises(cloud_kit.GuestFailure, match="is left unchanged") if keep else nullcontext():
        cloud_kit.main()
    assert ("mkfs.ext4" in ran) is not keep
    assert scratch.read_bytes() == b"no file system at all" * 1000


def test_what_is_neither_taken_nor_refused_is_told(
    guest: Guest, monkeypatch: pytest.MonkeyPatch
) -> None:
    guest.give("go", online=True)
    monkeypatch.setattr(cloud_kit, "RETRY_PAUSES", (0, 0))
    guest.link.logs["out"] = guest.place / "none" / "out"
    cloud_kit.main()
    ended = ExitStatus(code=7, channel=ExitChannel.ENDPOINT)
    told = [guest.seen() for _ in range(3)]
    assert told == [GuestReady(), ScriptEnded(ended), ExitReported(ended, undelivered=True)]
    assert guest.said[-1] == "vmjobs:abc:exit code=7 undelivered=yes"


@pytest.mark.soak
def test_what_is_not_sent_in_time_is_told(guest: Guest, monkeypatch: pytest.MonkeyPatch) -> None:
    guest.give("go", online=True)
    monkeypatch.setattr(cloud_kit, "FLUSH_SECONDS", 1.0)
    over = threading.Event()
    monkeypatch.setattr(guest.link, "on_log", lambda: over.wait(30))
    try:
        cloud_kit.main()
    finally:
        over.set()
    assert guest.said[-1] == "vmjobs:abc:exit code=7 undelivered=yes"


def test_signals_reach_the_script(guest: Guest) -> None:
    guest.give("wait", online=True)
    guest.link.send_signal(15)
    cloud_kit.main()
    assert guest.seen() == GuestReady()
    assert guest.seen() == ScriptEnded(ExitStatus(signal=15, channel=ExitChannel.ENDPOINT))


def test_without_a_network(guest: Guest) -> None:
    guest.give("go", online=False)
    cloud_kit.main()
    streams = {name: guest.place / f"from-{name}" for name in ("stdout", "stderr")}
    found = guest.disk(**streams)
    assert found.complete
    assert found.exit == ExitStatus(code=7, channel=ExitChannel.OUTPUT_DISK)
    assert streams["stdout"].read_text().endswith("\n200000\n")
    assert list(guest.output_collector.collected) == ["sub/a b%.csv"]


def test_what_cannot_be_taken_is_named_and_the_rest_is(guest: Guest) -> None:
    guest.give("odd", online=True)
    cloud_kit.main()
    assert guest.disk().complete
    output_collector = guest.output_collector
    assert list(output_collector.collected) == ["sub/a b%.csv"]
    assert output_collector.too_large
    other = {"sub/link.csv": "symbolic link", "sub/a fifo.csv": "FIFO"}
    assert set(output_collector.lacking) == {
        "sub/large.csv",
        "sub/new\nline.csv",
        "sub/\\udcff.csv",
        *other,
    }
    assert all(f"but a {what}" in output_collector.lacking[name] for name, what in other.items())
    assert not any("error" in line for line in guest.said)


def test_an_output_disk_that_cannot_be_written_is_told(guest: Guest) -> None:
    guest.give("go", online=False)
    (guest.place / "output.disk").unlink()
    cloud_kit.main()
    assert any("the output disk" in line for line in guest.said)
    assert guest.said[-1] == "vmjobs:abc:exit code=7 undelivered=yes"


def test_a_job_disk_that_is_none(guest: Guest) -> None:
    (guest.place / "job.disk").write_bytes(b"\0" * MIB)
    assert not cloud_kit.is_job_disk(guest.place / "job.disk")
    assert not cloud_kit.is_job_disk(guest.place / "none")
