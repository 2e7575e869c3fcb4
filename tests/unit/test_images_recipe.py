"""Recipes: those of the product are sound, and faults are told all at once."""

from __future__ import annotations

from pathlib import Path

import pytest

from images import recipe
from images.build.builder import build_key, guest_program
from vmjobs.errors import InvalidRequest, NotFound

GOOD = """
name = "mine"
version = "1"
suite = "bookworm"
epoch = 0
packages = ["busybox-static"]
"""


@pytest.mark.parametrize("name", recipe.names())
def test_the_recipes_of_the_product_are_sound(name: str) -> None:
    made = recipe.load(name)
    assert made.name == name
    assert made.kernel is not None
    assert "init=/sbin/vmjobs-init" in made.cmdline
    assert "busybox-static" in made.packages  # the initial RAM disk is made of it


def test_all_faults_are_told_at_once() -> None:
    bad = GOOD.replace('"mine"', '"No Name"').replace("epoch = 0", "epoch = -1")
    bad += 'colour = "red"\n[[files]]\npath = "relative"\ntext = ""\n[kernel]\npackage = "a b"\n'
    with pytest.raises(InvalidRequest) as caught:
        recipe.parse(bad, "mine.toml")
    fields = {fault.field for fault in caught.value.faults}
    assert fields == {"name", "epoch", "colour", "files.0.path", "kernel.package"}
    assert "mine.toml" in caught.value.message


@pytest.mark.parametrize("package", ["--hook=evil", "a,b", "a b", "$(x)", "../x", ""])
def test_package_names_cannot_be_options_or_shell(package: str) -> None:
    with pytest.raises(InvalidRequest):
        recipe.parse(GOOD.replace("busybox-static", package))


def test_text_that_is_not_toml_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="not TOML"):
        recipe.parse("name = ")


def test_recipes_come_from_files_as_well(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(GOOD)
    assert recipe.load(str(file)).name == "mine"
    with pytest.raises(NotFound, match="no recipe file"):
        recipe.load(str(tmp_path / "other.toml"))
    with pytest.raises(NotFound) as caught:
        recipe.load("unheard-of")
    assert "generic" in caught.value.hint


def test_what_a_recipe_says_counts_and_not_how_it_is_written() -> None:
    made = recipe.parse(GOOD)
    assert recipe.parse(f"# a comment\n{GOOD}").digest == made.digest
    assert recipe.parse(GOOD.replace("epoch = 0", "epoch = 1")).digest != made.digest


def test_a_build_is_another_one_when_recipe_or_guest_program_change() -> None:
    made, guest = recipe.parse(GOOD), guest_program()
    assert {"init.sh", "launch.sh", "initrd.sh"} <= set(guest)
    keys = {
        build_key(made, guest),
        build_key(recipe.parse(GOOD.replace("epoch = 0", "epoch = 1")), guest),
        build_key(made, {**guest, "init.sh": b"#!/bin/sh\n"}),
    }
    assert len(keys) == 3
