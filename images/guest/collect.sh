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

# list_outputs: paths that match the job's globs, relative to its directory, each once. What is not sent has
# a slash before it, and is as the host is told of it: what it is, and its percent-encoded name. False: that
# is not all, for want of room.
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
            encode "$path" && printf '/%s %s\n' "$left_out" "$encoded"
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
    # No more than the host reads, and than there is room for on an output disk.
    awk '/^\// { size += length; if (size < 524288) print substr($0, 2) }' "$run/outputs.list" >"$run/left-out" ||
        : >"$run/undelivered"
    if [ "$VMJOBS_NETWORK" = none ]; then
        write_output_disk
        return
    fi
    # A machine whose script has ended is not saved any more, and files may be large.
    # shellcheck disable=SC2034 # http.sh
    http_patience=
    while IFS= read -r path; do
        case $path in /*) continue ;; esac
        encode "$path" && file=$work/$path && size=$(size_of "$file")
        post_file main "/v1/outputs/$encoded" "$file" "$size" ||
            say "vmjobs: error: output $path was not taken (status $http_status)"
    done <"$run/outputs.list"
    [ -s "$run/left-out" ] || return 0
    post_file main /v1/undelivered "$run/left-out" "$(size_of "$run/left-out")" || {
        say "vmjobs: error: the names of outputs that are not sent were not taken (status $http_status)"
        : >"$run/undelivered"
    }
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
    left=$((left - $(size_of "$run/left-out")))
    set --
    while IFS= read -r path; do
        case $path in /*) continue ;; esac
        size=$(size_of "$work/$path")
        # The header, with a long name, and what fills the last block.
        if [ $((size + 2560)) -le "$left" ]; then
            left=$((left - size - 2560))
            set -- "$@" "outputs/$path"
        else
            encode "$path"
            echo "$size $encoded" >>"$run/left-out"
        fi
    done <"$run/outputs.list"
    if [ -s "$run/left-out" ]; then
        ln -s "$run/left-out" "$collect/undelivered"
        set -- undelivered "$@"
    fi
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
