"""``vmjobs image gc``."""

from __future__ import annotations

import click

from images.store.image_store import ImageStore
from images.store.local_gc import collect_garbage
from vmjobs.cli.common import config, echo, json_option, print_json, repository
from vmjobs.model import MIB
from vmjobs.wire import GcReport


@click.command("gc")
@click.option("--local", is_flag=True, help="Remove images without a name from the local store.")
@click.option("--dry-run", is_flag=True, help="Remove nothing; show what would be removed.")
@json_option
def collect(local: bool, dry_run: bool, as_json: bool) -> None:
    """Remove from the service the data that no image, job or upload needs.

    Needs an administrator's token. The service's worker does the same periodically.
    """
    if local:
        report = collect_garbage(ImageStore(config().images), dry_run=dry_run)
    else:
        with repository() as images:
            report = images.collect(dry_run=dry_run)
    if as_json:
        print_json(report)
        return
    echo(_sentence(report, "would be removed" if dry_run else "removed"))


def _sentence(report: GcReport, what: str) -> str:
    return (
        f"{what}: {report.images} images, {report.uploads} uploads, {report.blobs} files, "
        f"{report.contents} contents, {report.segments} segments, {report.bytes / MIB:.1f} MiB"
    )
