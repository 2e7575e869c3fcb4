"""Calls to HTCondor's daemons, with a time-out.

Every call is a short-lived process (:mod:`condor.daemon_call`, about 0.1 s) with a deadline.
"""

from __future__ import annotations

import json
import logging
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

log = logging.getLogger(__name__)

PROGRAM: Final = Path(__file__).with_name("daemon_call.py")
Ad = Mapping[str, Any]


#: The first job, at the beginning of the output of ``condor_submit -terse``.
_QUEUED: Final = re.compile(r"(\d+)\.0 - ")


class CallError(Exception):
    """A call that failed. named: the message contains the daemon and its address."""

    def __init__(self, message: str, *, named: bool = False) -> None:
        super().__init__(message)
        self.named = named


class RefusedError(Exception):
    """``condor_submit`` queued nothing; the message is its reason."""


def call(verb: str, timeout: float, **arguments: Any) -> dict[str, Any]:
    """Send a request to a daemon and return its answer.

    timeout: seconds for the whole call, including finding the daemon.

    Raises:
        CallError: it failed for any reason; a retry may succeed.
    """
    done = _run(verb, timeout, arguments)
    if done.returncode != 0:
        log.warning("%s call: %s", verb, done.stderr[-2000:].strip())
        raise CallError(f"the '{verb}' call ended with status {done.returncode}")
    return _answer(done.stdout)


def submit(timeout: float, held: Sequence[int] = (), **arguments: Any) -> int:
    """Queue the jobs of a submit file in one transaction and return their cluster.

    held: file descriptors that ``condor_submit`` inherits: they stay open until it ends, even if this
    process dies.

    Raises:
        RefusedError: nothing was queued; the message is the reason of ``condor_submit``.
        CallError: as for :func:`call`.
    """
    done = _run("submit", timeout, arguments, held)
    if queued := _QUEUED.match(done.stdout):
        return int(queued[1])
    if done.stdout:
        _answer(done.stdout)
    said = " ".join(done.stderr[max(0, done.stderr.find("ERROR:")) :].split())
    raise RefusedError(said[:1000] or f"condor_submit ended with status {done.returncode}")


def _run(
    verb: str, timeout: float, arguments: Mapping[str, Any], held: Sequence[int] = ()
) -> subprocess.CompletedProcess[str]:
    request = {"verb": verb, **arguments}
    try:
        # -P: this folder's modules must not shadow the standard library's.
        return subprocess.run(
            [sys.executable, "-P", str(PROGRAM)],
            input=json.dumps(request),
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=timeout,
            pass_fds=held,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise CallError(f"no answer to '{verb}' within {timeout:g} s") from error


def _answer(text: str) -> dict[str, Any]:
    answer: dict[str, Any] = json.loads(text)
    if "error" in answer:
        raise CallError(str(answer["error"]), named=True)
    return answer
