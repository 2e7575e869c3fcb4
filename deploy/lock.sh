#!/bin/sh
# Updates the lists of packages: the release of each, and the hash of its file, for Debian 12's Python on x86-64.
#   deploy/requirements.txt           what setup.sh installs; setup.cfg lists the packages
#   deploy/requirements-release.txt   the tool that release.sh describes them with
set -eu
cd "$(dirname "$0")/.."
report=$(mktemp)
trap 'rm -f "$report"' EXIT

# lock FILE PACKAGE...
lock() {
    file=$1
    shift
    .venv/bin/pip install --quiet --disable-pip-version-check --dry-run --ignore-installed --only-binary :all: \
        --report "$report" "$@"
    .venv/bin/python - "$report" >"$file" <<'EOF'
import json
import pathlib
import sys

print("# Made by deploy/lock.sh.")
for package in sorted(
    json.loads(pathlib.Path(sys.argv[1]).read_text())["install"],
    key=lambda package: package["metadata"]["name"].lower(),
):
    if "archive_info" in package["download_info"]:  # vmjobs itself is a folder
        about, sha256 = package["metadata"], package["download_info"]["archive_info"]["hashes"]["sha256"]
        print(f"{about['name']}=={about['version']} --hash=sha256:{sha256}")
EOF
}

lock deploy/requirements-release.txt cyclonedx-bom
lock deploy/requirements.txt setuptools '.[agent,server,demo,dev]'
