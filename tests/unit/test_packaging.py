"""The files of a wheel, and the packages installed with it."""

from __future__ import annotations

import re
import subprocess
from configparser import ConfigParser
from itertools import chain
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from setuptools import Distribution

from images.build.builder import GUEST_PROGRAMS
from tests.kit import ROOT

PACKAGES = ("vmjobs", "images", "repository", "condor", "node", "api")


def test_a_wheel_has_every_file_of_the_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    project = Distribution({"script_name": "setup.py"})
    project.parse_config_files()
    build = project.get_command_obj("build_py")
    build.ensure_finalized()
    modules = {Path(file).as_posix() for _, _, file in build.find_all_modules()}
    data = {f"{source}/{name}" for _, source, _, names in build.data_files for name in names}
    command = ["git", "ls-files", *PACKAGES, ":!*/README.md"]
    listed = subprocess.run(command, capture_output=True, text=True, check=True)
    compiled = (Path("images/guest").glob(f"{name}*") for name in GUEST_PROGRAMS)
    built = {*Path("vmjobs/kernel").glob("*"), *chain(*compiled)}
    assert {*listed.stdout.split(), *map(str, built)} == modules | data


def test_the_lock_file_has_a_release_and_a_hash_of_every_package_that_is_needed() -> None:
    lines = (ROOT / "deploy/requirements.txt").read_text("utf-8").splitlines()[1:]
    locked = [re.fullmatch(r"([\w.-]+)==(\S+)(?: --hash=sha256:[0-9a-f]{64})+", line) for line in lines]
    assert all(locked), "a line without a release or a hash"
    releases = {canonicalize_name(found[1]): found[2] for found in locked if found}
    setup = ConfigParser()
    setup.read(ROOT / "setup.cfg")
    needed = [setup["options"]["install_requires"], *setup["options.extras_require"].values()]
    for wanted in map(Requirement, filter(None, "\n".join(needed).splitlines())):
        assert releases[canonicalize_name(wanted.name)] in wanted.specifier, wanted
