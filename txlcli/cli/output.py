"""Generated text on its way to standard output."""

from typing import TYPE_CHECKING

from txlcli.report import Screen, json_text

if TYPE_CHECKING:
    from txlcli.generate import GeneratedText


class TextOutput:
    """Writes a text as it is made.

    A carriage return waits for what follows it: as part of a line end it is no control code.

    Attributes:
        is_line_open: The last thing written is no line end.
    """

    def __init__(self, screen: Screen) -> None:
        self.screen = screen
        self.is_line_open = False
        self._waiting = b""

    def write(self, text: bytes) -> None:
        """Write some text more."""
        text = self._waiting + text
        self._waiting = b"\r" if text.endswith(b"\r") else b""
        self._put(text.removesuffix(self._waiting))

    def end(self) -> None:
        """Write what waits."""
        self._put(self._waiting)
        self._waiting = b""

    def _put(self, text: bytes) -> None:
        if text:
            self.is_line_open = not text.endswith(b"\n")
        self.screen.write_text(text)


def json_line(result: "GeneratedText", *, has_logprobs: bool) -> bytes:
    """Return a finished sample as a line of JSON."""
    names = ["sample", "prompt", "text", "tokens", "stop", "seed", "tokens_per_s"]
    names += ["logprobs"] if has_logprobs else []
    return json_text({name: getattr(result, name) for name in names}).encode() + b"\n"
