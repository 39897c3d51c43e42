"""Transformer-XL on the command line and from Python."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from txlcli.api import LanguageModel as LanguageModel
    from txlcli.api import load as load

__version__ = "0.1.0"


class UserError(Exception):
    """A mistake that a user can mend: printed as one line without a traceback, exit code 2.

    The message reads `place: fault; got; remedy`.
    """


def __getattr__(name: str) -> Any:
    # Importing torch takes a second; only who asks for the Python interface pays it.
    if name in ("load", "LanguageModel"):
        from txlcli import api

        return getattr(api, name)
    raise AttributeError(f"module 'txlcli' has no attribute {name!r}")
