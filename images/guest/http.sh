# shellcheck shell=sh
# shellcheck disable=SC2154 # variables of base.sh and of job.env
# Requests to the host, with the program `talk`.

trap '' PIPE # a host that hangs up early is an error to handle; for the script the default is restored

# make_fifos: makes the fifos for the script's output.
make_fifos() {
    bb mkfifo "$run/out.fifo" "$run/err.fifo"
}

# size_of FILE: prints its size in bytes.
size_of() {
    stat -c %s "$1"
}

# talk WORD...: see talk.c.
talk() {
    export run VMJOBS_ENDPOINT VMJOBS_TOKEN VMJOBS_CHECKPOINT
    "$lib/talk" "$@"
}

# http SLOT METHOD PATH [SIZE COMMAND...]: sends a request whose body is the SIZE bytes that the command
# prints; prints the text of the answer. SLOT names the caller.
#
# 0: the answer was 2xx. 1: no answer, or a later try may succeed (408, 429, 5xx). 2: refused.
# $http_status has the status, 200 for all of 2xx, 000 without an answer.
http() {
    http_slot=$1 http_method=$2 http_path=$3
    if [ "${4:-0}" -gt 0 ]; then
        http_size=$4
        shift 4
        "$@" | talk "$http_method" "$http_path" "$http_size"
    else
        talk "$http_method" "$http_path" </dev/null
    fi
    http_status=$?
    case $http_status in
    0) http_status=200 && return 0 ;;
    1 | 12[6-9] | 1[3-9]? | 2??) http_status=000 && return 1 ;; # from 129 on: a signal ended it
    esac
    http_status=$((http_status + 398))
    case $http_status in
    408 | 429) return 1 ;;
    # A request that began before the new token arrived can be repeated.
    401) [ -n "${VMJOBS_CHECKPOINT:-}" ] && return 1 || return 2 ;;
    4??) return 2 ;;
    *) return 1 ;;
    esac
}

# with_retries COMMAND...: repeats it until it succeeds or is refused, at most five times.
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

# go_on: true if the last request failed only because this VM is being saved, or was resumed and needs
# its new token. Such a request is repeated without limit.
go_on() {
    [ -n "${VMJOBS_CHECKPOINT:-}" ] || return
    case $http_status in 401 | 503) ;; *) return 1 ;; esac
    renew "$http_slot" || pause 2
}

# renew SLOT: gets the new token and the time from the host, if there is a new one.
renew() {
    http "$1" GET /v1/renewal >"$run/$1.renewal" || return
    read -r token epoch <"$run/$1.renewal" || return 0
    keep_token "$token"
    set_clock "$epoch" 2
}

# post SLOT PATH SIZE COMMAND...: sends a POST request, with retries.
post() {
    post_slot=$1 post_path=$2
    shift 2
    with_retries http "$post_slot" POST "$post_path" "$@"
}

# post_text SLOT PATH TEXT
post_text() {
    post "$1" "$2" "${#3}" printf '%s' "$3"
}
