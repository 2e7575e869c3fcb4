#!/bin/sh
# Bootable images that no part of vmjobs makes, by Debian's own tools: build.sh NAME...
# Prints their paths, build/foreign/NAME.img. One that was made by the same recipe is taken as it is.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
store=$(cd "$here/../.." && pwd)/build/foreign
mkdir -p "$store"

key_of() { cat "$here/build.sh" "$here/lib.sh" "$here/$1.sh" "$here/guest/"* | sha256sum | cut -c 1-64; }

for name; do
    [ -f "$here/$name.sh" ] || { echo "build.sh: there is no recipe $name" >&2; exit 64; }
    # Two test processes may want the same image at once.
    exec 9>"$store/$name.lock"
    flock 9
    key=$(key_of "$name")
    if [ ! -f "$store/$name.img" ] || [ "$(cat "$store/$name.key" 2>/dev/null)" != "$key" ]; then
        rm -f "$store/$name.key" "$store/$name".part.*
        began=$(date +%s)
        echo "building the image $name with Debian's tools" >&2
        sh "$here/$name.sh" "$here" "$store/$name.part" >"$store/$name.log" 2>&1 ||
            { tail -n 40 "$store/$name.log" >&2; echo "build.sh: $name failed; see $store/$name.log" >&2; exit 70; }
        for part in "$store/$name".part.*; do
            mv "$part" "$store/$name.${part##*.part.}"
        done
        echo "$key" >"$store/$name.key"
        echo "built $name in $(($(date +%s) - began)) s" >&2
    fi
    exec 9>&-
    echo "$store/$name.img"
done
