"""Submits jobs with HTCondor's own tools and times them: sent to a submit host's Python by stdin.

Standard library only; it runs where the schedd is: ``time_condor_job.py DIRECTORY SECONDS``, with
``job.sub`` in the directory, whose log is ``job.log``. Prints as JSON the seconds from the start of
condor_submit to the line in the log that says that the last has ended, that log, when it began by this
host's clock, and what the job wrote to ``job.out``.
"""

import json
import re
import subprocess
import sys
import time
from pathlib import Path

#: How often the log is looked at, in seconds: it may be off by this much, to the good of the job.
LOOK = 0.02
ENDED = re.compile(r"^005 \(", re.MULTILINE)
STUCK = re.compile(r"^(009|012) \(", re.MULTILINE)


def main() -> None:
    """Submit, wait, print."""
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
