"""Container images sent to a service, by ``vmjobs image import --push`` and by job submit."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.kit.cli import vmjobs
from tests.kit.container_images import Layer, write_layout
from tests.kit.counting_proxy import proxy_to
from tests.kit.processes import running
from tests.kit.workstation import Workstation, alone, make_workstation
from vmjobs.model import MIB

#: Kernel and tools, made by `make images` or the first import.
WORK = Path(__file__).parents[2] / "build" / "work"


@contextmanager
def desk_of(folder: Path) -> Iterator[tuple[Workstation, Any]]:
    """A user, the service, and a proxy between them."""
    config = alone(folder)
    with running(config, folder / "log"), proxy_to(config.listen) as proxy:
        desk = make_workstation(config, proxy.url, folder / "home", "ada")
        WORK.mkdir(parents=True, exist_ok=True)
        (desk.home / "data").mkdir()
        (desk.home / "data" / "work").symlink_to(WORK)
        yield desk, proxy


def job_submit(desk: Workstation, *words: str) -> dict[str, Any]:
    """Run ``vmjobs job submit``."""
    found: dict[str, Any] = vmjobs("job", "submit", "--json", *words, environ=desk.environ()).json
    return found


@pytest.fixture
def layouts(tmp_path: Path) -> list[Path]:
    """Two container images that share all but one small layer."""
    base = Layer()
    for number in range(40):
        base.file(f"usr/lib/part{number}", os.urandom(200_000))
    made = []
    for name in ("one", "two"):
        top = Layer().file("etc/name", name)
        write_layout(tmp_path / name, [base, top], {"Entrypoint": ["/usr/bin/app"], "Cmd": ["x"]})
        made.append(tmp_path / name)
    return made


def test_an_imported_image_is_pushed_once_and_jobs_name_the_container(
    tmp_path: Path, layouts: list[Path]
) -> None:
    with desk_of(tmp_path) as (desk, proxy):
        told = desk.json("import", f"oci-layout:{layouts[0]}", "tool:1", "--push")
        first = proxy.up
        assert first > 8 * MIB
        assert told["image"]["digest"] == told["digest"]
        assert told["image"]["origin"]["source"] == told["source"]
        assert told["source"].startswith(f"oci-layout:{layouts[0]}@sha256:")
        shown = desk.json("show", "tool:1")
        assert (shown["owner"], shown["digest"]) == ("ada", told["digest"])
        assert shown["manifest"]["program"]["arguments"] == ["/usr/bin/app"]

        submitted = job_submit(desk, "--image", f"oci-layout:{layouts[0]}", "--program", "./a", "b c")
        (job,) = submitted["jobs"]
        assert job["image_digest"] == told["digest"]
        assert job["spec"]["strategy"] == "image"
        assert (job["spec"]["script"], job["spec"]["arguments"]) == ("", ["./a", "b c"])
        assert proxy.up - first < MIB

        before = proxy.up
        submitted = job_submit(desk, "--image", f"oci-layout:{layouts[1]}")
        assert submitted["jobs"][0]["image_digest"] != told["digest"]
        # The service has what both share: only one layer's file and the metadata are sent.
        assert proxy.up - before < 2 * MIB
