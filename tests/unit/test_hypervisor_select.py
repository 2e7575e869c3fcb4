"""Which hypervisor a job gets, and what is said where there is none."""

from __future__ import annotations

import pytest

from vmjobs.errors import NoHypervisor
from vmjobs.hypervisor.base import ProbeResult
from vmjobs.hypervisor.select import choose
from vmjobs.model import HypervisorKind

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
    assert choose(ALL, demanded, probed(**works)) is expected


def test_none_works() -> None:
    with pytest.raises(NoHypervisor) as caught:
        choose(ALL, None, probed(kvm=False, uml=False, qemu=False))
    for kind in ("kvm", "uml", "qemu"):
        assert f"{kind}: finding of {kind}" in caught.value.message


def test_what_is_demanded_does_not_work() -> None:
    with pytest.raises(NoHypervisor, match="demands, does not work on this node: kvm: finding of kvm"):
        choose(ALL, KVM, probed(kvm=False, uml=True))


def test_what_is_demanded_is_not_set_up() -> None:
    with pytest.raises(NoHypervisor, match="kvm: not set up here"):
        choose((UML,), KVM, probed(uml=True))


def test_nothing_is_set_up() -> None:
    with pytest.raises(NoHypervisor, match="none is set up"):
        choose((), None, ())


DISK = (KVM, QEMU)


def test_an_image_that_not_all_can_boot() -> None:
    assert choose(ALL, None, probed(kvm=False, uml=True, qemu=True), DISK) is QEMU
    with pytest.raises(NoHypervisor, match=r"with its image \(kvm or qemu\) works on this node"):
        choose(ALL, None, probed(kvm=False, uml=True, qemu=False), DISK)
    with pytest.raises(NoHypervisor, match="demands the hypervisor uml, but its image boots by kvm or"):
        choose(ALL, UML, probed(uml=True), DISK)
