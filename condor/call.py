"""Calls to daemons of HTCondor that always come back.

Every call is a short-lived process (:mod:`condor.daemon_call`, about 0.1 s) with a deadline.
"""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

log = logging.getLogger(__name__)

PROGRAM: Final = Path(__file__).with_name("daemon_call.py")
Ad = Mapping[str, Any]


class CallError(Exception):
    """A call that failed. named: the sentence says which daemon it was, and where."""

    def __init__(self, message: str, *, named: bool = False) -> None:
        super().__init__(message)
        self.named = named


def call(verb: str, timeout: float, **arguments: Any) -> dict[str, Any]:
    """Have a daemon do something.

    timeout: seconds for all of it, finding the daemon included.

    Raises:
        CallError: it failed, whatever the reason: only trying again can tell.
    """
    request = {"verb": verb, **arguments}
    try:
        # -P: this folder's modules must not be taken for the standard library's.
        done = subprocess.run(
            [sys.executable, "-P", str(PROGRAM)],
            input=json.dumps(request).encode(),
            capture_output=True,
            timeout=timeout,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise CallError(f"no answer to '{verb}' within {timeout:g} s") from error
    if done.returncode != 0:
        log.warning("%s call: %s", verb, done.stderr.decode("utf-8", "replace")[-2000:].strip())
        raise CallError(f"the '{verb}' call ended with status {done.returncode}")
    answer: dict[str, Any] = json.loads(done.stdout)
    if "error" in answer:
        raise CallError(str(answer["error"]), named=True)
    return answer
