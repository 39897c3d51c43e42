"""What a user may ask of generation."""

import math
import secrets
from dataclasses import dataclass, replace

from txlcli import UserError
from txlcli.model import Lengths


@dataclass(frozen=True, kw_only=True)
class SamplingOptions:
    """What a user may ask of generation; checked when it is made, so before any model is loaded.

    Attributes:
        max_tokens: Tokens to draw for each sample.
        temperature: Above 1 flattens the distribution, below 1 sharpens it, 0 takes the most probable token.
        top_k: Draw from the `top_k` most probable tokens; 0: from all.
        top_p: Draw from the fewest most probable tokens that have `top_p` of the probability; 1: from all.
        min_p: Draw from tokens at least `min_p` times as probable as the most probable one; 0: from all.
        repetition_penalty: Above 1 makes tokens among the last mem_len less probable; 1: off.
        seed: Seed of the random streams; None: a fresh one.
        num_samples: Samples to draw side by side.
        stop: Texts that end a sample; they are not part of its text.
        mem_len: Rows of memory; None: as trained.
        tgt_len: Tokens in a segment; None: as trained.

    Raises:
        UserError: a value that makes no sense; the message names the flag.
    """

    max_tokens: int = 500
    temperature: float = 0.8
    top_k: int = 0
    top_p: float = 0.95
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    num_samples: int = 1
    stop: tuple[str, ...] = ()
    mem_len: int | None = None
    tgt_len: int | None = None

    def __post_init__(self) -> None:
        _require(self.max_tokens >= 1, "--max-tokens", "must be 1 or more", self.max_tokens)
        is_hot = 0 <= self.temperature < math.inf
        _require(is_hot, "--temperature", "must be a finite number, 0 or more", self.temperature)
        _require(self.top_k >= 0, "--top-k", "must be 0 (off) or more", self.top_k)
        _require(0 < self.top_p <= 1, "--top-p", "must be above 0 and at most 1", self.top_p)
        _require(0 <= self.min_p <= 1, "--min-p", "must be from 0 to 1", self.min_p)
        is_penalty = 0 < self.repetition_penalty < math.inf
        _require(
            is_penalty, "--repetition-penalty", "must be finite and above 0 (1: off)", self.repetition_penalty
        )
        _require(self.seed is None or self.seed >= 0, "--seed", "must be 0 or more", self.seed)
        _require(self.num_samples >= 1, "--num-samples", "must be 1 or more", self.num_samples)
        _require(all(self.stop), "--stop", "must not be empty", "''")
        _require(self.mem_len is None or self.mem_len >= 0, "--mem-len", "must be 0 or more", self.mem_len)
        _require(self.tgt_len is None or self.tgt_len >= 1, "--tgt-len", "must be 1 or more", self.tgt_len)

    def seeded(self) -> "SamplingOptions":
        """Return these options with a seed, a fresh one if none was given."""
        return self if self.seed is not None else replace(self, seed=secrets.randbits(32))

    def lengths(self, trained: Lengths) -> Lengths:
        """Return the lengths to generate at: those asked for, else those of training."""
        lengths = trained._replace(
            mem_len=trained.mem_len if self.mem_len is None else self.mem_len,
            tgt_len=trained.tgt_len if self.tgt_len is None else self.tgt_len,
        )
        # That rule would leave a query without any key; scoring drops it there too.
        return lengths._replace(same_length="off") if lengths.span == 0 else lengths


def _require(is_met: bool, flag: str, rule: str, got: object) -> None:
    if not is_met:
        raise UserError(f"{flag}: {rule}; got {got}")
