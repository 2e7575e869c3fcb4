#!/bin/sh
# Starts a container engine if none runs: engine.sh start|stop STATE
# stop ends only an engine that start has started: its process id is in STATE/dockerd.pid.
set -eu
state=$2

start() {
    ! docker info >/dev/null 2>&1 || return 0
    command -v dockerd >/dev/null || { echo "there is no container engine; install one with: make setup" >&2; exit 1; }
    [ "$(id -u)" = 0 ] || { echo "the container engine does not run, or you may not use it" >&2; exit 1; }
    mkdir -p "$state"
    # After a crash the process id in this file may belong to another process, and dockerd would not start.
    left=$(cat /var/run/docker.pid 2>/dev/null || true)
    [ -z "$left" ] || [ "$(cat "/proc/$left/comm" 2>/dev/null)" = dockerd ] || rm -f /var/run/docker.pid
    nohup setsid dockerd >"$state/dockerd.log" 2>&1 &
    pid=$!
    echo $pid >"$state/dockerd.pid"
    deadline=$(($(date +%s) + 60))
    until docker info >/dev/null 2>&1; do
        if ! kill -0 $pid 2>/dev/null || [ "$(date +%s)" -ge $deadline ]; then
            tail -n 20 "$state/dockerd.log" >&2
            echo "the container engine does not start; its last log lines are above" >&2
            exit 1
        fi
        sleep 0.2
    done
    echo "started a container engine (log in $state/dockerd.log)"
}

stop() {
    [ -f "$state/dockerd.pid" ] || return 0
    if [ -n "$(docker ps -q 2>/dev/null)" ]; then
        echo "the container engine keeps running: it has other containers"
        return 0
    fi
    pid=$(cat "$state/dockerd.pid")
    # The process id may belong to another process by now.
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
