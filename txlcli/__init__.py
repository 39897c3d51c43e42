"""Transformer-XL on the command line and from Python."""

# As typing has it, whose import takes most of the time in which nobody listens for Ctrl-C yet.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from txlcli.api import LanguageModel as LanguageModel
    from txlcli.api import load as load

__version__ = "0.1.0"


class UserError(Exception):
    """A mistake that a user can mend: printed as one line without a traceback, exit code 2.

    The message reads `place: fault; got; remedy`. What a file or a name brings into it and cannot be
    printed is written as escapes, so it is one line, and no terminal obeys any of it.
    """

    def __init__(self, message: str) -> None:
        super().__init__(
            message
            if message.isprintable()
            else "".join(c if c.isprintable() else ascii(c)[1:-1] for c in message)
        )


def __getattr__(name: str) -> object:
    # Importing torch takes a second; only who asks for the Python interface pays it.
    if name in ("load", "LanguageModel"):
        from txlcli import api

        return getattr(api, name)
    raise AttributeError(f"module 'txlcli' has no attribute {name!r}")
