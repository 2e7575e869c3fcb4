#!/bin/sh
# Benchmarks on a grid of this machine: bench.sh [ARGUMENT of tests/bench/main.py...]
# A grid that is up already is used and left up; one that is started here is taken down again.
set -eu
cd "$(dirname "$0")/.."
# shellcheck source=/dev/null
. deploy/project

if [ -z "$(docker ps -q --filter "label=com.docker.compose.project=$COMPOSE_PROJECT_NAME" 2>/dev/null)" ]; then
    trap 'deploy/grid.sh remove' EXIT
fi
deploy/grid.sh up
# shellcheck source=/dev/null
. build/grid/env
PYTHONPATH=tests/integration:tests/contract .venv/bin/python tests/bench/main.py "$@"
