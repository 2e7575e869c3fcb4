#!/bin/sh
# condor_chirp for a VM whose image has none: the commands that jobs use, over the Chirp service of the job's
# starter.
#
# Protocol: a command is one line of words separated by spaces. The answer is a number, less than 0 for a
# failure; for some commands that many bytes follow.

usage() {
    cat >&2 <<'END'
usage: condor_chirp fetch REMOTE-FILE LOCAL-FILE
       condor_chirp put [-mode cwat] [-perm BITS] LOCAL-FILE REMOTE-FILE
       condor_chirp remove REMOTE-FILE
       condor_chirp get_job_attr NAME
       condor_chirp set_job_attr NAME VALUE
       condor_chirp get_job_attr_delayed NAME
       condor_chirp set_job_attr_delayed NAME VALUE
       condor_chirp ulog TEXT
END
    exit 1
}

# give_up SENTENCE
give_up() {
    echo "condor_chirp: $*" >&2
    exit 1
}

# quoted WORD: sets $quoted to the word, escaped for the protocol.
quoted() {
    case $1 in
    *[!A-Za-z0-9_./=:,+-]*) quoted=$(printf '%s.' "$1" | sed ':a; $!{N; ba}; s/[\\[:space:]]/\\&/g') quoted=${quoted%.} ;;
    *) quoted=$1 ;;
    esac
}

# ask WORD...: sends a command; sets $answer to the number in its answer. False if that is less than 0.
ask() {
    line=
    for word in "$@"; do
        quoted "$word"
        line="$line$quoted "
    done
    printf '%s\n' "${line% }"
    read -r answer || give_up 'the Chirp service hung up'
    [ "$answer" -ge 0 ]
}

# must WORD...: the same, but exits on a failure.
must() {
    ask "$@" || give_up "$1 $2: $(meaning)"
}

# meaning: prints what a negative answer means.
meaning() {
    case $answer in
    -1) echo 'not authenticated' ;;
    -2) echo 'not allowed; does the job have +WantIOProxy = true?' ;;
    -3) echo 'there is no such file or attribute' ;;
    -4) echo 'it exists already' ;;
    -5) echo 'it is too big' ;;
    -6) echo 'there is no space' ;;
    -8) echo 'the request is not valid' ;;
    *) echo "the service answers $answer" ;;
    esac
}

# open_file NAME MODE BITS: sets $file to the number of the opened file.
open_file() {
    must open "$@"
    file=$answer
    read -r _ || give_up 'the Chirp service hung up' # the file's stat(2) fields
}

fetch() {
    [ $# = 2 ] || usage
    open_file "$1" r 0
    if [ "$2" = - ]; then exec 5>&4; else exec 5>"$2" || exit 1; fi
    while must read "$file" 65536 && [ "$answer" -gt 0 ]; do
        head -c "$answer" >&5 || give_up "cannot write $2"
    done
    must close "$file"
}

put() {
    mode=cwat bits=777
    while :; do
        case $1 in
        -mode) mode=$2 ;;
        -perm) bits=$2 ;;
        *) break ;;
        esac
        shift 2 || usage
    done
    [ $# = 2 ] || usage
    [ "$1" = - ] || exec 3<"$1" || exit 1
    open_file "$2" "$mode" "$((0$bits))"
    chunk=$(mktemp) || exit 1
    while head -c 65536 <&3 >"$chunk" && size=$(stat -c %s "$chunk") && [ "$size" -gt 0 ]; do
        printf 'write %s %s\n' "$file" "$size"
        cat "$chunk"
        read -r answer || give_up 'the Chirp service hung up'
        [ "$answer" = "$size" ] || give_up "write $2: $(meaning)"
    done
    rm -f "$chunk"
    must close "$file"
}

# value COMMAND NAME: prints an attribute, on a line of its own.
value() {
    [ $# = 2 ] || usage
    must "$@"
    { head -c "$answer" && echo; } >&4
}

# talk COMMAND ARGUMENT...: runs a command. Standard input and output are the connection to the service;
# descriptors 3 and 4 are the caller's.
talk() {
    read -r _ _ cookie <"$config"
    must cookie "$cookie"
    command=$1
    shift
    case $command in
    fetch | put) "$command" "$@" ;;
    remove) [ $# = 1 ] && must unlink "$1" ;;
    get_job_attr | get_job_attr_delayed) value "$command" "$@" ;;
    set_job_attr | set_job_attr_delayed) [ $# = 2 ] && must "$command" "$1" "$2" ;;
    ulog) [ $# = 1 ] && must ulog "$1" ;;
    esac || usage
}

config=${_CONDOR_CHIRP_CONFIG:-${_CONDOR_SCRATCH_DIR:-.}/.chirp.config}
if [ "$1" = --connected ]; then
    shift
    talk "$@"
    exit
fi
case $1 in
fetch | put | remove | get_job_attr | set_job_attr | get_job_attr_delayed | set_job_attr_delayed | ulog) ;;
*) usage ;;
esac
read -r address port _ <"$config" || give_up "cannot read $config: this is not an HTCondor job"
exec 3<&0 4>&1
busybox=$(command -v busybox)
if [ -n "$busybox" ] && "$busybox" nc -h 2>&1 | grep -q -e '-e PROG'; then
    exec "$busybox" nc "$address" "$port" -e "$0" --connected "$@"
fi
# shellcheck disable=SC2016 # another shell's variables
exec bash -c 'exec 0<>"/dev/tcp/$1/$2" >&0 || exit; shift 2; exec "$@"' bash "$address" "$port" "$0" --connected "$@"
