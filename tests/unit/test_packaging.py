"""What a wheel has in it."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from setuptools import Distribution

ROOT = Path(__file__).parents[2]
PACKAGES = ("vmjobs", "images", "repository", "condor", "api")


def test_a_wheel_has_every_file_of_the_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    project = Distribution({"script_name": "setup.py"})
    project.parse_config_files()
    build = project.get_command_obj("build_py")
    build.ensure_finalized()
    modules = {Path(file).as_posix() for _, _, file in build.find_all_modules()}
    data = {f"{source}/{name}" for _, source, _, names in build.data_files for name in names}
    listed = subprocess.run(["git", "ls-files", *PACKAGES], capture_output=True, text=True, check=True)
    assert set(listed.stdout.split()) == modules | data
