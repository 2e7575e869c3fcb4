"""Benchmark 18: a job's bytes, in and out, by each network mode, over ``cp`` on the node."""

from __future__ import annotations

import os
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from bench.figures import Finding, compare
from bench.start_overhead import execute
from vmjobs.agent.run.services import RunServices
from vmjobs.local import describe_inputs
from vmjobs.model import MIB, HypervisorKind, JobSpec, NetworkMode

IN, OUT = 512 * MIB, 256 * MIB
_SCRIPT = f"#!/bin/sh\nhead -c {OUT} in >out\n"


def data(made: RunServices, digest: str, pairs: int) -> Iterator[Finding]:
    """Compare jobs with a network, jobs without one, and copies of the same bytes."""
    with tempfile.TemporaryDirectory(prefix="data-", dir="/var/tmp") as directory:
        given = Path(directory, "in")
        with given.open("wb") as file:
            for _ in range(IN // MIB):
                file.write(os.urandom(MIB))
        inputs = describe_inputs({"in": given})

        def job(mode: NetworkMode) -> float:
            spec = JobSpec(
                image=digest,
                script=_SCRIPT,
                inputs=inputs,
                outputs=("out",),
                disk=2 * (IN + OUT) // MIB,
                hypervisor=HypervisorKind.UML,
                network=mode,
            )
            began = time.monotonic()
            execute(made, digest, spec, files={"in": given})
            return time.monotonic() - began

        def copies() -> float:
            began = time.monotonic()
            for source, target, size in (
                ("in", "there", IN),
                ("there", "out", OUT),
                ("out", "back", OUT),
            ):
                with Path(directory, source).open("rb") as file:
                    cut = ["head", "-c", str(size)]
                    with Path(directory, target).open("wb") as sink:
                        subprocess.run(cut, stdin=file, stdout=sink, check=True)
            return time.monotonic() - began

        job(NetworkMode.NONE)  # fills the cache; not counted
        seen = []
        for number in range(pairs):
            ways = [lambda: job(NetworkMode.REPOSITORY), lambda: job(NetworkMode.NONE), copies]
            order = range(3) if number % 2 else range(2, -1, -1)
            took = {way: ways[way]() for way in order}
            seen.append((took[0], took[1], took[2]))
    what = f"{IN // MIB} MiB in, {OUT // MIB} MiB out"
    network = [(online, offline) for online, offline, _ in seen]
    yield compare(18, what, network, 1.1, measure="with network / without")
    over_copies = [(online, copied) for online, _, copied in seen]
    yield compare(18, what, over_copies, 3.0, measure="job / copies on the node")
