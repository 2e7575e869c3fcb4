"""The commands of this package."""

from __future__ import annotations

from typing import Final

from vmjobs.cli.lazy_commands import Command, CommandTable

COMMANDS: Final[CommandTable] = {
    "vmjobs": {
        "exec": Command(
            "condor.cli.exec:exec_job", "Run one job through this node's agent.", before="enter"
        ),
        "exec-unchanged": Command(
            "condor.cli.programs:exec_unchanged", "Run a transparent job.", before="enter"
        ),
    },
    "job": {
        "why": Command("condor.cli.why:why", "Explain why a job does not run.", before="wait"),
    },
    "cluster": {
        "wake": Command(
            "condor.cli.wake:wake", "Start a VM of the cluster in a machine ad.", before="drain"
        ),
    },
    "node": {
        "ad": Command(
            "condor.cli.programs:ad",
            "Print this node's machine ad attributes, for HTCondor's STARTD_CRON.",
            before="list",
        ),
    },
}
