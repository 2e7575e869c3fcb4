"""``vmjobs cluster wake``: the command that ``condor_rooster`` calls for an offline ad."""

from __future__ import annotations

import re
import sys
from typing import BinaryIO, Final

import click
from pydantic import TypeAdapter, ValidationError

from condor import names
from vmjobs.cli.common import client
from vmjobs.cluster.spec import ClusterName
from vmjobs.errors import InvalidRequest

#: Upper limit; an ad has about ten thousand bytes.
MAX_AD_BYTES: Final = 1 << 20
_CLUSTER_LINE: Final = re.compile(
    rf'{names.CLUSTER}[ \t]*=[ \t]*"([^"]*)"[ \t\r]*', re.IGNORECASE | re.ASCII
)
_CLUSTER_NAME: Final = TypeAdapter(ClusterName)


@click.command()
def wake() -> None:
    """Start a first VM in the cluster that the machine ad on standard input names.

    condor_rooster calls this for offline ads that match a job. The command requires a token of
    `vmjobs token create rooster POOL`, or an operator's. It changes nothing if the cluster already has
    VMs or must not have any.
    """
    name = read_cluster_name(sys.stdin.buffer)
    with client() as api:
        api.clusters.wake(name)


def read_cluster_name(source: BinaryIO) -> str:
    """Return the cluster that a machine ad, one attribute per line, names.

    Other attributes are ignored: every client that may advertise machines controls them.

    Raises:
        InvalidRequest: the ad is too long, or does not name exactly one valid cluster.
    """
    data = source.read(MAX_AD_BYTES + 1)
    if len(data) > MAX_AD_BYTES:
        raise InvalidRequest(f"the machine's ad on standard input has more than {MAX_AD_BYTES} bytes")
    lines = data.decode("utf-8", "replace").split("\n")
    found = [match.group(1) for line in lines if (match := _CLUSTER_LINE.fullmatch(line))]
    if len(found) != 1:
        raise InvalidRequest(
            f"the machine's ad on standard input has {names.CLUSTER} {len(found)} times, not once",
            hint="send the offline ad of a cluster, as condor_rooster does",
        )
    try:
        return _CLUSTER_NAME.validate_python(found[0])
    except ValidationError as error:
        raise InvalidRequest(
            f"the machine's ad on standard input has a {names.CLUSTER} that is not a cluster's name"
        ) from error
