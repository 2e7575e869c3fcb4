#!/bin/sh
# What shows that a machine of a virtual cluster can run jobs: it runs as one.
set -eu
[ "$(id -u)" != 0 ]
for place in . /tmp "${TMPDIR:-/tmp}"; do
    file=$(mktemp "$place/vmjobs-probe.XXXXXX")
    echo works >"$file"
    [ "$(cat "$file")" = works ]
    rm "$file"
done
