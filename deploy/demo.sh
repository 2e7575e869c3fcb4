#!/bin/sh
# The main job: LHC minimum-bias events from an array of virtual machines. demo.sh [JOBS]
set -eu
cd "$(dirname "$0")/.."
# shellcheck source=/dev/null
. build/grid/env
jobs=${1:-6}
out=build/demo
rm -rf "$out"
mkdir -p "$out"

echo "Submitting $jobs jobs to $VMJOBS_API_URL: each generates 300 events in a VM of its own"
vmjobs job submit --wait --name minbias --image hep --array "$jobs" \
    --input card.cmnd=examples/minbias.cmnd --output 'hist-*.csv' examples/minbias.sh | tee "$out/table.txt"

array=$(vmjobs job list --json --limit 1 | .venv/bin/python -c 'import json, sys; print(json.load(sys.stdin)[0]["array"])')
echo
echo "What the first VM printed:"
vmjobs job out "$(vmjobs job list --array "$array" --json | .venv/bin/python -c 'import json, sys; print(json.load(sys.stdin)[0]["id"])')"
echo
vmjobs job outputs "$array" --fetch "$out/parts" >/dev/null
.venv/bin/python examples/merge.py "$out/minbias" "$out"/parts/*/hist-*.csv
