#!/bin/sh
# vmjobs' own UML kernel: build.sh OUTPUT. Builds OUTPUT/linux.uml from Debian's newest kernel source, and writes
# OUTPUT/linux.uml.source, which names the source and this recipe. A kernel that this recipe has built before is
# taken from the cache: a build takes minutes.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
mkdir -p "$1"
out=$(cd "$1" && pwd)

recipe=$(cat "$0" "$here/config" | sha256sum)
recipe=${recipe%% *}
cached=${XDG_CACHE_HOME:-$HOME/.cache}/vmjobs/kernel/$recipe
if [ -x "$out/linux.uml" ] && grep -qx "recipe: $recipe" "$out/linux.uml.source" 2>/dev/null; then exit 0; fi

# put DIRECTORY: puts its kernel into OUTPUT, where VMs may run the present one.
put() {
    cp "$1/linux.uml" "$out/.linux.uml"
    mv "$out/.linux.uml" "$out/linux.uml"
    cp "$1/linux.uml.source" "$out"
}
if [ -d "$cached" ]; then
    put "$cached"
    exit 0
fi

echo "building the kernel for User Mode Linux (some minutes)"
# The build needs a directory outside the packages, whose files all go into containers and wheels.
place=$(mktemp -d -p "${TMPDIR:-/var/tmp}" vmjobs-kernel.XXXXXX)
trap 'rm -rf "$place"' EXIT
trap 'exit 130' INT
trap 'exit 143' TERM
cd "$place"

# The source may be of a newer Debian than the host. Debian's key verifies it, and the host's own apt is not used.
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

# A card on a tap device has no queues, but the driver takes their locks. A kernel with several processors would
# panic when the card's statistics are read.
sed -i -E -e 's/^\tspin_(un)?lock\(&vp->([rt]x)_queue->head_lock\);/\tif (vp->\2_queue)\n\t&/' \
    -e 's/(ring->[rt]x_(max_)?pending =) vp->([rt]x)_queue->max_depth/\1 !vp->\3_queue ? 0 : vp->\3_queue->max_depth/' \
    arch/um/drivers/vector_kern.c

# Without memory for a packet the driver reads it into a buffer that nothing has allocated. That error makes it stop
# receiving, and each packet to send then keeps the kernel busy for ever.
sed -i 's/^static char \*drop_buffer;$/static char drop_buffer[DROP_BUFFER_SIZE];/' arch/um/drivers/vector_kern.c
grep -q '^static char drop_buffer\[' arch/um/drivers/vector_kern.c

# A kernel for several processors masks a signal of theirs, by a system call, each time when it masks interrupts: that
# took two fifths of its time. With one processor no other sends it.
sed -i '/^static void __local_ipi_set/,/^}/s/^\tsigemptyset/\tif (uml_ncpus == 1)\n\t\treturn;\n&/' arch/um/os-Linux/smp.c
grep -q 'if (uml_ncpus == 1)$' arch/um/os-Linux/smp.c

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
mkdir result
strip -s -o result/linux.uml linux
{
    echo "source: $package $version of Debian"
    echo "compiler: $(gcc --version | head -n 1)"
    echo "recipe: $recipe"
} >result/linux.uml.source
put result
mkdir -p "${cached%/*}"
cp -r result "$cached.$$"
mv -T "$cached.$$" "$cached" || rm -rf "$cached.$$"
