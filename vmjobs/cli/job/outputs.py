"""``vmjobs job outputs``."""

from __future__ import annotations

from pathlib import Path

import click

from vmjobs.cli.common import client, echo, json_option, print_json, print_table
from vmjobs.cli.job.table import find_jobs, jobs_argument
from vmjobs.cli.transfer import download_all
from vmjobs.errors import InvalidRequest


@click.command()
@jobs_argument
@click.option(
    "--fetch",
    "directory",
    type=click.Path(path_type=Path, file_okay=False),
    help="Fetch them into this directory; with several JOBs, into a subdirectory for each.",
)
@json_option
def outputs(jobs: tuple[str, ...], directory: Path | None, as_json: bool) -> None:
    """List or fetch the output files of JOBs."""
    api = client()
    found = find_jobs(api, jobs)
    if directory is not None:
        one_array = len({job.array for job in found}) == 1
        fetched, failed = list[str](), list[str]()
        for job in found:
            own = str(job.index) if one_array else job.id
            target = directory / own if len(found) > 1 else directory
            paths, faults = download_all(api, job.id, job.outputs, target)
            fetched += map(str, paths)
            failed += faults
        if as_json:
            print_json(fetched)
        else:
            echo("\n".join(fetched))
        if failed:
            wanted = len(fetched) + len(failed)
            raise InvalidRequest(f"{len(failed)} of {wanted} outputs not fetched: {'; '.join(failed)}")
        return
    if as_json:
        print_json([{"job": j.id, "outputs": j.outputs, "rejected": j.rejected} for j in found])
        return
    print_table(
        ("JOB", "OUTPUT", "BYTES", "DIGEST"),
        [(j.id, o.path, o.size, o.digest) for j in found for o in j.outputs],
        ids=True,
    )
    for job in found:
        for entry in job.rejected:
            echo(f"{job.id} refused {entry.path}: {entry.why}", err=True)
