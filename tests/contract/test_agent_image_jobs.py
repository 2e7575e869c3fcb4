"""Jobs that bring their own image, through the agent's own steps, on real VMs.

The guest uses no kit: busybox and a few lines of shell, which an input file controls. It runs
as User Mode Linux; a test that needs a disk that boots by itself uses QEMU.
"""

from __future__ import annotations

import errno
import signal
import struct
import subprocess
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.kit.agent_runs import Lease
from tests.kit.firmware_guests import bios_disk
from tests.kit.full_disk import small_disk
from tests.kit.guests import BEGIN, root_disk_guest
from tests.kit.hypervisors import kill_all
from tests.kit.image_jobs import Node
from tests.kit.waiting import wait_until
from vmjobs.agent.journal import Journal
from vmjobs.agent.run.job_run import ReportUndelivered, execute
from vmjobs.agent.run.state import Run
from vmjobs.agent.run.suspend import suspending
from vmjobs.agent.vm.events import SignalSent
from vmjobs.errors import Unauthenticated
from vmjobs.hypervisor.base import BootImage, VmState
from vmjobs.hypervisor.libvirt.connection import node_connection
from vmjobs.hypervisor.libvirt.driver import Libvirt
from vmjobs.hypervisor.uml.driver import UserModeLinux
from vmjobs.model import (
    MIB,
    ExitChannel,
    ExitStatus,
    HypervisorKind,
    JobState,
    ReasonCode,
    Report,
)

S, C = JobState, ReasonCode

_INIT = (
    BEGIN
    + r"""
mount -t tmpfs tmp /tmp
mkdir /tmp/job /tmp/outputs
tar xf /dev/ubdb -C /tmp/job
. /tmp/job/job.env
cd /tmp
. /tmp/job/inputs/do
poweroff -f
"""
)


@pytest.fixture(scope="module")
def own_image(tmp_path_factory: pytest.TempPathFactory) -> BootImage:
    return root_disk_guest(tmp_path_factory.mktemp("own-image"), _INIT)


@pytest.fixture
def node(own_image: BootImage, tmp_path: Path) -> Iterator[Node]:
    node = Node(tmp_path, own_image, {HypervisorKind.UML: UserModeLinux()})
    yield node
    for driver in node.drivers.values():
        assert not [name for name in driver.list() if name.startswith(Journal(tmp_path).prefix)]


LEAVES = "echo 42 > outputs/answer; tar cf /dev/ubdd outputs; sync"
SAYS = 'echo "vmjobs:$VMJOBS_SENTINEL:exit code=7"'
POWERED_OFF = ExitStatus(code=0, channel=ExitChannel.POWEROFF)


def test_an_image_that_works_and_powers_off(node: Node) -> None:
    """Its usage is reported though VM and disks were gone before it could be measured."""
    work = "dd if=/dev/zero of=/dev/ubdc bs=1M count=8 conv=fsync; n=0"
    work += "; while [ $n -lt 1000000 ]; do n=$((n + 1)); done"
    ended = node.run(f"{work}; {LEAVES}", exit="poweroff", outputs=("answer",))
    assert ended.outcome.state is S.COMPLETED
    assert ended.outcome.exit == POWERED_OFF
    assert (ended.outputs / "answer").read_text() == "42\n"
    assert ended.states == [S.STAGING, S.BOOTING, S.RUNNING, S.COLLECTING, S.COMPLETED]
    assert "asks for no sign of readiness" in ended.reports[2].reason.message
    assert b"reboot: " in ended.console
    told = ended.reports[-1]
    assert told.cpu_seconds > 0.5
    assert 8 * MIB < told.bytes.pop("disk") < 40 * MIB
    assert 10 * MIB < told.bytes.pop("memory") <= 96 * MIB
    assert told.bytes.pop("console") == len(ended.console)
    assert told.bytes.pop("input") >= len(work)
    assert told.bytes == {"image": 0, "log": 0, "output": len("42\n")}
    assert [report.bytes.get("output", 0) for report in ended.reports[:-1]] == [0] * 4


