"""Names by which jobs requested images."""

from __future__ import annotations

import pytest

from vmjobs.agent.image_names import MAX_NAMES, ImageNames
from vmjobs.errors import NotFound


def test_names_are_those_of_what_is_there_by_what_they_meant_last() -> None:
    meant = {"hep": "sha256:a", "hep:1": "sha256:a", "worker": "sha256:b"}
    names = ImageNames(lambda name: meant.get(name, name))
    for name in (*meant, "sha256:a"):
        assert names.resolve(name) == meant.get(name, name)
    assert names.names_of(["sha256:a"]) == ("hep:1", "hep")
    meant["hep"] = "sha256:c"
    names.resolve("hep")
    assert names.names_of(["sha256:a", "sha256:b"]) == ("worker", "hep:1")


def test_the_last_ones_are_remembered() -> None:
    names = ImageNames(lambda name: "sha256:a")
    for number in range(MAX_NAMES + 5):
        names.resolve(f"i{number}")
    found = names.names_of(["sha256:a"])
    assert (len(found), found[0], found[-1]) == (MAX_NAMES, f"i{MAX_NAMES + 4}", "i5")


def test_what_is_not_there_has_no_name() -> None:
    def resolve(name: str) -> str:
        raise NotFound(f"there is no {name}")

    names = ImageNames(resolve)
    with pytest.raises(NotFound):
        names.resolve("hep")
    assert names.names_of(["hep", ""]) == ()
