"""Configures the log of a process: destination and format. Only commands call it."""

from __future__ import annotations

import json
import logging
import re
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Final, Literal

TEXT_FORMAT: Final = "%(asctime)s %(levelname)-7s %(name)s: %(message)s"
#: Subjects of messages; a message template has the word before the argument: ``job %s``.
SUBJECTS: Final = ("job", "array", "member", "cluster", "node", "image", "build", "pool")

_SUBJECT: Final = re.compile(rf"\b({'|'.join(SUBJECTS)}) $")
_CONVERSION: Final = re.compile(r"%(?:%|[-#0 +]*\d*(?:\.\d+)?[a-z])")


def configure_logging(level: str, form: Literal["text", "json"] = "text") -> None:
    """Log to standard error."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if form == "json" else logging.Formatter(TEXT_FORMAT))
    logging.basicConfig(level=level, handlers=[handler], force=True)
    # It logs at every start where it found keys, and at DEBUG what it signs.
    logging.getLogger("botocore").setLevel(logging.WARNING)


class JsonFormatter(logging.Formatter):
    """One JSON object per line.

    Keys: time (RFC 3339, UTC), level, logger, message; each of :data:`SUBJECTS` that the message names;
    exception, with its traceback.
    """

    def format(self, record: logging.LogRecord) -> str:
        found = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
            **dict(_subjects(record)),
        }
        if record.exc_info:
            found["exception"] = self.formatException(record.exc_info)
        return json.dumps(found)


def _subjects(record: logging.LogRecord) -> Iterator[tuple[str, str]]:
    """Yield a record's subjects: arguments that follow a subject in the template."""
    if not isinstance(record.msg, str) or not isinstance(record.args, tuple):
        return
    conversions = [m for m in _CONVERSION.finditer(record.msg) if m[0] != "%%"]
    for conversion, value in zip(conversions, record.args, strict=False):
        if named := _SUBJECT.search(record.msg, 0, conversion.start()):
            yield named[1], str(value)