@pytest.mark.parametrize(
    ("do", "fields", "code", "exit_code", "words"),
    [
        ("", {"exit": "poweroff", "outputs": ("answer",)}, C.OUTPUT_MISSING, 0,
         "powered off by itself but left nothing that matches answer"),
        ("echo rubbish > /dev/ubdd; sync", {"exit": "poweroff"}, C.SUCCEEDED, 0, ""),
        (SAYS, {"exit": "poweroff"}, C.SCRIPT_FAILED, 7, ""),
        (f"{SAYS}; sleep 1000", {"exit": "poweroff"}, C.SCRIPT_FAILED, 7, ""),
        ("", {}, C.BOOT_FAILED, None, ""),
        ("sleep 1000", {"ready": "started", "run_seconds": 8}, C.TIMED_OUT, None, ""),
        ("printf 'all done'; poweroff -f", {"exit": "console:^all done"}, C.SUCCEEDED, 0, ""),
        ("echo all done; exit 1", {"exit": "console:^all done$"}, C.SUCCEEDED, 0, ""),
        (SAYS, {"exit": "console:^all done$"}, C.NO_EXIT_REPORT, 7,
         "powered off before its console had shown"),
        # BOOT_FAILED, had its prompt not been seen in time
        ("printf 'login: '; sleep 10; echo over", {"ready": "console:login: $"},
         C.NO_EXIT_REPORT, None, ""),
        ("sleep 1000", {"ready": "console:^up$", "boot_seconds": 8}, C.BOOT_TIMED_OUT, None, ""),
        ("echo aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaab; sleep 1000",
         {"exit": "console:^(a|aa|aaa)+$"}, C.NO_EXIT_REPORT, None, ""),
    ],
)  # fmt: skip
def test_how_jobs_end(
    node: Node, do: str, fields: dict[str, object], code: ReasonCode, exit_code: int | None, words: str
) -> None:
    ended = node.run(do, **fields)
    assert ended.outcome.reason.code is code, ended.outcome.reason.message
    assert words in ended.outcome.reason.message
    status = ended.outcome.exit
    assert (status.code if status else None) == exit_code
    assert ended.outcome.state is (S.COMPLETED if code is C.SUCCEEDED else S.FAILED)
    cut_short = code in {C.TIMED_OUT, C.BOOT_TIMED_OUT}  # busy host: before any kernel output
    assert ended.console if cut_short else b"Linux version" in ended.console


def test_the_time_that_it_is_suspended_is_not_its_own(node: Node) -> None:
    seconds = 14

    def suspend(this_run: Run, lease: Lease) -> None:
        """Suspend the run as HTCondor does: stop the process that asked for it."""
        driver = node.drivers[HypervisorKind.UML]
        with subprocess.Popen(["sleep", "600"]) as asking, suspending(this_run, asking.pid):
            try:
                lease.wait_for(S.RUNNING)
                asking.send_signal(signal.SIGSTOP)
                since = time.monotonic()
                wait_until(
                    lambda: driver.state(this_run.choice.vm_name) is VmState.PAUSED, 60, "it to stand"
                )
                wait_until(lambda: time.monotonic() > since + seconds + 1, 60, "its time to pass")
                assert not lease.reached(S.COLLECTING)
                assert this_run.clock.ran() < seconds
                asking.send_signal(signal.SIGCONT)
                wait_until(
                    lambda: lease.reached(S.COLLECTING) or lease.reached(S.FAILED),
                    120,
                    "it to come to its end",
                )
                assert this_run.clock.ran() >= seconds
            finally:
                asking.kill()

    ended = node.run("sleep 1000", suspend, exit="poweroff", run_seconds=seconds)
    assert ended.outcome.reason.code is C.TIMED_OUT, ended.outcome.reason.message


def test_outputs_after_a_line_of_the_console(node: Node) -> None:
    do = f"{LEAVES}; echo all done; sleep 1000"
    ended = node.run(do, exit="console:^all done$", outputs=("answer",))
    assert ended.outcome.state is S.COMPLETED
    assert ended.outcome.exit == ExitStatus(code=0, channel=ExitChannel.CONSOLE)
    assert (ended.outputs / "answer").read_text() == "42\n"


