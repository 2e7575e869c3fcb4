"""Watches a pool from its central manager; sent to its host's Python by stdin.

It runs where HTCondor and its bindings are: ``cluster_watch.py SECONDS VM...`` reports when the
collector first has an ad of each of these VMs. With a submit description in the environment's
``JOB`` it first submits that, and reports when the job is in the queue and when it starts. Each report
is a line of JSON with the seconds of CLOCK_MONOTONIC, which all containers of a host share.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import htcondor2

#: Seconds between looks at the collector and the job's log: times are late by at most this.
LOOK = 0.1


def tell(what: str, name: str = "") -> None:
    """Print when something was first seen."""
    print(json.dumps({"what": what, "name": name, "at": time.monotonic()}), flush=True)  # noqa: T201


def submitted(description: str) -> Path:
    folder = Path(tempfile.mkdtemp(prefix="bench-"))
    (folder / "job.sub").write_text(description)
    told = subprocess.run(
        ["condor_submit", "-terse", "job.sub"], cwd=folder, capture_output=True, text=True, check=False
    )
    if told.returncode:
        sys.exit(told.stderr)
    tell("idle", told.stdout.split(".")[0])
    return folder / "job.log"


def main() -> None:
    seconds, wanted = float(sys.argv[1]), set(sys.argv[2:])
    names = ",".join(sorted(wanted))
    constraint = f'Offline =!= true && stringListMember(Machine, "{names}")'
    collector = htcondor2.Collector()
    log = submitted(os.environ["JOB"]) if os.environ.get("JOB") else None
    tell("watching")
    end = time.monotonic() + seconds
    while (wanted or log) and time.monotonic() < end:
        time.sleep(LOOK)
        found = collector.query(htcondor2.AdType.Startd, constraint, ["Machine"]) if wanted else []
        for name in {ad["Machine"] for ad in found} & wanted:
            wanted.remove(name)
            tell("in the pool", name)
        if log and log.exists() and "\n001 (" in log.read_text("utf-8", "replace"):
            tell("running")
            log = None
    if wanted or log:
        sys.exit(f"not seen within {seconds:g} s: {', '.join(sorted(wanted)) or 'the job begin'}")


main()
