"""``vmjobs job submit``."""

from __future__ import annotations

from typing import Any

import click

from images.cli.oci_ref import resolve_image
from vmjobs.cli.common import client, echo, json_option, print_json
from vmjobs.cli.job.wait import wait_and_show
from vmjobs.cli.spec_options import build_spec, spec_options, split_inputs, split_pairs
from vmjobs.cli.transfer import upload_all
from vmjobs.model import MAX_ARRAY


@click.command()
@spec_options
@click.option(
    "--array",
    "count",
    type=click.IntRange(1, MAX_ARRAY),
    default=1,
    show_default=True,
    help="Number of jobs.",
)
@click.option(
    "--checkpoint",
    is_flag=True,
    help="If the job is vacated, save its VM and continue on another node (kvm, xen, qemu).",
)
@click.option("--route", default="", help="Route to a site; default: the service's default route.")
@click.option("--accounting-group", default="", help="HTCondor accounting group.")
@click.option("--label", "labels", multiple=True, metavar="NAME=VALUE", help="May be repeated.")
@click.option("--idempotency-key", default="", help="Submitting again with the same key has no effect.")
@click.option("--wait", "and_wait", is_flag=True, help="Wait until the jobs have ended.")
@json_option
def submit(
    script: str | None,
    arguments: tuple[str, ...],
    inputs: tuple[str, ...],
    environment: tuple[str, ...],
    labels: tuple[str, ...],
    count: int,
    idempotency_key: str,
    and_wait: bool,
    as_json: bool,
    **fields: Any,
) -> None:
    """Submit SCRIPT with ARGUMENTS as a job, or an image that runs its own program.

    In the guest, VMJOBS_ARRAY_INDEX counts from 0 to one less than VMJOBS_ARRAY_COUNT.
    """
    api = client()
    fields["image"] = resolve_image(fields["image"], push=True)
    described = upload_all(api, split_inputs(inputs))
    pairs = split_pairs(labels, "--label")
    spec = build_spec(script, arguments, described, environment, labels=pairs, **fields)
    submitted = api.submit(spec, count, key=idempotency_key)
    ids = [job.id for job in submitted.jobs]
    if and_wait:
        wait_and_show(api, ids, None, as_json)
    elif as_json:
        print_json(submitted)
    else:
        echo(f"array {submitted.array}" if count > 1 else ids[0])
        for identifier in ids if count > 1 else ():
            echo(identifier)
