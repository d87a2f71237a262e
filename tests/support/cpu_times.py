"""`pytest --cpu-times`: CPU seconds of each test, including all processes started by the test.

Wall-clock time depends on the machine's other work. The cost of a test is the CPU time of this process, of its ended children,
and of the forkserver of ranks with its children, since ranks are no children of pytest.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterator
from multiprocessing import forkserver
from pathlib import Path

import pytest

PROPERTY = "cpu_s"

# A short test above this cost is always listed at the end of a run.
BUDGET_S = 15.0

_TICKS_A_SECOND = os.sysconf("SC_CLK_TCK")


def cpu_seconds() -> float:
    """Returns the CPU seconds of this process, of its ended children, and of the forkserver of ranks with all of its children."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system + _of_forking_process()


def _of_forking_process() -> float:
    pid = getattr(forkserver._forkserver, "_forkserver_pid", None)
    if pid is None:
        return 0.0
    children = Path(f"/proc/{pid}/task/{pid}/children")
    # Shared ranks are still running.
    live = children.read_text().split() if children.exists() else []
    return sum(map(_of_process, (pid, *live)))


def _of_process(pid: int | str) -> float:
    """Returns a process's own user and system time plus its ended children's: values 12 to 15 after the name in `stat`."""
    try:
        values = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return sum(map(int, values[11:15])) / _TICKS_A_SECOND


class CpuTimes:
    """Adds each phase's seconds to its report, which pytest-xdist's workers also send."""

    def __init__(self, config: pytest.Config) -> None:
        self._all = config.getoption("--cpu-times")
        self._last_s = cpu_seconds()
        self._by_test: dict[str, float] = defaultdict(float)
        self._slow: set[str] = set()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item) -> Iterator[None]:
        report = yield
        now_s = cpu_seconds()
        report.user_properties.append((PROPERTY, now_s - self._last_s))
        self._last_s = now_s
        return report

    def pytest_runtest_logstart(self) -> None:
        self._last_s = cpu_seconds()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._by_test[report.nodeid] += sum(value for name, value in report.user_properties if name == PROPERTY)
        if "slow" in report.keywords:
            self._slow.add(report.nodeid)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        over = {test: s for test, s in self._by_test.items() if s > BUDGET_S and test not in self._slow}
        if not self._all:
            self._write(terminalreporter, f"short tests over {BUDGET_S:.0f} CPU seconds", over)
            return
        by_file: dict[str, float] = defaultdict(float)
        by_folder: dict[str, float] = defaultdict(float)
        for test, spent_s in self._by_test.items():
            file = test.partition("::")[0]
            by_file[file] += spent_s
            by_folder[str(Path(file).parent)] += spent_s
        self._write(terminalreporter, "CPU seconds of tests", self._by_test)
        self._write(terminalreporter, "CPU seconds of files", by_file)
        self._write(terminalreporter, "CPU seconds of folders", by_folder)
        terminalreporter.write_line(f"{sum(by_file.values()):8.2f} together")

    def _write(self, terminalreporter: pytest.TerminalReporter, title: str, spent: dict[str, float]) -> None:
        if not spent:
            return
        terminalreporter.section(title)
        for name, spent_s in sorted(spent.items(), key=lambda each: -each[1]):
            terminalreporter.write_line(f"{spent_s:8.2f} {name}")
