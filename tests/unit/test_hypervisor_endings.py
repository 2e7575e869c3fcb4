"""How machines ended: what the drivers make of what they hear."""

from __future__ import annotations

import signal
import threading
from pathlib import Path

import pytest

from vmjobs.errors import NoHypervisor
from vmjobs.hypervisor import firmware
from vmjobs.hypervisor.base import Ending
from vmjobs.hypervisor.endings import Endings, of_cause, of_kernel


def test_the_first_cause_stands() -> None:
    endings = Endings()
    endings.expect("a")
    endings.heard("a", of_cause("guest-reset"))
    endings.heard("a", of_cause("host-signal"))  # how its process is cleared away
    endings.over("a", Ending.POWEROFF)
    assert endings.of("a", 0) is Ending.RESET
    endings.forget("a")
    assert endings.of("a", 0) is Ending.UNKNOWN


def test_the_word_may_come_late_or_never() -> None:
    endings = Endings()
    endings.expect("a")
    assert endings.of("a", 0.01) is Ending.UNKNOWN
    later = threading.Timer(0.05, endings.over, ["a", Ending.CRASHED])
    later.start()
    assert endings.of("a", 30) is Ending.CRASHED
    later.join()


def test_machines_that_nobody_expects_are_not_kept() -> None:
    endings = Endings()
    endings.over("b", Ending.POWEROFF)
    assert endings.of("b", 0) is Ending.UNKNOWN


@pytest.mark.parametrize(
    ("cause", "expected"),
    [
        ("guest-shutdown", Ending.POWEROFF),
        ("guest-reset", Ending.RESET),
        ("guest-panic", Ending.PANICKED),
        ("host-signal", Ending.KILLED),
        ("host-error", Ending.CRASHED),
        ("something-new", Ending.UNKNOWN),
        ("", Ending.UNKNOWN),
    ],
)
def test_causes(cause: str, expected: Ending) -> None:
    assert of_cause(cause) is expected


@pytest.mark.parametrize(
    ("status", "console", "expected"),
    [
        (0, b"[   3.1] reboot: Power down\n", Ending.POWEROFF),
        (0, b"[   3.1] reboot: System halted\n", Ending.POWEROFF),
        (0, b"reboot: Power down\n[   3.1] reboot: Restarting system\n", Ending.RESET),
        (0, b"the guest said nothing of it\n", Ending.UNKNOWN),
        (0, b"", Ending.UNKNOWN),
        (1, b"reboot: Power down\n", Ending.CRASHED),
        (-signal.SIGABRT, b"Kernel panic", Ending.PANICKED),
        (-signal.SIGKILL, b"reboot: Power down\n", Ending.KILLED),
        (-signal.SIGSEGV, b"reboot: Power down\n", Ending.CRASHED),
    ],
)
def test_uml_never_guesses_a_power_off(
    path: Path, status: int, console: bytes, expected: Ending
) -> None:
    path.write_bytes(console)
    assert of_kernel(status, path) is expected


def test_firmware_is_found_and_copied(tmp_path: Path) -> None:
    code, variables = tmp_path / "code", tmp_path / "vars"
    places = [(str(tmp_path / "none"), str(variables)), (str(code), str(variables))]
    code.write_bytes(b"code")
    assert firmware.find(places) is None
    variables.write_bytes(b"variables")
    found = firmware.find(places)
    workdir = tmp_path / "work"
    workdir.mkdir()
    own = firmware.lay_out(workdir, found)
    assert own.code == code
    assert own.variables.parent == workdir
    assert own.variables.read_bytes() == b"variables"
    with pytest.raises(NoHypervisor, match="no UEFI firmware"):
        firmware.lay_out(workdir, None)
