"""The program's entrance: `python -m txlcli` and `txl` are the same."""

import os
import signal
from types import FrameType


def main() -> None:
    """Run the command line; before a command listens itself, a signal ends it without a traceback."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _end)
    from txlcli.cli import main as run

    run()


def _end(number: int, frame: FrameType | None) -> None:
    """Exit at once: nothing is there yet that could be saved."""
    os._exit(128 + number)


if __name__ == "__main__":
    main()
