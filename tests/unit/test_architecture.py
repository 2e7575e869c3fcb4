"""Checks imports against the table of allowed ones (docs/architecture.md)."""

from __future__ import annotations

import ast
import re
from functools import cache
from graphlib import TopologicalSorter

import pytest

from tests.kit import ROOT

MAY_IMPORT = {
    "vmjobs": {"vmjobs"},
    "images": {"vmjobs", "images"},
    "repository": {"vmjobs", "images", "repository"},
    "condor": {"vmjobs", "condor"},
    "node": {"vmjobs", "images", "condor", "node"},
    "api": {"vmjobs", "images", "repository", "condor", "node", "api"},
}


@cache
def imports() -> dict[str, set[str]]:
    """Return what all modules import, by name; a package is its ``__init__``."""
    paths = [path for folder in MAY_IMPORT for path in (ROOT / folder).rglob("*.py")]
    return {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): imported(
            path.read_text("utf-8")
        )
        for path in paths
    }


def imported(code: str) -> set[str]:
    """Return the modules, and names in modules, that a module imports anywhere."""
    found = set()
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def top(name: str) -> str:
    return name.partition(".")[0]


def test_imports_follow_the_table() -> None:
    for module, names in imports().items():
        folders = {top(name) for name in names} & MAY_IMPORT.keys()
        assert folders <= MAY_IMPORT[top(module)], module


def test_no_module_imports_itself_through_others() -> None:
    """Lazy imports and those for type checks count, too."""
    graph = {
        module: {name if name in imports() else name.rpartition(".")[0] for name in names}
        for module, names in imports().items()
    }
    TopologicalSorter(graph).prepare()  # raises CycleError, with the modules of a cycle


@pytest.mark.parametrize("folder", ["run", "cluster_vms", "vm"])
def test_neither_runs_nor_cluster_vms_import_the_other(folder: str) -> None:
    others = tuple(f"vmjobs.agent.{other}." for other in {"run", "cluster_vms"} - {folder})
    for module, names in imports().items():
        if module.startswith(f"vmjobs.agent.{folder}."):
            assert not [name for name in names if name.startswith(others)], module


def test_one_module_imports_libvirt_and_one_package_the_htcondor_bindings() -> None:
    tops = {module: {top(name) for name in names} for module, names in imports().items()}
    bindings = {"htcondor", "htcondor2", "classad", "classad2"}
    assert len([module for module, names in tops.items() if "libvirt" in names]) == 1
    assert {top(module) for module, names in tops.items() if names & bindings} == {"condor"}


@pytest.mark.parametrize("folder", ["tests", "bench"])
def test_what_tests_share_is_in_their_kit(folder: str) -> None:
    """A test module is imported by no other module."""
    for path in (ROOT / folder).rglob("*.py"):
        assert not re.search(r"(?m)^\s*(from|import) (\S*\.)?test_", path.read_text("utf-8")), path
