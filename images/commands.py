"""The commands of this package, and the groups that they are in."""

from __future__ import annotations

from typing import Final

import click

from vmjobs.cli.lazy_commands import Command, CommandTable, LazyGroup


@click.command(cls=LazyGroup)
def image() -> None:
    """Build images, and keep them in the service's repository.

    IMAGE is a digest, a name or name:tag of your own or the library's, or NAMESPACE/NAME:TAG.
    """


COMMANDS: Final[CommandTable] = {
    "vmjobs": {
        "image": Command("images.commands:image", "Build and manage images.", before="cluster"),
    },
    "job": {
        "submit": Command(
            "images.cli.submit:submit",
            "Submit a script as a job, or an array of jobs.",
            before="status",
        ),
    },
    "image": {
        "push": Command("images.cli.push:push", "Send an image to the repository."),
        "pull": Command("images.cli.pull:pull", "Fetch an image from the repository."),
        "list": Command("images.cli.list:list_images", "List images."),
        "show": Command("images.cli.list:show", "Show one image in detail."),
        "tag": Command("images.cli.tag:tag", "Give an image another name."),
        "rm": Command("images.cli.tag:remove", "Remove names, and images without names."),
        "share": Command("images.cli.change:share", "Set who may see and boot an image."),
        "deprecate": Command("images.cli.change:deprecate", "Mark an image as deprecated."),
        "verify": Command("images.cli.verify:verify", "Find damaged chunks."),
        "prefetch": Command("images.cli.prefetch:prefetch", "Make nodes fetch an image in advance."),
        "gc": Command("images.cli.gc:collect", "Remove images and data no longer needed."),
        "inspect": Command("images.cli.inspect:inspect", "Show a file's format and boot method."),
        "convert": Command("images.cli.convert:convert", "Convert a disk to another format."),
        "import": Command(
            "images.cli.import_oci:import_image", "Make an image from a container image."
        ),
        "builds": Command("images.cli.remote:builds", "Show, await or cancel remote builds."),
    },
}
