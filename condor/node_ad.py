"""What a startd's cron starts: it prints the node's machine ad attributes, as the agent has them.

It runs for as long as the startd: no module that takes long to import is needed.
"""

from __future__ import annotations

import math
import os
import select
import socket
import sys

from condor import machine_ad
from vmjobs.agent import framing
from vmjobs.agent_socket import ANSWER_SECONDS, agent_socket
from vmjobs.errors import InvalidRequest

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

#: How often an agent that answers is asked again, in seconds: free disk and jobs change all the time.
ASK_SECONDS = 10.0
#: How often one is looked for where there is none.
LOOK_SECONDS = 1.0

OUT = 1


def main(*, follow: bool) -> None:
    """Print the attributes; with ``follow`` anew whenever they may have changed, until nobody reads."""
    path, known_absent = agent_socket(), False
    while True:
        try:
            for text in _said_by_agent(path):
                _print(text)
                known_absent = False
                if not follow:
                    return
        except InvalidRequest as error:
            # An agent of another release, which whoever starts this anew may have, too.
            _print(machine_ad.absent())
            sys.exit(f"the agent's word is not understood: {error.message}")
        if not known_absent:
            _print(machine_ad.absent())
        if not follow:
            return
        known_absent = True
        _wait(LOOK_SECONDS)  # nothing tells when a socket appears


def _said_by_agent(path: str) -> Iterator[str]:
    """What the agent says of its node, every few seconds, until there is no agent.

    Raises:
        InvalidRequest: something came that is no message.
    """
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(ANSWER_SECONDS)
            connection.connect(path)
            messages = framing.receive(connection)
            while True:
                # It answers, and says something unasked when it must not wait: each is as good.
                if not _wait(0.0, connection):
                    framing.send(connection, {"type": "status"})
                answer = next(messages, None)
                if not isinstance(answer, dict) or answer.get("type") != "status":
                    return
                yield _lines(answer)
                _wait(ASK_SECONDS, connection)
    except OSError:
        return


def _lines(answer: dict[str, object]) -> str:
    try:
        return machine_ad.lines(answer["node"])  # type: ignore[arg-type]
    except (LookupError, TypeError, AttributeError) as error:
        raise InvalidRequest(f"{framing.NO_MESSAGE}: {error!r}") from error


def _print(text: str) -> None:
    data = text.encode("utf-8", "backslashreplace")
    while data:
        data = data[os.write(OUT, data) :]


def _wait(seconds: float, connection: socket.socket | None = None) -> bool:
    """Wait so long, or until the agent has said something, or is gone: whether it has, or is.

    Whoever read us being gone ends this program.
    """
    poller = select.poll()
    poller.register(OUT, 0)
    if connection is not None:
        poller.register(connection, select.POLLIN)
    happened = {number for number, _ in poller.poll(math.ceil(seconds * 1000))}
    if OUT in happened:
        sys.exit(0)
    return bool(happened)
