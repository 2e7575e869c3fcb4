"""``vmjobs cluster``: virtual clusters, for those who operate them."""

from __future__ import annotations

import importlib

import click

#: verb -> (module, attribute, one line of help).
VERBS = {
    "apply": ("vmjobs.cli.cluster_apply", "apply", "Have clusters as files declare them."),
    "diff": ("vmjobs.cli.cluster_check", "diff", "Say what apply would change."),
    "validate": ("vmjobs.cli.cluster_check", "validate", "Say what is wrong with declarations."),
    "list": ("vmjobs.cli.cluster_show", "list_clusters", "List clusters."),
    "show": ("vmjobs.cli.cluster_show", "show", "Show a cluster and its machines."),
    "events": ("vmjobs.cli.cluster_watch", "events", "Show what happened to a cluster."),
    "console": ("vmjobs.cli.cluster_watch", "console", "Print the console of a machine."),
    "scale": ("vmjobs.cli.cluster_change", "scale", "Have another number of machines."),
    "upgrade": ("vmjobs.cli.cluster_change", "upgrade", "Have another image, one machine at a time."),
    "drain": ("vmjobs.cli.cluster_change", "drain", "Let all machines end with their jobs."),
    "resume": ("vmjobs.cli.cluster_change", "resume", "Start machines again after drain."),
    "retry": ("vmjobs.cli.cluster_change", "retry", "Try again what has failed, at once."),
    "delete": ("vmjobs.cli.cluster_change", "delete", "Have a cluster gone."),
}


class _Verbs(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in VERBS:
            return None
        module, attribute, _ = VERBS[cmd_name]
        command: click.Command = getattr(importlib.import_module(module), attribute)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, _, text) in VERBS.items()])


@click.command(cls=_Verbs)
def cluster() -> None:
    """Operate virtual clusters: machines that stay, and are workers of an HTCondor pool.

    FILE has declarations in YAML or JSON; - is standard input. To change clusters takes a token of
    `vmjobs token user NAME --admin`.
    """
