"""``vmjobs serve``: serves the REST API."""

from __future__ import annotations

import click

from api.serve import serve as serve_api
from vmjobs.cli.common import config
from vmjobs.cli.logs import configure_logging


@click.command()
def serve() -> None:
    """Serve the REST API until a signal stops it. Database migrations run first."""
    settings = config("broker_ca")
    configure_logging(settings.log_level, settings.log_format)
    serve_api(settings)
