"""Text that a vocabulary cannot read, where it has no id for what it does not know."""

from txlcli import UserError


class OutsideVocabulary(UserError):
    """A text holds what has no id.

    Attributes:
        symbol: It, as messages show it.
        offset: Where it begins in the text, in bytes.
        remedy: What text the vocabulary takes.
    """

    def __init__(self, symbol: str, offset: int, remedy: str, place: str = "text") -> None:
        super().__init__(f"{place}: not in the vocabulary; got {symbol} at byte {offset}; {remedy}")
        self.symbol, self.offset, self.remedy = symbol, offset, remedy

    def at(self, place: str, offset: int) -> "OutsideVocabulary":
        """Say it of a place that the user knows."""
        return OutsideVocabulary(self.symbol, offset, self.remedy, place)


def shown(symbol: str) -> str:
    """Quote a symbol for a message, escaped where it cannot be printed."""
    return f"`{symbol}`" if symbol.isprintable() else ascii(symbol)
