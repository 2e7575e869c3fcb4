"""Ways to force rows of the table of outcomes, and what is asserted of a row."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tests.kit.grid import ODD, Grid, wait_for
from tests.kit.submit_host import BY_CONDOR_C, PATIENT, Desk, at_site, kill_machine, where

#: HoldReasonCode of transparent jobs: JobPolicy, as the job's own expression was true.
JOB_POLICY = 3
#: Expected HoldReasonSubCodes of outcomes that hold the job at once,
HELD = {
    "NOT_FOUND": 101,
    "IMAGE_REJECTED": 102,
    "IMAGE_UNSUITABLE": 103,
    "INVALID_REQUEST": 104,
    "TOO_LARGE": 105,
    "OUTPUT_TOO_LARGE": 106,
    "CONSOLE_FLOODED": 107,
    "KERNEL_PANIC": 108,
    "BOOT_TIMED_OUT": 109,
    "NO_EXIT_REPORT": 110,
    "TIMED_OUT": 111,
}
#: and of outcomes that requeue it.
AGAIN = {
    "FORBIDDEN": 120,
    "UNAVAILABLE": 121,
    "BOOT_FAILED": 122,
    "GUEST_LOST": 123,
    "IMAGE_UNAVAILABLE": 124,
    "NO_HYPERVISOR": 126,
    "NODE_FAILED": 127,
    "OUTPUT_MISSING": 128,
    "SCRIPT_FAILED": 129,
    "SCRIPT_KILLED": 130,
    "INTERNAL": 131,
    "EXEC_LOST": 132,
    "STORAGE_FULL": 133,
    "UNAUTHENTICATED": 134,
    "NOT_RESUMED": 135,
}

#: Commands that an image's init runs before it becomes the guest program.
INITS = {
    **ODD,
    "test-powers-off": "busybox poweroff -f",
    "test-bare": "rm /usr/bin/setpriv; exec /sbin/vmjobs-init",
    # When the job starts, root runs the job's script as-root: a guest in which anything can go wrong.
    "test-obeys": """[ -c /dev/null ] || busybox mount -t devtmpfs devtmpfs /dev
