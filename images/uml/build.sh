#!/bin/sh
# vmjobs' own UML kernel: build.sh OUTPUT. Makes OUTPUT/linux.uml of Debian's newest kernel source, and
# OUTPUT/linux.uml.source, which says what it was made of. Nothing to do if that was made of the same files as now.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
mkdir -p "$1"
out=$(cd "$1" && pwd)

want=$(cat "$0" "$here/config" | sha256sum)
want=${want%% *}
if [ -x "$out/linux.uml" ] && grep -qx "recipe: $want" "$out/linux.uml.source" 2>/dev/null; then exit 0; fi

# Not beside the packages: what lies there goes into containers and wheels.
place=$(mktemp -d -p "${TMPDIR:-/var/tmp}" vmjobs-kernel.XXXXXX)
trap 'rm -rf "$place"' EXIT
trap 'exit 130' INT
trap 'exit 143' TERM
cd "$place"

# Packages of a newer Debian than the host's may be, known by Debian's signatures. No state of the host's apt is used.
mkdir -p lists/partial archives/partial
for suite in trixie trixie-backports; do
    echo "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] http://deb.debian.org/debian $suite main"
done >sources.list
cat >apt.conf <<EOF
Dir::Etc::SourceList "$place/sources.list";
Dir::Etc::SourceParts "/dev/null";
Dir::Etc::Preferences "/dev/null";
Dir::Etc::PreferencesParts "/dev/null";
Dir::State::Lists "$place/lists";
Dir::State::status "/dev/null";
Dir::Cache "$place";
Acquire::Languages "none";
Acquire::Retries "3";
APT::Sandbox::User "";
EOF
export APT_CONFIG="$place/apt.conf"
apt-get -qq update
package=$(apt-cache search --names-only '^linux-source-[0-9.]*$' | cut -d ' ' -f 1 | sort -V | tail -n 1)
apt-get -qq download "$package"
version=$(dpkg-deb --field "$package"_*.deb Version)
dpkg-deb --fsys-tarfile "$package"_*.deb | tar -xO "./usr/src/$package.tar.xz" | tar -xJ
cd "$package"

# A card on a tap device has no queues, whose locks its driver takes all the same: where a kernel has several
# processors, it would stop at the first look at the card's statistics.
sed -i -E -e 's/^\tspin_(un)?lock\(&vp->([rt]x)_queue->head_lock\);/\tif (vp->\2_queue)\n\t&/' \
    -e 's/(ring->[rt]x_(max_)?pending =) vp->([rt]x)_queue->max_depth/\1 !vp->\3_queue ? 0 : vp->\3_queue->max_depth/' \
    arch/um/drivers/vector_kern.c

# A build gives the same bytes on every host and in every directory.
export ARCH=um LC_ALL=C KBUILD_BUILD_USER=vmjobs KBUILD_BUILD_HOST=vmjobs KBUILD_BUILD_VERSION=1
KBUILD_BUILD_TIMESTAMP=@$(stat -c %Y Makefile)
export KBUILD_BUILD_TIMESTAMP

awk '/^#/ || !NF { next } { print "CONFIG_" $0 (/=/ ? "" : "=y") }' "$here/config" >wanted
KCONFIG_ALLCONFIG=wanted make -s allnoconfig >/dev/null
missing=$(grep -vxFf .config wanted || true)
[ -z "$missing" ] || {
    echo "$package $version does not take what images/uml/config asks for: $missing" >&2
    exit 1
}
make -s -j "$(nproc)" linux
strip -s -o "$out/.linux.uml" linux
mv "$out/.linux.uml" "$out/linux.uml"
{
    echo "source: $package $version of Debian"
    echo "compiler: $(gcc --version | head -n 1)"
    echo "recipe: $want"
} >"$out/linux.uml.source"
