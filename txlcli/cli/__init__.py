"""The command line: flags to settings, events to the screen, errors to exit codes.

Exit codes: 0 done; 1 failed (a bug, which keeps its traceback, or a training that went non-finite);
2 usage, settings or unusable input, told in one line; 130 interrupted and 143 terminated, after saving.
stdout carries results only, stderr everything else. A reader that closes the pipe has had enough: that
ends a command quietly.

The flags of `train` are the settings of `config`, one each; those of the other commands are plain
parameters. Nothing heavy is imported before a command needs it.
"""

from txlcli.cli import train, generate, eval, convert, bench, config, runs  # noqa: F401, I001  # in the order of the help
from txlcli.cli.app import app as main

__all__ = ["main"]
