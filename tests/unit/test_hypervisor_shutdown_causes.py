"""Shutdown causes of VMs, as the drivers derive them from events."""

from __future__ import annotations

import signal
import threading
from pathlib import Path

import pytest

from vmjobs.errors import NoHypervisor
from vmjobs.hypervisor.base import ShutdownCause
from vmjobs.hypervisor.libvirt import firmware
from vmjobs.hypervisor.shutdown_causes import ShutdownCauses, cause_from_qemu, cause_from_uml_exit


def test_the_first_cause_stands() -> None:
    shutdown_causes = ShutdownCauses()
    shutdown_causes.expect("a")
    shutdown_causes.record_cause("a", cause_from_qemu("guest-reset"))
    shutdown_causes.record_cause("a", cause_from_qemu("host-signal"))  # cleanup of its process
    shutdown_causes.ended("a", ShutdownCause.POWEROFF)
    assert shutdown_causes.of("a", 0) is ShutdownCause.RESET
    shutdown_causes.forget("a")
    assert shutdown_causes.of("a", 0) is ShutdownCause.UNKNOWN


def test_the_word_may_come_late_or_never() -> None:
    shutdown_causes = ShutdownCauses()
    shutdown_causes.expect("a")
    assert shutdown_causes.of("a", 0.01) is ShutdownCause.UNKNOWN
    later = threading.Timer(0.05, shutdown_causes.ended, ["a", ShutdownCause.CRASHED])
    later.start()
    assert shutdown_causes.of("a", 30) is ShutdownCause.CRASHED
    later.join()


def test_vms_that_nobody_expects_are_not_kept() -> None:
    shutdown_causes = ShutdownCauses()
    shutdown_causes.ended("b", ShutdownCause.POWEROFF)
    assert shutdown_causes.of("b", 0) is ShutdownCause.UNKNOWN


@pytest.mark.parametrize(
    ("cause", "expected"),
    [
        ("guest-shutdown", ShutdownCause.POWEROFF),
        ("guest-reset", ShutdownCause.RESET),
        ("guest-panic", ShutdownCause.PANICKED),
        ("host-signal", ShutdownCause.KILLED),
        ("host-error", ShutdownCause.CRASHED),
        ("something-new", ShutdownCause.UNKNOWN),
        ("", ShutdownCause.UNKNOWN),
    ],
)
def test_causes(cause: str, expected: ShutdownCause) -> None:
    assert cause_from_qemu(cause) is expected


@pytest.mark.parametrize(
    ("status", "console", "expected"),
    [
        (0, b"[   3.1] reboot: Power down\n", ShutdownCause.POWEROFF),
        (0, b"[   3.1] reboot: System halted\n", ShutdownCause.POWEROFF),
        (0, b"reboot: Power down\n[   3.1] reboot: Restarting system\n", ShutdownCause.RESET),
        (0, b"the guest said nothing of it\n", ShutdownCause.UNKNOWN),
        (0, b"", ShutdownCause.UNKNOWN),
        (1, b"reboot: Power down\n", ShutdownCause.CRASHED),
        (-signal.SIGABRT, b"Kernel panic", ShutdownCause.PANICKED),
        (-signal.SIGKILL, b"reboot: Power down\n", ShutdownCause.KILLED),
        (-signal.SIGSEGV, b"reboot: Power down\n", ShutdownCause.CRASHED),
    ],
)
def test_uml_never_guesses_a_power_off(
    path: Path, status: int, console: bytes, expected: ShutdownCause
) -> None:
    path.write_bytes(console)
    assert cause_from_uml_exit(status, path) is expected


def test_firmware_is_found_and_copied(tmp_path: Path) -> None:
    code, variables = tmp_path / "code", tmp_path / "vars"
    places = [(str(tmp_path / "none"), str(variables)), (str(code), str(variables))]
    code.write_bytes(b"code")
    assert firmware.find(places) is None
    variables.write_bytes(b"variables")
    found = firmware.find(places)
    workdir = tmp_path / "work"
    workdir.mkdir()
    own = firmware.prepare_firmware(workdir, found)
    assert own.code == code
    assert own.variables.parent == workdir
    assert own.variables.read_bytes() == b"variables"
    with pytest.raises(NoHypervisor, match="no UEFI firmware"):
        firmware.prepare_firmware(workdir, None)
