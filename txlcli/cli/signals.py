"""SIGINT and SIGTERM: the first asks, the second ends."""

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType

import typer


class Interruption:
    """Whether the user asked to stop; calling it answers.

    The first SIGINT or SIGTERM only raises the flag, so that the command can finish its step and save; the
    second ends the process at once. Signals arrive through a descriptor that a thread reads, so that they
    are heard while the main thread is deep in a library too.

    Attributes:
        notice: What the first signal is answered with.
        signal: The first signal; 0: none came.
        is_raised: The first also raises KeyboardInterrupt in the main thread: for work that takes long, asks
            nothing, and loses nothing that is not made again.
    """

    def __init__(self, notice: str = "") -> None:
        self.notice = notice
        self.signal = 0
        self.is_raised = False

    def __call__(self) -> bool:
        """Say whether to stop."""
        return self.signal != 0

    def heard(self, number: int) -> None:
        """Take a signal."""
        if self.signal:
            os._exit(128 + number)
        self.signal = number
        with suppress(OSError):
            # A terminal has just shown ^C in the middle of a line.
            start = "\n" if os.isatty(2) else ""
            # Not through sys.stderr, whose lock the main thread may hold.
            os.write(2, f"{start}{self.notice}\n".encode())

    def interrupt(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal in the main thread; Python hands its number to the descriptor by itself."""
        if self.is_raised:
            while not self.signal:  # until the thread has taken it, which is at once
                time.sleep(0.001)
            raise KeyboardInterrupt

    def stop(self) -> None:
        """Ask to stop where no signal did."""
        self.signal = self.signal or signal.SIGINT

    def forget(self) -> None:
        """Take the wish as fulfilled, so that the next signal is the first again."""
        self.signal = 0

    def leave(self) -> None:
        """Exit with the code of the signal if there was one: 130 or 143."""
        if self.signal:
            raise typer.Exit(128 + self.signal)


@contextmanager
def listening(notice: str) -> Iterator[Interruption]:
    """Listen for SIGINT and SIGTERM while the block runs."""
    interruption = Interruption(notice)
    if threading.current_thread() is not threading.main_thread():
        yield interruption
        return
    import socket

    reader, writer = socket.socketpair()
    writer.setblocking(False)

    def watch() -> None:
        while data := reader.recv(1):
            if data[0] in (signal.SIGINT, signal.SIGTERM):
                interruption.heard(data[0])

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    before = {
        number: signal.signal(number, interruption.interrupt) for number in (signal.SIGINT, signal.SIGTERM)
    }
    descriptor = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    try:
        yield interruption
    finally:
        signal.set_wakeup_fd(descriptor)
        for number, handler in before.items():
            signal.signal(number, handler)
        writer.close()
        thread.join()
        reader.close()
