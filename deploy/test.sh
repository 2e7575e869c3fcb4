#!/bin/bash
# Runs all tests: test.sh [soak] [PYTEST ARGUMENT...]. They use their own grid and images in build/test, which are
# renewed at the start and removed at the end; other grids are not touched. test.sh down removes a remaining grid.
# soak: tests that take minutes each: deaths of processes under clusters and jobs, each with a line, and large images.
# Durations of phases and tests are in build/test/results; failed tests are not repeated.
# bash, because job control of Debian's sh needs a terminal.
set -eu
cd "$(dirname "$0")/.."
# shellcheck source=/dev/null
. deploy/project
export VMJOBS_PROJECT="$COMPOSE_PROJECT_NAME-test" VMJOBS_GRID_STATE=build/test/grid
if [ "${1:-}" = down ]; then exec deploy/grid.sh down; fi

results=build/test/results
rm -rf $results
mkdir -p $results
job=

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
    [ -z "$job" ] || { kill -INT -- "-$job" && wait "$job"; } 2>/dev/null || true
    deploy/grid.sh remove
    .venv/bin/python tests/report.py $results || true
    exit $status
}
trap finish EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

# Tests add images, so they get a copy of build/images. The files never change, so hard links suffice.
own_images() {
    rm -rf build/test/images
    mkdir -p build/test
    cp -al build/images build/test/images
}

grid() {
    own_images
    VMJOBS_IMAGE_DIR=$PWD/build/test/images
    export VMJOBS_IMAGE_DIR
    # shellcheck source=/dev/null
    deploy/grid.sh renew && . $VMJOBS_GRID_STATE/env
}

# background COMMAND...: runs it in a process group of its own, in parallel with what follows; join waits for it.
background() {
    set -m
    "$@" >$results/background.log 2>&1 </dev/null 9>&- &
    job=$!
    set +m
}

join() {
    wait $job || true
    job= # from now on its number may belong to another process group
    cat $results/background.log
}

# Image builds and jobs on the grid mostly wait. So tests that need no grid run in parallel with them.
if [ "${1:-}" = soak ]; then
    shift
    phase images make -s --no-print-directory -j 2 soak-images
    background tests soak-contract tests/contract -n 0 -m soak "$@"
    phase grid grid
    tests soak-integration tests/integration -n 3 --dist loadfile -m 'soak and not disruptive' "$@"
    join
    tests soak-faults tests/integration -n 0 -m 'soak and disruptive' "$@"
else
    without_grid() {
        tests unit tests/unit -n 2
        flock $results/images.lock true # contract tests need the images
        tests contract tests/contract -n 2 --dist loadfile -m 'not soak'
    }
    exec 9>$results/images.lock
    flock 9
    background without_grid
    phase "lint and images" make -s --no-print-directory -j 3 lint test-images
    exec 9>&-
    phase grid grid
    tests integration tests/integration -n 4 --dist loadfile -m 'not disruptive and not soak' "$@"
    tests faults tests/integration -n 0 -m 'disruptive and not soak' "$@"
    join
fi
! grep ' failed ' $results/phases >&2
