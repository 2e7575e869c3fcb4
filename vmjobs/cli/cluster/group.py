"""``vmjobs cluster``: commands for operators of virtual clusters."""

from __future__ import annotations

import click

from vmjobs.cli.lazy_commands import LazyGroup

#: subcommand -> (module, attribute, one line of help).
SUBCOMMANDS = {
    "apply": ("vmjobs.cli.cluster.apply", "apply", "Create or change clusters as files declare them."),
    "diff": ("vmjobs.cli.cluster.check", "diff", "Show what apply would change."),
    "validate": ("vmjobs.cli.cluster.check", "validate", "Check declarations for faults."),
    "list": ("vmjobs.cli.cluster.show", "list_clusters", "List clusters."),
    "show": ("vmjobs.cli.cluster.show", "show", "Show a cluster and its VMs."),
    "events": ("vmjobs.cli.cluster.watch", "events", "Show what happened to a cluster."),
    "console": ("vmjobs.cli.cluster.watch", "console", "Print the console of a VM."),
    "ssh": ("vmjobs.cli.cluster.ssh", "ssh", "Log in to a VM, or run a command in it."),
    "scp": ("vmjobs.cli.cluster.ssh", "scp", "Copy files to or from a VM."),
    "connect": ("vmjobs.cli.cluster.ssh", "connect", ""),
    "scale": ("vmjobs.cli.cluster.change", "scale", "Change the number of VMs."),
    "upgrade": ("vmjobs.cli.cluster.change", "upgrade", "Change the image, one VM at a time."),
    "wake": ("vmjobs.cli.cluster.wake", "wake", "Start a VM of the cluster in a machine ad."),
    "drain": ("vmjobs.cli.cluster.change", "drain", "Stop all VMs once their jobs have ended."),
    "resume": ("vmjobs.cli.cluster.change", "resume", "Start VMs again after drain."),
    "retry": ("vmjobs.cli.cluster.change", "retry", "Retry failed VMs and images at once."),
    "delete": ("vmjobs.cli.cluster.change", "delete", "Delete a cluster."),
}


@click.command(cls=LazyGroup, lazy_commands=SUBCOMMANDS)
def cluster() -> None:
    """Operate virtual clusters: long-running VMs that are workers of an HTCondor pool.

    FILE has declarations in YAML or JSON; - is standard input. Changing clusters requires a token of
    `vmjobs token create user NAME --admin`.
    """
