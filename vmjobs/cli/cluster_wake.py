"""``vmjobs cluster wake``: what ``condor_rooster`` calls for a machine that is switched off."""

from __future__ import annotations

import re
import sys
from typing import BinaryIO, Final

import click
from pydantic import TypeAdapter, ValidationError

from condor import names
from vmjobs.cli.support import client
from vmjobs.cluster.spec import ClusterName
from vmjobs.errors import InvalidRequest

#: An ad has some ten thousand bytes.
MAX_AD_BYTES: Final = 1 << 20
_LINE: Final = re.compile(rf'{names.CLUSTER}[ \t]*=[ \t]*"([^"]*)"[ \t\r]*', re.IGNORECASE | re.ASCII)
_NAME: Final = TypeAdapter(ClusterName)


@click.command()
def wake() -> None:
    """Have a machine in the cluster of the machine ad on standard input, where it has none.

    condor_rooster calls this for machines that are switched off and that a job would run on. It takes a
    token of `vmjobs token create rooster POOL`, or an operator's. Nothing changes where the cluster has
    machines already, or is to have none.
    """
    name = cluster_of(sys.stdin.buffer)
    with client() as api:
        api.clusters.wake(name)


def cluster_of(source: BinaryIO) -> str:
    """The cluster that a machine's ad, one attribute to a line, is of.

    Nothing else of the ad is looked at: anybody who may advertise a machine says what stands there.

    Raises:
        InvalidRequest: it is too long, or does not say so exactly once, with a name of a cluster.
    """
    data = source.read(MAX_AD_BYTES + 1)
    if len(data) > MAX_AD_BYTES:
        raise InvalidRequest(f"the machine's ad on standard input has more than {MAX_AD_BYTES} bytes")
    lines = data.decode("utf-8", "replace").split("\n")
    found = [match.group(1) for line in lines if (match := _LINE.fullmatch(line))]
    if len(found) != 1:
        raise InvalidRequest(
            f"the machine's ad on standard input has {names.CLUSTER} {len(found)} times, not once",
            hint="send the ad of a cluster's machine that is switched off, as condor_rooster does",
        )
    try:
        return _NAME.validate_python(found[0])
    except ValidationError as error:
        raise InvalidRequest(
            f"the machine's ad on standard input has a {names.CLUSTER} that is no name of a cluster"
        ) from error
