# shellcheck shell=sh
# shellcheck disable=SC2154 # variables of base.sh and of job.env
# A small HTTP client over netcat. busybox's wget cannot send files: --post-file stops at the first
# NUL byte and needs the whole file in memory. A client of our own also tells a refusal from silence.

carriage_return=$(printf '\r')
netcat=nc
case $applets in *' nc '*) netcat='/bin/busybox nc' ;; esac
trap '' PIPE # a server that hangs up early is an error to handle; the script gets its own default

# size_of FILE: its bytes.
size_of() {
    stat -c %s "$1"
}

# http SLOT SECONDS METHOD PATH [FILE]: one request, the file as its body, the body of the answer on
# standard output. SLOT names the caller: each has connections of its own. Gives up after SECONDS.
#
# 0: the answer was 2xx. 1: no answer, or one that may change (408, 429, 5xx). 2: refused.
# $http_status has the status, 000 without an answer.
http() {
    http_ask=$run/$1.ask http_answer=$run/$1.answer http_status=000 http_length=
    [ -p "$http_ask" ] || mkfifo "$http_ask" "$http_answer"
    http_server=${VMJOBS_ENDPOINT#http://}
    http_server=${http_server%%/*}
    case $http_server in *:*) http_port=${http_server##*:} ;; *) http_port=80 ;; esac
    http_size=0
    [ -z "${5:-}" ] || http_size=$(size_of "$5")

    # Request and answer pass through fifos, so that netcat's input stays open until the answer is
    # complete: a server may take the end of its input for a client that went away.
    # shellcheck disable=SC2086 # a command of two words
    timeout "$2" $netcat -w 30 "${http_server%%:*}" "$http_port" \
        <"$http_ask" >"$http_answer" 2>/dev/null 3>&- 4>&- &
    http_netcat=$!
    exec 5>"$http_ask" 6<"$http_answer"
    {
        printf '%s %s HTTP/1.0\r\nHost: %s\r\n' "$3" "$4" "$http_server"
        printf 'Authorization: Bearer %s\r\n' "$VMJOBS_TOKEN"
        [ "$3" = GET ] || printf 'Content-Type: application/octet-stream\r\n'
        [ "$3" = GET ] || printf 'Content-Length: %s\r\n' "$http_size"
        printf 'Connection: close\r\n\r\n'
        [ -z "${5:-}" ] || cat "$5"
    } >&5 2>/dev/null
    if read -r _ http_status _ <&6; then
        while read -r http_line <&6; do
            http_line=${http_line%"$carriage_return"}
            case $http_line in
            '') break ;;
            [Cc]ontent-[Ll]ength:*) http_length=${http_line##*[: ]} ;;
            esac
        done
        [ "$http_status" = 204 ] || cat <&6
    fi
    exec 5>&- 6<&-
    kill "$http_netcat" 2>/dev/null
    wait "$http_netcat" 2>/dev/null
    case $http_status in
    2??) return 0 ;;
    408 | 429) return 1 ;;
    4??) return 2 ;;
    *) return 1 ;;
    esac
}

# with_retries COMMAND...: until it succeeds or is refused, five times at most.
with_retries() {
    for delay in 1 2 4 8 0; do
        "$@"
        outcome=$?
        [ "$outcome" = 1 ] || return "$outcome"
        pause "$delay"
    done
    return 1
}

# post SLOT PATH FILE [SECONDS]: with retries; the answer's body is dropped.
post() {
    with_retries http "$1" "${4:-60}" POST "$2" "$3" >/dev/null
}

# post_text SLOT PATH TEXT
post_text() {
    printf '%s' "$3" >"$run/$1.text"
    post "$1" "$2" "$run/$1.text"
}

# get_job: script and inputs, unpacked as they arrive. An answer that ends early is none.
get_job() {
    rm -rf "$job/stage" "$run/job.pipe" "$run/job.count"
    mkdir "$job/stage"
    mkfifo "$run/job.pipe"
    wc -c <"$run/job.pipe" >"$run/job.count" &
    counter=$!
    {
        http main 3600 GET /v1/job.tar
        echo "$? ${http_length:-} $http_status" >"$run/job.status"
    } | tee "$run/job.pipe" | bb tar -xf - -C "$job/stage" 2>"$run/tar.log"
    unpacked=$?
    wait "$counter"
    read -r outcome expected http_status <"$run/job.status"
    [ "$outcome" = 0 ] || return "$outcome"
    read -r received <"$run/job.count"
    [ "${expected:-$received}" = "$received" ] || return 1
    [ "$unpacked" = 0 ] || fail "cannot unpack the job: $(cat "$run/tar.log")"
}

fetch_job() {
    with_retries get_job || fail "cannot fetch the job from $VMJOBS_ENDPOINT (status $http_status)"
    take_job
}
