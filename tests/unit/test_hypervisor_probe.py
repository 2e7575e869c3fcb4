"""What a probe says of a guest that did not boot in time."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from vmjobs.hypervisor.base import VmConfig
from vmjobs.hypervisor.libvirt import kvm
from vmjobs.hypervisor.probe import boot_probe
from vmjobs.model import HypervisorKind


class Guest:
    """A driver whose guest prints these words, and runs until a deadline or ends at once."""

    kind = HypervisorKind.QEMU

    def __init__(self, words: str, ends: bool) -> None:
        self.words, self.ends = words, ends

    def start(self, vm: VmConfig) -> None:
        vm.console.write_text(self.words)

    def wait(self, name: str, timeout: float) -> None:
        time.sleep(0 if self.ends else timeout)

    def destroy(self, name: str) -> None:
        pass


@pytest.mark.parametrize(
    ("words", "ends", "is_slow"),
    [("[ 3.1] Freeing memory\n", False, True), ("[ 3.1] panic\n", True, False), ("", False, False)],
)
def test_a_guest_that_was_booting_is_slow(
    tmp_path: Path, words: str, ends: bool, is_slow: bool
) -> None:
    driver: Any = Guest(words, ends)
    kernel = tmp_path / "kernel"
    kernel.touch()
    found = boot_probe(driver, version=lambda: "1", deadline=0.2, kernel=kernel)
    assert (found.works, found.is_slow) == (False, is_slow), found.detail
    assert (words.strip() or "nothing heard") in found.detail


@pytest.mark.parametrize(
    ("cpuinfo", "works"),
    [
        ("processor\t: 0\nflags\t\t: fpu vmx sse2\n", True),
        ("processor\t: 0\nflags\t\t: fpu svm sse2\n", True),
        ("processor\t: 0\nflags\t\t: fpu sse2\n", False),
        ("processor\t: 0\nFeatures\t: fp asimd\n", True),  # aarch64 has no flag for it
    ],
)
def test_kvm_needs_hardware_virtualization(tmp_path: Path, cpuinfo: str, works: bool) -> None:
    (tmp_path / "cpuinfo").write_text(cpuinfo)
    (tmp_path / "kvm").touch()
    reason = kvm.unavailable_reason(tmp_path / "kvm", tmp_path / "cpuinfo")
    assert reason == "" if works else "hardware virtualization" in reason
    assert "cannot be opened" in kvm.unavailable_reason(tmp_path / "none", tmp_path / "cpuinfo")