(until [ -e /job/work/now ]; do sleep 0.1; done; sh /job/work/tree/as-root) &
exec /sbin/vmjobs-init""",
}
#: Users look at these lines first.
LAST_LINES = r"; the console's last lines:\s+\S"
#: Waits until root's script is done.
WAIT = "until [ -e obeyed ]; do sleep 0.1; done"
OBEYED = "; touch /job/work/tree/obeyed"


def _no_more(_desk: Desk, _cluster: str) -> None:
    """Do nothing: the job ends by itself."""


@dataclass(frozen=True)
class Way:
    """How a test forces a row.

    said: pattern that the hold reason must match. root: script that root runs in the guest.
    lines: more lines of the submit file. large: MiB of an extra input file.
    deed: action on the job after submission.
    """

    said: str
    script: str = "sleep 1000"
    image: str = "generic"
    root: str = ""
    lines: Mapping[str, str] = field(default_factory=dict)
    large: int = 0
    deed: Callable[[Desk, str], None] = _no_more


def kill_the_machine(desk: Desk, cluster: str) -> None:
    kill_machine(*at_site(desk, cluster))


def kill_what_runs_it(desk: Desk, cluster: str) -> None:
    node, name = where(*at_site(desk, cluster))
    starter = name.partition(".")[2]
    desk.grid.on(node, "pkill", "-9", "-P", starter, "-f", "exec-unchanged")


WAYS: dict[str, Way] = {
    # HTCondor checks the files to transfer before all else, which must not hide the reason.
    "NOT_FOUND": Way(
        "no-such-image", image="no-such-image", lines={"transfer_output_files": "never-made"}
    ),
    "IMAGE_UNSUITABLE": Way("the image has no setpriv", image="test-bare"),
    "INVALID_REQUEST": Way("VMJobHypervisor.*kvm", lines={"__VMJobHypervisor": '"abacus"'}),
    "TOO_LARGE": Way("larger than its disk; .*request_disk", large=1100),
    "OUTPUT_TOO_LARGE": Way("more than its disk; .*request_disk", "fallocate -l 1900M big"),
    "CONSOLE_FLOODED": Way(
        rf"beyond \d+ bytes{LAST_LINES}(?s:.*)more and more",
        image="test-obeys",
        root="busybox yes more and more | tr '\\n' ' ' >/dev/console",
    ),
    "KERNEL_PANIC": Way(f"Attempted to kill init.*{LAST_LINES}", image="test-panics"),
    "BOOT_TIMED_OUT": Way(
        f"not ready within 4 s.*{LAST_LINES}",
        image="test-never-ready",
        lines={"__VMJobBootTimeout": "4"},
    ),
    "NO_EXIT_REPORT": Way(
        f"powered off without.*{LAST_LINES}", image="test-obeys", root="busybox poweroff -f"
    ),
    "BOOT_FAILED": Way(
        f"powered off before the guest was ready.*{LAST_LINES}", image="test-powers-off"
    ),
    "GUEST_LOST": Way("killed from outside", deed=kill_the_machine),
    "NO_HYPERVISOR": Way(
        "demands the hypervisor uml.*boots by", image="test-bios", lines={"__VMJobHypervisor": '"uml"'}
    ),
    "OUTPUT_MISSING": Way(
        "not transferred", WAIT, "test-obeys", root=f"ln -s /dev/null /job/work/left{OBEYED}"
    ),
    "SCRIPT_FAILED": Way(
        "could not run the job.*status 1", WAIT, "test-obeys", f"cp /bin/false /bin/tar{OBEYED}"
    ),
    "SCRIPT_KILLED": Way(
        "could not run the job.*signal 9", image="test-obeys", root="busybox killall -9 script"
    ),
    "EXEC_LOST": Way("was killed", deed=kill_what_runs_it),
}


def submit(grid: Grid, code: str, way: Way, node: str = "") -> tuple[Desk, str]:
    """Submit a job at the origin; return its desk and cluster. node: the node to run it."""
    desk = Desk(grid, "submit", BY_CONDOR_C)
    lines = {"transfer_input_files": "data", **way.lines}
    if code in AGAIN:
        lines["__VMJobMaxStarts"] = "1"
    desk("mkdir", "-p", desk.folder)
    if way.root:
        desk.write("as-root", way.root)
        lines["transfer_input_files"] += ",as-root"
    if way.large:
        desk("truncate", "-s", f"{way.large}M", f"{desk.folder}/large")
        lines["transfer_input_files"] += ",large"
    if node:
        lines["__remote_Requirements"] = f'TARGET.Machine == "{node}.grid"'
    return desk, desk.submit(way.script, image=way.image, **lines)


def held(desk: Desk, cluster: str) -> dict[str, Any]:
    """The job's ad from `condor_q -hold`, once it is held."""

    def look() -> dict[str, Any] | None:
        found: list[dict[str, Any]] = json.loads(desk("condor_q", "-hold", cluster, "-json") or "[]")
        return found[0] if found else None

    try:
        return wait_for(look, f"job {cluster} to be held at {desk.host}", PATIENT)
    except AssertionError as late:
        raise AssertionError(f"{late}: {desk.ad(cluster) or desk.ad(cluster, ended=True)}") from late


def assert_row(code: str, said: str, ad: Mapping[str, Any]) -> None:
    """Assert the row's codes, outcome and code prefix, and that the reason is helpful."""
    told = (ad["HoldReasonCode"], ad["HoldReasonSubCode"], ad["HoldReason"])
    assert told[:2] == (JOB_POLICY, {**HELD, **AGAIN}[code]), told
    # A job that may start only once is held either way. (The policy reads this attribute.)
    assert ad["ChirpVMOutcome"] == ("hold" if code in HELD else "again"), told
    assert told[2].startswith(f"{code}: "), told
    assert re.search(said, told[2]), told
    assert ad["NumJobStarts"] == 1, ad["NumJobStarts"]
