"""Which hypervisor a job gets, and the error if there is none."""

from __future__ import annotations

from dataclasses import replace

import pytest

from vmjobs.errors import NoHypervisor
from vmjobs.hypervisor.base import ProbeResult, VmNeeds
from vmjobs.hypervisor.select import choose
from vmjobs.model import Capabilities, HypervisorKind

KVM, UML, QEMU = HypervisorKind.KVM, HypervisorKind.UML, HypervisorKind.QEMU
ALL = (KVM, UML, QEMU)


def probed(**works: bool) -> list[ProbeResult]:
    return [ProbeResult(HypervisorKind(k), w, f"finding of {k}", 1.0) for k, w in works.items()]


@pytest.mark.parametrize(
    ("works", "demanded", "expected"),
    [
        ({"kvm": True, "uml": True, "qemu": True}, None, KVM),
        ({"kvm": False, "uml": True, "qemu": True}, None, UML),
        ({"kvm": False, "uml": False, "qemu": True}, None, QEMU),
        ({"kvm": True, "uml": True, "qemu": True}, QEMU, QEMU),
        ({"kvm": True, "uml": True, "qemu": True}, UML, UML),
    ],
)
def test_the_first_that_works(
    works: dict[str, bool], demanded: HypervisorKind | None, expected: HypervisorKind
) -> None:
    assert choose(ALL, VmNeeds(demanded), probed(**works)) is expected


DISK = (KVM, QEMU)


def test_what_an_image_needs_decides() -> None:
    fallback = replace(probed(uml=True)[0], abilities=Capabilities(cloud_init=False))
    found = [fallback, *probed(qemu=True)]
    assert choose(ALL, VmNeeds(), found) is UML
    assert choose(ALL, VmNeeds(cloud_init=True), found) is QEMU
    with pytest.raises(NoHypervisor, match="uml: its kernel here cannot read cloud-init data"):
        choose(ALL, VmNeeds(UML, cloud_init=True), found)
    assert choose(ALL, VmNeeds(able=DISK), probed(kvm=False, uml=True, qemu=True)) is QEMU
    with pytest.raises(NoHypervisor, match="the image is for riscv64, and this node's processors are"):
        choose(ALL, VmNeeds(architecture="riscv64"), found)
    emulator = replace(probed(qemu=True)[0], abilities=Capabilities(architectures=("s390x",)))
    assert choose(ALL, VmNeeds(architecture="s390x"), [fallback, emulator]) is QEMU
    with pytest.raises(NoHypervisor, match="uml: its VMs have no s390x processors"):
        choose(ALL, VmNeeds(UML, architecture="s390x"), [fallback, emulator])


@pytest.mark.parametrize(
    ("kinds", "demanded", "works", "able", "why"),
    [
        (ALL, None, {"kvm": False, "uml": False}, ALL, "kvm: finding of kvm.*uml: finding of uml"),
        (ALL, KVM, {"kvm": False, "uml": True}, ALL, "does not work on this node: kvm: finding of kvm"),
        ((UML,), KVM, {"uml": True}, ALL, "kvm: not set up here"),
        ((), None, {}, ALL, "none is set up"),
        (ALL, None, {"uml": True, "qemu": False}, DISK, r"\(kvm or qemu\) works on this node"),
        (ALL, UML, {"uml": True}, DISK, "demands the hypervisor uml, but its image boots by kvm or"),
    ],
)
def test_why_there_is_none(
    kinds: tuple[HypervisorKind, ...],
    demanded: HypervisorKind | None,
    works: dict[str, bool],
    able: tuple[HypervisorKind, ...],
    why: str,
) -> None:
    with pytest.raises(NoHypervisor, match=why):
        choose(kinds, VmNeeds(demanded, able), probed(**works))
