#!/bin/sh
# The grid on this host: grid.sh up|renew|down|remove|stop|logs. Its state is in build/grid, or in
# VMJOBS_GRID_STATE.
# XEN=1 adds the node that is a Xen host; it stays until down or remove.
# renew starts an empty grid. remove deletes containers and volumes; down also the images made for them.
set -eu
cd "$(dirname "$0")/.."

state=${VMJOBS_GRID_STATE:-build/grid}
engine=build/engine # one engine serves all grids of this checkout
authorities=$PWD/$state/authorities.pem
made=build/container-images # names of images that deploy/images.sh added; outlives the containers
# shellcheck source=/dev/null
. deploy/project
services="submit site node1 node2 api worker builder postgres rabbitmq"

began=$(date +%s)
say() { printf '[%3d s] %s\n' $(($(date +%s) - began)) "$*"; }
die() { echo "$*" >&2; exit 1; }

compose() {
    files="-f docker-compose.yml"
    [ ! -f "$state/kvm.yml" ] || files="$files -f $state/kvm.yml"
    if docker compose version >/dev/null 2>&1; then
        # shellcheck disable=SC2086 # a list of words
        docker compose $files --project-directory . "$@"
    else
        # shellcheck disable=SC2086
        docker-compose $files --project-directory . "$@"
    fi
}

free_port() {
    python3 -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])'
}

# Compose has no optional devices, so this file is written only if there is a /dev/kvm. The processor's flags
# are checked too: without them /dev/kvm belongs to a module that cannot boot stock kernels.
write_kvm() {
    rm -f "$state/kvm.yml"
    [ -c /dev/kvm ] && grep -qwE 'vmx|svm' /proc/cpuinfo || return 0
    group=$(stat -c %g /dev/kvm)
    cat >"$state/kvm.yml" <<END
services:
  node1: {devices: [/dev/kvm], group_add: ["$group"]}
  node2: {devices: [/dev/kvm], group_add: ["$group"]}
  builder: {devices: [/dev/kvm], group_add: ["$group"]}
END
}

container() {
    docker ps -q --filter "label=com.docker.compose.project=$COMPOSE_PROJECT_NAME" \
        --filter "label=com.docker.compose.service=$1"
}

# healthy CONTAINER: runs its health check now. Docker's own result may be a minute old.
healthy() {
    docker inspect -f '{{range slice .Config.Healthcheck.Test 1}}{{println .}}{{end}}' "$1" | sed '/^$/d' |
        xargs -d '\n' timeout 20 docker exec "$1"
}

wait_healthy() {
    deadline=$(($(date +%s) + ${GRID_SECONDS:-180}))
    for service in $services; do
        until healthy "$(container "$service")" >/dev/null 2>&1; do
            if [ "$(date +%s)" -ge $deadline ]; then
                docker logs --tail 30 "$(container "$service")" >&2 || true
                die "$service did not become healthy; its last log lines are above"
            fi
            sleep 0.5
        done
    done
}

# Starts the container engine, and fails if another checkout has a grid of this name.
begin() {
    mkdir -p "$state"
    deploy/engine.sh start $engine
    require_ours
}

# Removes containers, volumes and networks.
empty() { compose down --volumes --remove-orphans --timeout 5; }

up() {
    begin
    write_kvm
    xen=
    if [ -n "${XEN:-}" ] || [ -n "$(container node-xen)" ]; then
        xen=node-xen
        services="$services $xen"
        : "${GRID_SECONDS:=900}" # its processors are emulated
    fi
    say "base images"
    deploy/images.sh $made
    say "images of vmjobs"
    # shellcheck disable=SC2086
    compose build secrets node1 builder $xen >"$state/build.log" 2>&1 || die "$(tail -n 40 "$state/build.log")"
    if [ -n "$(container api)" ]; then
        VMJOBS_API_PORT=$(docker port "$(container api)" 8443 | sed -n 's/.*://p;q')
    else
        VMJOBS_API_PORT=$(free_port)
    fi
    export VMJOBS_API_PORT
    say "containers"
    # All services at once: compose starts them in parallel.
    # shellcheck disable=SC2086
    compose up -d --no-build $services >"$state/up.log" 2>&1 || die "$(tail -n 40 "$state/up.log")"
    wait_healthy
    for user in vmjobs physicist; do
        docker exec -u $user "$(container submit)" /usr/share/vmjobs/grid/standby
    done
    write_authorities
    (
        umask 077
        docker exec "$(container api)" vmjobs token create user "$(id -un)" >"$state/token"
    )
    cat >"$state/env" <<END
export VMJOBS_API_URL=https://127.0.0.1:$VMJOBS_API_PORT
export REQUESTS_CA_BUNDLE=$authorities CURL_CA_BUNDLE=$authorities
export VMJOBS_TOKEN_FILE=$PWD/$state/token
export VMJOBS_GRID=$COMPOSE_PROJECT_NAME
export PATH=$PWD/.venv/bin:\$PATH
END
    say "images for the library"
    publish
    say "the grid is up: https://127.0.0.1:$VMJOBS_API_PORT; eval \"\$(make -s env)\" to use it"
}

