"""Rules for all tests: in the integration suite nothing is skipped, or the run fails."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from formats_kit import lab, samples
from s3_kit import _s3_process, own_s3_server, s3_keys, s3_server, s3_url

#: Fixtures of several suites.
__all__ = ["_s3_process", "lab", "own_s3_server", "s3_keys", "s3_server", "s3_url", "samples"]

_skipped: list[str] = []

#: Settings that a test run itself is given; others are not to leak from a shell into tests.
_OF_TESTS = frozenset({"VMJOBS_TEST_KERNEL"})


@pytest.fixture(autouse=True, scope="session")
def _no_settings_from_outside(request: pytest.FixtureRequest) -> Iterator[None]:
    """Unit and contract tests see no VMJOBS_* variables; the integration suite is told its grid."""
    with pytest.MonkeyPatch.context() as patch:
        if not any("integration" in str(item.path) for item in request.session.items):
            for name in [n for n in os.environ if n.startswith("VMJOBS_") and n not in _OF_TESTS]:
                patch.delenv(name)
        yield


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Remember what was skipped."""
    if (
        report.skipped
        and report.nodeid.startswith("tests/integration/")
        and not hasattr(report, "wasxfail")
    ):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        _skipped.append(f"{report.nodeid}: {reason}")


def pytest_sessionfinish(session: pytest.Session) -> None:
    """A skip that hides a missing part is a failure."""
    if _skipped and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say why the run failed."""
    if _skipped:
        terminalreporter.section("integration tests must not be skipped")
        for line in _skipped:
            terminalreporter.line(line)
