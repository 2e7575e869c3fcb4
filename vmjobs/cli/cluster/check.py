"""``vmjobs cluster validate`` and ``diff``."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import click

from vmjobs.cli.cluster.common import FieldChange, changed_fields, files_argument, format_vm_count
from vmjobs.cli.common import client, echo, json_option, print_json
from vmjobs.cli.manifests import ClusterManifest, ManifestFinding, raise_findings, read_clusters
from vmjobs.cluster.wire import Assessment
from vmjobs.errors import (
    Conflict,
    Fault,
    Forbidden,
    InvalidRequest,
    NotFound,
    Unauthenticated,
    Unavailable,
)

if TYPE_CHECKING:
    from vmjobs.client import Client
    from vmjobs.client.clusters import Clusters

#: The exit status of diff(1) where there are differences.
EXIT_DIFFERENT = 1


@dataclass
class AssessmentReport:
    """The service's answers about declarations. assessments: of valid ones, by name."""

    assessments: dict[str, Assessment] = field(default_factory=dict)
    findings: list[ManifestFinding] = field(default_factory=list)


def assess(api: Clusters, manifests: Sequence[ClusterManifest]) -> AssessmentReport:
    """Have the service check declarations.

    Raises:
        Unavailable, Unauthenticated, Forbidden: the service cannot be asked.
    """
    found = AssessmentReport()
    for manifest in manifests:
        try:
            found.assessments[manifest.spec.name] = api.assess(manifest.spec)
        except InvalidRequest as error:
            faults = error.faults or (Fault("", error.code, error.message),)
            located = [manifest.finding(fault) for fault in faults]
            found.findings += sorted(located, key=lambda f: (f.place.line, f.place.column))
        except NotFound as error:
            found.findings.append(manifest.finding(Fault("image", error.code, error.message)))
        except Conflict as error:
            found.findings.append(manifest.finding(Fault("name", error.code, error.message)))
    return found


@click.command()
@files_argument
@click.option("--capacity", is_flag=True, help="Report VMs that would be PENDING as faults.")
@click.option("--offline", is_flag=True, help="Do not ask the service.")
@json_option
def validate(files: tuple[str, ...], capacity: bool, offline: bool, as_json: bool) -> None:
    """Check the clusters that FILEs declare. Nothing is changed.

    All faults are reported at once, as FILE:LINE:COLUMN. The service checks images and pools, and
    computes how many VMs would run now.
    """
    if capacity and offline:
        raise click.UsageError("--capacity asks the service; it cannot be used with --offline")
    manifests = read_clusters(files)
    findings = list(manifests.findings)
    report = AssessmentReport()
    if not offline:
        report = _assess_online(manifests.clusters, findings)
        findings += report.findings
        if capacity:
            findings += _pending_findings(manifests.clusters, report)
    if as_json:
        found = [finding.to_dict() for finding in findings]
        print_json({"findings": found, "assessments": report.assessments})
        if findings:
            sys.exit(InvalidRequest.exit_code)
        return
    raise_findings(findings)
    for manifest in manifests.clusters:
        spec = manifest.spec
        echo(f"{manifest.file}: {spec.name}: {_placement_text(report.assessments.get(spec.name))}")


def _assess_online(
    manifests: Sequence[ClusterManifest], findings: Sequence[ManifestFinding]
) -> AssessmentReport:
    try:
        with client() as api:
            return assess(api.clusters, manifests)
    except (Unavailable, Unauthenticated, Forbidden) as error:
        if findings:  # the user has to fix these first
            echo(f"vmjobs: the service was not asked: {error.message}", err=True)
            return AssessmentReport()
        error.hint = error.hint or "with --offline the service is not asked"
        raise


def _placement_text(assessment: Assessment | None) -> str:
    if assessment is None:
        return "valid (the service was not asked)"
    placed = sum(assessment.placed.values())
    where = ", ".join(f"{count} on {node}" for node, count in sorted(assessment.placed.items()))
    text = f"valid; there is room for {format_vm_count(placed)}" + (f" ({where})" if where else "")
    if assessment.pending:
        text += f"; {assessment.pending} would be PENDING: {assessment.why}"
    return text


def _pending_findings(
    manifests: Sequence[ClusterManifest], report: AssessmentReport
) -> list[ManifestFinding]:
    found = []
    for manifest in manifests:
        assessment = report.assessments.get(manifest.spec.name)
        if assessment and assessment.pending:
            message = f"{format_vm_count(assessment.pending)} would be PENDING: {assessment.why}"
            found.append(manifest.finding(Fault("size", "pending", message)))
    return found


@click.command()
@files_argument
@json_option
def diff(files: tuple[str, ...], as_json: bool) -> None:
    """Show what `apply` of FILEs would change. Exits with 0 if nothing, else with 1."""
    manifests = read_clusters(files).require_valid()
    findings: list[ManifestFinding] = []
    with client() as api:
        found = {d.spec.name: _differences(api, d, findings) for d in manifests}
    raise_findings(findings)
    if as_json:
        print_json([_diff_as_json(name, changed) for name, changed in found.items()])
    else:
        for name, changed in found.items():
            if changed is None:
                echo(f"{name} would be created")
            elif changed:
                echo(f"{name} would be changed")
                for change in changed:
                    echo(f"  {change}")
    if any(changed is None or changed for changed in found.values()):
        sys.exit(EXIT_DIFFERENT)


def _differences(
    api: Client, manifest: ClusterManifest, findings: list[ManifestFinding]
) -> list[FieldChange] | None:
    """Return the changes that `apply` would make; None if the cluster does not exist."""
    spec = manifest.spec
    image = spec.image
    if not image.startswith("sha256:"):
        try:
            image = api.image(spec.image).digest
        except NotFound as error:
            findings.append(manifest.finding(Fault("image", error.code, error.message)))
    try:
        return changed_fields(api.clusters.get(spec.name), spec, image)
    except NotFound:
        return None


def _diff_as_json(name: str, changed: list[FieldChange] | None) -> dict[str, Any]:
    if changed is None:
        return {"name": name, "outcome": "created", "changes": []}
    outcome = "changed" if changed else "unchanged"
    return {"name": name, "outcome": outcome, "changes": [asdict(change) for change in changed]}
