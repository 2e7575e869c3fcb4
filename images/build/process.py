"""Run the builder's programs, with the proxies and certificates that downloads need."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from images.build.scratch_dir import ScratchDir
from vmjobs.errors import BuildError
from vmjobs.subprocess import command_line
from vmjobs.subprocess import run as run_program

_KEPT: Final = ("SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "XDG_CACHE_HOME")
_KEPT_PREFIXES: Final = ("PIP_", "http_proxy", "https_proxy", "no_proxy", "HTTP_PROXY", "HTTPS_PROXY")


def run(
    argv: Sequence[str | Path],
    *,
    timeout: float,
    place: ScratchDir,
    env: Mapping[str, str] | None = None,
) -> bytes:
    """Run a program and return its standard output; proxies and certificates are passed on.

    timeout: seconds. place: for its temporary files; its ``check_cancelled`` can end the program.

    Raises:
        BuildError: it is not installed, took too long or failed. Errors of ``check_cancelled``.
    """
    if shutil.which(str(argv[0])) is None:
        raise BuildError(
            f"{argv[0]} is not installed, and images cannot be built without it",
            hint=f"needed for: {command_line(argv)}",
        )
    kept = {k: v for k, v in os.environ.items() if k in _KEPT or k.startswith(_KEPT_PREFIXES)}
    return run_program(
        argv,
        timeout=timeout,
        env={**kept, **place.environment, **(env or {})},
        error=BuildError,
        check_cancelled=place.check_cancelled,
        inherit=(place.marker,),
    ).stdout
