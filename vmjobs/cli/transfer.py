"""Uploads and downloads with progress bars."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from rich.progress import Progress

from vmjobs.cli.progress import byte_bars
from vmjobs.errors import Fault, InvalidRequest, InvalidSpec
from vmjobs.file_transfer import ProgressCallback
from vmjobs.model import InputFile, Output

if TYPE_CHECKING:
    from vmjobs.client import Client


def upload_all(api: Client, files: Mapping[str, Path]) -> tuple[InputFile, ...]:
    """Upload input files that the repository does not have yet.

    Raises:
        InvalidSpec: files do not exist; with a fault for each.
    """
    missing = [
        Fault(f"inputs.{n}", "missing_input", f"no file {p}")
        for n, p in files.items()
        if not p.is_file()
    ]
    if missing:
        raise InvalidSpec(
            f"input files are missing: {', '.join(f.message for f in missing)}", faults=missing
        )
    with byte_bars() as shown:
        return tuple(
            api.upload_input(path, name, _add_bar(shown, name, path.stat().st_size))
            for name, path in files.items()
        )


def download_all(
    api: Client, job_id: str, wanted: tuple[Output, ...], directory: Path
) -> tuple[list[Path], list[str]]:
    """Download and verify outputs of a job; return their paths, and error messages."""
    fetched, failed = [], []
    with byte_bars() as shown:
        for output in wanted:
            try:
                bar = _add_bar(shown, output.path, output.size)
                fetched.append(api.download_output(job_id, output, directory, bar))
            except InvalidRequest as error:  # this host cannot store it; continue with the next
                failed.append(f"{job_id} {output.path}: {error.message}")
    return fetched, failed


def _add_bar(shown: Progress, name: str, size: int) -> ProgressCallback:
    task = shown.add_task(name, total=size)
    return lambda done, total: shown.update(task, completed=done, total=total)
