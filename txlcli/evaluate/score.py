"""What an evaluation tells: its progress and the score, with the numbers derived from it."""

import math
from dataclasses import dataclass

from txlcli.model import Lengths


@dataclass(frozen=True)
class EvalProgress:
    """How far an evaluation is, in tokens run; those of warm-up included."""

    done: int
    total: int


@dataclass(frozen=True, kw_only=True)
class Score:
    """What a text scored, and how.

    Attributes:
        lengths: The lengths scored with: mem_len as asked for, same_length as applied.
        tokens: Tokens scored.
        total_nll: Their negative log-likelihood in nats, summed in float64; inf where the model gives no
            number.
        n_bytes: Bytes of the scored tokens in the text's own encoding; None: unknown.
        n_characters: Characters that end with a scored token; None: unknown.
        n_words: Words that end with a scored token; None: unknown.
        context_min: Tokens that a prediction sees directly, the current one included: the fewest in a full
            segment with a full memory. This and the next two never exceed the text; a prediction near the
            start of its document sees less where memory ends with documents.
        context_max: The most.
        receptive_field: Tokens that the last prediction of a full segment depends on through all layers.
        is_beyond_training: Whether memory or segment is longer than the model was trained with.
        n_stream: Streams that ran side by side, at most.
        n_line: Lines scored; None: not by line.
        elapsed_s: Wall time, reading and warm-up included.
        notices: What the user should know about this score, one sentence each.
    """

    lengths: Lengths
    tokens: int
    total_nll: float
    n_bytes: int | None
    n_characters: int | None
    n_words: int | None
    context_min: int
    context_max: int
    receptive_field: int
    is_beyond_training: bool
    n_stream: int
    n_line: int | None
    elapsed_s: float
    notices: tuple[str, ...]

    @property
    def nll(self) -> float:
        """Mean nats per token."""
        return self.total_nll / self.tokens

    @property
    def perplexity(self) -> float:
        """The exponential of `nll`; inf where float64 cannot hold it."""
        return _exp(self.nll)

    @property
    def bits_per_byte(self) -> float | None:
        """Bits per byte of the scored text in its own encoding."""
        return self._bits_per(self.n_bytes)

    @property
    def bits_per_char(self) -> float | None:
        """Bits per character of the scored text."""
        return self._bits_per(self.n_characters)

    @property
    def word_perplexity(self) -> float | None:
        """Perplexity per word: the loss of all tokens spread over the words."""
        return _exp(self.total_nll / self.n_words) if self.n_words else None

    @property
    def tokens_per_s(self) -> float:
        """Scored tokens per second."""
        return self.tokens / self.elapsed_s if self.elapsed_s > 0 else math.inf

    def _bits_per(self, n_units: int | None) -> float | None:
        return self.total_nll / math.log(2) / n_units if n_units else None


def _exp(x: float) -> float:
    try:
        return math.exp(x)
    except OverflowError:
        return math.inf