def test_what_was_left_in_time_is_delivered(node: Node) -> None:
    do = f"{LEAVES}; while :; do :; done"
    ended = node.run(do, exit="poweroff", outputs=("answer", "more"), run_seconds=12)
    assert ended.outcome.reason.code is C.TIMED_OUT
    assert "had not powered off after 12 s" in ended.outcome.reason.message
    assert ended.outcome.exit is None
    assert ended.reports[-1].cpu_seconds > 0.8, "what a killed machine has used is known"
    assert (ended.outputs / "answer").read_text() == "42\n"


def test_a_status_on_the_output_disk_decides(node: Node) -> None:
    do = (
        "echo '{\"code\": 3}' > exit.json; echo out > stdout; echo 42 > outputs/answer;"
        "tar cf /dev/ubdd exit.json stdout outputs; sync"
    )
    for rule in ("poweroff", "report"):
        ended = node.run(do, exit=rule, outputs=("answer",))
        assert ended.outcome.reason.code is C.SCRIPT_FAILED
        assert ended.outcome.exit == ExitStatus(code=3, channel=ExitChannel.OUTPUT_DISK)
        assert ended.out == b"out\n"
        assert (ended.outputs / "answer").exists()


def test_an_output_disk_that_is_too_small(node: Node) -> None:
    do = "dd if=/dev/zero of=outputs/answer bs=1M count=40; tar cf /dev/ubdd outputs; sync"
    ended = node.run(do, exit="poweroff", outputs=("answer",), memory=192)
    assert ended.outcome.reason.code is C.OUTPUT_TOO_LARGE


def test_a_job_without_a_script_has_none_on_its_disk(node: Node) -> None:
    look = "ls /tmp/job; ls /tmp/job/script && echo there it is; ls /dev/ubd*"
    ended = node.run(look, exit="poweroff")
    assert b"job.json" in ended.console
    assert b"there it is" not in ended.console
    assert b"/dev/ubdd" in ended.console
    assert b"/dev/ubde" not in ended.console, "there is no data for cloud-init"


def test_a_vm_that_is_killed_while_it_writes_its_outputs_is_no_success(node: Node) -> None:
    def kill(this_run: Run, lease: Lease) -> None:
        lease.wait_for(S.BOOTING)
        wait_until(lambda: this_run.console.exists() and b"half of it" in this_run.console.read_bytes())
        kill_all(this_run.choice.vm_name)

    half = "echo '{\"code\": 0}' > exit.json; tar cf /dev/ubdd exit.json; sync; echo half of it"
    ended = node.run(f"{half}; sleep 1000", kill)
    assert ended.outcome.reason.code is C.GUEST_LOST
    assert ended.outcome.exit == ExitStatus(code=0, channel=ExitChannel.OUTPUT_DISK)


@pytest.mark.parametrize("do", ["sleep 1000", "trap 'poweroff -f' INT; sleep 1000 & wait"])
def test_a_vm_that_is_told_to_stop_did_not_finish(node: Node, do: str) -> None:
    """Even if it powers off in time: the signal made it do so, not its work."""

    def stop(this_run: Run, lease: Lease) -> None:
        lease.wait_for(S.RUNNING)
        this_run.request.event_queue.put(SignalSent(signal.SIGTERM))

    ended = node.run(f"echo 0 > /proc/sys/kernel/ctrl-alt-del; {do}", stop, exit="poweroff")
    assert ended.outcome.state is S.PREEMPTED
    assert ended.outcome.reason.code is C.EVICTED


def test_cloud_init_data_is_the_last_disk(node: Node) -> None:
    do = (
        "mkdir -p /tmp/seed; mount -t iso9660 -o ro /dev/ubde /tmp/seed; cat /tmp/seed/user-data;"
        "echo writable > /dev/ubde && echo wrote; busybox strings /dev/ubde | head -9"
    )
    node.image = replace(node.image, cloud_init=True)
    ended = node.run(do, exit="poweroff", user_data="#cloud-config\n# mine\n")
    assert b"# mine" in ended.console
    assert b"cidata" in ended.console
    assert b"wrote" not in ended.console


