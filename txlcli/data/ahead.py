"""Reading ahead: values of coming steps made in a thread, so that a step does not wait for the disk."""

import queue
import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

Value = TypeVar("Value")

CLOSING_S = 0.1
"""How often a thread that may not go further ahead looks whether it is still wanted."""


class Ahead(Generic[Value]):
    """Makes `make(step)` for one step after the other in a thread, and hands each out once.

    Args:
        make: Makes the value of a step; nobody else may use what it uses.
        first: The first step.
        stop: The step after the last.
        n_ahead: How many values may wait.

    Attributes:
        waited_s: Seconds that `take` has waited for the thread.
    """

    def __init__(self, make: Callable[[int], Value], first: int, stop: int, n_ahead: int) -> None:
        self.waited_s = 0.0
        self._next = first
        self._steps = range(first, stop)
        self._make = make
        self._made: queue.Queue[Value | BaseException] = queue.Queue(max(1, n_ahead))
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="reading ahead", daemon=True)
        self._thread.start()

    def has(self, step: int) -> bool:
        """Say whether this step is the next one to be taken."""
        return step == self._next and step in self._steps

    def take(self, step: int) -> Value:
        """Return the value of the next step, or raise what making it raised."""
        assert self.has(step), step
        begun = time.perf_counter()
        value = self._made.get()
        self.waited_s += time.perf_counter() - begun
        self._next += 1
        if isinstance(value, BaseException):
            self._next = self._steps.stop
            raise value
        return value

    def close(self) -> None:
        """End the thread."""
        self._is_over.set()
        self._thread.join()

    def _run(self) -> None:
        for step in self._steps:
            try:
                value: Value | BaseException = self._make(step)
            except BaseException as error:
                value = error
            while not self._is_over.is_set():
                try:
                    self._made.put(value, timeout=CLOSING_S)
                    break
                except queue.Full:
                    continue
            if self._is_over.is_set() or isinstance(value, BaseException):
                return
