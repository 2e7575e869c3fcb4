# shellcheck shell=sh
# What the machines of a gateway have in common: their address and names, the account that people have, what
# they say of their service, and standing still for a backup. Read by each role's script, which has
#
#   prepare       everything that the service needs
#   service       becomes the service, by: become PROGRAM...
#   check         true if the service answers; what is wrong, else, on its standard output
#   stop_service  asks the process $service to end
#   renew         has the machine's new token in its place, where it has any
#
# Signals come to the whole process group: what they are not for has a session of its own.
#
#   USR1  freeze: /job does not change until USR2 thaws it, or frozen_seconds are over
#   USR2  thaw; there may be a new token
#   TERM  shut down, and end with status 0
set -u
umask 022
trap 'exit 0' TERM INT # there is nothing yet to shut down
trap : USR1 USR2

here=$PWD
data=/job
frozen_seconds=60
look_seconds=20  # between looks at a service that answers
check_seconds=30 # that an answer may take

say() { printf 'vmjobs-gateway: %s\n' "$*"; }

give_up() {
    say "down $*"
    exit 69
}

# set_address: of the second card, which is the one on the gateway's own network.
set_address() {
    read -r address <"$here/address"
    tries=0
    until second_card; do
        tries=$((tries + 1))
        [ "$tries" -le 50 ] || give_up 'there is no card on the private network'
        sleep 0.1 # a driver may still be looking for its hardware
    done
    if ! busybox ip link set "$card" up || ! busybox ip address add "$address" dev "$card"; then
        give_up "cannot give $card the address $address"
    fi
}

# second_card: its name in $card.
second_card() {
    first=
    for path in /sys/class/net/eth* /sys/class/net/vec* /sys/class/net/en*; do
        [ -e "$path" ] || continue
        card=${path##*/}
        [ -z "$first" ] || return 0
        first=$card
    done
    return 1
}

set_names() {
    read -r host <"$here/host"
    echo "$host" >/proc/sys/kernel/hostname
    echo "$host" >/etc/hostname
    { echo '127.0.0.1 localhost' && cat "$here/hosts"; } >/etc/hosts
}

# put NAME PATH OWNER [MODE]: one of the script's files in its place, at once or not at all. Where it came from
# everybody could read it.
put() {
    mkdir -p "${2%/*}" && cp "$here/$1" "$2.new" && chown "$3" "$2.new" && chmod "${4:-0644}" "$2.new" &&
        mv "$2.new" "$2" && return
    give_up "cannot write $2"
}

# put_secret NAME PATH OWNER: nobody else can read it, nor is it left where it came from.
put_secret() {
    if ! (umask 077 && mkdir -p "${2%/*}") || ! chown "$3" "${2%/*}"; then give_up "cannot make ${2%/*}"; fi
    put "$1" "$2" "$3" 0600
    rm -f "$here/$1"
}

# start_door: where root's way in begins.
start_door() {
    setsid bash "$here/door" &
    door=$!
}

# add_account NAME NUMBER HOME SHELL: nobody has a password.
add_account() {
    grep -q "^$1:" /etc/passwd && return
    echo "$1:*:$2:$2::$3:$4" >>/etc/passwd
    echo "$1:x:$2:" >>/etc/group
}

# add_person: the account of those who use the gateway, of the same number on all machines.
add_person() {
    read -r person <"$here/person"
    home=$data/people/$person
    add_account "$person" 64000 "$home" /bin/bash
    mkdir -p "$home" && chown "$person:$person" "$home" && chmod 0700 "$home" && return
    give_up "cannot make $home"
}

# --------------------------------------------------------------------------- a backup

freeze() {
    if [ -n "$thaw_timer" ]; then # once more, and as long again
        stop_thaw_timer
    else
        stop_watch # what it asks would wait, and seem to have failed
        sync
        if ! problem=$(fsfreeze -f "$data" 2>&1); then
            say "error: $data cannot be frozen: $problem"
            start_watch
            return
        fi
    fi
    # Whoever had it frozen may be gone by then.
    setsid sh -c "sleep $frozen_seconds && kill -s USR2 $$" &
    thaw_timer=$!
    say frozen
}

thaw() {
    if [ -n "$thaw_timer" ]; then
        stop_thaw_timer
        fsfreeze -u "$data"
    else
        stop_watch # so that it says again how the service does
    fi
    say thawed
    start_watch
}

stop_thaw_timer() {
    kill -s KILL -- "-$thaw_timer" 2>/dev/null
    thaw_timer=
}

# --------------------------------------------------------------------------- the service

renew() { :; }

# renew_token PATH OWNER: the machine's token, from its endpoint. The job's own token is never an argument, so no wget,
# but the guest program's HTTP with pipes of our own.
renew_token() {
    (
        umask 077
        run=/run/vmjobs-gateway
        mkdir -p "$run" && cd "$run" || exit
        # shellcheck source=/dev/null
        . /run/vmjobs/job/job.env
        # shellcheck source=/dev/null
        . /usr/lib/vmjobs/base.sh
        # shellcheck source=/dev/null
        . /usr/lib/vmjobs/http.sh
        http main GET /v1/token >"$here/token" && [ -s "$here/token" ]
    ) && put_secret token "$1" "$2"
}

# watch: says when the service begins to answer, when it no longer does, and when it does again. Before, it takes the
# token that there is now: it is started again when there is a new one.
watch() {
    last='' renewed=''
    while :; do
        [ -n "$renewed" ] || ! renew || renewed=1
        if problem=$(check); then
            now=up
        else
            now="down ${problem:-it does not answer}"
        fi
        if [ "$now" = up ] || [ -n "$last" ]; then
            [ "$now" = "$last" ] || say "$now"
            last=$now
        fi
        if [ "$now" = up ]; then sleep "$look_seconds"; else sleep 1; fi
    done
}

# become PROGRAM...: in a session of its own.
become() { exec setsid env --default-signal=USR1,USR2 "$@"; }

start_watch() {
    setsid sh "$0" watch &
    watcher=$!
}

stop_watch() { kill -s KILL -- "-$watcher" 2>/dev/null; }

# answers WHAT COMMAND...: true if it succeeds in time.
answers() {
    what=$1
    shift
    timeout "$check_seconds" "$@" >/dev/null 2>&1 && return
    echo "$what does not answer"
    return 1
}

stop() {
    say 'shuts down'
    stopping=1
    [ -z "$thaw_timer" ] || thaw
    stop_service
}

# run_role [watch]: what a role's script ends with.
run_role() {
    if [ "${1:-}" = watch ]; then
        trap - TERM INT USR1 USR2
        watch
        exit
    fi
    stopping='' thaw_timer=''
    set_address
    set_names
    start_door
    prepare
    trap '' USR1 USR2
    service &
    service=$!
    trap freeze USR1
    trap thaw USR2
    trap stop TERM INT
    start_watch
    # `wait` comes back whenever a signal has been dealt with.
    status=0
    while kill -0 "$service" 2>/dev/null; do
        wait "$service"
        status=$?
    done
    trap '' TERM INT USR1 USR2
    stop_watch
    kill -s TERM -- "-$door" 2>/dev/null
    if [ -n "$stopping" ]; then
        sync
        exit 0
    fi
    say "down the service ended with status $status"
    last_words
    [ "$status" != 0 ] || status=70
    exit "$status"
}

# last_words: the end of the logs, where people look first.
last_words() {
    for log in "$data"/log/*; do
        [ ! -f "$log" ] || tail -n 20 "$log"
    done
}
