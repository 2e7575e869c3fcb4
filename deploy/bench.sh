#!/bin/sh
# Benchmarks on a grid of this host: bench.sh [ARGUMENT of bench/main.py...]
# A running grid is used and left running; otherwise one is started, and removed afterwards.
set -eu
cd "$(dirname "$0")/.."
# shellcheck source=/dev/null
. deploy/project

if [ -z "$(docker ps -q --filter "label=com.docker.compose.project=$COMPOSE_PROJECT_NAME" 2>/dev/null)" ]; then
    trap 'deploy/grid.sh remove' EXIT
    trap 'exit 130' INT
    trap 'exit 143' TERM
fi
deploy/grid.sh up
# shellcheck source=/dev/null
. build/grid/env
.venv/bin/python -m bench.main "$@"