def test_the_root_file_system_may_be_in_a_partition(node: Node) -> None:
    system = node.image.root.read_bytes()
    entries = (b"", struct.pack("<B3sB3sII", 0, b"", 0x83, b"", 2048, len(system) // 512))
    table = b"".join(entry.ljust(16, b"\0") for entry in entries).ljust(64, b"\0")
    disk = node.folder / "partitioned"
    disk.write_bytes((b"\0" * 446 + table + b"\x55\xaa").ljust(MIB, b"\0") + system)
    node.image = replace(node.image, root=disk, partition=2)
    ended = node.run("cat /proc/cmdline", exit="poweroff")
    assert ended.outcome.state is S.COMPLETED, ended.outcome.reason.message
    assert b"root=/dev/ubda2" in ended.console


def test_a_disk_that_boots_goes_to_a_hypervisor_that_can(node: Node) -> None:
    node.image = bios_disk(node.folder / "disk", "the disk speaks", "poweroff")
    refused = node.run(exit="poweroff")
    assert refused.outcome.reason.code is C.NO_HYPERVISOR
    assert [report.hypervisor for report in refused.reports] == [None, None]
    node.tries_left = 2
    back = node.run(exit="poweroff")
    assert (back.outcome.state, back.outcome.reason.code) == (S.PREEMPTED, C.NO_HYPERVISOR)
    assert back.states == [S.STAGING, S.PREEMPTED]
    node.tries_left = 0
    node.drivers[HypervisorKind.QEMU] = Libvirt(HypervisorKind.QEMU, node_connection())
    ended = node.run(exit="poweroff")
    assert ended.outcome.state is S.COMPLETED, ended.outcome.reason.message
    assert ended.reports[-1].hypervisor is HypervisorKind.QEMU
    assert b"the disk speaks" in ended.console


def test_a_job_whose_outputs_its_node_loses_is_run_again_and_no_other(node: Node) -> None:
    """A job whose outputs the service refuses is not run again."""
    node.tries_left = 3
    for refusal, state, code, node_at_fault in (
        (OSError(errno.EIO, "Input/output error"), S.PREEMPTED, C.NODE_FAILED, True),
        (Unauthenticated("the token is over"), S.FAILED, C.INTERNAL, False),
    ):
        node.refuses = refusal
        outcome = node.run(LEAVES, outputs=("answer",), exit="poweroff").outcome
        assert (outcome.state, outcome.reason.code, outcome.node_at_fault) == (
            state,
            code,
            node_at_fault,
        )
        assert outcome.exit is not None


def test_what_a_node_cannot_read_is_not_what_the_job_left_out(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    node.tries_left = 3

    def lose(_: Lease, report: Report) -> None:
        if report.state is S.COLLECTING:
            (this_run.directory / "output.disk").unlink()

    monkeypatch.setattr(Lease, "progress", lose)
    this_run, _, _ = node.start(LEAVES, outputs=("answer",), exit="poweroff")
    outcome = execute(this_run)
    assert (outcome.state, outcome.reason.code) == (S.PREEMPTED, C.NODE_FAILED)


def test_a_job_is_no_success_without_what_it_printed(node: Node) -> None:
    """Undelivered output is lost with the run: a later agent cannot deliver it either."""
    node.settings = replace(node.settings, deliver_seconds=1)
    this_run, job, lease = node.start(LEAVES, outputs=("answer",), exit="poweroff")
    job.hears_of_nothing_printed = True
    with pytest.raises(ReportUndelivered) as untold:
        execute(this_run)
    left = Report.model_validate_json(untold.value.left.outcome)
    assert (left.state, left.reason.code, left.exit) == (S.FAILED, C.INTERNAL, POWERED_OFF)
    assert "the job's printed output could not be delivered" in left.reason.message
    assert not lease.reached(S.COMPLETED)


def test_a_node_that_cannot_begin_a_job_gives_it_back(node: Node) -> None:
    with small_disk(node.folder / "runs", 1, inodes=1):
        for node.tries_left, state in ((1, S.PREEMPTED), (0, S.FAILED)):
            ended = node.run()
            assert (ended.outcome.reason.code, ended.outcome.node_at_fault) == (C.NODE_FAILED, True)
            assert ended.states == [S.STAGING, state]
