"""The grid's builder: it builds, boots and publishes a user's image, and a job runs in it."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
from pathlib import Path

from tests.kit.grid import Grid
from tests.kit.processes import VMJOBS
from vmjobs.model import JobState

#: Packages come from Debian's servers, and two hypervisors boot the result.
BUILD_SECONDS = 900


def build(*words: str | Path) -> subprocess.CompletedProcess[str]:
    """Have the grid build an image, as a user does."""
    return subprocess.run(
        [VMJOBS, "image", "build", "--remote", *words],
        capture_output=True,
        text=True,
        env=os.environ,
        timeout=BUILD_SECONDS,
        check=False,
    )


def test_a_recipe_becomes_an_image_that_jobs_run_in(grid: Grid, tmp_path: Path) -> None:
    word = secrets.token_hex(8)
    mine = tmp_path / "mine.toml"
    mine.write_text(
        f'name = "mine"\nversion = "1"\nlayers = ["generic"]\nprobe = "grep -q {word} /etc/word"\n'
        f'[[files]]\npath = "/etc/word"\ntext = "{word}"\n'
    )
    done = build("generic", mine, "--json")
    assert done.returncode == 0, done.stderr
    generic, found = json.loads(done.stdout)
    assert (generic["state"], found["state"]) == ("DONE", "DONE")
    # The same recipe gives the same image, wherever it is built.
    assert grid.api.image(found["name"].replace("mine", "generic")).digest == generic["digest"]
    (job,) = grid.submit("#!/bin/sh\ncat /etc/word\n", image=found["name"])
    assert job.image_digest == found["digest"]
    (ended,) = grid.wait(job)
    assert ended.state is JobState.COMPLETED, ended.reason
    assert grid.out(job) == word
    # An image that fails its probe is not published.
    mine.write_text(mine.read_text().replace(f"grep -q {word}", "grep -q something-else"))
    failed = build(mine, "--name", "other")
    assert failed.returncode == 70
    assert "fails its boot test" in failed.stderr
    assert "other" not in {image.name for image in grid.api.images()}
