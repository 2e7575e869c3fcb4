# shellcheck shell=sh
# Functions for all VMs of a gateway: address and names, accounts, reports about the service, and
# freezing for a backup. Each role's script reads this file and defines
#
#   prepare       set up everything that the service needs
#   service       replace the process by the service, with: become PROGRAM...
#   check         succeed if the service answers; otherwise print the problem
#   stop_service  ask the process $service to end
#   renew         install the VM's new token, if it has any
#
# Signals go to the whole process group: processes that must not get them run in sessions of their own.
#
#   USR1  freeze: /job does not change until USR2 thaws it, or frozen_seconds have passed
#   USR2  thaw; there may be a new token
#   TERM  shut down, and end with status 0
set -u
umask 022
trap 'exit 0' TERM INT # nothing to shut down yet
trap : USR1 USR2

here=$PWD
data=/job
frozen_seconds=60
look_seconds=20  # between checks of a service that answers
check_seconds=30 # time-out of a check

say() { printf 'vmjobs-gateway: %s\n' "$*"; }

give_up() {
    say "down $*"
    exit 69
}

# set_address: configure the second interface, which is on the gateway's own network.
set_address() {
    read -r address <"$here/address"
    tries=0
    until second_card; do
        tries=$((tries + 1))
        [ "$tries" -le 50 ] || give_up 'there is no interface on the private network'
        sleep 0.1 # a driver may still be detecting its hardware
    done
    if ! busybox ip link set "$card" up || ! busybox ip address add "$address" dev "$card"; then
        give_up "cannot give $card the address $address"
    fi
}

# second_card: set $card to its name.
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

# put NAME PATH OWNER [MODE]: install one of the script's files, atomically. The original is world-readable.
put() {
    mkdir -p "${2%/*}" && cp "$here/$1" "$2.new" && chown "$3" "$2.new" && chmod "${4:-0644}" "$2.new" &&
        mv "$2.new" "$2" && return
    give_up "cannot write $2"
}

# put_secret NAME PATH OWNER: install a file that only its owner can read, and remove the original.
put_secret() {
    if ! (umask 077 && mkdir -p "${2%/*}") || ! chown "$3" "${2%/*}"; then give_up "cannot make ${2%/*}"; fi
    put "$1" "$2" "$3" 0600
    rm -f "$here/$1"
}

# start_ssh_relay: start the SSH relay, for log-ins of root.
start_ssh_relay() {
    setsid bash "$here/ssh_relay" &
    ssh_relay=$!
}

# add_account NAME NUMBER HOME SHELL: without a password.
add_account() {
    ! grep -q "^$1:[^:]*:$2:" /etc/passwd || return 0
    ! grep -q "^$1:" /etc/passwd || give_up "$1 is an account of this image already"
    echo "$1:*:$2:$2::$3:$4" >>/etc/passwd
    echo "$1:x:$2:" >>/etc/group
}

# add_people: their accounts and homes, with the same numbers on all VMs.
add_people() {
    while read -r person number; do
        home=$data/people/$person
        add_account "$person" "$number" "$home" /bin/bash
        if ! mkdir -p "$home" || ! chown "$number:$number" "$home" || ! chmod 0700 "$home"; then
            give_up "cannot make $home"
        fi
    done <"$here/people"
}

# --------------------------------------------------------------------------- a backup

freeze() {
    if [ -n "$thaw_timer" ]; then # frozen already: start the time anew
        stop_thaw_timer
    else
        stop_watch # its checks would block, and seem to have failed
        sync
        if ! problem=$(fsfreeze -f "$data" 2>&1); then
            say "error: $data cannot be frozen: $problem"
            start_watch
            return
        fi
    fi
    # The process that requested the freeze may die before it thaws.
    setsid sh -c "sleep $frozen_seconds && kill -s USR2 $$" &
    thaw_timer=$!
    say frozen
}

thaw() {
    if [ -n "$thaw_timer" ]; then
        stop_thaw_timer
        fsfreeze -u "$data"
    else
        stop_watch # so that it reports the state of the service again
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

# renew_token PATH OWNER
renew_token() { fetch_token && put_secret token "$1" "$2"; }

# fetch_token: fetch the VM's token from its endpoint. The job's own token must not be an argument, so this
# does not use wget, but the guest program's HTTP with separate pipes.
fetch_token() {
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
    )
}

# watch: report when the service begins to answer, when it stops, and when it answers again. First renew the token:
# watch is restarted when there is a new one.
watch() {
    last='' renewed='' last_full=''
    while :; do
        report_fullness
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

# report_fullness: report how full $data is, in percent, in steps of five. Room that was made goes back to the host.
report_fullness() {
    full=$(busybox df -P "$data" | busybox awk 'NR == 2 { print int($5 / 5) * 5 }')
    [ -n "$full" ] && [ "$full" != "$last_full" ] || return
    say "full $full"
    # The file system discards blocks whose end its journal has on disk.
    if [ "$full" -lt "${last_full:-0}" ]; then sync && fstrim "$data" 2>/dev/null; fi
    last_full=$full
}

# become PROGRAM...: replace this process by the program, in a session of its own.
become() { exec setsid env --default-signal=USR1,USR2 "$@"; }

start_watch() {
    setsid sh "$0" watch &
    watcher=$!
}

stop_watch() { kill -s KILL -- "-$watcher" 2>/dev/null; }

# answers WHAT COMMAND...: succeed if the command succeeds in time.
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

# run_role [watch]: run the role; each role's script ends with this.
run_role() {
    if [ "${1:-}" = watch ]; then
        trap - TERM INT USR1 USR2
        watch
        exit
    fi
    stopping='' thaw_timer=''
    set_address
    set_names
    start_ssh_relay
    prepare
    trap '' USR1 USR2
    service &
    service=$!
    trap freeze USR1
    trap thaw USR2
    trap stop TERM INT
    start_watch
    # `wait` returns after each signal that was handled.
    status=0
    while kill -0 "$service" 2>/dev/null; do
        wait "$service"
        status=$?
    done
    trap '' TERM INT USR1 USR2
    stop_watch
    kill -s TERM -- "-$ssh_relay" 2>/dev/null
    if [ -n "$stopping" ]; then
        sync
        exit 0
    fi
    say "down the service ended with status $status"
    last_words
    [ "$status" != 0 ] || status=70
    exit "$status"
}

# last_words: print the end of the logs, for the console.
last_words() {
    for log in "$data"/log/*; do
        [ ! -f "$log" ] || tail -n 20 "$log"
    done
}
