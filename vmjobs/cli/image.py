"""``vmjobs image``: commands for local images and images in the service's repository."""

from __future__ import annotations

import click

from vmjobs.cli.lazy_commands import LazyGroup

#: subcommand -> (module, attribute, one line of help).
SUBCOMMANDS = {
    "push": ("vmjobs.cli.image_push", "push", "Send an image to the repository."),
    "pull": ("vmjobs.cli.image_pull", "pull", "Fetch an image from the repository."),
    "list": ("vmjobs.cli.image_list", "list_images", "List images."),
    "show": ("vmjobs.cli.image_list", "show", "Show one image in detail."),
    "tag": ("vmjobs.cli.image_tag", "tag", "Give an image another name."),
    "rm": ("vmjobs.cli.image_tag", "remove", "Remove names, and images without names."),
    "share": ("vmjobs.cli.image_change", "share", "Set who may see and boot an image."),
    "deprecate": ("vmjobs.cli.image_change", "deprecate", "Mark an image as deprecated."),
    "verify": ("vmjobs.cli.image_verify", "verify", "Find damaged chunks."),
    "prefetch": ("vmjobs.cli.image_prefetch", "prefetch", "Make nodes fetch an image in advance."),
    "gc": ("vmjobs.cli.image_gc", "collect", "Remove images and data no longer needed."),
    "inspect": ("vmjobs.cli.image_inspect", "inspect", "Show a file's format and boot method."),
    "convert": ("vmjobs.cli.image_convert", "convert", "Convert a disk to another format."),
    "import": ("vmjobs.cli.image_import", "import_image", "Make an image from a container image."),
    "build": ("vmjobs.cli.image_build", "build", "Build an image from a recipe."),
    "builds": ("vmjobs.cli.image_remote", "builds", "Show, await or cancel remote builds."),
}


@click.command(cls=LazyGroup, lazy_commands=SUBCOMMANDS)
def image() -> None:
    """Build images, and keep them in the service's repository.

    IMAGE is a digest, a name or name:tag of your own or the library's, or NAMESPACE/NAME:TAG.
    """
