#!/bin/bash
# All tests: test.sh [soak] [PYTEST ARGUMENT...]. They have a grid and images of their own in build/test, which are
# renewed at the start and taken down at the end; no other grid is touched. test.sh down removes what is left of one.
# soak: tests that take minutes each: what dies under clusters and jobs, with a line about each, and large images.
# What each phase and test took is in build/test/results; nothing that fails is run again.
# Not sh: job control of Debian's needs a terminal.
set -eu
cd "$(dirname "$0")/.."
# shellcheck source=/dev/null
. deploy/project
export VMJOBS_PROJECT="$COMPOSE_PROJECT_NAME-test" VMJOBS_GRID_STATE=build/test/grid
if [ "${1:-}" = down ]; then exec deploy/grid.sh down; fi

results=build/test/results
rm -rf $results
mkdir -p $results
beside=

# phase NAME COMMAND...: runs it, and notes how long it took.
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
    [ -z "$beside" ] || { kill -INT -- "-$beside" && wait "$beside"; } 2>/dev/null || true
    deploy/grid.sh remove
    .venv/bin/python tests/report.py $results || true
    exit $status
}
trap finish EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

# Tests add images; those of build/images are not theirs. The files never change, so that links will do.
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

if [ "${1:-}" = soak ]; then
    shift
    phase images make -s --no-print-directory -j 2 soak-images
    tests soak-contract tests/contract -n 0 -m soak "$@"
    phase grid grid
    tests soak-grid tests/integration -n 0 -m soak "$@"
else
    # Builds of images and jobs on the grid wait most of their time. Tests that need no grid run beside them, in a
    # process group of their own; contract tests need the images.
    exec 9>$results/images.lock
    flock 9
    set -m
    {
        tests unit tests/unit -n 2
        flock $results/images.lock true
        tests contract tests/contract -n 2 --dist loadfile -m 'not soak'
    } >$results/beside.log 2>&1 </dev/null 9>&- &
    beside=$!
    set +m
    phase "lint and images" make -s --no-print-directory -j 3 lint test-images
    exec 9>&-
    phase grid grid
    tests integration tests/integration -n 4 --dist loadfile -m 'not disruptive and not soak' "$@"
    tests faults tests/integration -n 0 -m 'disruptive and not soak' "$@"
    wait $beside || true
    beside= # its number may be another group's from now on
    cat $results/beside.log
fi
! grep ' failed ' $results/phases >&2
