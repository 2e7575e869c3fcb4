"""``vmjobs cluster apply``."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from vmjobs.cli.cluster.check import assess
from vmjobs.cli.cluster.common import (
    FieldChange,
    changed_fields,
    files_argument,
    format_vm_count,
    retry_hint,
)
from vmjobs.cli.cluster.wait import wait_options, wait_until_up
from vmjobs.cli.common import client, echo, json_option, print_json
from vmjobs.cli.manifests import raise_findings, read_clusters
from vmjobs.cluster.spec import ClusterSpec
from vmjobs.cluster.wire import ApplyOutcome, ApplyResult
from vmjobs.errors import NotFound

if TYPE_CHECKING:
    from vmjobs.client.clusters import Clusters


@click.command()
@files_argument
@wait_options("all VMs are UP")
@json_option
def apply(files: tuple[str, ...], wait: bool, timeout: float, as_json: bool) -> None:
    """Create or change the clusters that FILEs declare; none if any has a fault.

    A cluster that is already as declared stays untouched. If the declaration of its VMs changes, they
    are replaced one at a time, each once its jobs have ended. Clusters that no FILE names stay.
    """
    manifests = read_clusters(files).require_valid()
    with client() as api:
        raise_findings(assess(api.clusters, manifests).findings)
        done = []
        for manifest in manifests:
            done.append(apply_spec(api.clusters, manifest.spec))
            if not as_json:
                print_outcome(*done[-1])
        names = [applied.cluster.name for applied, _ in done]
        found = wait_until_up(api.clusters, names, timeout) if wait else [a.cluster for a, _ in done]
    if as_json:
        rows = zip(done, found, strict=True)
        print_json(
            [
                {"outcome": a.outcome, "changes": [asdict(c) for c in changed], "cluster": cluster}
                for (a, changed), cluster in rows
            ]
        )


def apply_spec(api: Clusters, spec: ClusterSpec) -> tuple[ApplyResult, list[FieldChange]]:
    """Declare a cluster; return the answer and the changed fields."""
    try:
        before = api.get(spec.name)
    except NotFound:
        before = None
    applied = api.put(spec)
    if applied.outcome is not ApplyOutcome.CHANGED or before is None:
        return applied, []
    return applied, changed_fields(before, applied.cluster.spec, applied.cluster.image)


def print_outcome(applied: ApplyResult, changed: list[FieldChange]) -> None:
    cluster = applied.cluster
    wanted = f", {format_vm_count(cluster.target)} of {cluster.spec.image}"
    echo(f"{cluster.name} {applied.outcome}" + wanted * (applied.outcome is ApplyOutcome.CREATED))
    if cluster.failed:
        echo(f"  {cluster.failed.message}; {retry_hint(cluster)}")
    for change in changed:
        echo(f"  {change}")
