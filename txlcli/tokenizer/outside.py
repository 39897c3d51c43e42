"""Text that a vocabulary cannot read, where it has no id for what it does not know."""

from txlcli import UserError


class OutsideVocabulary(UserError):
    """A text holds what has no id.

    Attributes:
        symbol: It, as messages show it.
        offset: Where it begins in the text, in bytes.
        remedy: What text the vocabulary takes.
    """

    def __init__(
        self, symbol: str, offset: int, remedy: str, place: str = "text", where: str | None = None
    ) -> None:
        where = where or f"byte {offset}"
        super().__init__(f"{place}: not in the vocabulary; got {symbol} at {where}; {remedy}")
        self.symbol, self.offset, self.remedy = symbol, offset, remedy

    def at(self, place: str, where: str) -> "OutsideVocabulary":
        """Say it of a place that the user knows, such as a file and `byte 12` in it."""
        return OutsideVocabulary(self.symbol, self.offset, self.remedy, place, where)


def shown(symbol: str) -> str:
    """Quote a symbol for a message, escaped where it cannot be printed."""
    return f"`{symbol}`" if symbol.isprintable() else ascii(symbol)
