"""``vmjobs image prefetch``."""

from __future__ import annotations

import sys
import time

import click

from images.cli.common import display_name
from vmjobs.cli.common import (
    EXIT_TIMED_OUT,
    echo,
    image_argument,
    json_option,
    print_json,
    print_table,
    repository,
)
from vmjobs.wire import PrefetchRequest, PrefetchState

POLL_SECONDS = 2.0


@click.command()
@image_argument
@click.option("--site", default="", help="All nodes of this site.")
@click.option("--node", "nodes", multiple=True, help="This node; may be repeated.")
@click.option("--wait", "wait_seconds", is_flag=True, help="Wait until all of them have it.")
@click.option("--timeout", type=float, help="Seconds to wait at most.")
@json_option
def prefetch(
    image: str,
    site: str,
    nodes: tuple[str, ...],
    wait_seconds: bool,
    timeout: float | None,
    as_json: bool,
) -> None:
    """Make nodes fetch IMAGE now, so that jobs need not wait for it.

    A node fetches it at its next announcement, within about half a minute.
    """
    if not site and not nodes:
        raise click.UsageError("give --site SITE or --node NODE")
    request = PrefetchRequest(site=site, nodes=nodes)
    end = None if timeout is None else time.monotonic() + timeout
    with repository() as images:
        found = images.detail(image)
        state = images.prefetch(found.digest, request)
        while wait_seconds and not _is_complete(state) and (end is None or time.monotonic() < end):
            time.sleep(POLL_SECONDS)
            state = images.prefetch(found.digest, request)
    if as_json:
        print_json(state)
    else:
        share = f"{len(state.cached)} of {len(_all_nodes(state))} nodes"
        echo(f"{display_name(found, image)}: {share} have it")
        rows = [
            (name, "has it" if name in state.cached else "asked") for name in sorted(_all_nodes(state))
        ]
        print_table(("NODE", ""), rows)
    if wait_seconds and not _is_complete(state):
        sys.exit(EXIT_TIMED_OUT)


def _all_nodes(state: PrefetchState) -> set[str]:
    return {*state.wanted, *state.cached}


def _is_complete(state: PrefetchState) -> bool:
    return _all_nodes(state) == set(state.cached)
