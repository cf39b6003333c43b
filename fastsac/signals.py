"""SIGINT and SIGTERM: what ends a program at once, and what asks a run to end well."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any


class Stopped(KeyboardInterrupt):
    """A signal ends the program now; the message is one line for the user."""

    def __init__(self, number: int) -> None:
        super().__init__(f"stopped by {signal.Signals(number).name}")
        self.exit_status = 128 + number
        """The shell's convention."""


class StopRequest:
    """Owner of SIGTERM and SIGINT while it is open, in the main thread.

    A signal raises `Stopped`. After `defer`, the first one becomes a flag that the loop reads,
    and only the second one raises.
    """

    def __init__(self) -> None:
        self.signal_number = 0
        self._deferred = False
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        del kind, tb
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        if isinstance(error, SystemExit) and error.code == signal.SIGTERM:
            raise Stopped(signal.SIGTERM) from None  # a handler that Ray sets while it starts
        if isinstance(error, KeyboardInterrupt) and not isinstance(error, Stopped):
            # Ray gives one of its own for what a handler raises while it waits
            raise Stopped(self.signal_number or signal.SIGINT) from None

    def __bool__(self) -> bool:
        return self.signal_number != 0

    @property
    def exit_status(self) -> int:
        """128 + signal number, as shells have it; 0 when nothing was asked."""
        return 128 + self.signal_number if self else 0

    def take_again(self) -> None:
        """Take the signals from whoever took them since; Ray does when it starts."""
        for number in self._previous:
            signal.signal(number, self._handle)

    def defer(self) -> None:
        """From now on, the first signal waits for the loop to read it."""
        self._deferred = True

    def _handle(self, number: int, frame: FrameType | None) -> None:
        del frame
        first = not self
        self.signal_number = number
        if not (self._deferred and first):
            raise Stopped(number)
