"""Selects the hypervisor of a job."""

from __future__ import annotations

import platform
from collections.abc import Sequence

from vmjobs.errors import NoHypervisor
from vmjobs.hypervisor.base import ProbeResult, VmNeeds
from vmjobs.model import Capabilities, HypervisorKind


def choose(
    kinds: Sequence[HypervisorKind],
    needs: VmNeeds,
    results: Sequence[ProbeResult],
) -> HypervisorKind:
    """Return the first of ``kinds`` that works for the VM, or the demanded one.

    Raises:
        NoHypervisor: none works; the message has the result of each probe.
    """
    demanded, able, architecture = needs.demanded, needs.able, needs.architecture
    if results and not any(has_architecture(result.abilities, architecture) for result in results):
        raise NoHypervisor(
            f"the image is for {architecture}, and this node's processors are {platform.machine()}",
            hint="install Debian's package qemu-system-arm for aarch64, qemu-system-misc for s390x",
        )
    if demanded is not None and demanded not in able:
        why = f"its image boots by {' or '.join(able)} only" if able else "nothing can run its image"
        raise NoHypervisor(f"the job demands the hypervisor {demanded}, but {why}")
    wanted = [kind for kind in kinds if demanded in {None, kind} and kind in able]
    lacking = {result.kind: _lacking(result, needs) for result in results}
    for kind in wanted:
        if lacking.get(kind) == "":
            return kind
    asked = wanted if demanded is None else [demanded]
    details = "; ".join(f"{kind}: {_detail(kind, kinds, lacking)}" for kind in asked)
    what = "no hypervisor" if demanded is None else f"the hypervisor {demanded}, which the job demands,"
    tail = " works on this node" if demanded is None else " does not work on this node"
    if demanded is None and set(able) != set(HypervisorKind):
        what = f"no hypervisor that can run the job with its image ({' or '.join(able) or 'none can'})"
    raise NoHypervisor(
        f"{what}{tail}: {details or 'none is set up'}",
        hint="`vmjobs doctor` shows what each probe found",
    )


def has_architecture(can: Capabilities, architecture: str) -> bool:
    """Whether VMs can have an architecture, as ``uname -m`` calls it; ``""``: any."""
    return architecture in {"", platform.machine(), *can.architectures}


def _lacking(result: ProbeResult, needs: VmNeeds) -> str:
    """Return why this hypervisor cannot run the VM; ``""`` if it can."""
    can = result.abilities
    if not result.works:
        return result.detail or "its probe failed"
    if not has_architecture(can, needs.architecture):
        return f"its VMs have no {needs.architecture} processors"
    if can.cpus < needs.cpus:
        plural = "s" * (can.cpus > 1)
        return f"a VM has {can.cpus} processor{plural} here, and the job needs {needs.cpus}"
    if needs.cloud_init and not can.cloud_init:
        return "its kernel here cannot read cloud-init data"
    return ""


def _detail(
    kind: HypervisorKind, kinds: Sequence[HypervisorKind], lacking: dict[HypervisorKind, str]
) -> str:
    if kind not in kinds:
        return "not set up here"
    return lacking.get(kind, "not probed")
