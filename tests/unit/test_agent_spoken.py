"""Names by which jobs have asked for images."""

from __future__ import annotations

import pytest

from vmjobs.agent.spoken import MAX_NAMES, SpokenNames
from vmjobs.errors import NotFound


def test_names_are_those_of_what_is_there_by_what_they_meant_last() -> None:
    meant = {"hep": "sha256:a", "hep:1": "sha256:a", "worker": "sha256:b"}
    spoken = SpokenNames(lambda name: meant.get(name, name))
    for name in (*meant, "sha256:a"):
        assert spoken.resolve(name) == meant.get(name, name)
    assert spoken.of(["sha256:a"]) == ("hep:1", "hep")
    meant["hep"] = "sha256:c"
    spoken.resolve("hep")
    assert spoken.of(["sha256:a", "sha256:b"]) == ("worker", "hep:1")


def test_the_last_ones_are_remembered() -> None:
    spoken = SpokenNames(lambda name: "sha256:a")
    for number in range(MAX_NAMES + 5):
        spoken.resolve(f"i{number}")
    found = spoken.of(["sha256:a"])
    assert (len(found), found[0], found[-1]) == (MAX_NAMES, f"i{MAX_NAMES + 4}", "i5")


def test_what_is_not_there_has_no_name() -> None:
    def resolve(name: str) -> str:
        raise NotFound(f"there is no {name}")

    spoken = SpokenNames(resolve)
    with pytest.raises(NotFound):
        spoken.resolve("hep")
    assert spoken.of(["hep", ""]) == ()
