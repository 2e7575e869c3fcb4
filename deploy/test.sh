#!/bin/bash
# Runs all tests: test.sh [soak|xen] [PYTEST ARGUMENT...]. They use their own grids and images in build/test, which are
# renewed at the start and removed at the end; other grids are not touched. test.sh down removes remaining grids.
# soak: tests that take minutes each: deaths of processes under clusters and jobs, each with a line, and large images.
# xen: tests on Xen hosts, which run in QEMU: of the driver, and of jobs on a grid's node.
# Durations of phases and tests are in build/test/results; failed tests are not repeated.
# bash, because job control of Debian's sh needs a terminal.
set -eu
cd "$(dirname "$0")/.."
# shellcheck source=/dev/null
. deploy/project
project=$COMPOSE_PROJECT_NAME
grids="test faults" # the second is for tests that kill parts of their grid

# on_grid NAME ACTION: deploy/grid.sh for a grid of the tests.
on_grid() { VMJOBS_PROJECT="$project-$1" VMJOBS_GRID_STATE=build/test/$1 deploy/grid.sh "$2"; }

if [ "${1:-}" = down ]; then
    for name in $grids; do on_grid "$name" down; done
    exit
fi

results=build/test/results
rm -rf $results
mkdir -p $results
jobs=

# phase NAME COMMAND...: runs it, and records its duration.
phase() {
    name=$1
    shift
    echo "== $name"
    began=$(date +%s)
    outcome=passed
    "$@" || outcome=failed
    echo "$(($(date +%s) - began)) $outcome $name" >>$results/phases
}

# tests NAME ARGUMENT...
tests() {
    name=$1
    shift
    phase "$name" .venv/bin/pytest -q -p no:cacheprovider -o junit_family=xunit1 \
        --junit-xml="$results/$name.xml" "$@"
}

finish() {
    status=$?
    trap '' EXIT INT TERM
    for job in $jobs; do { kill -INT -- "-$job" && wait "$job"; } 2>/dev/null || true; done
    for name in $grids; do on_grid "$name" remove; done
    .venv/bin/python tests/report.py $results || true
    exit $status
}
trap finish EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

# grid NAME: starts an empty grid, for the tests that this shell runs from now on.
grid() {
    # Tests add images, so they get a copy of build/images. The files never change, so hard links suffice.
    export VMJOBS_IMAGE_DIR=$PWD/build/test/$1-images
    rm -rf "$VMJOBS_IMAGE_DIR"
    mkdir -p build/test
    cp -al build/images "$VMJOBS_IMAGE_DIR"
    # shellcheck source=/dev/null
    on_grid "$1" renew && . "build/test/$1/env"
}

# background COMMAND...: runs it in a process group of its own, in parallel with what follows; join waits for all.
background() {
    set -m
    "$@" >"$results/$1.log" 2>&1 </dev/null 9>&- &
    jobs="$jobs $!"
    set +m
}

join() {
    while [ -n "$jobs" ]; do
        job=${jobs##* }
        wait "$job" || true
        jobs=${jobs% *} # from now on its number may belong to another process group
    done
    cat $results/*.log
}

# Image builds and jobs on the grids mostly wait. So these run in parallel with tests that need no grid.
if [ "${1:-}" = soak ]; then
    shift
    phase images make -s --no-print-directory -j 2 soak-images
    background tests soak-contract tests/contract -n 0 -m 'soak and not xen' "$@"
    phase grid grid test
    tests soak-integration tests/integration -n 3 --dist loadfile -m 'soak and not disruptive and not xen' "$@"
    join
    tests soak-faults tests/integration -n 0 -m 'soak and disruptive' "$@"
elif [ "${1:-}" = xen ]; then
    shift
    export XEN=1 VMJOBS_PATIENCE=4
    phase images make -s --no-print-directory -j 2 test-images
    phase drivers deploy/soak-xen.sh
    phase grid grid test
    tests xen tests/integration -n 0 -m xen "$@"
else
    without_grid() {
        # Where all containers share one control group, the kernel gives them as much processor time as one process
        # of these tests, and the grids' daemons would not answer in time.
        renice -n 10 "$BASHPID" >/dev/null
        tests unit tests/unit -n 2
        flock $results/images.lock true # contract tests need the images
        tests contract tests/contract -n 3 --dist loadfile -m 'not soak'
    }
    with_faults() {
        phase "grid for faults" grid faults
        tests faults tests/integration -n 0 -m 'disruptive and not soak'
    }
    export VMJOBS_PATIENCE=2 GRID_SECONDS=400 # deadlines, beside so much else
    exec 9>$results/images.lock
    flock 9
    background without_grid
    phase "lint and images" make -s --no-print-directory -j 3 lint test-images
    exec 9>&-
    phase grid grid test
    background with_faults # their grid has the same container images
    tests integration tests/integration -n 3 --dist loadfile -m 'not disruptive and not soak' "$@"
    join
fi
! grep ' failed ' $results/phases >&2
