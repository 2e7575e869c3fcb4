"""``vmjobs image``: everything about images, here and in the service's repository."""

from __future__ import annotations

import click

from vmjobs.cli.verbs import Verbs

#: verb -> (module, attribute, one line of help).
VERBS = {
    "push": ("vmjobs.cli.image_push", "push", "Send an image to the repository."),
    "pull": ("vmjobs.cli.image_pull", "pull", "Fetch an image from the repository."),
    "list": ("vmjobs.cli.image_list", "list_images", "List images."),
    "show": ("vmjobs.cli.image_list", "show", "Show one image in detail."),
    "tag": ("vmjobs.cli.image_tag", "tag", "Give an image another name."),
    "rm": ("vmjobs.cli.image_tag", "remove", "Take names away, and images that have none left."),
    "share": ("vmjobs.cli.image_change", "share", "Say who may see and boot an image."),
    "deprecate": ("vmjobs.cli.image_change", "deprecate", "Warn people off an image."),
    "verify": ("vmjobs.cli.image_verify", "verify", "Look for damaged blocks."),
    "prefetch": ("vmjobs.cli.image_prefetch", "prefetch", "Have nodes fetch an image beforehand."),
    "gc": ("vmjobs.cli.image_gc", "collect", "Remove what nothing needs any more."),
    "inspect": ("vmjobs.cli.image_inspect", "inspect", "Say what a file is, without opening it up."),
    "convert": ("vmjobs.cli.image_convert", "convert", "Convert a disk to another format."),
    "import": ("vmjobs.cli.image_import", "import_image", "Make an image of a container image."),
    "build": ("vmjobs.cli.image_build", "build", "Build an image from a recipe."),
    "builds": ("vmjobs.cli.image_remote", "builds", "Look after builds by the service."),
}


@click.command(cls=Verbs, verbs=VERBS)
def image() -> None:
    """Build images, and keep them in the service's repository.

    IMAGE is a digest, a name or name:tag of your own or the library's, or NAMESPACE/NAME:TAG.
    """
