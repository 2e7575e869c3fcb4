"""The commands of this package, and the groups that they are in."""

from __future__ import annotations

from typing import Final

import click

from vmjobs.cli.lazy_commands import Command, CommandTable, LazyGroup


@click.command(cls=LazyGroup)
def gateway() -> None:
    """Run a grid gateway: a small site's servers as VMs on a private network.

    It needs no service, no scheduler and no root rights. Its VMs keep running when these commands
    end, and keep their data over restarts.
    """


@click.command(cls=LazyGroup)
def worker() -> None:
    """Let execute nodes of the site join the pool of a gateway's computing element."""


@click.command(cls=LazyGroup)
def bench() -> None:
    """Measure what VMs cost on this host: the same programs in VMs and on the host itself."""


COMMANDS: Final[CommandTable] = {
    "vmjobs": {
        "gateway": Command("node.commands:gateway", "Run a grid gateway on this host.", before="node"),
        "run": Command("node.cli.run:run", "Run a script in a VM on this host.", before="exec"),
        "agent": Command("node.cli.agent:agent", "Run jobs for HTCondor on this node.", before="exec"),
        "bench": Command(
            "node.commands:bench", "Measure what VMs cost on this host.", before="completion"
        ),
        "doctor": Command(
            "node.cli.doctor:doctor", "Check this host and report faults.", before="completion"
        ),
    },
    "image": {
        "build": Command("node.cli.build:build", "Build an image from a recipe.", before="builds"),
    },
    "bench": {
        "list": Command("node.cli.bench:list_suites", "List suites and their tests."),
        "run": Command("node.cli.bench:run", "Measure the same programs in VMs and on this host."),
        "report": Command("node.cli.bench:write_report", "Write the reports of a measurement again."),
        "compare": Command("node.cli.bench:compare", "Compare two measurements."),
    },
    "worker": {
        "add": Command("node.cli.gateway.worker:add", "Write what a node needs to join the pool."),
        "remove": Command("node.cli.gateway.worker:remove", "Refuse a node from now on."),
        "list": Command("node.cli.gateway.worker:list_nodes", "List nodes that may be in the pool."),
    },
    "gateway": {
        "validate": Command("node.cli.gateway.install:validate", "Check a declaration for faults."),
        "install": Command(
            "node.cli.gateway.install:install", "Make a gateway's images, disks and keys."
        ),
        "boot": Command("node.cli.gateway.lifecycle:boot", "Start VMs, and wait until they are up."),
        "stop": Command("node.cli.gateway.lifecycle:stop", "Shut VMs down."),
        "upgrade": Command("node.cli.gateway.upgrade:upgrade", "Switch VMs to the current images."),
        "show": Command("node.cli.gateway.show:show", "Show a gateway and its VMs."),
        "console": Command("node.cli.gateway.show:console", "Print the console of a VM."),
        "ssh": Command("node.cli.gateway.ssh:ssh", "Log in to a VM, or run a command in it."),
        "connect": Command("node.cli.gateway.ssh:connect", ""),
        "token": Command("node.cli.gateway.token:token", "Print a token for a user on another host."),
        "worker": Command("node.commands:worker", "Let nodes of the site run the gateway's jobs."),
        "run": Command("node.cli.gateway.lifecycle:run", "Supervise the VMs in the foreground."),
        "enable": Command("node.cli.gateway.enable:enable", "Let systemd start it with this host."),
        "disable": Command("node.cli.gateway.enable:disable", "Let systemd no longer start it."),
        "backup": Command("node.cli.gateway.backup:backup", "Copy a whole gateway into one file."),
        "restore": Command("node.cli.gateway.backup:restore", "Restore a gateway from a backup."),
        "delete": Command(
            "node.cli.gateway.lifecycle:delete", "Delete a gateway with all of its data."
        ),
    },
}
