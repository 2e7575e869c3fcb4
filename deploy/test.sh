#!/bin/sh
# All tests but the linters: unit, contract, integration on a grid. test.sh [soak] [PYTEST ARGUMENT...]
# A grid that is up already is used and left up; one that is started here is taken down again.
# soak: tests that take minutes each: what dies under clusters and jobs, with a line about each, and large images.
set -eu
cd "$(dirname "$0")/.."
# shellcheck source=/dev/null
. deploy/project
cache=build/pytest-cache

# What takes longest is printed: the whole is to stay below an hour.
slow="--durations=25 --durations-min=5"

# tests ARGUMENT...: runs them side by side. What fails then is run once more by itself, and said to be: deadlines
# of processes, machines and containers are met or not with what else goes on. It has to pass there.
tests() {
    rm -rf $cache
    # shellcheck disable=SC2086 # two words
    .venv/bin/pytest -q -o cache_dir=$cache $slow "$@" && return
    echo "== once more, one at a time: what failed beside others"
    .venv/bin/pytest -q -o cache_dir=$cache "$@" -n 0 --last-failed --last-failed-no-failures none
}

# alone ARGUMENT...: runs them one at a time, with nothing beside them: what fails there has failed.
alone() {
    # shellcheck disable=SC2086 # two words
    .venv/bin/pytest -q -o cache_dir=$cache $slow "$@" -n 0
}

began=$(date +%s)
part() { printf '== %s, after %d min\n' "$1" $((($(date +%s) - began) / 60)); }

if [ "${1:-}" = soak ]; then
    shift
    soak=yes
    part "soak: contract"
    alone tests/contract -m soak "$@" || [ $? -eq 5 ] # none is meant
else
    soak=
    part unit
    tests tests/unit -n 2
    part contract
    # They wait for machines to boot a good part of their time.
    tests tests/contract -n 3 --dist loadfile -m 'not soak'
fi

part grid
ours="label=com.docker.compose.project=$COMPOSE_PROJECT_NAME"
if [ -f build/grid/env ] && [ "$(docker ps -q --filter "$ours" 2>/dev/null)" ]; then
    deploy/grid.sh up
else
    # Another checkout in this place, whose tests were killed, may have left one that comes back with the engine.
    trap 'deploy/grid.sh remove' EXIT
    # By which that happens then, too.
    trap 'exit 130' INT
    trap 'exit 143' TERM
    deploy/grid.sh renew
fi
# shellcheck source=/dev/null
. build/grid/env

if [ "$soak" ]; then
    part "soak: integration"
    alone tests/integration -m soak "$@"
    exit
fi
part integration
# Jobs wait for the scheduler most of their time: files of tests run side by side.
tests tests/integration -n 4 --dist loadfile -m 'not disruptive and not soak' "$@"
part "integration, with services that die"
harness=tests/integration/test_every_step.py
alone $harness -m 'not soak' "$@"
tests tests/integration -n 0 -m 'disruptive and not soak' --ignore $harness "$@"
