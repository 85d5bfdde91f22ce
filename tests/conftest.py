"""What the reference computes inside the tests uses one thread, as ranks do: several would wait for each other's core. Tests
that are all skipped are not green, as checks are not."""

import gc
import os
import signal
from collections.abc import Iterator

import pytest
from forked_jobs import forked_main as forked_main

from harness.core.launch import resident_client

os.environ["OMP_NUM_THREADS"] = "1"  # read once, when torch is imported
if (
    signal.getsignal(signal.SIGINT) is signal.SIG_IGN
):  # in a shell's background, where all that tests start would ignore it too
    signal.signal(signal.SIGINT, signal.default_int_handler)
ENDED = {"skipped": False, "otherwise": False}


@pytest.fixture(scope="session", autouse=True)
def commands_of_tests_leave_no_server() -> Iterator[None]:
    """Those that tests start; the session's own checks may come from one that stays."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(resident_client.SERVER_VARIABLE, "own")
        yield


def pytest_collection_finish(session: pytest.Session) -> None:
    """Six thousand tests and all that they import stay until the end: they need not be walked through again and again."""
    gc.collect()
    gc.freeze()


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if "harness" not in report.keywords and (report.skipped or report.when == "call" or report.failed):
        ENDED["skipped" if report.skipped and not hasattr(report, "wasxfail") else "otherwise"] = True


def pytest_sessionfinish(session: pytest.Session) -> None:
    if session.exitstatus == pytest.ExitCode.OK and ENDED["skipped"] and not ENDED["otherwise"]:
        print("\nnothing was tested: all tests skipped, which is not a pass")
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
