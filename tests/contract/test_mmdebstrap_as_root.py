"""mmdebstrap-as-root gives a builder packages of Debian's archive as root, nothing else."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

HELPER = Path(__file__).parents[2] / "deploy" / "libexec" / "mmdebstrap-as-root"
MIRROR = "http://deb.debian.org/debian"


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["--quiet"],
        [""],
        ["Trixie"],
        ["-trixie"],
        ["trixie", "/etc/shadow"],
        ["trixie", "bookworm"],
        ["--unshare-helper", "rm", "-rf", "/etc"],
        ["--mode=root", "trixie"],
        ["--format=directory", "trixie"],
        ["--aptopt=Dir::Etc=/tmp", "trixie"],
        ["--setup-hook=id", "trixie"],
        ["--customize-hook=id", "trixie"],
        ['--customize-hook=sh x $(id) "$1"', "trixie"],
        ['--customize-hook=sh x -o "$1"', "trixie"],
        ["--include=./evil.deb", "trixie"],
        ["--include=/tmp/evil.deb", "trixie"],
        ["--include=-oDir::Etc=/tmp", "trixie"],
        ["--include=a,-y", "trixie"],
        ["--include=?installed", "trixie"],
        ["--include=a b", "trixie"],
        ["--include=a\nb", "trixie"],
        ["trixie", f"deb [trusted=yes] {MIRROR} trixie main"],
        ["trixie", f"deb {MIRROR} bookworm main"],
        ["trixie", "deb http://example.org/debian trixie main"],
        ["trixie", "deb file:///tmp trixie main"],
        [f"deb {MIRROR}  main"],
    ],
)
def test_what_packages_do_not_need_is_refused(arguments: list[str]) -> None:
    done = subprocess.run([HELPER, *arguments], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("mmdebstrap-as-root: refused: ")


def test_the_epoch_is_a_number() -> None:
    environment = {"PATH": "/usr/bin:/bin", "SOURCE_DATE_EPOCH": "0; id"}
    done = subprocess.run(
        [HELPER, "trixie"], capture_output=True, text=True, timeout=60, check=False, env=environment
    )
    assert (done.returncode, done.stdout) == (2, "")
