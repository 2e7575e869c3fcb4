"""Jobs in images for other architectures than the node's, which QEMU emulates."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kit.cli import vmjobs
from tests.kit.image_builds import STORE

pytestmark = pytest.mark.soak


@pytest.mark.parametrize("architecture", ["aarch64", "s390x"])
def test_a_script_job(architecture: str, tmp_path: Path) -> None:
    script = tmp_path / "job.sh"
    script.write_text("#!/bin/sh\nuname -m >machine\ncat machine given\nexit 3\n")
    given = tmp_path / "given"
    given.write_text("input\n")
    words = ["run", "--image", f"generic-{architecture}", "--input", given, "--output", "machine"]
    places = {"image_dir": STORE, "state_dir": tmp_path / "state"}
    done = vmjobs(*words, "--output-dir", tmp_path / "out", script, **places, code=3)
    assert done.out == f"{architecture}\ninput\n"
    assert (tmp_path / "out" / "machine").read_text() == f"{architecture}\n"


def test_a_hypervisor_without_the_architecture_is_refused(tmp_path: Path) -> None:
    script = tmp_path / "job.sh"
    script.write_text("#!/bin/sh\n")
    places = {"image_dir": STORE, "state_dir": tmp_path / "state"}
    words = ["run", "--image", "generic-aarch64", "--hypervisor", "uml", script]
    done = vmjobs(*words, **places, code=125)
    assert "its image boots by qemu only" in done.err
