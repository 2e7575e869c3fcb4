"""Processor time that a node spends on a transparent job, apart from the job's VM.

Needs no grid: the agent is a part of this process, which starts `exec-unchanged` as a starter does. A
job is ``/bin/true`` in a VM of User-mode Linux. To run it alone:
``.venv/bin/python -m bench.beside 20``.
"""

from __future__ import annotations

import compileall
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Iterator

from bench.figures import Finding, spread
from tests.kit import ROOT
from tests.kit.agent_node import agent_node

#: Seconds for which an idle job is observed.
IDLE = 20.0


def beside(count: int) -> Iterator[Finding]:
    """Measure in a separate process: what this one uses is not the agent's."""
    argv = [sys.executable, "-m", "bench.beside", str(count)]
    done = subprocess.run(
        argv, env={**os.environ, "PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE, check=True
    )
    found = json.loads(done.stdout)
    for what, target in (("exec-unchanged", 0.04), ("agent", 0.1)):
        seconds = found.pop(what)
        seen = spread(seconds)
        name = f"processor time of a job, {what}"
        details = found if what == "agent" else {}
        yield Finding(0, name, seconds, [], "seconds", seen.median, seen, target, details=details)


def main() -> None:
    """Run ``argv[1]`` jobs, and print as JSON the seconds of each and bytes of memory."""
    for package in ("condor", "vmjobs"):
        compileall.compile_dir(ROOT / package, quiet=2)
    with agent_node() as node:
        node.cost("/bin/true")  # loads the image's parts into memory
        ours, agents = [], []
        for _ in range(int(sys.argv[1])):
            before = _used()
            ours.append(node.cost("/bin/true"))
            agents.append(_used() - before)
        job = node.resident("echo up; sleep 1000")
        before = _used()
        time.sleep(IDLE)
        idle, memory = (_used() - before) / IDLE, job.memory
        node.end(job)
    found = {"exec-unchanged": ours, "agent": agents, "agent, each second": idle, "memory": memory}
    print(json.dumps(found))  # noqa: T201


def _used() -> float:
    """Seconds of processor time that this process, which contains the agent, has used."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    main()
