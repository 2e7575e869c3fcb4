"""Write progress into the job ad by HTCondor's Chirp service.

The starter of a job with ``WantIOProxy`` listens on a local port and writes address and cookie
to ``.chirp.config`` in the scratch directory. The protocol is one line a command; the answer is
a line with a number, negative for a failure.

Processes that run beside each job import this: it imports no module that takes long to load.
"""

from __future__ import annotations

import math
import os
import re
import socket

from condor import names

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path
    from typing import Final

    from vmjobs.cluster.pool import ClassAdValue

#: The longest line that the starter accepts, in bytes.
LINE_MAX: Final = 5000
#: Strings are cut to literals of this many bytes: the starter accepts 993 in a delayed update, and job
#: ads are mirrored in full, repeatedly.
VALUE_MAX: Final = 990

_ATTRIBUTE: Final = re.compile(r"Chirp[A-Za-z0-9_]{1,60}")


class ClassAdExpression:
    """A ClassAd expression made by vmjobs; strings from elsewhere are literals in it."""

    __slots__ = ("text",)

    def __init__(self, text: str) -> None:
        self.text = text

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ClassAdExpression) and other.text == self.text

    def __hash__(self) -> int:
        return hash(self.text)


if TYPE_CHECKING:
    #: A value that may be written into a job ad.
    AttributeValue = ClassAdValue | ClassAdExpression


class ChirpReporter:
    """Writes attributes into the ad of the job that this process runs in.

    config: the file with address and cookie; by default the one that HTCondor's environment names,
    or ``.chirp.config`` in the current directory. Without it all calls do nothing.
    warn: called with a message if attributes could not be written.
    timeout: seconds for each line of a call and its answer.
    """

    def __init__(
        self,
        config: str | Path = "",
        warn: Callable[[str], object] = lambda _why: None,
        timeout: float = 5.0,
    ) -> None:
        self._config = config or os.environ.get("_CONDOR_CHIRP_CONFIG") or names.CHIRP_CONFIG
        self._warn = warn
        self._timeout = timeout
        self._published: dict[str, AttributeValue] = {}
        self._published_later: dict[str, AttributeValue] = {}

    def publish(self, attributes: Mapping[str, AttributeValue]) -> bool:
        """Write attributes into the job ad. Return False if that fails; raise nothing.

        Writes only values that have changed: each attribute is an event in the job's log.
        """
        try:
            self._send_changes(attributes, self._published, b"set_job_attr")
        except (OSError, ValueError) as error:
            self._warn(f"progress did not get into the job ad: {error}")
            return False
        return True

    def publish_later(self, attributes: Mapping[str, AttributeValue], *, last: bool = False) -> bool:
        """Write attributes with the starter's next update or the job's end, without events.

        The ad has them before the schedd evaluates the job's policy.

        last: write unchanged values too. An update may have been lost with its connection.
        """
        try:
            self._send_changes(
                attributes, {} if last else self._published_later, b"set_job_attr_delayed"
            )
        except (OSError, ValueError):
            # A node may be configured to accept no delayed updates; every node accepts at most a
            # hundred names, and those of the job itself count too.
            return self.publish(attributes)
        return True

    def publish_state(self, attributes: Mapping[str, AttributeValue], *, last: bool = False) -> bool:
        """Write the state now and the rest later: one event in the job's log for each state."""
        state = {name: value for name, value in attributes.items() if name == names.VM_STATE}
        rest = {name: value for name, value in attributes.items() if name not in state}
        return self.publish_later(rest, last=last) & self.publish(state)

    def _send_changes(
        self,
        attributes: Mapping[str, AttributeValue],
        published: dict[str, AttributeValue],
        command: bytes,
    ) -> None:
        unset = object()
        fresh = {n: value for n, value in attributes.items() if published.get(n, unset) != value}
        if not fresh or not os.path.isfile(self._config):
            return
        self._send([set_command(name, value, command) for name, value in fresh.items()])
        published.update(fresh)

    def _send(self, commands: Sequence[bytes]) -> None:
        host, port, cookie = read_chirp_config(self._config)
        lines = [b"cookie " + quote(cookie) + b"\n", *commands]
        with socket.create_connection((host, int(port)), self._timeout) as connection:
            connection.settimeout(self._timeout)
            with connection.makefile("rb") as answers:
                for line in lines:
                    connection.sendall(line)
                    answer = answers.readline(LINE_MAX).strip()
                    if not answer or int(answer) < 0:
                        command = line.split(b" ", 2)[:2] if line is not lines[0] else [b"cookie"]
                        what = b" ".join(command).decode("ascii", "replace").strip()
                        raise ValueError(f"the starter answered {answer!r} to {what}")


def read_chirp_config(config: str | Path) -> tuple[str, str, str]:
    """Read host, port and cookie of the starter's Chirp service.

    Raises:
        OSError, ValueError: the file is missing or has another format.
    """
    with open(config, encoding="ascii") as file:
        host, port, cookie = file.read(LINE_MAX).split()
    return host, port, cookie


def set_command(name: str, value: AttributeValue, command: bytes = b"set_job_attr") -> bytes:
    """The line that sets an attribute. command: ``set_job_attr`` or ``set_job_attr_delayed``.

    Raises:
        ValueError: attributes of this name are not mirrored (``Chirp…`` are), or the line is too long.
    """
    if not _ATTRIBUTE.fullmatch(name):
        raise ValueError(f"attribute {name!r}: not sent back to the submit host (expected Chirp...)")
    text = value.text if isinstance(value, ClassAdExpression) else literal(value)
    line = command + b" " + quote(name) + b" " + quote(text) + b"\n"
    if len(line) > LINE_MAX:
        raise ValueError(f"the value of {name} is too long")
    return line


def literal(value: ClassAdValue, limit: int = VALUE_MAX) -> str:
    """A value as a ClassAd literal. No string becomes an expression.

    limit: bytes to which a longer string's literal is cut; 0 for no limit.
    """
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(value)
    if isinstance(value, float):
        return repr(value) if math.isfinite(value) else "undefined"
    # Control characters would garble the listing of a queue. A schedd expands `$$(` anywhere. A
    # backslash differs between the old syntax (starter, startd) and the new one: only before a quote
    # it is an escape in both.
    text = "".join(c if c.isprintable() else " " for c in value[: limit or None])
    pieces = text.replace("$$", "$ $").replace("\\", "/").replace('"', '\\"')
    if limit:
        pieces = pieces.encode()[: limit - 2].decode(errors="ignore")
        if pieces.endswith("\\"):  # the quote that it escaped is cut off
            pieces = pieces[:-1]
    return f'"{pieces}"'


def quote(word: str) -> bytes:
    """A word of a command, with its spaces and backslashes escaped."""
    return re.sub(r"([\\ \t\r\n])", r"\\\1", word).encode("utf-8")
