#!/bin/sh
# All tests but the linters: unit, contract, integration on a grid. test.sh [PYTEST ARGUMENT...]
# A grid that is up already is used and left up; one that is started here is taken down again.
set -eu
cd "$(dirname "$0")/.."
export COMPOSE_PROJECT_NAME="${VMJOBS_PROJECT:-vmjobs}"
pytest=.venv/bin/pytest

echo "== unit"
$pytest -q -n 2 tests/unit
echo "== contract"
$pytest -q -n 2 --dist loadfile tests/contract

echo "== grid"
if [ -z "$(docker ps -q --filter "label=com.docker.compose.project=$COMPOSE_PROJECT_NAME" 2>/dev/null)" ]; then
    trap 'deploy/grid.sh remove' EXIT
fi
deploy/grid.sh up
# shellcheck source=/dev/null
. build/grid/env
export VMJOBS_GRID="$COMPOSE_PROJECT_NAME"

echo "== integration"
# Jobs wait for the scheduler most of their time: files of tests run side by side.
$pytest -q -n 3 --dist loadfile -m 'not disruptive' tests/integration "$@"
echo "== integration, with services that die"
$pytest -q -m disruptive tests/integration "$@"
