"""Errors to exit codes: what a command raises becomes one line and a number."""

import errno
import io
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from difflib import get_close_matches
from typing import Any, NoReturn, TextIO

import typer
from typer.core import TyperGroup

from txlcli import UserError
from txlcli.files import describe_error
from txlcli.report import Screen, escape_line

_FAILED, _UNUSABLE = 1, 2
_FULL = (errno.ENOSPC, errno.EDQUOT)


class Failed(Exception):
    """A command came to nothing through no mistake in its use: told in one line, exit code 1."""


# typer may or may not carry its own click; from a public name its errors are reached either way.
_ClickError: type[Exception] = typer.BadParameter.__mro__[2]


class Commands(TyperGroup):
    """The command group; turns what its commands raise into one line and an exit code."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:  # Any: handed through to typer
        super().__init__(*args, **kwargs)
        # Plain help: the first page must come at once, and drawing panels takes as long as all else together.
        self.rich_markup_mode = None

    def main(  # type: ignore[override]  # typer's has more parameters, none of which anyone passes
        self, args: Sequence[str] | None = None, **_: object
    ) -> NoReturn:
        """Run a command line and exit."""
        arguments = list(sys.argv[1:] if args is None else args)
        _prepare_streams()
        try:
            with self.make_context("txl", arguments) as context:
                self.invoke(context)
            sys.stdout.flush()
        except typer.Exit as end:
            try:
                sys.stdout.flush()
            except BrokenPipeError:
                _silence()
            sys.exit(end.exit_code)
        except UserError as error:
            _end(str(error), _UNUSABLE)
        except _ClickError as error:
            _end(_usage_text(error), _UNUSABLE)
        except Failed as error:
            _end(str(error), _FAILED)
        except BrokenPipeError:
            # Nobody reads any more.
            _silence()
            sys.exit(0)
        except OSError as error:
            if error.errno not in _FULL:
                raise
            _silence(sys.stdout)
            _end(f"{error.filename or 'output'}: cannot be written; {describe_error(error)}", _UNUSABLE)
        except SystemExit as end:
            # rich ends by itself, with 1, where the reader of a help page closes the pipe.
            if not isinstance(end.__context__, BrokenPipeError):
                raise
            _silence()
            sys.exit(0)
        except (KeyboardInterrupt, typer.Abort):
            sys.exit(128 + signal.SIGINT)
        sys.exit(0)


def _prepare_streams() -> None:
    """See to it that writing to stdout and stderr never fails on a character, or because they are closed."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, io.TextIOWrapper(io.BytesIO(), encoding="utf-8"))
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def _end(text: str, code: int) -> NoReturn:
    screen = Screen.of(sys.stderr)
    with suppress(OSError):
        screen.write(f"{screen.style('error', 'red')}: {escape_line(text)}")
    sys.exit(code)


def _silence(*streams: TextIO) -> None:
    """See to it that the interpreter's own last flush of these streams, or of both, cannot complain."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in streams or (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
        with suppress(OSError, ValueError):
            os.dup2(nowhere, stream.fileno())


def _usage_text(error: Exception) -> str:
    """Say in our words what click found wrong with a command line."""
    context = getattr(error, "ctx", None)
    option = getattr(error, "option_name", None)
    parameter = getattr(error, "param", None)
    message = str(getattr(error, "message", error)).rstrip(".")
    if option and hasattr(error, "possibilities"):
        known = (
            [flag for p in context.command.params for flag in (*p.opts, *p.secondary_opts)] if context else []
        )
        return f"{option}: no such option{_near(option, known) or _see_help(context)}"
    if option:
        return f"{option}: needs a value"
    if parameter is not None:
        name = next(
            (flag for flag in parameter.opts if flag.startswith("--")), parameter.metavar or parameter.name
        )
        return (
            f"{name}: {message[:1].lower()}{message[1:]}"
            if message
            else f"{name}: missing{_see_help(context)}"
        )
    if message.startswith("No such command"):
        name = message.split("'")[1] if "'" in message else ""
        known = list(context.command.commands) if context else []
        return f"{name}: no such command{_near(name, known) or _see_help(context)}"
    return f"{message[:1].lower()}{message[1:]}{_see_help(context)}"


def _near(name: str, known: Sequence[str]) -> str:
    near = get_close_matches(name.replace("_", "-"), known, n=1)
    return f"; did you mean {near[0]}?" if near else ""


def _see_help(context: Any) -> str:  # Any: click's context, whose place depends on typer's version
    return f"; see {context.command_path} --help" if context else ""
