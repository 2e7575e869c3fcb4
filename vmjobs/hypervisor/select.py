"""Selects the hypervisor of a job."""

from __future__ import annotations

import platform
from collections.abc import Sequence

from vmjobs.errors import NoHypervisor
from vmjobs.hypervisor.base import ProbeResult
from vmjobs.model import HypervisorKind


def choose(
    kinds: Sequence[HypervisorKind],
    demanded: HypervisorKind | None,
    results: Sequence[ProbeResult],
    able: Sequence[HypervisorKind] = tuple(HypervisorKind),
    cpus: int = 1,
    *,
    cloud_init: bool = False,
    architecture: str = "",
) -> HypervisorKind:
    """Return the first of ``kinds`` that works for the job, or the demanded one.

    able: those that can boot the image and have the features that the job needs.
    cpus: processors of its VM. cloud_init: its guest looks for NoCloud data.
    architecture: of the image's machine code, as ``uname -m`` calls it; ``""``: any.

    Raises:
        NoHypervisor: none works; the message has the result of each probe.
    """
    if architecture not in {"", here := platform.machine()}:
        raise NoHypervisor(f"the image is for {architecture}, and this node's processors are {here}")
    if demanded is not None and demanded not in able:
        why = f"its image boots by {' or '.join(able)} only" if able else "nothing can run its image"
        raise NoHypervisor(f"the job demands the hypervisor {demanded}, but {why}")
    wanted = [kind for kind in kinds if demanded in {None, kind} and kind in able]
    lacking = {result.kind: _lacking(result, cpus, cloud_init=cloud_init) for result in results}
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


def _lacking(result: ProbeResult, cpus: int, *, cloud_init: bool) -> str:
    """Return why this hypervisor cannot run the VM; ``""`` if it can."""
    can = result.abilities
    if not result.works:
        return result.detail or "its probe failed"
    if can.cpus < cpus:
        plural = "s" * (can.cpus > 1)
        return f"a VM has {can.cpus} processor{plural} here, and the job needs {cpus}"
    if cloud_init and not can.cloud_init:
        return "its kernel here cannot read cloud-init data"
    return ""


def _detail(
    kind: HypervisorKind, kinds: Sequence[HypervisorKind], lacking: dict[HypervisorKind, str]
) -> str:
    if kind not in kinds:
        return "not set up here"
    return lacking.get(kind, "not probed")
