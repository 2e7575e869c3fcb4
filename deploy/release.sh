#!/bin/sh
# Builds a release into build/release: source archive, wheel, Debian packages, container images, a bill of materials of
# the Python packages (CycloneDX), the list of Debian's packages in each image, and SHA256SUMS. The commit must have the
# tag v and the version of vmjobs/__init__.py.
#   release.sh             all of it
#   release.sh packages    without container images, and from a commit without a tag
# The UML kernel of the packages is that of vmjobs/kernel.
set -eu
cd "$(dirname "$0")/.."
what=${1:-all}
version=$(sed -n 's/^__version__ = "\(.*\)"$/\1/p' vmjobs/__init__.py)
out=$PWD/build/release/$version

fail() { echo "release: $1" >&2; exit 1; }

[ -z "$(git status --porcelain)" ] || fail "there are changes that are not committed"
[ "$what" = packages ] || [ "$(git tag --points-at HEAD "v$version")" = "v$version" ] ||
    fail "this commit has no tag v$version; set one with: git tag -a v$version -m 'vmjobs $version'"

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
rm -rf "$out"
mkdir -p "$out" "$work/src"
# The time of the commit makes two builds of it the same.
SOURCE_DATE_EPOCH=$(git log -1 --format=%ct)
export SOURCE_DATE_EPOCH
git archive HEAD | tar -x -C "$work/src"
cp -a vmjobs/kernel "$work/src/vmjobs/"
cp -a images/guest/talk* images/guest/unpack* "$work/src/images/guest/"

git archive --prefix="vmjobs-$version/" HEAD | gzip -n >"$out/vmjobs-$version.tar.gz"
.venv/bin/pip wheel --quiet --disable-pip-version-check --no-deps --no-build-isolation --wheel-dir "$out" "$work/src"

# deb NAME: packs the files below $work/NAME, described by deploy/debian/NAME.control.
deb() {
    name=$1
    install -d "$work/$name/DEBIAN" "$work/$name/usr/share/doc/$name"
    install -m 0644 LICENSE "$work/$name/usr/share/doc/$name/copyright"
    sed "s/@VERSION@/$version/" "deploy/debian/$name.control" >"$work/$name/DEBIAN/control"
    [ ! -e "deploy/debian/$name.postinst" ] ||
        install -m 0755 "deploy/debian/$name.postinst" "$work/$name/DEBIAN/postinst"
    find "$work/$name" -exec touch -h -d "@$SOURCE_DATE_EPOCH" {} +
    dpkg-deb --root-owner-group --build "$work/$name" "$out/${name}_${version}_amd64.deb" >/dev/null
}

root=$work/vmjobs
install -d "$root/usr/lib/python3/dist-packages" "$root/usr/bin" "$root/usr/share/doc/vmjobs"
.venv/bin/pip install --quiet --disable-pip-version-check --no-deps --no-compile --no-index \
    --target "$root/usr/lib/vmjobs" "$out"/*.whl
rm -rf "$root/usr/lib/vmjobs/bin"
echo /usr/lib/vmjobs >"$root/usr/lib/python3/dist-packages/vmjobs.pth"
install deploy/libexec/vmjobs deploy/libexec/vmjobs-qemu "$root/usr/bin"
for name in aarch64 s390x; do ln -s vmjobs-qemu "$root/usr/bin/vmjobs-qemu-$name"; done
install -m 0644 README.md CHANGELOG.md docs/*.md "$root/usr/share/doc/vmjobs"
deb vmjobs

root=$work/vmjobs-node
install -d "$root/usr/libexec/vmjobs" "$root/usr/share/vmjobs/condor" "$root/usr/lib/systemd/system"
install deploy/libexec/agent-start deploy/libexec/token-renew deploy/libexec/exec-unchanged deploy/libexec/node-ad \
    deploy/libexec/xen-card \
    "$root/usr/libexec/vmjobs"
install -m 0644 deploy/libexec/ssh-to-job.sshd "$root/usr/libexec/vmjobs"
gcc -std=gnu17 -O2 -Wall -Wextra -Werror -static -s -o "$root/usr/libexec/vmjobs/job-wrapper" deploy/job-wrapper/job-wrapper.c
ln -s /usr/bin/python3 "$root/usr/libexec/vmjobs/python3"
ln -s /usr/lib/vmjobs "$root/usr/libexec/vmjobs/modules"
install -m 0644 condor/config/*.conf "$root/usr/share/vmjobs/condor"
install -m 0644 deploy/vmjobs-agent.service "$root/usr/lib/systemd/system"
deb vmjobs-node

deb vmjobs-server

# The bill of materials of the Python packages; its tool is not needed otherwise.
python3 -m venv "$work/tools"
"$work/tools/bin/pip" install --quiet --disable-pip-version-check --require-hashes --only-binary :all: \
    -r deploy/requirements-release.txt
"$work/tools/bin/cyclonedx-py" requirements --output-reproducible --output-file "$out/vmjobs-$version.cdx.json" \
    deploy/requirements.txt 2>/dev/null

if [ "$what" = all ]; then
    deploy/engine.sh start "$work/engine"
    deploy/images.sh "$work/base-images"
    for target in vmjobs-base vmjobs-node vmjobs-builder; do
        docker build --quiet --file deploy/Dockerfile --target "$target" --tag "$target:$version" . >/dev/null
    done
    docker save "vmjobs-base:$version" "vmjobs-node:$version" "vmjobs-builder:$version" |
        zstd -q -T0 -o "$out/vmjobs-images-$version.tar.zst"
    for target in vmjobs-base vmjobs-node vmjobs-builder; do
        # shellcheck disable=SC2016 # dpkg-query's own variables
        docker run --rm "$target:$version" dpkg-query -W -f '${Package} ${Version} ${Architecture}\n' \
            >"$out/$target-$version.packages"
    done
    deploy/engine.sh stop "$work/engine"
fi

cd "$out"
sha256sum -- * >"$work/SHA256SUMS"
mv "$work/SHA256SUMS" .
ls -sh
