#!/bin/sh
# Gets the base images of docker-compose.yml: pulls them if a registry is reachable, otherwise builds them from
# Debian's packages under the same names.
# DEBIAN_MIRROR names a mirror other than Debian's own.
#   deploy/images.sh MADE    appends the name of each new image to the file MADE
set -eu
cd "$(dirname "$0")/.."
made=$1
pull_seconds=${PULL_SECONDS:-120}

have() { docker image inspect "$1" >/dev/null 2>&1; }

reachable=unknown
pull() {
    if [ "$reachable" = unknown ]; then
        # Asked once, because without a registry each pull would wait for its own time-out.
        if timeout 10 docker manifest inspect "$1" >/dev/null 2>&1; then reachable=yes; else reachable=no; fi
    fi
    [ "$reachable" = yes ] && timeout "$pull_seconds" docker pull --quiet "$1" >/dev/null 2>&1
}

bootstrap() {
    work=$(mktemp -d)
    trap 'rm -rf "$work"' EXIT
    mmdebstrap --quiet --variant=minbase --include=ca-certificates trixie "$work/root.tar" ${DEBIAN_MIRROR:+"$DEBIAN_MIRROR"}
    docker import "$work/root.tar" "$1" >/dev/null
    rm -rf "$work"
    trap - EXIT
}

get() {
    image=$1
    shift
    have "$image" && return
    if pull "$image"; then
        echo "  pulled $image"
    else
        "$@"
        echo "  built $image from Debian's packages"
    fi
    echo "$image" >>"$made"
}

build() { docker build --quiet --tag "$1" "$2" >/dev/null 2>"$made.log" || { cat "$made.log" >&2; exit 1; }; }

get debian:trixie-slim bootstrap debian:trixie-slim
get postgres:17 build postgres:17 deploy/postgres
get rabbitmq:4 build rabbitmq:4 deploy/rabbitmq
rm -f "$made.log"
