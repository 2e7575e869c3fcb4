"""Submits jobs with HTCondor's own tools and times them.

Sent to the Python of a schedd's host by stdin; uses only the standard library:
``time_condor_job.py DIRECTORY SECONDS``, with ``job.sub`` in the directory, whose log is ``job.log``.
It prints as JSON: the seconds from the start of condor_submit until the log says that the last job has
ended, that log, the start time by this host's clock, and what the job wrote to ``job.out``.
"""

import json
import re
import subprocess
import sys
import time
from pathlib import Path

#: Seconds between looks at the log; times may be off by this much, in the job's favour.
LOOK = 0.02
ENDED = re.compile(r"^005 \(", re.MULTILINE)
STUCK = re.compile(r"^(009|012) \(", re.MULTILINE)


def main() -> None:
    directory, patience = Path(sys.argv[1]), float(sys.argv[2])
    log = directory / "job.log"
    began = time.time()
    told = subprocess.run(
        ["condor_submit", "-terse", "job.sub"],
        cwd=directory,
        capture_output=True,
        text=True,
        check=False,
    )
    if told.returncode:
        sys.exit(told.stderr)
    count = int(told.stdout.rpartition(".")[2]) + 1  # of "7.0 - 7.59"
    size, text = 0, ""
    while len(ENDED.findall(text)) < count:
        if STUCK.search(text) or time.time() > began + patience:
            subprocess.run(["condor_rm", told.stdout.split(".")[0]], check=False, capture_output=True)
            sys.exit(f"no end after {time.time() - began:.0f} s: {text}")
        time.sleep(LOOK)
        if log.exists() and log.stat().st_size != size:
            text = log.read_text("utf-8", "replace")
            size = log.stat().st_size
    seconds, out = time.time() - began, directory / "job.out"
    printed = out.read_text("utf-8", "replace") if out.exists() else ""
    found = {"seconds": seconds, "log": text, "began": began, "out": printed}
    print(json.dumps(found))  # noqa: T201


main()
