"""The hypervisors of a node: probed, remembered, probed again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from vmjobs.agent.hypervisor_registry import HypervisorRegistry
from vmjobs.errors import NoHypervisor
from vmjobs.hypervisor.base import ProbeResult, VmNeeds
from vmjobs.model import Capabilities, HypervisorKind

QEMU, UML = HypervisorKind.QEMU, HypervisorKind.UML


class Driver:
    """A driver with only a probe."""

    def __init__(self, kind: HypervisorKind, works: bool, is_slow: bool = False) -> None:
        self.kind, self.works, self.is_slow, self.probes = kind, works, is_slow, 0

    abilities = Capabilities(cpus=2, cloud_init=False)

    def probe(self, deadline: float) -> ProbeResult:
        self.probes += 1
        detail = "booted" if self.works else "no kernel"
        return ProbeResult(self.kind, self.works, detail, 0.1, is_slow=self.is_slow)


def fleet(*drivers: Any, cache: Path | None = None) -> HypervisorRegistry:
    return HypervisorRegistry({driver.kind: driver for driver in drivers}, 1.0, cache)


def test_what_failed_is_looked_at_again_and_what_works_is_not() -> None:
    uml, qemu = Driver(UML, works=True), Driver(QEMU, works=False)
    node = fleet(uml, qemu)
    with pytest.raises(NoHypervisor, match="no kernel"):
        node.choose(VmNeeds(QEMU))
    qemu.works = True
    node.reprobe_failing()
    assert node.choose(VmNeeds(QEMU)) is qemu
    assert node.choose(VmNeeds()) is uml
    assert (uml.probes, qemu.probes) == (1, 2)


def test_a_hypervisor_in_doubt_is_probed_again_and_others_are_not() -> None:
    uml, qemu = Driver(UML, works=True), Driver(QEMU, works=True)
    node, losses = fleet(uml, qemu), []
    node.on_loss = lambda: losses.append(node.results)
    node.probe()
    assert node.reprobe(UML).works
    uml.works = False
    assert not node.reprobe(UML).works
    assert not node.reprobe(UML).works
    assert len(losses) == 1, "it is told once"
    uml.probes -= 1
    assert (uml.probes, qemu.probes) == (3, 1)
    assert node.choose(VmNeeds()) is qemu
    with pytest.raises(NoHypervisor):
        node.choose(VmNeeds(UML))
    uml.works = True
    node.reprobe_failing(only_likely=True)
    assert node.choose(VmNeeds()) is uml


def test_what_never_worked_is_not_looked_at_as_if_it_were_lost() -> None:
    uml, qemu = Driver(UML, works=True), Driver(QEMU, works=False)
    node = fleet(uml, qemu)
    node.probe()
    node.reprobe_failing(only_likely=True)
    assert (uml.probes, qemu.probes) == (1, 1)


def test_what_was_slow_when_the_node_was_busy_is_looked_at_again() -> None:
    qemu = Driver(QEMU, works=False, is_slow=True)
    node = fleet(Driver(UML, works=True), qemu)
    node.probe()
    qemu.works = True
    node.reprobe_failing(only_likely=True)
    assert node.choose(VmNeeds(QEMU)) is qemu


def test_findings_are_kept_between_processes(tmp_path: Path) -> None:
    first, second = Driver(UML, works=True), Driver(UML, works=True)
    fleet(first, cache=tmp_path / "probes.json").choose(VmNeeds())
    assert fleet(second, cache=tmp_path / "probes.json").choose(VmNeeds()) is second
    assert second.probes == 0


def test_a_cache_in_which_nothing_works_is_not_believed(tmp_path: Path) -> None:
    with pytest.raises(NoHypervisor):
        fleet(Driver(UML, works=False), cache=tmp_path / "probes.json").choose(VmNeeds())
    mended = Driver(UML, works=True)
    assert fleet(mended, cache=tmp_path / "probes.json").choose(VmNeeds()) is mended
