"""Runs on a node of the grid until killed: records which VMs exist there.

It writes a line at each change: time, and each VM's job and attempt. It looks for VMs in the
kernel's process list, not in the agent's records.
"""

from __future__ import annotations

import json
import re
import time
from pathlib import Path

SEEN = Path("/run/lock/step_watch.seen")
RUNS = Path("/var/lib/vmjobs/agent/runs")
#: Matches the first process of a VM (UML kernel or QEMU); other processes may carry the name too.
MACHINE = re.compile(rb"(?:umid=|guest=)vmjobs-[0-9a-f]{8}-([0-9a-f]{32})")
#: Seconds between two scans: shorter than any VM takes to boot.
TICK = 0.2


def main() -> None:
    names: dict[str, str] = {}
    last: list[str] = []
    while True:
        living = sorted(filter(None, {name_of(attempt, names) for attempt in attempts()}))
        if living != last:
            with SEEN.open("a", encoding="utf-8") as file:
                file.write(json.dumps([time.time(), living]) + "\n")
            last = living
        time.sleep(TICK)


def attempts() -> set[str]:
    found = set()
    for words in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            machine = MACHINE.search(words.read_bytes())
        except OSError:  # the process ended during the scan
            continue
        if machine:
            found.add(machine[1].decode())
    return found


def name_of(attempt: str, names: dict[str, str]) -> str:
    if attempt not in names:
        try:
            names[attempt] = json.loads((RUNS / attempt / "run.json").read_text())["job"]
        except OSError:  # the run has just ended and its record is deleted, or else:
            return f"of no run: {attempt}" if attempt in attempts() else ""
    return f"{names[attempt]} {attempt}"


if __name__ == "__main__":
    main()
