"""`txl generate --interactive`: lines in, answers out, one memory through all of them."""

import sys
from typing import TYPE_CHECKING

from txlcli import UserError
from txlcli.cli.output import TextOutput, json_line
from txlcli.cli.signals import Interruption
from txlcli.files import read_stdin
from txlcli.report import Screen

if TYPE_CHECKING:
    from txlcli.api import LanguageModel
    from txlcli.generate import Dialogue, Prompt, SamplingOptions


class Conversation:
    """Answers a prompt, if there is one, and then each line of standard input until it ends.

    An empty line adds nothing: the model goes on. Ctrl-C ends an answer that is being made; where a line is
    waited for, the command.

    Args:
        lm: The model.
        options: How to draw each answer.
        screen: Where to ask, and to say what cannot be read.
        out: Where answers go.
        is_echoed: What is answered goes there too, unless it stands there as it was typed.
        is_json: Each answer is a line of JSON; `has_logprobs`: with log-probabilities.
        interruption: Whether the user asked to stop.
    """

    def __init__(
        self,
        lm: "LanguageModel",
        options: "SamplingOptions",
        screen: Screen,
        out: Screen,
        interruption: Interruption,
        *,
        is_echoed: bool,
        is_json: bool,
        has_logprobs: bool,
    ) -> None:
        self.lm, self.screen, self.out, self.interruption = lm, screen, out, interruption
        self.is_echoed, self.is_json, self.has_logprobs = is_echoed, is_json, has_logprobs
        self.is_typed = sys.stdin is not None and sys.stdin.isatty()
        self._text = TextOutput(out)
        self._dialogue: Dialogue = lm.dialogue(options)

    def hold(self, prompt: bytes | None) -> None:
        """Go on until the input ends; None: the first line is waited for.

        Raises:
            UserError: the model cannot read a line, and nobody is there to type another.
        """
        if prompt is not None:
            self._answer(prompt, is_shown=False)
        while not self.interruption() and (line := self._next_line()) is not None:
            self._answer(line, is_shown=self.is_typed and self.out.is_terminal)

    def _next_line(self) -> bytes | None:
        """Return the next line of standard input, an empty one without its end; None: there is none."""
        if self.is_typed and not self.screen.is_quiet:
            self.screen.stream.write(self.screen.fit(self.screen.style("» ", "dim")))
            self.screen.stream.flush()
        self.interruption.notice = "leaving"
        self.interruption.is_raised = True
        try:
            line = read_stdin(is_line=True)
        except KeyboardInterrupt:
            return None
        finally:
            self.interruption.is_raised = False
        if not line:
            return None
        return line if line.rstrip(b"\r\n") else b""

    def _answer(self, added: bytes, *, is_shown: bool) -> None:
        try:
            prompt = self.lm.read_prompt(added, self._dialogue)
        except UserError as error:
            if not self.is_typed:
                raise
            self.screen.warn(str(error))
            return
        for notice in prompt.notices:
            self.screen.note(notice)
        if self.is_echoed and not self.is_json and not is_shown:
            self._text.write(added)
        self._write(prompt)
        if self.is_typed and self.interruption.signal:
            self.interruption.forget()

    def _write(self, prompt: "Prompt") -> None:
        """Write the answer to something added."""
        from txlcli.generate import GeneratedText

        self.interruption.notice = "ending this answer; once more to leave at once"
        for event in self.lm.answer(self._dialogue, prompt):
            if not self.is_json:
                self._text.write(b"" if isinstance(event, GeneratedText) else event.text.encode())
            elif isinstance(event, GeneratedText):
                self.out.write_text(json_line(event, has_logprobs=self.has_logprobs))
            if self.interruption():
                break
        self._text.end()
        if self.is_typed and self.out.is_terminal and self._text.is_line_open:
            self._text.write(b"\n")  # for the eye alone: the text goes on where it was
