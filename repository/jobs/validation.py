"""Validates jobs against the limits of the service and the resources of live nodes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import PurePosixPath

from repository.images import Viewer
from repository.images.catalog import Catalog
from vmjobs.config import Config
from vmjobs.errors import Fault, InvalidRequest, InvalidSpec, NotFound
from vmjobs.model import (
    CHECKPOINTABLE_KINDS,
    MIB,
    NODE_ARCHITECTURE,
    HypervisorKind,
    JobSpec,
    NetworkMode,
    Node,
    check_cpus,
    check_image_cpus,
)

#: Size of a blob, by owner and digest; ``None``: the owner does not have it.
BlobSize = Callable[[str, str], int | None]


def validate_job(
    spec: JobSpec,
    config: Config,
    nodes: Sequence[Node],
    catalog: Catalog,
    viewer: Viewer,
    blob_size: BlobSize,
) -> str:
    """Validate a job; return the digest of the image that will run.

    nodes: the live nodes; if there are none, their resources are not checked.
    viewer: the submitting user; images that he may not see do not exist.
    Raises InvalidSpec with every fault, not only the first.
    """
    digest, kinds, architecture = "", tuple(HypervisorKind), NODE_ARCHITECTURE
    faults: list[Fault] = []
    try:
        digest = catalog.resolve(viewer, spec.image)
        manifest = catalog.parsed_manifest(viewer, digest)
        kinds, architecture = manifest.hypervisors, manifest.architecture
        if spec.checkpoint and spec.network is not NetworkMode.NONE and not manifest.renews:
            text = "the guest cannot be checkpointed: it does not accept a new token (guest contract 3)"
            faults.append(Fault("checkpoint", "cannot_save", text))
    except (NotFound, InvalidRequest) as error:
        faults.append(unknown_image(error))
    faults += _not_bootable(spec, kinds)
    faults += _beyond_limits(spec, config)
    faults += _beyond_nodes(spec, nodes, kinds, architecture)
    faults += _wrong_inputs(spec, viewer.user, blob_size)
    faults += _conflicting_inputs(spec)
    if faults:
        raise InvalidSpec("the job cannot run here", faults=faults)
    return digest


def unknown_image(error: NotFound | InvalidRequest) -> Fault:
    """Return the fault of a specification whose image does not exist."""
    text = f"{error.message}; {error.hint}" if error.hint else error.message
    return Fault("image", "unknown_image", text)


def narrow_kinds(spec: JobSpec, kinds: tuple[HypervisorKind, ...]) -> tuple[HypervisorKind, ...]:
    """Return the hypervisor kinds that can boot the image and that the job allows."""
    return tuple(kind for kind in kinds if kind in spec.kinds)


def _not_bootable(spec: JobSpec, kinds: tuple[HypervisorKind, ...]) -> Iterator[Fault]:
    if spec.hypervisor is not None and spec.hypervisor not in kinds:
        able = ", ".join(kinds)
        text = f"the image cannot be booted by {spec.hypervisor}, only by {able}"
        yield Fault("hypervisor", "cannot_boot", text)
    elif why := check_cpus(spec.hypervisor, spec.cpus) or check_image_cpus(spec.cpus, kinds):
        yield Fault("cpus", "above_hypervisor", why)
    elif not narrow_kinds(spec, kinds):
        able, want = ", ".join(kinds), " and ".join(CHECKPOINTABLE_KINDS)
        text = f"only {want} can checkpoint a VM, but the image boots on {able}"
        yield Fault("checkpoint", "cannot_save", text)


def _beyond_limits(spec: JobSpec, config: Config) -> Iterator[Fault]:
    limits = (
        ("cpus", spec.cpus, config.max_cpus, "processors"),
        ("memory", spec.memory, config.max_memory, "MiB"),
        ("disk", spec.disk, config.max_disk, "MiB"),
        ("run_seconds", spec.run_seconds, config.max_run_seconds, "seconds"),
    )
    for field, asked, limit, unit in limits:
        if asked > limit:
            yield Fault(field, "above_limit", f"{asked} {unit} asked for, the limit here is {limit}")
    known = {"", "local", config.default_route, *config.routes}
    if spec.route not in known:
        names = ", ".join(sorted(known - {""}))
        yield Fault("route", "unknown_route", f"there is no route {spec.route!r}; known are {names}")


def _beyond_nodes(
    spec: JobSpec, nodes: Sequence[Node], able: tuple[HypervisorKind, ...], architecture: str
) -> Iterator[Fault]:
    """Yield faults for resources that no live node has, alone or, if those fit, together."""
    if not nodes:
        return
    before = 0
    wanted = {"cpus": spec.cpus, "memory": spec.memory, "disk": spec.disk}
    for field, asked in wanted.items():
        largest = max(int(getattr(node, field)) for node in nodes)
        if asked > largest:
            before += 1
            unit = "processors" if field == "cpus" else "MiB"
            yield Fault(
                field, "above_nodes", f"{asked} {unit} asked for, the largest node has {largest}"
            )
    kinds = {info.kind for node in nodes for info in node.hypervisors if info.works}
    if spec.hypervisor is not None and spec.hypervisor not in kinds:
        before += 1
        have = ", ".join(sorted(kinds)) or "none"
        yield Fault(
            "hypervisor", "no_node", f"no live node has a working {spec.hypervisor}; there is {have}"
        )
    elif not kinds.intersection(able):
        before += 1
        have, want = ", ".join(sorted(kinds)) or "none", ", ".join(able)
        text = f"no live node has what boots the image ({want}); there is {have}"
        yield Fault("image", "no_node", text)
    elif not any(info.can_run(architecture) for node in nodes for info in node.hypervisors):
        before += 1
        yield Fault("image", "no_node", f"the image is for {architecture}, which no live node emulates")
    if not before and not any(_has_resources(spec, node, able, architecture) for node in nodes):
        yield Fault("", "no_node", "no single live node has all that the job asks for")


def _has_resources(
    spec: JobSpec, node: Node, able: tuple[HypervisorKind, ...], architecture: str
) -> bool:
    kinds = {info.kind for info in node.hypervisors if info.can_run(architecture)}.intersection(
        narrow_kinds(spec, able)
    )
    enough = spec.cpus <= node.cpus and spec.memory <= node.memory and spec.disk <= node.disk
    return enough and bool(kinds)


def _conflicting_inputs(spec: JobSpec) -> Iterator[Fault]:
    """Yield faults for a file at a path that is the folder of another input."""
    folders = {parent for file in spec.inputs for parent in PurePosixPath(file.name).parents}
    for number, file in enumerate(spec.inputs):
        if PurePosixPath(file.name) in folders:
            text = f"{file.name} is a file, and the folder of another input"
            yield Fault(f"inputs.{number}", "in_the_way", text)


def missing_inputs(spec: JobSpec, lost: Collection[str]) -> Iterator[Fault]:
    """Yield a fault for each input whose digest is in ``lost``, as its owner does not have it."""
    for number, file in enumerate(spec.inputs):
        if file.digest in lost:
            yield Fault(
                f"inputs.{number}",
                "missing_blob",
                f"the bytes of {file.name} were not uploaded: you have no blob {file.digest}",
            )


def _wrong_inputs(spec: JobSpec, owner: str, blob_size: BlobSize) -> Iterator[Fault]:
    sizes = {file.digest: blob_size(owner, file.digest) for file in spec.inputs}
    yield from missing_inputs(spec, [digest for digest, size in sizes.items() if size is None])
    for number, file in enumerate(spec.inputs):
        size = sizes[file.digest]
        if size is not None and size != file.size:
            yield Fault(
                f"inputs.{number}", "wrong_size", f"{file.name} has {size} bytes, not {file.size}"
            )
    total = sum(file.size for file in spec.inputs)
    if total > spec.disk * MIB:
        yield Fault("disk", "too_small", f"the inputs alone have {total} bytes")
