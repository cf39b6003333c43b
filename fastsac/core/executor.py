"""Running methods of owned objects, in this process or in many.

`CollectorGroup` and `LearnerGroup` are written against `Executor`; `InlineExecutor` is the
whole system in one process, for a debugger and for unit tests. `fastsac.runtime` has the same
interface over Ray actors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol


class WorkerDied(RuntimeError):
    """A process that held one of our objects is gone."""


class WorkerHung(RuntimeError):
    """A process that holds one of our objects has not answered in time."""


class Executor(Protocol):
    """Spawn a class on a host, call its methods, wait for results."""

    def spawn(self, cls: type, *, bundle: int, cpus: float, threads: int, **kwargs: Any) -> Any:
        """Construct `cls(**kwargs)` on the host of rank `bundle`; returns a handle at once."""
        ...

    def share(self, value: Any) -> Any:
        """`value` in a form that is cheap to pass to many calls."""
        ...

    def call(self, handle: Any, method: str, *args: Any) -> Any:
        """Start `method(*args)`; calls on one handle run in order. Returns a pending result."""
        ...

    def wait(self, pending: Sequence[Any]) -> list[Any]:
        """Results in the order of `pending`; raises what a method raised, or `WorkerDied`."""
        ...

    def outcomes(
        self, pending: Sequence[Any], timeouts_s: Sequence[float] | None = None
    ) -> list[Any]:
        """As `wait`, but an exception takes the place of its own result only.

        Args:
            timeouts_s: how long to wait for each, counted from this call; what is late is a
                `WorkerHung`. None waits for ever.
        """
        ...

    def kill(self, handle: Any) -> None:
        """End an object's process at once, whatever it is doing."""
        ...

    def host_address(self, *, bundle: int) -> str:
        """Address of the host of rank `bundle`, for the ranks to meet at."""
        ...

    def close(self) -> None:
        """End every object's process."""
        ...


@dataclass(frozen=True)
class _Done:
    """What an inline call gave."""

    value: Any = None
    error: Exception | None = None


class InlineExecutor:
    """Everything in this process: `call` runs the method at once."""

    def spawn(self, cls: type, *, bundle: int, cpus: float, threads: int, **kwargs: Any) -> Any:
        del bundle, cpus, threads  # one process has one host and one thread pool
        return cls(**kwargs)

    def share(self, value: Any) -> Any:
        return value

    def call(self, handle: Any, method: str, *args: Any) -> Any:
        values = [arg.value if isinstance(arg, _Done) else arg for arg in args]
        try:
            return _Done(value=getattr(handle, method)(*values))
        except Exception as error:
            return _Done(error=error)

    def wait(self, pending: Sequence[Any]) -> list[Any]:
        for done in pending:
            if done.error is not None:
                raise done.error
        return [done.value for done in pending]

    def outcomes(
        self, pending: Sequence[Any], timeouts_s: Sequence[float] | None = None
    ) -> list[Any]:
        del timeouts_s  # what ran at once is never late
        return [done.value if done.error is None else done.error for done in pending]

    def kill(self, handle: Any) -> None:
        del handle  # this process goes on

    def host_address(self, *, bundle: int) -> str:
        del bundle
        return "127.0.0.1"

    def close(self) -> None:
        pass
