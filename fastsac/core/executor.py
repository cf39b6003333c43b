"""Running methods of owned objects, in this process or in many.

`CollectorGroup` and `LearnerGroup` are written against `Executor`; `InlineExecutor` is the
whole system in one process, for a debugger and for unit tests. `fastsac.runtime` has the same
interface over Ray actors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol


class WorkerDied(RuntimeError):
    """A process that held one of our objects is gone."""


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

    def host_address(self, *, bundle: int) -> str:
        """Address of the host of rank `bundle`, for the ranks to meet at."""
        ...

    def close(self) -> None:
        """End every object's process."""
        ...


class InlineExecutor:
    """Everything in this process: `call` runs the method at once."""

    def spawn(self, cls: type, *, bundle: int, cpus: float, threads: int, **kwargs: Any) -> Any:
        del bundle, cpus, threads  # one process has one host and one thread pool
        return cls(**kwargs)

    def share(self, value: Any) -> Any:
        return value

    def call(self, handle: Any, method: str, *args: Any) -> Any:
        return getattr(handle, method)(*args)

    def wait(self, pending: Sequence[Any]) -> list[Any]:
        return list(pending)

    def host_address(self, *, bundle: int) -> str:
        del bundle
        return "127.0.0.1"

    def close(self) -> None:
        pass
