#!/bin/sh
# Updates deploy/requirements.txt: the release of each package that setup.sh installs, and the hash of
# its file, for Debian 12's Python on x86-64. setup.cfg lists the packages.
set -eu
cd "$(dirname "$0")/.."
report=$(mktemp)
trap 'rm -f "$report"' EXIT
.venv/bin/pip install --quiet --disable-pip-version-check --dry-run --ignore-installed --only-binary :all: \
    --report "$report" setuptools '.[agent,server,demo,dev]'
.venv/bin/python - "$report" >deploy/requirements.txt <<'EOF'
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
