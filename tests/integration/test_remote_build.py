"""The grid's builder: it builds, boots and publishes a user's image, and a job runs in it."""

from __future__ import annotations

import secrets
from pathlib import Path

from tests.kit.cli import Done, vmjobs
from tests.kit.grid import Grid
from vmjobs.model import JobState

#: Packages come from Debian's servers, and two hypervisors boot the result.
BUILD_SECONDS = 900


def build(*words: str | Path) -> Done:
    """Have the grid build an image, as a user does."""
    return vmjobs("image", "build", "--remote", *words, timeout=BUILD_SECONDS)


def test_a_recipe_becomes_an_image_that_jobs_run_in(grid: Grid, tmp_path: Path) -> None:
    word = secrets.token_hex(8)
    mine = tmp_path / "mine.toml"
    mine.write_text(
        f'name = "mine"\nversion = "1"\nlayers = ["generic"]\nprobe = "grep -q {word} /etc/word"\n'
        f'[[files]]\npath = "/etc/word"\ntext = "{word}"\n'
    )
    done = build("generic", mine, "--json")
    generic, found = done.json
    assert (generic["state"], found["state"]) == ("DONE", "DONE")
    # The same recipe gives the same image, wherever it is built.
    assert grid.api.image(found["name"].replace("mine", "generic")).digest == generic["digest"]
    (job,) = grid.submit("#!/bin/sh\ncat /etc/word\n", image=found["name"])
    assert job.image_digest == found["digest"]
    (ended,) = grid.wait(job)
    assert ended.state is JobState.COMPLETED, ended.reason
    assert grid.out(job) == word
