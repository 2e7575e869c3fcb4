"""The job wrapper, built as for the grid, and a shared object that reports its loading."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SOURCES = Path(__file__).parents[2] / "deploy/job-wrapper"
#: Runs wherever a loader loads it: as a library, an auditor or a character set converter.
_EVIL = """
#include <fcntl.h>
#include <unistd.h>
__attribute__((constructor)) static void mark(void) { close(open(MARK, O_CREAT | O_WRONLY, 0666)); }
unsigned la_version(unsigned version) { mark(); return version; }
int gconv_init(void *step) { (void)step; mark(); return 1; }
int gconv(void) { return 1; }
"""


def build_wrapper(target: Path, program: Path | None = None) -> Path:
    """Build the wrapper. program: what it starts in place of exec-unchanged."""
    defined = [] if program is None else [f'-DEXEC="{program}"']
    flags = ("-std=gnu17", "-O2", "-Wall", "-Wextra", "-Werror", "-static", *defined)
    subprocess.run(["cc", *flags, "-o", target, SOURCES / "job-wrapper.c"], check=True)
    return target


def install_program(folder: Path, name: str) -> list[str]:
    """Install a program of ``deploy/libexec`` as docs/operators.md does; returns its command."""
    root = SOURCES.parents[1]
    (folder / name).write_bytes((root / "deploy/libexec" / name).read_bytes())
    (folder / "modules").unlink(missing_ok=True)
    (folder / "modules").symlink_to(root)
    return [sys.executable, "-IS", str(folder / name)]


def build_evil(folder: Path, mark: Path) -> Path:
    """Build a shared object that makes the file ``mark`` when it is loaded."""
    source, target = folder / "evil.c", folder / "evil.so"
    source.write_text(_EVIL)
    flags = ("-shared", "-fPIC", "-w", f'-DMARK="{mark}"')
    subprocess.run(["cc", *flags, "-o", target, source], check=True)
    return target
