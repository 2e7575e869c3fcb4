"""``vmjobs cluster``: virtual clusters, for those who operate them."""

from __future__ import annotations

import click

from vmjobs.cli.verbs import Verbs

#: verb -> (module, attribute, one line of help).
VERBS = {
    "apply": ("vmjobs.cli.cluster_apply", "apply", "Have clusters as files declare them."),
    "diff": ("vmjobs.cli.cluster_check", "diff", "Say what apply would change."),
    "validate": ("vmjobs.cli.cluster_check", "validate", "Say what is wrong with declarations."),
    "list": ("vmjobs.cli.cluster_show", "list_clusters", "List clusters."),
    "show": ("vmjobs.cli.cluster_show", "show", "Show a cluster and its machines."),
    "events": ("vmjobs.cli.cluster_watch", "events", "Show what happened to a cluster."),
    "console": ("vmjobs.cli.cluster_watch", "console", "Print the console of a machine."),
    "ssh": ("vmjobs.cli.cluster_ssh", "ssh", "Log in to a machine, or run a command in it."),
    "scp": ("vmjobs.cli.cluster_ssh", "scp", "Copy files to a machine, or from it."),
    "connect": ("vmjobs.cli.cluster_ssh", "connect", ""),
    "scale": ("vmjobs.cli.cluster_change", "scale", "Have another number of machines."),
    "upgrade": ("vmjobs.cli.cluster_change", "upgrade", "Have another image, one machine at a time."),
    "wake": ("vmjobs.cli.cluster_wake", "wake", "Have the cluster of a machine's ad wake."),
    "drain": ("vmjobs.cli.cluster_change", "drain", "Let all machines end with their jobs."),
    "resume": ("vmjobs.cli.cluster_change", "resume", "Start machines again after drain."),
    "retry": ("vmjobs.cli.cluster_change", "retry", "Try again what has failed, at once."),
    "delete": ("vmjobs.cli.cluster_change", "delete", "Have a cluster gone."),
}


@click.command(cls=Verbs, verbs=VERBS)
def cluster() -> None:
    """Operate virtual clusters: machines that stay, and are workers of an HTCondor pool.

    FILE has declarations in YAML or JSON; - is standard input. To change clusters takes a token of
    `vmjobs token create user NAME --admin`.
    """
