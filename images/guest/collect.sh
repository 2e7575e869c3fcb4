# shellcheck shell=sh
# shellcheck disable=SC2154 # variables of base.sh and of job.env
# After the script: writes its outputs to the output disk, and reports its exit status.

announce_collecting() {
    note=$result
    # A full disk explains a failure, or lost output of a success.
    if [ -e "$run/out.full" ] || [ -e "$run/err.full" ] || { [ "$result" != code=0 ] && disk_full; }; then
        note="$result disk=full"
    fi
    say "vmjobs:$VMJOBS_SENTINEL:collecting $note"
    [ "$VMJOBS_NETWORK" = none ] || post_text main /v1/collecting "$note" ||
        say "vmjobs: error: cannot report the end of the script (status $http_status)"
}

# disk_full: true if the scratch disk has no free space or no free inodes.
disk_full() {
    # shellcheck disable=SC2046 # three words
    set -- $(stat -f -c '%a %S %d' "$job" 2>/dev/null)
    [ $# = 3 ] || return 1
    [ $(($1 * $2)) -lt 65536 ] || [ "$3" = 0 ]
}

# list_outputs: prints paths that match the job's globs, relative to its directory, each once; writes omitted
# outputs to `left-out`, for the host: type, and percent-encoded name. False: incomplete, for lack of space.
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

# matches GLOB: prints matching names; spaces in the glob are part of names. Regular files are sent, except files
# that a symbolic link would take from outside, and files whose names have several lines (listed with a size).
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
            continue # a directory, or no such file
        fi
        if [ -z "$left_out" ]; then
            printf '%s\n' "$path"
        else
            leave_out "$left_out" "$path" >&3
        fi
    done
    unset IFS
}

# leave_out WHAT PATH: prints the line for an omitted output.
leave_out() {
    if ! { encode "$2" && printf '%s %s\n' "$1" "$encoded"; }; then : >"$run/undelivered"; fi
}

# inside PATH: true if the path stays in the job's directory. Remembers the last directory, as many files share it.
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

# encode PATH: sets $encoded to the percent-encoded path.
encode() {
    encoded=$1
    case $1 in
    *[!A-Za-z0-9._/-]*)
        encoded=$(printf '%s' "$1" | od -An -v -tx1 | tr -d '\n' | sed 's/ /%/g; s/%2f/\//g')
        ;;
    esac
}

# deliver_outputs: writes a tar stream to the output disk. The exit status comes first, so that it arrives even if
# writing fails later; without a network the script's output follows.
deliver_outputs() {
    [ -b "$output_disk" ] || fail 'there is no output disk'
    : >"$run/left-out"
    if [ -s "$run/job/outputs" ]; then list_outputs; fi >"$run/outputs.list" || : >"$run/undelivered"
    # Not on the scratch disk, which may be full. tar follows the links below; the outputs have none.
    collect=$run/collect
    bb mkdir "$collect"
    printf '{"%s": %s}\n' "${result%=*}" "${result#*=}" >"$collect/exit.json" || : >"$run/undelivered"
    set -- exit.json
    read -r left <"/sys/class/block/${output_disk##*/}/size" && left=$((left * 512 - 1048576))
    if [ "$VMJOBS_NETWORK" = none ]; then
        for name in stdout stderr; do
            [ -f "$job/$name" ] || : >"$job/$name" # the script removed it
            bb ln -s "$job/$name" "$collect/$name"
            left=$((left - $(size_of "$job/$name")))
        done
        set -- exit.json stdout stderr
    fi
    bb ln -s "$work" "$collect/outputs"
    choose_outputs
    if [ -s "$run/left-out" ]; then
        ln -s "$run/left-out" "$collect/undelivered"
        set -- "$@" undelivered
    fi
    # shellcheck disable=SC3045 # dash and ash have it; Linux then allows a command line of 6 MiB, not 2
    ulimit -s unlimited
    write_disk "$@" 2>"$run/tar.log" || {
        say "vmjobs: error: cannot collect the outputs: $(cat "$run/tar.log")"
        : >"$run/undelivered"
    }
}

# write_disk NAME...: writes these, and the outputs that fit.
write_disk() {
    set -f
    IFS=$newline
    # shellcheck disable=SC2046 # a name is a line
    set -- "$@" $(cat "$run/fitting")
    unset IFS
    bb tar -chf "$output_disk" -C "$collect" "$@" &&
        bb dd count=0 conv=notrunc,fsync if=/dev/null of="$output_disk"
}

# choose_outputs: writes to `fitting` the outputs that fit into $left bytes with headers and padding, and the
# others to `left-out`, cut to the size that the host reads.
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
        say "vmjobs: error: cannot report the exit status (status $http_status)"
}
