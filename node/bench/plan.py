"""Suites of benchmarks, and the plan of a measurement."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from pydantic import Field, ValidationError

from vmjobs.errors import InvalidRequest, NotFound, reason_of
from vmjobs.model import FrozenModel, faults_of

#: The shipped suites.
FOLDER: Final = Path(__file__).parent / "suites"
#: The side that runs on the host itself.
NATIVE: Final = "native"
#: Units of durations. Units that end in ``/s`` are speeds; others do not depend on a clock.
DURATIONS: Final = frozenset({"s", "ms", "us"})
#: What a neighbour does: a VM, or natively a container, that misbehaves beside the measured copies.
NEIGHBOURS: Final = {
    "cpu": "--cpu 1",
    "memory": "--vm 1 --vm-keep --vm-bytes 512m",
    "disk": "--hdd 1 --hdd-bytes 64m --hdd-opts fsync",
    "fork": "--fork 4 --exec 4",
}
#: Starts every script. ``BENCH_SIDE``: native, or vm. In a VM a signal starts the test, and the console
#: shows the guest's clock without delay: it may run slower or faster than the host's.
_PRELUDE: Final = r"""#!/bin/sh
set -eu
figure() { printf 'figure %s %s\n' "$1" "$2"; }
clock() {
    [ "$BENCH_SIDE" = native ] || printf '\nvmjobs-bench %s %s\n' "$1" "$(date +%s%N)" >/dev/console
}
go=
trap 'go=1' USR1
echo "kernel $(uname -r)"
echo ready
if [ "$BENCH_SIDE" = native ]; then
    read -r go
else
    while [ -z "$go" ]; do
        sleep 3600 &
        [ -n "$go" ] || wait $! || :
    done
fi
trap - USR1
as=
if [ "$(id -u)" = 0 ]; then
    as='setpriv --reuid 65534 --regid 65534 --clear-groups'
    chown 65534:65534 "$PWD" "$TMPDIR"
    chmod a+x /job "$HOME"
fi
clock begin
trap 'clock end' EXIT
"""


class Test(FrozenModel):
    """A figure that a suite's script prints. what: for people. unit: ``events/s``, ``us``."""

    what: str
    unit: str

    @property
    def is_duration(self) -> bool:
        """Whether less is better."""
        return self.unit in DURATIONS

    def by_the_host_clock(self, value: float, pace: float) -> float:
        """Correct a value. pace: seconds of the guest's clock in a second of the host's."""
        if self.is_duration:
            return value / pace
        return value * pace if self.unit.endswith("/s") else value


class Suite(FrozenModel):
    """Tests that one script runs.

    programs: that it needs. memory, disk: of its VM, in MiB. seconds: deadline for its script.
    script: calls ``figure NAME VALUE`` for each test. Its variables: ``BENCH_SECONDS``, how long a test
    should take; ``BENCH_SCALE``, 1 or 10, the size of a test that has a fixed size; ``as``, words
    before a program that does not run as root.
    server: a script that serves the tests from the host; empty: none. It prints a line once it
    is ready. Both get ``BENCH_ADDRESS`` and, for the server to listen on, three ``BENCH_PORTS``.
    """

    name: str = Field(pattern=r"^[a-z][a-z0-9-]{0,31}$")
    what: str
    programs: tuple[str, ...] = ()
    cpus: int = Field(1, ge=1)
    memory: int = Field(512, ge=32)
    disk: int = Field(512, ge=16)
    seconds: int = Field(1800, ge=1)
    tests: dict[str, Test] = Field(min_length=1)
    script: str
    server: str = ""

    @property
    def whole_script(self) -> str:
        """The script as it runs on each side."""
        return _PRELUDE + self.script


def neighbour(kind: str) -> Suite:
    """Return the endless script of a neighbour. kind: one of :data:`NEIGHBOURS`."""
    return Suite(
        name=f"neighbour-{kind}",
        what="misbehaves",
        programs=("setpriv", "stress-ng"),
        memory=768,
        tests={"none": {"what": "it measures nothing", "unit": ""}},
        seconds=7 * 24 * 3600,
        script=f'cd "$TMPDIR"\nexec $as stress-ng {NEIGHBOURS[kind]} >&2\n',
    )


class Plan(FrozenModel):
    """What is measured.

    image: its digest. sides: ``native`` and hypervisors. guests: numbers of copies at the same time.
    neighbours: beside them, one at a time; empty: none. rounds: of each side. quick: tests take as
    little time as possible.
    """

    image: str
    suites: tuple[Suite, ...]
    sides: tuple[str, ...]
    guests: tuple[int, ...] = (1,)
    neighbours: tuple[str, ...] = ("",)
    rounds: int = Field(5, ge=1, le=1000)
    quick: bool = False

    def turns(self) -> Iterator[Turn]:
        """Yield all turns in order: sides alternate, and each goes first as often as the others."""
        for suite in self.suites:
            for guests in self.guests:
                for number in range(self.rounds):
                    first = number % len(self.sides)
                    for side in (*self.sides[first:], *self.sides[:first]):
                        for beside in self.neighbours:
                            case = Case(suite=suite.name, guests=guests, neighbour=beside)
                            yield Turn(case=case, side=side, number=number)


class Case(FrozenModel):
    """So many copies of a suite at the same time. neighbour: beside them; empty: none."""

    suite: str
    guests: int = 1
    neighbour: str = ""

    def __str__(self) -> str:
        copies = f", {self.guests} at once" if self.guests > 1 else ""
        return f"{self.suite}{copies}{f', beside {self.neighbour}' if self.neighbour else ''}"


class Turn(FrozenModel):
    """One turn of a side. number: of the round, from 0."""

    case: Case
    side: str
    number: int


def shipped_suites() -> list[str]:
    return sorted(path.stem for path in FOLDER.glob("*.sh") if "." not in path.stem)


def load_suite(name: str) -> Suite:
    """Load a shipped suite, or one of the user's own.

    name: of a shipped suite; or the path of a description, ``./mine.toml``, beside its script,
        ``mine.sh``, and that of its server, if it has one, ``mine.server.sh``.

    Raises:
        NotFound: there is no such suite, or a file cannot be read.
        InvalidRequest: the description is invalid, with a fault for each mistake.
    """
    path = Path(name) if "/" in name or name.endswith(".toml") else FOLDER / f"{name}.toml"
    if path.parent == FOLDER and name not in shipped_suites():
        known = ", ".join(shipped_suites())
        raise NotFound(f"there is no suite {name!r}; there are {known}, and files like ./mine.toml")
    try:
        fields = tomllib.loads(path.read_text("utf-8"))
        script = path.with_suffix(".sh").read_text("utf-8")
        serves = path.with_suffix(".server.sh")
        server = serves.read_text("utf-8") if serves.exists() else ""
    except (OSError, UnicodeDecodeError) as error:
        raise NotFound(f"cannot read the suite {path} and its script: {reason_of(error)}") from error
    except tomllib.TOMLDecodeError as error:
        raise InvalidRequest(f"{path} is no TOML: {error}") from error
    try:
        return Suite(**{**fields, "name": path.stem, "script": script, "server": server})
    except ValidationError as error:
        faults = faults_of(error)
        listing = "; ".join(f"{fault.field}: {fault.message}" for fault in faults)
        raise InvalidRequest(f"{path}: {listing}", faults=faults) from error
