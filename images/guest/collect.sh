# shellcheck shell=sh
# shellcheck disable=SC2154 # variables of base.sh and of job.env
# After the script: its outputs and how it ended, to the endpoint or to the output disk.

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

# list_outputs: paths that match the job's globs, relative to its directory, each once. Regular files
# only, and none that a symbolic link would take from outside. Percent-encoded, with a slash before it, where
# it has more than one line: the host does not take it, and is to say so. False: that is not all, for want
# of room.
list_outputs() {
    cd "$work" || return 0
    real_work=$(readlink -f .)
    real_work=${real_work%/}
    set +f
    while IFS= read -r glob; do
        case /$glob/ in //* | */../*) continue ;; esac
        matches "$glob"
    done <"$run/job/outputs" | awk '!seen[$0]++'
    listed=$?
    cd /
    return "$listed"
}

# matches GLOB: spaces in it are part of names.
matches() {
    IFS=
    for path in $1; do
        if [ -f "$path" ] && [ ! -L "$path" ] && inside "$path"; then
            case $path in
            *"$newline"*) encode "$path" && printf '/%s\n' "$encoded" ;;
            *) printf '%s\n' "$path" ;;
            esac
        fi
    done
    unset IFS
}

# inside PATH: no directory on the way leads out of the job's directory.
inside() {
    case $1 in
    */*) ;;
    *) return 0 ;;
    esac
    case $(readlink -f "$1") in
    "$real_work"/*) return 0 ;;
    esac
    return 1
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

deliver_outputs() {
    if [ -s "$run/job/outputs" ]; then list_outputs; fi >"$run/outputs.list" || : >"$run/undelivered"
    if [ "$VMJOBS_NETWORK" = none ]; then
        write_output_disk
        return
    fi
    # A machine whose script has ended is not saved any more, and files may be large.
    # shellcheck disable=SC2034 # http.sh
    http_patience=
    while IFS= read -r path; do
        case $path in
        /*) encoded=${path#/} file=/dev/null size=0 ;;
        *) encode "$path" && file=$work/$path && size=$(size_of "$file") ;;
        esac
        post_file main "/v1/outputs/$encoded" "$file" "$size" ||
            say "vmjobs: error: output $path was not taken (status $http_status)"
    done <"$run/outputs.list"
}

# write_output_disk: one tar stream, the exit status first, so that it arrives whatever follows.
write_output_disk() {
    [ -b "$output_disk" ] || fail 'there is no output disk'
    # Not on the scratch disk, which may be full. Links are followed below; among the outputs there
    # are none.
    collect=$run/collect
    mkdir "$collect"
    printf '{"%s": %s}\n' "${result%=*}" "${result#*=}" >"$collect/exit.json"
    for name in stdout stderr; do
        if [ -f "$job/$name" ]; then
            ln -s "$job/$name" "$collect/$name"
        else
            : >"$collect/$name" # the script removed it
        fi
    done
    ln -s "$work" "$collect/outputs"
    read -r left <"/sys/class/block/${output_disk##*/}/size" && left=$((left * 512 - 65536))
    left=$((left - $(size_of "$job/stdout" || echo 0) - $(size_of "$job/stderr" || echo 0)))
    set --
    while IFS= read -r path; do
        size=0
        case $path in
        /*) encoded=${path#/} ;;
        *)
            size=$(size_of "$work/$path")
            # The header, with a long name, and what fills the last block.
            if [ $((size + 2560)) -le "$left" ]; then
                left=$((left - size - 2560))
                set -- "$@" "outputs/$path"
                continue
            fi
            encode "$path"
            ;;
        esac
        echo "$size $encoded" >>"$collect/undelivered"
    done <"$run/outputs.list"
    [ ! -e "$collect/undelivered" ] || set -- undelivered "$@"
    set -- exit.json stdout stderr "$@"
    {
        bb tar -chf - -C "$collect" "$@" 2>"$run/tar.log" || {
            say "vmjobs: error: cannot collect the outputs: $(cat "$run/tar.log")"
            : >"$run/uncollected"
        }
    } | dd bs=1048576 conv=fsync of="$output_disk" 2>"$run/dd.log" || {
        say "vmjobs: error: the output disk is too small: $(head -n 1 "$run/dd.log")"
        return # which the host sees
    }
    [ ! -e "$run/uncollected" ] || : >"$run/undelivered"
}

announce_exit() {
    note=$result
    [ ! -e "$run/undelivered" ] || note="$result undelivered=yes"
    say "vmjobs:$VMJOBS_SENTINEL:exit $note"
    [ "$VMJOBS_NETWORK" = none ] || post_text main /v1/exit "$note" ||
        say "vmjobs: error: the exit report was not taken (status $http_status)"
}
