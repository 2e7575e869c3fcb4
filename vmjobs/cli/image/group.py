"""``vmjobs image``: commands for local images and images in the service's repository."""

from __future__ import annotations

import click

from vmjobs.cli.lazy_commands import LazyGroup

#: subcommand -> (module, attribute, one line of help).
SUBCOMMANDS = {
    "push": ("vmjobs.cli.image.push", "push", "Send an image to the repository."),
    "pull": ("vmjobs.cli.image.pull", "pull", "Fetch an image from the repository."),
    "list": ("vmjobs.cli.image.list", "list_images", "List images."),
    "show": ("vmjobs.cli.image.list", "show", "Show one image in detail."),
    "tag": ("vmjobs.cli.image.tag", "tag", "Give an image another name."),
    "rm": ("vmjobs.cli.image.tag", "remove", "Remove names, and images without names."),
    "share": ("vmjobs.cli.image.change", "share", "Set who may see and boot an image."),
    "deprecate": ("vmjobs.cli.image.change", "deprecate", "Mark an image as deprecated."),
    "verify": ("vmjobs.cli.image.verify", "verify", "Find damaged chunks."),
    "prefetch": ("vmjobs.cli.image.prefetch", "prefetch", "Make nodes fetch an image in advance."),
    "gc": ("vmjobs.cli.image.gc", "collect", "Remove images and data no longer needed."),
    "inspect": ("vmjobs.cli.image.inspect", "inspect", "Show a file's format and boot method."),
    "convert": ("vmjobs.cli.image.convert", "convert", "Convert a disk to another format."),
    "import": ("vmjobs.cli.image.import_oci", "import_image", "Make an image from a container image."),
    "build": ("vmjobs.cli.image.build", "build", "Build an image from a recipe."),
    "builds": ("vmjobs.cli.image.remote", "builds", "Show, await or cancel remote builds."),
}


@click.command(cls=LazyGroup, lazy_commands=SUBCOMMANDS)
def image() -> None:
    """Build images, and keep them in the service's repository.

    IMAGE is a digest, a name or name:tag of your own or the library's, or NAMESPACE/NAME:TAG.
    """
