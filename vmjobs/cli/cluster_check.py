"""``vmjobs cluster validate`` and ``diff``."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import click

from vmjobs.cli.cluster_support import Change, changes, files_argument, machines
from vmjobs.cli.declarations import Declaration, Finding, read, refuse
from vmjobs.cli.support import client, echo, json_option, print_json
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
DIFFERENT = 1


# --------------------------------------------------------------------------- validate


@dataclass
class Assessed:
    """The service's answers about declarations. assessments: of valid ones, by name."""

    assessments: dict[str, Assessment] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)


def assess(api: Clusters, declared: Sequence[Declaration]) -> Assessed:
    """Have the service check declarations.

    Raises:
        Unavailable, Unauthenticated, Forbidden: the service cannot be asked.
    """
    found = Assessed()
    for declaration in declared:
        try:
            found.assessments[declaration.spec.name] = api.assess(declaration.spec)
        except InvalidRequest as error:
            faults = error.faults or (Fault("", error.code, error.message),)
            told = [declaration.finding(fault) for fault in faults]
            found.findings += sorted(told, key=lambda f: (f.place.line, f.place.column))
        except NotFound as error:
            found.findings.append(declaration.finding(Fault("image", error.code, error.message)))
        except Conflict as error:
            found.findings.append(declaration.finding(Fault("name", error.code, error.message)))
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
    declared = read(files)
    findings = list(declared.findings)
    assessed = Assessed()
    if not offline:
        assessed = _ask(declared.clusters, findings)
        findings += assessed.findings
        if capacity:
            findings += _short_of(declared.clusters, assessed)
    if as_json:
        found = [finding.plain() for finding in findings]
        print_json({"findings": found, "assessments": assessed.assessments})
        if findings:
            sys.exit(InvalidRequest.exit_code)
        return
    refuse(findings)
    for declaration in declared.clusters:
        spec = declaration.spec
        echo(f"{declaration.file}: {spec.name}: {_outlook(assessed.assessments.get(spec.name))}")


def _ask(declared: Sequence[Declaration], findings: Sequence[Finding]) -> Assessed:
    try:
        with client() as api:
            return assess(api.clusters, declared)
    except (Unavailable, Unauthenticated, Forbidden) as error:
        if findings:  # the user has to fix these first
            echo(f"vmjobs: the service was not asked: {error.message}", err=True)
            return Assessed()
        error.hint = error.hint or "with --offline the service is not asked"
        raise


def _outlook(assessment: Assessment | None) -> str:
    if assessment is None:
        return "valid (the service was not asked)"
    placed = sum(assessment.placed.values())
    where = ", ".join(f"{count} on {node}" for node, count in sorted(assessment.placed.items()))
    text = f"valid; there is room for {machines(placed)}" + (f" ({where})" if where else "")
    if assessment.pending:
        text += f"; {assessment.pending} would be PENDING: {assessment.why}"
    return text


def _short_of(declared: Sequence[Declaration], assessed: Assessed) -> list[Finding]:
    """Return findings for VMs that would be PENDING."""
    found = []
    for declaration in declared:
        assessment = assessed.assessments.get(declaration.spec.name)
        if assessment and assessment.pending:
            message = f"{machines(assessment.pending)} would be PENDING: {assessment.why}"
            found.append(declaration.finding(Fault("size", "pending", message)))
    return found


# --------------------------------------------------------------------------- diff


@click.command()
@files_argument
@json_option
def diff(files: tuple[str, ...], as_json: bool) -> None:
    """Show what `apply` of FILEs would change. Exits with 0 if nothing, else with 1."""
    declared = read(files).checked()
    findings: list[Finding] = []
    with client() as api:
        found = {d.spec.name: _differences(api, d, findings) for d in declared}
    refuse(findings)
    if as_json:
        print_json([_plain(name, changed) for name, changed in found.items()])
    else:
        for name, changed in found.items():
            if changed is None:
                echo(f"{name} would be created")
            elif changed:
                echo(f"{name} would be changed")
                for change in changed:
                    echo(f"  {change}")
    if any(changed is None or changed for changed in found.values()):
        sys.exit(DIFFERENT)


def _differences(api: Client, declaration: Declaration, findings: list[Finding]) -> list[Change] | None:
    """Return the changes that `apply` would make; None if the cluster does not exist."""
    spec = declaration.spec
    image = spec.image
    if not image.startswith("sha256:"):
        try:
            image = api.image(spec.image).digest
        except NotFound as error:
            findings.append(declaration.finding(Fault("image", error.code, error.message)))
    try:
        return changes(api.clusters.get(spec.name), spec, image)
    except NotFound:
        return None


def _plain(name: str, changed: list[Change] | None) -> dict[str, Any]:
    if changed is None:
        return {"name": name, "outcome": "created", "changes": []}
    outcome = "changed" if changed else "unchanged"
    return {"name": name, "outcome": outcome, "changes": [asdict(change) for change in changed]}
