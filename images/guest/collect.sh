# shellcheck shell=sh
# shellcheck disable=SC2154 # variables of base.sh and of job.env
# After the script: its outputs, to the output disk, and how it ended.

announce_collecting() {
    note=$result
    # Success needs no explanation, unless it is of what it printed.
    if [ -e "$run/out.full" ] || [ -e "$run/err.full" ] || { [ "$result" != code=0 ] && disk_full; }; then
        note="$result disk=full"
    fi
    say "vmjobs:$VMJOBS_SENTINEL:collecting $note"
    [ "$VMJOBS_NETWORK" = none ] || post_text main /v1/collecting "$note" ||
        say "vmjobs: error: the end of the script was not taken (status $http_status)"
}

# disk_full: true if the scratch disk has no room, for bytes or for names.
disk_full() {
    # shellcheck disable=SC2046 # three words
    set -- $(stat -f -c '%a %S %d' "$job" 2>/dev/null)
    [ $# = 3 ] || return 1
    [ $(($1 * $2)) -lt 65536 ] || [ "$3" = 0 ]
}

# list_outputs: paths that match the job's globs, relative to its directory, each once; to `left-out` what is not
# sent, as the host is told of it: what it is, and its percent-encoded name. False: that is not all, for want of
# room.
list_outputs() {
    cd "$work" || return 0
    real_work=$(readlink -f .)
    real_work=${real_work%/} seen_directory=
    set +f
    while IFS= read -r glob; do
        case /$glob/ in //* | */../*) continue ;; esac
        matches "$glob"
    done <"$run/job/outputs" 3>"$run/left-out" | awk '!seen[$0]++'
    listed=$?
    cd /
    return "$listed"
}

# matches GLOB: spaces in it are part of names. Regular files are sent, but for those that a symbolic link
# would take from outside, and those whose names have more than one line, of which the host is told a size.
matches() {
    IFS=
    for path in $1; do
        if [ -L "$path" ]; then
            left_out='link'
        elif [ -f "$path" ] && ! inside "$path"; then
            left_out='outside'
        elif [ -f "$path" ]; then
            case $path in *"$newline"*) left_out=0 ;; *) left_out= ;; esac
        elif [ -p "$path" ]; then
            left_out='fifo'
        elif [ -S "$path" ]; then
            left_out='socket'
        elif [ -c "$path" ] || [ -b "$path" ]; then
            left_out='device'
        else
            continue # a directory, or nothing
        fi
        if [ -z "$left_out" ]; then
            printf '%s\n' "$path"
        else
            leave_out "$left_out" "$path" >&3
        fi
    done
    unset IFS
}

# leave_out WHAT PATH: the line by which the host is told.
leave_out() {
    if ! { encode "$2" && printf '%s %s\n' "$1" "$encoded"; }; then : >"$run/undelivered"; fi
}

# inside PATH: no directory on the way leads out of the job's directory. Many files are in one directory.
inside() {
    case $1 in
    */*) ;;
    *) return 0 ;;
    esac
    if [ "${1%/*}" != "$seen_directory" ]; then
        seen_directory=${1%/*}
        case $(readlink -f "$seen_directory")/ in
        "$real_work"/*) seen_inside=0 ;;
        *) seen_inside=1 ;;
        esac
    fi
    return "$seen_inside"
}

# encode PATH: percent-encoded for a URL, in $encoded.
encode() {
    encoded=$1
    case $1 in
    *[!A-Za-z0-9._/-]*)
        encoded=$(printf '%s' "$1" | od -An -v -tx1 | tr -d '\n' | sed 's/ /%/g; s/%2f/\//g')
        ;;
    esac
}

# deliver_outputs: one tar stream on the output disk, the exit status first, so that it arrives whatever
# follows; without a network what the script printed, which has no other way.
deliver_outputs() {
    [ -b "$output_disk" ] || fail 'there is no output disk'
    : >"$run/left-out"
    if [ -s "$run/job/outputs" ]; then list_outputs; fi >"$run/outputs.list" || : >"$run/undelivered"
    # Not on the scratch disk, which may be full. Links are followed below; among the outputs there
    # are none.
    collect=$run/collect
    mkdir "$collect"
    printf '{"%s": %s}\n' "${result%=*}" "${result#*=}" >"$collect/exit.json"
    set -- exit.json
    read -r left <"/sys/class/block/${output_disk##*/}/size" && left=$((left * 512 - 1048576))
    if [ "$VMJOBS_NETWORK" = none ]; then
        for name in stdout stderr; do
            [ -f "$job/$name" ] || : >"$job/$name" # the script removed it
            ln -s "$job/$name" "$collect/$name"
            left=$((left - $(size_of "$job/$name")))
        done
        set -- exit.json stdout stderr
    fi
    ln -s "$work" "$collect/outputs"
    choose_outputs
    if [ -s "$run/left-out" ]; then
        ln -s "$run/left-out" "$collect/undelivered"
        set -- "$@" undelivered
    fi
    # shellcheck disable=SC3045 # dash and ash have it; Linux then takes a command line of 6 MiB, not 2
    ulimit -s unlimited
    write_disk "$@" 2>"$run/tar.log" || {
        say "vmjobs: error: cannot collect the outputs: $(cat "$run/tar.log")"
        : >"$run/undelivered"
    }
}

# write_disk NAME...: these, and the outputs that fit.
write_disk() {
    set -f
    IFS=$newline
    # shellcheck disable=SC2046 # a name is a line
    set -- "$@" $(cat "$run/fitting")
    unset IFS
    bb tar -chf "$output_disk" -C "$collect" "$@" &&
        dd count=0 conv=notrunc,fsync if=/dev/null of="$output_disk"
}

# choose_outputs: of the list those that fit into $left bytes with their headers, and padded, in `fitting`; the
# others in `left-out`, which has no more than the host reads.
choose_outputs() {
    : >"$run/fitting"
    [ -s "$run/outputs.list" ] && cd "$work" || return 0
    tr '\n' '\0' <"$run/outputs.list" | bb xargs -0 stat -c '%s %n' -- 2>/dev/null | {
        awk -v left="$left" -v fitting="$run/fitting" '{
            name = substr($0, length($1) + 2)
            need = $1 + (length(name) > 80 ? 3072 : 1024)
            if (need <= left) { left -= need; print "outputs/" name >fitting } else print
        }' || : >"$run/undelivered"
    } | while read -r size path; do
        leave_out "$size" "$path"
    done >>"$run/left-out"
    cd /
    [ "$(size_of "$run/left-out")" -le 524288 ] || {
        head -c 524288 "$run/left-out" >"$run/left-out.most" && mv "$run/left-out.most" "$run/left-out"
        : >"$run/undelivered"
    }
}

announce_exit() {
    note=$result
    [ ! -e "$run/undelivered" ] || note="$result undelivered=yes"
    say "vmjobs:$VMJOBS_SENTINEL:exit $note"
    [ "$VMJOBS_NETWORK" = none ] || post_text main /v1/exit "$note" ||
        say "vmjobs: error: the exit report was not taken (status $http_status)"
}
