"""Which hypervisor a job gets."""

from __future__ import annotations

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
) -> HypervisorKind:
    """The first of ``kinds`` whose probe was a success, or the demanded one.

    able: those that can boot the image, and have what the job asks for.
    cpus: processors of its machine.

    Raises:
        NoHypervisor: there is none; the message has what each probe found.
    """
    if demanded is not None and demanded not in able:
        why = f"its image boots by {' or '.join(able)} only" if able else "nothing can run its image"
        raise NoHypervisor(f"the job demands the hypervisor {demanded}, but {why}")
    wanted = [kind for kind in kinds if demanded in {None, kind} and kind in able]
    working = {result.kind for result in results if result.works and result.cpus >= cpus}
    for kind in wanted:
        if kind in working:
            return kind
    found = {result.kind: _finding(result, cpus) for result in results}
    asked = wanted if demanded is None else [demanded]
    details = "; ".join(f"{kind}: {_detail(kind, kinds, found)}" for kind in asked)
    what = "no hypervisor" if demanded is None else f"the hypervisor {demanded}, which the job demands,"
    tail = " works on this node" if demanded is None else " does not work on this node"
    if demanded is None and set(able) != set(HypervisorKind):
        what = f"no hypervisor that can run the job with its image ({_either(able)})"
    raise NoHypervisor(
        f"{what}{tail}: {details or 'none is set up'}",
        hint="`vmjobs doctor` shows what each probe found",
    )


def _either(able: Sequence[HypervisorKind]) -> str:
    return " or ".join(able) or "none can"


def _finding(result: ProbeResult, cpus: int) -> str:
    if not result.works or result.cpus >= cpus:
        return result.detail
    plural = "s" * (result.cpus > 1)
    return f"a machine has {result.cpus} processor{plural} here, and {cpus} are asked for"


def _detail(
    kind: HypervisorKind, kinds: Sequence[HypervisorKind], found: dict[HypervisorKind, str]
) -> str:
    if kind not in kinds:
        return "not set up here"
    return found.get(kind, "not probed")
