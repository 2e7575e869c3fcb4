"""The STARTD_CRON program: prints the agent's attributes for the node's machine ad.

It runs as long as the startd: it imports no module that takes long to load.
"""

from __future__ import annotations

import math
import os
import select
import socket
import sys

from condor.pool import machine_ad
from vmjobs.agent import framing
from vmjobs.agent_socket import ANSWER_SECONDS, agent_socket
from vmjobs.errors import InvalidRequest

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

#: Seconds between two requests to the agent: free disk and jobs change all the time.
POLL_SECONDS = 10.0
#: Seconds between two attempts to find an agent while there is none.
RETRY_SECONDS = 1.0

STDOUT_FD = 1


def main(*, follow: bool) -> None:
    """Print the attributes; with ``follow``, again after changes, until output is closed."""
    path, known_absent = agent_socket(), False
    while True:
        try:
            for text in _agent_reports(path):
                _print(text)
                known_absent = False
                if not follow:
                    return
        except InvalidRequest as error:
            # An agent of another release; the startd's next start of this program may have it, too.
            _print(machine_ad.lines_without_agent())
            sys.exit(f"invalid message from the agent: {error.message}")
        if not known_absent:
            _print(machine_ad.lines_without_agent())
        if not follow:
            return
        known_absent = True
        _wait(RETRY_SECONDS)  # there is no event for a new socket


def _agent_reports(path: str) -> Iterator[str]:
    """Yield the agent's attributes of its node, every few seconds, until the agent is gone.

    Raises:
        InvalidRequest: the agent sent something that is no message.
    """
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(ANSWER_SECONDS)
            connection.connect(path)
            messages = framing.receive(connection)
            while True:
                # The agent answers requests, and also sends urgent updates unasked.
                if not _wait(0.0, connection):
                    framing.send(connection, {"type": "status"})
                answer = next(messages, None)
                if not isinstance(answer, dict) or answer.get("type") != "status":
                    return
                yield _lines(answer)
                _wait(POLL_SECONDS, connection)
    except OSError:
        return


def _lines(answer: dict[str, object]) -> str:
    try:
        return machine_ad.lines(answer["node"])  # type: ignore[arg-type]
    except (LookupError, TypeError, AttributeError) as error:
        raise InvalidRequest(f"{framing.INVALID_MESSAGE}: {error!r}") from error


def _print(text: str) -> None:
    data = text.encode("utf-8", "backslashreplace")
    while data:
        data = data[os.write(STDOUT_FD, data) :]


def _wait(seconds: float, connection: socket.socket | None = None) -> bool:
    """Wait so long; return True as soon as the agent sends something or is gone.

    Exits if the reader of this program's output is gone.
    """
    poller = select.poll()
    poller.register(STDOUT_FD, 0)
    if connection is not None:
        poller.register(connection, select.POLLIN)
    happened = {number for number, _ in poller.poll(math.ceil(seconds * 1000))}
    if STDOUT_FD in happened:
        sys.exit(0)
    return bool(happened)
