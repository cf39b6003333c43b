"""One collector's process as the fleet sees it: called with a deadline, replaced when it fails."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from collectors.collector import CollectReport
from collectors.guard import EnvContractError, EnvError
from fastsac.core.executor import Executor, WorkerDied, WorkerHung

RESTART_WINDOW_S = 600.0
"""Restarts longer ago than this do not count against a shard."""
FIRST_BACKOFF_S = 1.0
"""Wait before a second restart in a row; it doubles from one to the next. The first is at once."""
HISTORY = 100
"""Calls that a deadline looks back on."""
WARM_UP = 3
"""Calls before the history says anything: the first ones load models and compile kernels."""
FIRST_DEADLINE_S = 1800.0
"""Deadline until then."""
LEAST_DEADLINE_S = 10.0
DEADLINE_FACTOR = 10.0


class Deadline:
    """How long one kind of call may take on one shard: ten times the slowest of its last hundred,
    and at least 10 s; half an hour until it was called three times."""

    def __init__(self) -> None:
        self._seconds: deque[float] = deque(maxlen=HISTORY)

    def count(self, seconds: float) -> None:
        self._seconds.append(seconds)

    @property
    def seconds(self) -> float:
        if len(self._seconds) < WARM_UP:
            return FIRST_DEADLINE_S
        return max(LEAST_DEADLINE_S, DEADLINE_FACTOR * max(self._seconds))


class Shard:
    """Owner of one shard's process. After a failure it waits out a backoff, starts anew under the
    fleet's view, and joins when it is ready; the other shards need not wait for it."""

    def __init__(
        self,
        number: int,
        executor: Executor,
        spawn: Callable[[int], Any],
        *,
        max_restarts: int,
    ) -> None:
        """
        Args:
            spawn: makes the process and returns its handle, given the number of restarts before.
            max_restarts: in any `RESTART_WINDOW_S`.
        """
        self.number = number
        self.restarts = 0
        self.rows_written = 0
        """Vector steps known to be in its replay shard."""
        self.joining = False
        """Whether it is ready and has not collected since it was restarted."""
        self.memory_is_new = False
        """Whether its newest process found no replay shard to go on with."""
        self._deadlines: dict[str, Deadline] = {}
        self._executor = executor
        self._spawn = spawn
        self._max_restarts = max_restarts
        self._failures: deque[float] = deque()
        self._error: Exception
        self._restart_at: float | None = None
        self._starting: Any = None
        self._handle = spawn(0)

    @property
    def up(self) -> bool:
        return self._restart_at is None and self._starting is None

    def call(self, method: str, *args: Any) -> Any:
        return self._executor.call(self._handle, method, *args)

    def deadline(self, method: str) -> Deadline:
        return self._deadlines.setdefault(method, Deadline())

    def count(self, report: CollectReport) -> int:
        """Take note of a tick; returns the vector steps that are new."""
        seconds = report.metrics["time/collect"]
        assert isinstance(seconds, float)
        self.deadline("collect").count(seconds)
        return self.count_rows(report.rows_written)

    def count_rows(self, rows_written: int) -> int:
        new = rows_written - self.rows_written
        self.rows_written = rows_written
        return new

    def fail(self, error: Exception) -> None:
        """End the process, and plan the next one.

        Raises:
            EnvError, WorkerDied: the restarts are used up, or another would change nothing.
            Exception: `error` is none of a shard's failures.
        """
        if not isinstance(error, EnvError | WorkerDied | WorkerHung):
            raise error
        if isinstance(error, EnvContractError):
            raise error
        now = time.monotonic()
        while self._failures and now - self._failures[0] > RESTART_WINDOW_S:
            self._failures.popleft()
        recent = len(self._failures)
        if recent >= self._max_restarts:
            raise _used_up(error, self.number, recent)
        self._failures.append(now)
        self._error = error
        self._executor.kill(self._handle)
        self._restart_at = now + (FIRST_BACKOFF_S * 2 ** (recent - 1) if recent else 0.0)
        self._starting, self.joining = None, False

    def restart(
        self,
        first_step: int,
        fleet_state: Mapping[str, Tensor],
        memory: Callable[[], bytes | None],
        *,
        wait: bool,
    ) -> int | None:
        """Bring a failed shard a step further: once its backoff is over a process is started, and
        once that is ready the shard is up.

        Args:
            memory: gives the replay shard that outlived its collector, or None.
            wait: stay until it is up.

        Returns:
            Vector steps found in its replay shard if it is up now, None if it is not yet.

        Raises:
            As `fail`.
        """
        while not self.up:
            if self._restart_at is not None:
                left_s = self._restart_at - time.monotonic()
                if left_s > 0 and not wait:
                    return None
                time.sleep(max(0.0, left_s))
                self._start(first_step, fleet_state, memory)
            if self._starting is not None:
                rows = self._await_start(FIRST_DEADLINE_S if wait else 0.0)
                if rows is not None or not wait:
                    return rows
        return None

    def _start(
        self,
        first_step: int,
        fleet_state: Mapping[str, Tensor],
        memory: Callable[[], bytes | None],
    ) -> None:
        self.restarts += 1
        self._restart_at = None
        self._start_by = time.monotonic() + FIRST_DEADLINE_S
        self._deadlines.clear()
        try:
            self._handle = self._spawn(self.restarts)
        except Exception as error:  # inline, the constructor runs at once
            self.fail(WorkerDied(f"the collector of shard {self.number}: {error}"))
            return
        kept = memory()
        self.memory_is_new = kept is None
        self._starting = self.call("start", first_step, fleet_state, kept)

    def _await_start(self, timeout_s: float) -> int | None:
        [outcome] = self._executor.outcomes([self._starting], [timeout_s])
        if isinstance(outcome, WorkerHung) and time.monotonic() < self._start_by:
            return None
        if isinstance(outcome, Exception):
            self.fail(outcome)
            return None
        self._starting, self.joining = None, True
        return outcome


def _used_up(error: Exception, shard: int, restarts: int) -> Exception:
    """`error`, saying how often it was tried."""
    tried = f" (restarted {restarts} times, see fleet.collector_restarts)" if restarts else ""
    if isinstance(error, EnvError):
        return EnvError(f"{error}{tried}", error.shard, error.details)
    if isinstance(error, WorkerHung):
        return WorkerDied(f"the collector of shard {shard} hangs: {error}{tried}")
    return WorkerDied(f"{error}{tried}")
