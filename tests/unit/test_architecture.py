"""Checks imports against the table of allowed ones (docs/architecture.md)."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("vmjobs", "images", "repository", "condor", "node", "api")
MAY_IMPORT = {
    "vmjobs": {"vmjobs"},
    "images": {"vmjobs", "images"},
    "repository": {"vmjobs", "images", "repository"},
    "condor": {"vmjobs", "condor"},
    "node": {"vmjobs", "images", "condor", "node"},
    "api": {"vmjobs", "images", "repository", "condor", "node", "api"},
}
#: Import cycles that remain; no other module may join them.
KNOWN_CYCLES = (
    {"images.formats.qcow2", "images.formats.qcow2_tables"},
    {f"vmjobs.agent.run.{name}" for name in ("checkpoint", "job_run", "monitor", "steps")},
)


def modules() -> Iterator[Path]:
    for folder in FOLDERS:
        yield from sorted((ROOT / folder).rglob("*.py"))


def imported(path: Path) -> set[str]:
    """Return the modules, and names in modules, that a module imports anywhere."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


@pytest.mark.parametrize("path", list(modules()), ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_follow_the_table(path: Path) -> None:
    folder = path.relative_to(ROOT).parts[0]
    tops = {name.split(".")[0] for name in imported(path)}
    assert tops & set(FOLDERS) <= MAY_IMPORT[folder]


def test_no_module_imports_itself_through_others() -> None:
    """Lazy imports and those for type checks count, too."""
    names = {module_name(path): path for path in modules()}
    graph = {
        name: {found if found in names else found.rpartition(".")[0] for found in imported(path)}
        for name, path in names.items()
    }
    for cycle in KNOWN_CYCLES:
        for name in cycle & graph.keys():
            graph[name] -= cycle
    TopologicalSorter(graph).prepare()  # raises CycleError, with the modules of a cycle


def test_one_module_imports_libvirt_and_one_package_the_htcondor_bindings() -> None:
    users: dict[str, set[str]] = {"libvirt": set(), "htcondor": set()}
    for path in modules():
        for name in imported(path):
            top = name.split(".")[0]
            if top == "libvirt":
                users["libvirt"].add(str(path.relative_to(ROOT)))
            if top in {"htcondor", "htcondor2", "classad", "classad2"}:
                users["htcondor"].add(path.relative_to(ROOT).parts[0])
    assert len(users["libvirt"]) <= 1
    assert users["htcondor"] <= {"condor"}


@pytest.mark.parametrize("path", list(modules()), ids=lambda p: str(p.relative_to(ROOT)))
def test_no_shell_is_ever_started(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.keyword) and node.arg == "shell":
            assert isinstance(node.value, ast.Constant)
            assert node.value.value is False
