"""Benchmark 10: programs in UML VMs with each kernel, and on the node itself."""

from __future__ import annotations

import io
import re
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

from bench.figures import Finding, compare, in_turns
from bench.start_overhead import execute
from vmjobs.agent.run.services import RunServices
from vmjobs.hypervisor.uml.driver import UserModeLinux
from vmjobs.hypervisor.uml.kernel_boot import DEBIAN_KERNEL
from vmjobs.local import describe_inputs
from vmjobs.model import HypervisorKind, JobSpec, NetworkMode, StreamName

HERE = Path(__file__).parent
_FILES = {name: HERE.parent / "examples" / name for name in ("minbias.sh", "minbias.cmnd")}
_EVENTS = """#!/bin/sh
began=$(date +%s%N)
sh minbias.sh minbias.cmnd
took=$((($(date +%s%N) - began) / 1000000))
printf 'pythia %d.%03d\\n' $((took / 1000)) $((took % 1000))
"""
#: By name: the kernel, and the processors of its VM for two processes.
OURS = {
    "own, seccomp": (UserModeLinux(), 2),
    "own, ptrace": (UserModeLinux(system_calls="ptrace"), 1),
}
DEBIAN = UserModeLinux(DEBIAN_KERNEL)
PROBE_SECONDS = 30.0
COSTS = ("system call", "fork", "exec", "two processes")
Seconds = dict[str, float]


def uml_kernel(made: RunServices, digest: str, pairs: int) -> Iterator[Finding]:
    """Compare our kernel in both modes with Debian's, and a computation with one on the node.

    digest: of an image with Pythia.
    """
    with tempfile.TemporaryDirectory(prefix="kernel-costs-") as directory:
        program = Path(directory) / "kernel_costs"
        build = ["gcc", "-O2", "-static", "-o", str(program), str(HERE / "kernel_costs.c"), "-lm"]
        subprocess.run(build, check=True)

        inside = partial(_inside, made, digest, program)

        def ours(driver: UserModeLinux, cpus: int) -> Seconds:
            on_the_node = _seconds(subprocess.check_output([program], text=True))
            return {"compute on the node": on_the_node["compute"]} | inside(driver, cpus)

        # Debian's release 6.1 boots nothing on processors with AMX: then its rows are left out.
        is_usable = DEBIAN.probe(PROBE_SECONDS).works
        theirs: Callable[[], Seconds] = partial(inside, DEBIAN, 1) if is_usable else dict
        for name, how in OURS.items():
            seen = in_turns(pairs, partial(ours, *how), theirs)
            for cost in (*COSTS, "boot to power-off", "pythia") if is_usable else ():
                found = [(here[cost], there[cost]) for here, there in seen]
                yield compare(10, f"{cost}, {name}", found, 1.0, measure="own / Debian's")
            found = [(here["compute"], here["compute on the node"]) for here, _ in seen]
            yield compare(10, f"compute, {name}", found, 1.05, measure="guest / node")


def _inside(made: RunServices, digest: str, program: Path, driver: UserModeLinux, cpus: int) -> Seconds:
    """Seconds that a program measures in a VM, of a VM's life, and of a run of Pythia."""
    costs = "#!/bin/sh\nchmod +x kernel_costs\nexec ./kernel_costs\n"
    files = {"kernel_costs": program}
    found = _seconds(_run(made, digest, costs, files, driver, 1))
    if cpus > 1:
        several = _seconds(_run(made, digest, costs, files, driver, cpus))
        found["two processes"] = several["two processes"]
    began = time.monotonic()
    _run(made, digest, "#!/bin/sh\n", {}, driver, 1)
    found["boot to power-off"] = time.monotonic() - began
    return found | _seconds(_run(made, digest, _EVENTS, _FILES, driver, 1))


def _seconds(said: str) -> Seconds:
    """Parse lines of a name and seconds."""
    lines = re.findall(r"^([a-z ]+) ([0-9.]+)$", said, re.MULTILINE)
    return {name: float(seconds) for name, seconds in lines}


def _run(
    made: RunServices,
    digest: str,
    script: str,
    files: dict[str, Path],
    driver: UserModeLinux,
    cpus: int,
) -> str:
    """Return what a script prints in a VM of this driver.

    Raises:
        RuntimeError: it did not complete.
    """
    said = io.BytesIO()
    spec = JobSpec(
        image=digest,
        script=script,
        inputs=describe_inputs(files),
        cpus=cpus,
        hypervisor=HypervisorKind.UML,
        network=NetworkMode.NONE,
    )
    execute(
        replace(made, choose=lambda _needs: driver),
        digest,
        spec,
        files=files,
        sinks={StreamName.OUT: said},
    )
    return said.getvalue().decode()
