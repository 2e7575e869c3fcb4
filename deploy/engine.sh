#!/bin/sh
# A container engine where none runs and no service manager starts one: engine.sh start|stop STATE
# Only an engine that this started is stopped again: its process id is in STATE/dockerd.pid.
set -eu
state=$2

start() {
    ! docker info >/dev/null 2>&1 || return 0
    command -v dockerd >/dev/null || { echo "there is no container engine; make setup installs one" >&2; exit 1; }
    [ "$(id -u)" = 0 ] || { echo "the container engine does not run, or you may not use it" >&2; exit 1; }
    mkdir -p "$state"
    # After a crash the number in here may belong to another process, and dockerd would not start.
    left=$(cat /var/run/docker.pid 2>/dev/null || true)
    [ -z "$left" ] || [ "$(cat "/proc/$left/comm" 2>/dev/null)" = dockerd ] || rm -f /var/run/docker.pid
    nohup setsid dockerd >"$state/dockerd.log" 2>&1 &
    pid=$!
    echo $pid >"$state/dockerd.pid"
    deadline=$(($(date +%s) + 60))
    until docker info >/dev/null 2>&1; do
        if ! kill -0 $pid 2>/dev/null || [ "$(date +%s)" -ge $deadline ]; then
            tail -n 20 "$state/dockerd.log" >&2
            echo "the container engine does not start; above are its last lines" >&2
            exit 1
        fi
        sleep 0.2
    done
    echo "started a container engine (log in $state/dockerd.log)"
}

stop() {
    [ -f "$state/dockerd.pid" ] || return 0
    if [ -n "$(docker ps -q 2>/dev/null)" ]; then
        echo "the container engine goes on: there are containers of somebody else"
        return 0
    fi
    pid=$(cat "$state/dockerd.pid")
    # A number may have been given to another process since.
    if [ "$(cat "/proc/$pid/comm" 2>/dev/null)" = dockerd ]; then
        kill "$pid"
        while kill -0 "$pid" 2>/dev/null; do sleep 0.2; done
        echo "stopped the container engine"
    fi
    rm -f "$state/dockerd.pid"
}

case $1 in
    start | stop) "$1" ;;
esac
