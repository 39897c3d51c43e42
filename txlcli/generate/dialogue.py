"""A text that a user and a model write in turn, with one memory through all of it."""

import time
from collections.abc import Iterator

import numpy as np
import torch

from txlcli.generate.decode import Event, Piece, Sample, feed, fits_in_memory, numbers, read_prompt
from txlcli.generate.options import SamplingOptions
from txlcli.generate.sampling import Floats, Ids
from txlcli.generate.text import Prompt
from txlcli.model import KVCache, TransformerXL
from txlcli.tokenizer import Tokenizer


class Dialogue:
    """A text that grows by what a user adds and by what the model answers.

    Nothing is read twice: each answer costs what its tokens and those just added cost, however long the text
    has become. The model sees what it would see had all of it been one prompt: what was added, and every
    token that it drew, those of stop texts too.

    Args:
        model: The model, in evaluation mode.
        tokenizer: Its tokenizer.
        options: How to draw each answer; one sample. Answer k is drawn from the random stream of sample k.
        precision: Precision of the matrix products, fp32, bf16 or fp16.

    Raises:
        UserError: the model's positions do not allow these lengths.
    """

    def __init__(
        self,
        model: TransformerXL,
        tokenizer: Tokenizer,
        options: SamplingOptions,
        *,
        precision: str = "fp32",
    ) -> None:
        assert not model.training, "dropout must be off"
        assert options.num_samples == 1, "who adds to one text adds to no other"
        self.n_answers = 0
        self._model, self._tokenizer, self._precision = model, tokenizer, precision
        self._options, self._lengths = options.seeded(), options.lengths(model.lengths)
        model.refuse_lengths(self._lengths)
        self._cache: KVCache | None = None
        self._unread = np.zeros(0, dtype=np.int64)
        self._last = np.zeros(0, dtype=np.int64)

    def answer(self, added: Prompt) -> Iterator[Event]:
        """Add to the text, and yield the answer as it is made and when it ends, as `generate` does.

        Who stops taking events ends the answer there; the tokens drawn until then are part of the text.

        Raises:
            UserError: the cache does not fit in memory, or the model predicts something that is not a number.
        """
        self._append(added.ids)
        assert len(self._unread), "the first text has at least the token that an empty one starts from"
        window = self._lengths.mem_len
        sample = Sample(self.n_answers, self._tokenizer, added.text, self._last, self._options, window)
        self.n_answers += 1
        elapsed_s = 0.0
        while sample.stop is None:
            begin_s = time.perf_counter()
            text = sample.add(self._read())
            self._append(np.array([sample.ids[-1]]))
            if len(sample.ids) > 1:
                elapsed_s += time.perf_counter() - begin_s
            if text:
                yield Piece(sample.number, text)
        yield sample.result(elapsed_s)

    def _append(self, ids: Ids) -> None:
        self._unread = np.append(self._unread, ids).astype(np.int64)
        kept = max(1, self._lengths.mem_len)
        self._last = np.append(self._last, ids).astype(np.int64)[-kept:]

    def _read(self) -> Floats:
        """Read what was added last, and return the log-probabilities of the next token: [V]."""
        ids = self._unread
        with fits_in_memory(self._model, self._lengths, 1):
            if self._cache is None:
                log_probs, self._cache = read_prompt(
                    self._model, ids, self._lengths, precision=self._precision
                )
            else:
                tokens = torch.from_numpy(ids)[None].to(self._model.device)
                log_probs, self._cache = feed(self._model, tokens, self._cache, precision=self._precision)
        self._unread = ids[:0]
        row: Floats = numbers(log_probs)[0]
        return row