renew() {
    begin
    empty >"$state/down.log" 2>&1 || die "$(tail -n 40 "$state/down.log")"
    up
}

# Writes the certificate authorities: those of this host, and the one of the API's certificate.
write_authorities() {
    known=${REQUESTS_CA_BUNDLE:-/etc/ssl/certs/ca-certificates.crt}
    [ "$known" != "$authorities" ] || known=/etc/ssl/certs/ca-certificates.crt
    { cat "$known" && docker exec "$(container api)" cat /etc/vmjobs/ca.pem; } >"$authorities.new"
    mv "$authorities.new" "$authorities"
}

# Pushes every image of the local store with a plain name to the namespace library. An unchanged image costs one
# request, a changed one the upload of its changed chunks.
publish() {
    VMJOBS_API_URL=https://127.0.0.1:$VMJOBS_API_PORT
    VMJOBS_TOKEN_FILE=$PWD/$state/admin-token
    VMJOBS_IMAGE_DIR=${VMJOBS_IMAGE_DIR:-$PWD/build/images}
    REQUESTS_CA_BUNDLE=$authorities
    export VMJOBS_API_URL VMJOBS_TOKEN_FILE VMJOBS_IMAGE_DIR REQUESTS_CA_BUNDLE
    [ -s "$state/admin-token" ] || administrate
    push_all || { administrate && push_all; } || die "$(tail -n 20 "$state/publish.log")"
    sed -n '/ unchanged$/!s/^library\/.*/    &/p' "$state/publish.log"
}

push_all() {
    .venv/bin/vmjobs image push --all-local --namespace library --public >"$state/publish.log" 2>&1
}

administrate() {
    (
        umask 077
        docker exec "$(container api)" vmjobs token create user operator --admin >"$state/admin-token"
    )
}

# Fails if another checkout has started the grid of this name (VMJOBS_PROJECT): this one must not use or remove it.
require_ours() {
    others=$(docker ps -aq --filter "label=com.docker.compose.project=$COMPOSE_PROJECT_NAME" 2>/dev/null |
        xargs -r docker inspect -f '{{index .Config.Labels "com.docker.compose.project.working_dir"}}' |
        sort -u | grep -vxF "$PWD") || return 0
    die "the grid $COMPOSE_PROJECT_NAME belongs to $others: work there, or set VMJOBS_PROJECT to another name"
}

remove() {
    require_ours
    ! docker info >/dev/null 2>&1 || empty 2>/dev/null || true
    deploy/engine.sh stop $engine
    rm -rf "$state"
}

down() {
    require_ours
    if docker info >/dev/null 2>&1; then
        empty 2>/dev/null || true
        for name in base node builder xen; do docker rmi "$COMPOSE_PROJECT_NAME/$name"; done >/dev/null 2>&1 || true
        docker image prune --force --filter label=vmjobs.project="$COMPOSE_PROJECT_NAME" >/dev/null 2>&1 || true
        if [ -f $made ]; then
            # Another deployment may use the same images: docker keeps images in use.
            tac $made | xargs -r -n 1 docker rmi >/dev/null 2>&1 || true
        fi
    fi
    deploy/engine.sh stop $engine
    rm -rf "$state"
}

case ${1:-} in
    up | renew | down | remove) "$1" ;;
    stop) require_ours && compose stop ;;
    logs) compose logs --follow --tail 50 ;;
    *) die "usage: deploy/grid.sh up|renew|down|remove|stop|logs" ;;
esac
