"""Rules for all tests: only missing hardware allows a skip, and few tests may be flaky."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator

import pytest

#: Fixtures of several suites.
pytest_plugins = ["tests.kit.cli", "tests.kit.disk_formats", "tests.kit.s3_server"]
pytest.register_assert_rewrite("tests.kit")

_skipped: list[str] = []

#: The one reason to skip a test: this processor cannot run KVM or Debian's UML kernel.
_HARDWARE = re.compile(r"(Skipped: )?(kvm|AMX): ")
#: At most this many tests may be marked ``flaky``.
_MOST_FLAKY = 5

#: Settings of a test run itself; no others may leak from a shell into tests.
_OF_TESTS = frozenset({"VMJOBS_TEST_KERNEL"})


@pytest.fixture(autouse=True, scope="session")
def _no_settings_from_outside(request: pytest.FixtureRequest) -> Iterator[None]:
    """Hide VMJOBS_* variables from unit and contract tests; integration tests need their grid."""
    with pytest.MonkeyPatch.context() as patch:
        if not any("integration" in str(item.path) for item in request.session.items):
            for name in [n for n in os.environ if n.startswith("VMJOBS_") and n not in _OF_TESTS]:
                patch.delenv(name)
        yield


@pytest.hookimpl(tryfirst=True)  # before pytest evaluates -m
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark unit tests quick, rows of the soak as soak, and flaky tests as allowed to fail.

    Flaky tests are listed with their reasons.

    Raises:
        UsageError: a flaky test has no reason or date, or there are too many flaky tests.
    """
    flaky = []
    for item in items:
        if "unit" in item.path.parts and not item.get_closest_marker("slow"):
            item.add_marker("quick")
        rows = {row for mark in item.iter_markers("soak_for") for row in mark.args}
        if rows and rows & set(re.split(r"[\[\]-]", item.name)):
            item.add_marker("soak")
        if mark := item.get_closest_marker("flaky"):
            if not {"reason", "since"} <= mark.kwargs.keys():
                raise pytest.UsageError(f"{item.nodeid}: flaky(reason=..., since=...)")
            reason = f"{mark.kwargs['reason']} (since {mark.kwargs['since']})"
            item.user_properties.append(("flaky", reason))
            item.add_marker(pytest.mark.xfail(reason=reason, strict=False))
            flaky.append(item.nodeid.partition("[")[0])
    if len(set(flaky)) > _MOST_FLAKY:
        raise pytest.UsageError(f"more than {_MOST_FLAKY} tests are flaky: mend some")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Record a skipped test."""
    if report.skipped and not hasattr(report, "wasxfail"):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        if not _HARDWARE.match(reason):
            _skipped.append(f"{report.nodeid}: {reason}")


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail the run if a test was skipped because a part is missing."""
    if _skipped and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print why the run failed."""
    if _skipped:
        terminalreporter.section("tests must not be skipped")
        for line in _skipped:
            terminalreporter.line(line)
