#!/bin/sh
# All tests: test.sh [soak] [PYTEST ARGUMENT...]. They have a grid and images of their own in build/test, which are
# renewed at the start and taken down at the end; no other grid is touched. test.sh down removes what is left of one.
# soak: tests that take minutes each: what dies under clusters and jobs, with a line about each, and large images.
# What each phase and test took is in build/test/results; nothing that fails is run again.
set -eu
cd "$(dirname "$0")/.."
# shellcheck source=/dev/null
. deploy/project
export VMJOBS_PROJECT="$COMPOSE_PROJECT_NAME-test" VMJOBS_GRID_STATE=build/test/grid
if [ "${1:-}" = down ]; then exec deploy/grid.sh down; fi

results=build/test/results
rm -rf $results
mkdir -p $results
failed=
images=

# phase NAME COMMAND...: runs it, and notes how long it took.
phase() {
    name=$1
    shift
    echo "== $name"
    began=$(date +%s)
    outcome=passed
    "$@" || outcome=failed
    echo "$(($(date +%s) - began)) $outcome $name" >>$results/phases
    [ $outcome = passed ] || failed="$failed $name"
}

# tests NAME ARGUMENT...
tests() {
    name=$1
    shift
    phase "$name" .venv/bin/pytest -q -o cache_dir=build/test/cache -o junit_family=xunit1 \
        --junit-xml="$results/$name.xml" "$@"
}

finish() {
    status=$?
    trap '' EXIT INT TERM
    [ -z "$images" ] || kill "$images" 2>/dev/null || true
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
    # Images wait for Debian's servers and for compressors while the processors run the unit tests.
    make -s --no-print-directory -j 2 test-images >$results/images.log 2>&1 &
    images=$!
    phase lint make -s --no-print-directory lint
    tests unit tests/unit -n 2
    phase images wait $images
    images= # its number may be another process's from now on
    # They wait for machines to boot a good part of their time.
    tests contract tests/contract -n 3 --dist loadfile -m 'not soak'
    phase grid grid
    # Jobs wait for the scheduler most of their time: files of tests run side by side.
    tests integration tests/integration -n 4 --dist loadfile -m 'not disruptive and not soak' "$@"
    tests faults tests/integration -n 0 -m 'disruptive and not soak' "$@"
fi
[ -z "$failed" ] || { echo "failed:$failed" >&2; exit 1; }
