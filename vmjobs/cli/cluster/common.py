"""Helpers of the cluster commands: arguments, texts, differences between declarations."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import click

from vmjobs.cli.common import client, completion_retries
from vmjobs.cluster.spec import ClusterSpec, SizeRange
from vmjobs.cluster.vm_state import ClusterVmCode
from vmjobs.cluster.wire import Cluster, ClusterVm
from vmjobs.errors import VMJobsError


def complete_cluster(_ctx: click.Context, _parameter: click.Parameter, incomplete: str) -> list[str]:
    """Complete names of clusters; none if the service does not answer at once."""
    try:
        with client(completion_retries()) as api:
            found = api.clusters.list()
    except VMJobsError:
        return []
    return [cluster.name for cluster in found if cluster.name.startswith(incomplete)]


def complete_vm_name(ctx: click.Context, _parameter: click.Parameter, incomplete: str) -> list[str]:
    """Complete names of a cluster's VMs."""
    try:
        with client(completion_retries()) as api:
            found = api.clusters.get(ctx.params.get("name") or "")
    except VMJobsError:
        return []
    return [vm.name for vm in found.members if vm.name.startswith(incomplete)]


name_argument = click.argument("name", metavar="NAME", shell_complete=complete_cluster)
files_argument = click.argument(
    "files", metavar="FILE...", nargs=-1, required=True, type=click.Path(allow_dash=True)
)


def format_size(size: int | SizeRange) -> str:
    """Return a size as text, such as ``1 to 8``."""
    return f"{size.min} to {size.max}" if isinstance(size, SizeRange) else str(size)


def format_vm_count(count: int) -> str:
    """Return a number of VMs as text, such as ``2 VMs``."""
    return "1 VM" if count == 1 else f"{count} VMs"


def short_digest(digest: str) -> str:
    """Return the first 12 hexadecimal digits of a digest."""
    return digest.removeprefix("sha256:")[:12]


def format_reason(vm: ClusterVm) -> str:
    """Return the reason for a cluster VM's state on one line; empty for ``PROGRESS``."""
    text = vm.message.partition("\n")[0]
    return text if vm.code is ClusterVmCode.PROGRESS else f"{vm.code}: {text}".removesuffix(": ")


@dataclass(frozen=True)
class FieldChange:
    """A changed field of a declaration. Values are JSON data."""

    field: str
    old: Any
    new: Any

    def __str__(self) -> str:
        return f"{self.field}: {_value_text(self.old)} -> {_value_text(self.new)}"


def _value_text(value: Any) -> str:
    return value if isinstance(value, str) and value else "none" if value is None else json.dumps(value)


def changed_fields(cluster: Cluster, spec: ClusterSpec, image: str) -> list[FieldChange]:
    """Return the fields that ``spec`` changes in the latest, even failed, declaration.

    image: the digest of the image in ``spec``.
    """
    declared = cluster.failed or cluster
    old, new = dict(_flatten(declared.spec)), dict(_flatten(spec))
    if declared.image != image:  # the same name may mean another image by now
        old["image"] = f"{old['image']} ({short_digest(declared.image)})"
        new["image"] = f"{new['image']} ({short_digest(image)})"
    fields = dict.fromkeys([*new, *old])
    found = [FieldChange(f, old.get(f), new.get(f)) for f in fields]
    # Compare as JSON: in Python 1 == True.
    return [change for change in found if json.dumps(change.old) != json.dumps(change.new)]


def _flatten(spec: ClusterSpec) -> Iterator[tuple[str, Any]]:
    for field, value in spec.model_dump(mode="json").items():
        if field in {"attributes", "limits"}:
            yield from ((f"{field}.{name}", item) for name, item in value.items())
        else:
            yield field, value


def retry_hint(cluster: Cluster) -> str:
    """Return a hint for a declaration that failed and was rolled back."""
    return f"fix the declaration, or retry it: `vmjobs cluster retry {cluster.name}`"
