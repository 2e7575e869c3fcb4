"""Runs on a node of the grid until it is killed: writes down which machines live there.

It writes a line each time that changes: seconds, and each machine's job and attempt. Machines are
looked for where the kernel has them, not where the agent does.
"""

from __future__ import annotations

import json
import re
import time
from pathlib import Path

SEEN = Path("/run/lock/step_watch.seen")
RUNS = Path("/var/lib/vmjobs/agent/runs")
#: A machine's first process: its kernel, or QEMU; in whatever else its name may stand.
MACHINE = re.compile(rb"(?:umid=|guest=)vmjobs-[0-9a-f]{8}-([0-9a-f]{32})")
#: Between two looks, in seconds: shorter than any machine takes to boot.
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
        except OSError:  # it ended while we looked
            continue
        if machine:
            found.add(machine[1].decode())
    return found


def name_of(attempt: str, names: dict[str, str]) -> str:
    if attempt not in names:
        try:
            names[attempt] = json.loads((RUNS / attempt / "run.json").read_text())["job"]
        except OSError:  # it has just ended, and its record went after it; or else:
            return f"of no run: {attempt}" if attempt in attempts() else ""
    return f"{names[attempt]} {attempt}"


if __name__ == "__main__":
    main()
