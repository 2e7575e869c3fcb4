# shellcheck shell=sh
# shellcheck disable=SC2154 # variables of base.sh and of job.env
# A small HTTP client over netcat. busybox's wget cannot send files: --post-file stops at the first
# NUL byte and needs the whole file in memory. A client of our own also tells a refusal from silence.

carriage_return=$(printf '\r')
netcat=nc
case $applets in *"${newline}nc$newline"*) netcat="$busybox nc" ;; esac
# A machine that may be saved, and go on elsewhere, may wait for an answer that was on its way then: seconds
# until it asks again. Empty: it waits as long as it takes.
http_patience=40
http_timeout=
trap '' PIPE       # a server that hangs up early is an error to handle; the script gets its own default

# make_fifos: for every slot, and for the script's output.
make_fifos() {
    set -- "$run/out.fifo" "$run/err.fifo"
    for slot in main control out err; do
        set -- "$@" "$run/$slot.ask" "$run/$slot.answer"
    done
    bb mkfifo "$@"
    [ -z "${VMJOBS_CHECKPOINT:-}" ] || find_timeout
}

# find_timeout: $http_timeout, for machines that may be saved, if there is one that works. (Of old some
# wanted the seconds elsewhere.)
find_timeout() {
    for timeout in "$busybox timeout" timeout; do
        [ -n "$http_timeout" ] || ! $timeout 1 true 2>/dev/null || http_timeout=$timeout
    done
}

# size_of FILE: its bytes.
size_of() {
    stat -c %s "$1"
}

# http SLOT METHOD PATH [SIZE COMMAND...]: one request with the SIZE bytes that the command prints as
# its body; prints the body of the answer. SLOT names the caller: each has connections of its
# own. There is no deadline but $http_patience: the host has one for everything that a guest does.
#
# 0: the answer was 2xx. 1: no answer, or one that may change (408, 429, 5xx). 2: refused.
# $http_status has the status, 000 without an answer.
http() {
    http_slot=$1 http_ask=$run/$1.ask http_answer=$run/$1.answer http_status=000 http_length=
    http_server=${VMJOBS_ENDPOINT#http://}
    http_server=${http_server%%/*}
    case $http_server in *:*) http_port=${http_server##*:} ;; *) http_port=80 ;; esac

    # Request and answer pass through fifos, so that netcat's input stays open until the answer is
    # complete: a server may take the end of its input for a client that went away.
    connect "${http_server%%:*}" "$http_port" 2>/dev/null 3>&- 4>&- &
    http_netcat=$!
    exec 5>"$http_ask" 6<"$http_answer"
    [ -z "${VMJOBS_CHECKPOINT:-}" ] || read -r VMJOBS_TOKEN <"$run/token"
    {
        printf '%s %s HTTP/1.0\r\nHost: %s\r\n' "$2" "$3" "$http_server"
        printf 'Authorization: Bearer %s\r\n' "$VMJOBS_TOKEN"
        [ "$2" = GET ] || printf 'Content-Type: application/octet-stream\r\n'
        [ "$2" = GET ] || printf 'Content-Length: %s\r\n' "$4"
        printf 'Connection: close\r\n\r\n'
        if [ "${4:-0}" -gt 0 ]; then
            shift 4
            "$@"
        fi
    } >&5 2>/dev/null
    ! read -r _ http_status _ <&6 || http_body <&6
    exec 5>&- 6<&-
    kill "$http_netcat" 2>/dev/null
    wait "$http_netcat" 2>/dev/null
    case $http_status in
    2??) return 0 ;;
    408 | 429) return 1 ;;
    4??)
        # A request that began before the new token came is not refused for good.
        [ "$http_status" != 401 ] || [ -z "${VMJOBS_CHECKPOINT:-}" ] || return 1
        return 2
        ;;
    *) return 1 ;;
    esac
}

# connect HOST PORT: netcat between the fifos, in place of this process.
connect() {
    if [ -z "$http_timeout" ] || [ -z "$http_patience" ]; then
        # shellcheck disable=SC2086 # a command of two words
        exec $netcat -w 30 "$1" "$2" <"$http_ask" >"$http_answer"
    fi
    # What ends netcat must not hold the fifos open.
    # shellcheck disable=SC2016,SC2086
    exec $http_timeout "$http_patience" /bin/sh -c 'exec $0 -w 30 "$1" "$2" <"$3" >"$4"' \
        "$netcat" "$1" "$2" "$http_ask" "$http_answer" </dev/null >/dev/null
}

# http_body: passes on the body, where there is one that anybody wants.
http_body() {
    case $http_status in 200) ;; *) return 0 ;; esac
    while read -r http_line; do
        http_line=${http_line%"$carriage_return"}
        case $http_line in
        '') break ;;
        [Cc]ontent-[Ll]ength:*) http_length=${http_line##*[: ]} ;;
        esac
    done
    [ "$http_length" = 0 ] || bb cat
}

# with_retries COMMAND...: until it succeeds or is refused, five times at most.
with_retries() {
    for delay in 1 2 4 8 0; do
        while :; do
            "$@"
            outcome=$?
            [ "$outcome" = 1 ] || return "$outcome"
            go_on || break
        done
        pause "$delay"
    done
    return 1
}

# go_on: true if nothing is wrong but that this machine is being saved, or goes on elsewhere and has to
# learn its new token first. Asking again makes sense then, however often.
go_on() {
    [ -n "${VMJOBS_CHECKPOINT:-}" ] || return
    case $http_status in 401 | 503) ;; *) return 1 ;; esac
    renew "$http_slot" || pause 2
}

# renew SLOT: take the new token and the time from the host, if there is a new one.
renew() {
    http "$1" GET /v1/renewal >"$run/$1.renewal" || return
    read -r token epoch <"$run/$1.renewal" || return 0
    keep_token "$token"
    set_clock "$epoch" 2
}

# post SLOT PATH SIZE COMMAND...: with retries.
post() {
    post_slot=$1 post_path=$2
    shift 2
    with_retries http "$post_slot" POST "$post_path" "$@"
}

# post_text SLOT PATH TEXT
post_text() {
    post "$1" "$2" "${#3}" printf '%s' "$3"
}

# post_file SLOT PATH FILE SIZE: with a mark where it was neither taken nor refused, which the host is to know.
post_file() {
    post "$1" "$2" "$4" bb cat "$3"
    outcome=$?
    [ "$outcome" != 1 ] || : >"$run/undelivered"
    return "$outcome"
}
