"""Recipes: the product's own are valid, and all errors are reported at once."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from images import recipe
from images.build.bootstrap import SiteRepository, archive_path, sources
from images.build.builder import build_key, guest_program
from vmjobs.errors import InvalidRequest, NotFound

GOOD = """
name = "mine"
version = "1"
suite = "bookworm"
epoch = 0
packages = ["busybox-static"]
"""
#: Package names that would be options or shell syntax.
NO_PACKAGES = ("--hook=evil", "a,b", "a b", "$(x)", "../x", "")


def one(text: str) -> recipe.Recipe:
    return recipe.compose([recipe.parse(text)])


@pytest.mark.parametrize("name", recipe.names())
def test_the_recipes_of_the_product_are_sound(name: str) -> None:
    made = recipe.load(name)
    assert made.name == name
    assert made.kernel is not None
    assert made.probes
    assert made.layers[-1] == name
    assert "init=/sbin/vmjobs-init" in made.cmdline
    assert "busybox-static" in made.packages  # the initial RAM disk needs it


def test_all_faults_are_told_at_once() -> None:
    bad = GOOD.replace('"mine"', '"No Name"').replace("epoch = 0", "epoch = -1")
    bad += 'colour = "red"\n[[files]]\npath = "relative"\ntext = ""\n[kernel]\npackage = "a b"\n'
    with pytest.raises(InvalidRequest) as caught:
        recipe.parse(bad, "mine.toml")
    fields = {fault.field for fault in caught.value.faults}
    assert fields == {"name", "epoch", "colour", "files.0.path", "kernel.package"}
    assert "mine.toml" in caught.value.message


@pytest.mark.parametrize(
    ("text", "why"),
    [(GOOD.replace("busybox-static", name), "packages") for name in NO_PACKAGES]
    + [
        (f"{GOOD}allow_expired_archive = {word}\n", "allow_expired")
        for word in ('"yes"', "1", '"false"')
    ]
    + [("name = ", "not TOML")],
)
def test_what_is_no_recipe_is_refused(text: str, why: str) -> None:
    with pytest.raises(InvalidRequest, match=why):
        recipe.parse(text)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("packages", [f"p{n}" for n in range(recipe.MAX_PACKAGES + 1)]),
        ("packages", ["p" * 101]),
        ("drop", [f"usr/{n}" for n in range(recipe.MAX_DROPS + 1)]),
        ("drop", ["*" * 257]),
        ("probes", ["true"] * (recipe.MAX_PROBES + 1)),
        ("probes", ["#" * (recipe.MAX_TEXT + 1)]),
        ("files", [{"path": "/x", "text": "#" * (recipe.MAX_TEXT + 1)}]),
        ("environment", {f"V{n}": "" for n in range(recipe.MAX_VARIABLES + 1)}),
        ("suite", "s" * 65),
        ("kernel", {"package": "linux", "modules": ["m"] * (recipe.MAX_WORDS + 1)}),
    ],
)
def test_no_recipe_keeps_a_builder_busy_by_its_length(field: str, value: object) -> None:
    whole = recipe.load("generic").model_dump(mode="json")
    assert recipe.Recipe.model_validate(whole)
    with pytest.raises(ValidationError) as caught:
        recipe.Recipe.model_validate({**whole, field: value})
    assert all(fault["loc"][0] == field for fault in caught.value.errors())


def test_layers_with_too_much_together_are_refused() -> None:
    layers = [
        recipe.parse(GOOD).model_copy(update={"name": name, "probe": f"# {name}"})
        for name in (f"l{n}" for n in range(recipe.MAX_PROBES + 1))
    ]
    with pytest.raises(InvalidRequest, match="probes: must have at most 50 items"):
        recipe.compose(layers)


def test_recipes_come_from_files_as_well(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(GOOD)
    assert recipe.load(str(file)).name == "mine"
    with pytest.raises(NotFound, match="no recipe file"):
        recipe.load(str(tmp_path / "other.toml"))
    with pytest.raises(NotFound) as caught:
        recipe.load("unheard-of")
    assert "generic" in caught.value.hint


def test_layers_add_up() -> None:
    full, hep = recipe.load("full"), recipe.load("hep")
    assert full.layers == ("generic", "python", "hep", "root", "kerberos", "full")
    assert set(hep.packages) | {"krb5-user"} <= set(full.packages)
    assert full.python is not None
    assert {"pythia8mc", "uproot"} <= {wheel.name for wheel in full.python.wheels}
    assert full.environment == hep.environment
    assert (full.suite, full.cmdline, full.kernel) == (hep.suite, hep.cmdline, hep.kernel)
    assert len(full.probes) == 5


def write(folder: Path, name: str, text: str) -> str:
    file = folder / f"{name}.toml"
    file.write_text(f'name = "{name}"\nversion = "2"\n{text}')
    return str(file)


def test_the_last_layer_that_says_something_is_right(tmp_path: Path) -> None:
    write(tmp_path, "low", 'layers = ["generic"]\nslack = 99\n[environment]\nA = "1"\nB = "1"\n')
    top = write(
        tmp_path, "top", 'layers = ["./low.toml"]\ncmdline = ["init=/x"]\n[environment]\nB = "2"\n'
    )
    made = recipe.load(top)
    assert (made.name, made.version, made.slack, made.cmdline) == ("top", "2", 99, ("init=/x",))
    assert made.environment == {"A": "1", "B": "2"}
    assert made.suite == "bookworm"


def test_layers_that_do_not_go_together_are_refused(tmp_path: Path) -> None:
    top = write(tmp_path, "top", 'layers = ["hep", "worker"]\n')
    with pytest.raises(InvalidRequest, match=r"different releases \(.*bookworm.*trixie"):
        recipe.load(top)
    alone = write(tmp_path, "alone", "")
    with pytest.raises(InvalidRequest) as caught:
        recipe.load(alone)
    assert {fault.field for fault in caught.value.faults} == {"suite", "epoch", "packages"}


def test_circles_of_layers_and_layers_that_are_not_there_are_named(tmp_path: Path) -> None:
    write(tmp_path, "one", 'layers = ["./two.toml"]\n')
    two = write(tmp_path, "two", 'layers = ["./one.toml"]\n')
    with pytest.raises(InvalidRequest, match="cycle"):
        recipe.load(two)
    with pytest.raises(NotFound, match="unheard-of"):
        recipe.load(write(tmp_path, "top", 'layers = ["unheard-of"]\n'))


def test_a_build_is_another_one_when_recipe_or_guest_program_change() -> None:
    made, guest = one(GOOD), guest_program()
    assert {"init.sh", "launch.sh", "initrd.sh"} <= set(guest)
    keys = {
        build_key(made, guest),
        build_key(one(GOOD.replace("epoch = 0", "epoch = 1")), guest),
        build_key(made, {**guest, "init.sh": b"#!/bin/sh\n"}),
    }
    assert len(keys) == 3


EXPIRED = f"{GOOD}allow_expired_archive = true\n"


def test_an_archive_that_is_out_of_date_is_taken_only_where_a_recipe_says_so(tmp_path: Path) -> None:
    key = tmp_path / "key.asc"
    key.touch()
    site = SiteRepository("deb http://packages.example.org/apt stable main", key)
    debian = "http://deb.debian.org/debian bookworm main"
    assert sources(one(GOOD)) == []
    assert sources(one(GOOD), site) == [
        f"deb {debian}",
        f"deb [signed-by={key}] http://packages.example.org/apt stable main",
    ]
    assert sources(one(EXPIRED)) == [f"deb [check-valid-until=no] {debian}"]
    assert sources(one(EXPIRED), site) == [
        f"deb [check-valid-until=no] {debian}",
        f"deb [check-valid-until=no signed-by={key}] http://packages.example.org/apt stable main",
    ]


def test_who_allows_an_archive_that_is_out_of_date_does_so_for_all_layers_and_nobody_else(
    tmp_path: Path,
) -> None:
    top = recipe.parse('name = "top"\nversion = "1"\nlayers = ["mine"]\n')
    assert recipe.compose([recipe.parse(EXPIRED), top]).allow_expired_archive
    assert one(EXPIRED).digest != one(GOOD).digest
    assert archive_path(one(EXPIRED), tmp_path) != archive_path(one(GOOD), tmp_path)


def test_an_image_has_one_architecture_and_wheels_for_x86_64_alone() -> None:
    arm, root = recipe.parse(GOOD).model_copy(update={"architecture": "aarch64"}), recipe.load("root")
    assert recipe.compose([recipe.parse(GOOD), arm]).architecture == "aarch64"
    assert recipe.compose([recipe.parse(GOOD)]).digest != recipe.compose([arm]).digest
    wheels = arm.model_copy(update={"name": "wheels", "python": root.python})
    other = arm.model_copy(update={"name": "other", "architecture": "s390x"})
    with pytest.raises(InvalidRequest) as caught:
        recipe.compose([wheels, other])
    assert {fault.field for fault in caught.value.faults} == {"architecture", "python"}
