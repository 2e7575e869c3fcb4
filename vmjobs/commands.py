"""The commands of this package, and the groups that they are in."""

from __future__ import annotations

from typing import Final

import click

from vmjobs.cli.lazy_commands import Command, CommandTable, LazyGroup


@click.command(cls=LazyGroup)
def job() -> None:
    """Submit and manage jobs.

    JOB is a job's id, or an array's id for all of its jobs. The first 6 or more characters suffice if
    they are unique among your jobs.
    """


@click.command(cls=LazyGroup)
def cluster() -> None:
    """Operate virtual clusters: long-running VMs that are workers of an HTCondor pool.

    FILE has declarations in YAML or JSON; - is standard input. Changing clusters requires a token of
    `vmjobs token create user NAME --admin`.
    """


@click.command(cls=LazyGroup)
def node() -> None:
    """Show execute nodes."""


COMMANDS: Final[CommandTable] = {
    "vmjobs": {
        "job": Command("vmjobs.commands:job", "Submit and manage jobs."),
        "cluster": Command("vmjobs.commands:cluster", "Operate virtual clusters."),
        "node": Command("vmjobs.commands:node", "Show execute nodes."),
        "enter": Command("vmjobs.cli.enter:enter", "Enter the VM of an HTCondor job on its node."),
        "completion": Command("vmjobs.cli.completion:completion", "Print shell completion code."),
    },
    "job": {
        "status": Command("vmjobs.cli.job.status:status", "Show jobs in detail."),
        "list": Command("vmjobs.cli.job.status:list_jobs", "List your jobs."),
        "wait": Command("vmjobs.cli.job.wait:wait", "Wait until jobs have ended."),
        "log": Command("vmjobs.cli.job.status:log", "Show a job's history."),
        "out": Command("vmjobs.cli.job.streams:out", "Print a job's standard output."),
        "err": Command("vmjobs.cli.job.streams:err", "Print a job's standard error."),
        "console": Command("vmjobs.cli.job.streams:console", "Print the console of a job's VM."),
        "outputs": Command("vmjobs.cli.job.outputs:outputs", "List or fetch a job's output files."),
        "cancel": Command("vmjobs.cli.job.change:cancel", "Cancel jobs."),
        "hold": Command("vmjobs.cli.job.change:hold", "Hold jobs until they are released."),
        "release": Command("vmjobs.cli.job.change:release", "Release held jobs."),
    },
    "cluster": {
        "apply": Command(
            "vmjobs.cli.cluster.apply:apply", "Create or change clusters as files declare them."
        ),
        "diff": Command("vmjobs.cli.cluster.check:diff", "Show what apply would change."),
        "validate": Command("vmjobs.cli.cluster.check:validate", "Check declarations for faults."),
        "list": Command("vmjobs.cli.cluster.show:list_clusters", "List clusters."),
        "show": Command("vmjobs.cli.cluster.show:show", "Show a cluster and its VMs."),
        "events": Command("vmjobs.cli.cluster.watch:events", "Show what happened to a cluster."),
        "console": Command("vmjobs.cli.cluster.watch:console", "Print the console of a VM."),
        "ssh": Command("vmjobs.cli.cluster.ssh:ssh", "Log in to a VM, or run a command in it."),
        "scp": Command("vmjobs.cli.cluster.ssh:scp", "Copy files to or from a VM."),
        "connect": Command("vmjobs.cli.cluster.ssh:connect", ""),
        "scale": Command("vmjobs.cli.cluster.change:scale", "Change the number of VMs."),
        "upgrade": Command("vmjobs.cli.cluster.change:upgrade", "Change the image, one VM at a time."),
        "drain": Command("vmjobs.cli.cluster.change:drain", "Stop all VMs once their jobs have ended."),
        "resume": Command("vmjobs.cli.cluster.change:resume", "Start VMs again after drain."),
        "retry": Command("vmjobs.cli.cluster.change:retry", "Retry failed VMs and images at once."),
        "delete": Command("vmjobs.cli.cluster.change:delete", "Delete a cluster."),
    },
    "node": {
        "list": Command("vmjobs.cli.nodes:list_nodes", "List the nodes that announced themselves."),
        "show": Command(
            "vmjobs.cli.nodes:show",
            "Show one node: its probe results, cached images, jobs and cluster VMs.",
        ),
    },
}
