"""Helpers of the image commands: names, completion, a progress bar."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import click
from pydantic import TypeAdapter, ValidationError
from rich.progress import Progress, TextColumn

from vmjobs.cli.common import config
from vmjobs.cli.progress import byte_bars
from vmjobs.errors import InvalidRequest
from vmjobs.model import ImageRef
from vmjobs.wire import ImageDetail

_REF: TypeAdapter[str] = TypeAdapter(ImageRef)


@dataclass(frozen=True)
class QualifiedName:
    """An image's name and tag. namespace: empty means the user's own."""

    namespace: str
    name: str
    tag: str = "latest"

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}:{self.tag}".removeprefix("/")


def parse_name(text: str, namespace: str = "") -> QualifiedName:
    """Parse ``[NAMESPACE/]NAME[:TAG]``.

    Raises:
        InvalidRequest: the text is not such a name.
    """
    try:
        _REF.validate_python(text)
    except ValidationError as error:
        raise InvalidRequest(
            f"{text!r} is not a valid image name",
            hint="names are like muons:2026 or mygroup/muons:2026, in lower case",
        ) from error
    if text.startswith("sha256:"):
        raise InvalidRequest(f"{text!r} is a digest, not a name")
    path, _, tag = text.partition(":")
    given, _, name = path.rpartition("/")
    if given and namespace and given != namespace:
        raise InvalidRequest(f"the name {text} is not in the namespace {namespace}")
    return QualifiedName(given or namespace, name, tag or "latest")


def display_name(found: ImageDetail, ref: str | QualifiedName) -> str:
    """Return a name of an image, if possible the one in ``ref``, or else its digest."""
    names = [QualifiedName(tag.namespace, tag.name, tag.tag) for tag in found.tags]
    if isinstance(ref, QualifiedName) or not ref.startswith("sha256:"):
        wanted = ref if isinstance(ref, QualifiedName) else parse_name(ref)
        names.sort(key=lambda name: (name.name, name.tag) != (wanted.name, wanted.tag))
    return str(names[0]) if names else found.digest


def complete_local(_ctx: click.Context, _parameter: click.Parameter, incomplete: str) -> list[str]:
    """Complete names of images in the local store."""
    from images.store.image_store import ImageStore  # noqa: PLC0415

    found = [f"{entry.name}:{entry.tag}" for entry in ImageStore(config().images).list()]
    return [name for name in found if name.startswith(incomplete)]


def cache_folder(name: str) -> Path:
    """Return a directory below the user's cache directory."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "vmjobs" / name


class ByteProgress:
    """A thread-safe progress bar of bytes. sent: bytes of this part transferred; 0: not shown."""

    def __init__(self, shown: Progress, text: str, total: int) -> None:
        self._shown = shown
        self._total = total
        self._task = shown.add_task(text, total=total, wire="")
        self._lock = threading.Lock()
        self._before = self._done = self.sent = 0

    def start_next_part(self) -> None:
        """Start the next part: its bytes count from 0."""
        with self._lock:
            self._before += self._done
            self._done = self.sent = 0

    def show_fraction(self, fraction: float) -> None:
        self(int(fraction * self._total))

    def __call__(self, done: int, sent: int = 0) -> None:
        with self._lock:
            self._done, self.sent = done, sent
            wire = f"{sent / 1e6:.0f} MB sent" if sent else ""
            self._shown.update(self._task, completed=self._before + done, wire=wire)


@contextmanager
def byte_progress(text: str, total: int) -> Iterator[ByteProgress]:
    """Show a bar with rate and time left; without a terminal, print lines."""
    with byte_bars(TextColumn("{task.fields[wire]}")) as shown:
        yield ByteProgress(shown, text, total)
