"""The commands of this package."""

from __future__ import annotations

from typing import Final

from vmjobs.cli.lazy_commands import Command, CommandTable

COMMANDS: Final[CommandTable] = {
    "vmjobs": {
        "token": Command(
            "api.cli.token:token",
            "Make, list and revoke bearer tokens (on the API's host).",
            before="run",
        ),
        "serve": Command("api.cli.serve:serve", "Serve the REST API.", before="doctor"),
        "worker": Command(
            "api.cli.worker:worker", "Submit and track jobs (Celery worker and beat).", before="doctor"
        ),
    },
}
