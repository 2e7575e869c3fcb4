"""``vmjobs image import``."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from images.cli.common import parse_name
from images.cli.oci_ref import import_container, push_container
from images.oci.container import ARCHITECTURE
from images.oci.fetch import RegistryAccess
from vmjobs.cli.common import echo, json_option, print_json
from vmjobs.errors import InvalidRequest

_PLATFORM = f"linux/{ARCHITECTURE}"


@click.command("import")
@click.argument("reference")
@click.argument("name", metavar="[NAME[:TAG]]", required=False, default="")
@click.option("--push", is_flag=True, help="Also send it to the repository.")
@click.option("--username", default="", help="For the registry; with --password-stdin.")
@click.option("--password-stdin", is_flag=True, help="Read the password from standard input.")
@click.option(
    "--authfile",
    type=click.Path(path_type=Path, dir_okay=False, exists=True),
    help="Credentials as `skopeo login` or `docker login` wrote them; default: theirs.",
)
@click.option("--insecure", is_flag=True, help="Allow HTTP, and HTTPS with any certificate.")
@click.option(
    "--platform", default=_PLATFORM, show_default=True, help="The image to choose from an index."
)
@json_option
def import_image(
    reference: str,
    name: str,
    push: bool,
    username: str,
    password_stdin: bool,
    authfile: Path | None,
    insecure: bool,
    platform: str,
    as_json: bool,
) -> None:
    """Make a VM image of a container image, without root rights.

    REFERENCE is oci:REGISTRY/NAME:TAG, oci:REGISTRY/NAME@sha256:…, oci-layout:DIR[:TAG] or
    docker-archive:FILE. A job without a script runs what the container runs; its user, environment
    and working directory are the container's. The same container image gives the same VM image.
    """
    if platform != _PLATFORM:
        raise InvalidRequest(f"{platform} cannot boot: only {_PLATFORM} has a kernel")
    if bool(username) != password_stdin:
        raise click.UsageError("--username and --password-stdin go together")
    if username and authfile:
        raise click.UsageError("give either --authfile, or --username and --password-stdin")
    password = sys.stdin.readline().rstrip("\r\n") if password_stdin else ""
    access = RegistryAccess(authfile=authfile, username=username, password=password, insecure=insecure)
    wanted = parse_name(name) if name else None
    if wanted is not None and wanted.namespace and not push:
        raise InvalidRequest(f"{name}: local images have no namespace")
    found = import_container(
        reference, access, wanted.name if wanted else "", wanted.tag if wanted else ""
    )
    detail = push_container(found, wanted.namespace if wanted else "") if push else None
    if as_json:
        print_json({**vars(found), "image": detail})
    else:
        echo(f"{found.name}:{found.tag} {found.digest}")
