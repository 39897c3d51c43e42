"""Reading a prompt into the cache, and drawing one token after the other."""

import codecs
import time
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from txlcli import UserError
from txlcli.device import autocast, is_out_of_memory
from txlcli.generate.options import SamplingOptions
from txlcli.generate.sampling import Floats, Ids, distribution, draw, random_stream
from txlcli.generate.text import Prompt, split_at_stop
from txlcli.model import KVCache, Lengths, TransformerXL
from txlcli.tokenizer import Tokenizer

# Attention scores take heads x piece x keys numbers, so a long segment of a prompt is read in several pieces.
_PIECE_TOKENS = 256

LENGTH = "length"
DOCUMENT = "document"


@dataclass(frozen=True)
class Piece:
    """Text of a sample as it is made: whole characters that no stop text can take back."""

    sample: int
    text: str


@dataclass(frozen=True)
class GeneratedText:
    """A finished sample.

    Attributes:
        sample: Its number, from 0.
        prompt: The prompt's text.
        text: The text after the prompt, without the stop text that ended it.
        tokens: Tokens drawn, those of the stop text and the document's end included.
        stop: The stop text that ended it, `document` where the model ended its document, else `length`.
        seed: Seed of the random stream, together with `sample`.
        tokens_per_s: Speed after the prompt and the first token; None if there was no second.
        logprobs: Of each token drawn the model's own log-probability in nats, before temperature and filters.
        ids: The tokens drawn.
    """

    sample: int
    prompt: str
    text: str
    tokens: int
    stop: str
    seed: int
    tokens_per_s: float | None
    logprobs: tuple[float, ...] = field(repr=False)
    ids: tuple[int, ...] = field(repr=False)


Event: TypeAlias = Piece | GeneratedText


def generate(
    model: TransformerXL,
    tokenizer: Tokenizer,
    prompt: Prompt,
    options: SamplingOptions,
    *,
    precision: str = "fp32",
) -> Iterator[Event]:
    """Continue a prompt, yielding text as it is made and each sample when it ends.

    The prompt is read once for all samples, which then run side by side; the pieces of several samples are
    interleaved, `in_order` sorts them. No random state but the samples' own is touched.

    Args:
        model: The model, in evaluation mode.
        tokenizer: Its tokenizer.
        prompt: What to continue.
        options: How.
        precision: Precision of the matrix products, fp32, bf16 or fp16.

    Raises:
        UserError: the model's positions do not allow these lengths, the cache does not fit in memory, or the
            model predicts something that is not a number.
    """
    assert not model.training, "dropout must be off"
    options, asked = options.seeded(), options.lengths(model.lengths)
    model.refuse_lengths(asked)
    lengths = _at_most(asked, len(prompt.ids) + options.max_tokens)
    n_samples = options.num_samples
    with fits_in_memory(model, lengths, n_samples):
        log_probs, cache = read_prompt(model, prompt.ids, lengths, precision=precision)
        cache = cache.repeat(n_samples)
    window = lengths.mem_len
    samples = [Sample(k, tokenizer, prompt.text, prompt.ids, options, window) for k in range(n_samples)]
    rows = np.broadcast_to(numbers(log_probs), (len(samples), log_probs.shape[-1]))
    elapsed_s = 0.0
    for n_drawn in range(1, options.max_tokens + 1):
        begin_s = time.perf_counter()
        if n_drawn > 1:
            # Samples that ended stay in the batch: their last token is fed again and the result ignored.
            tokens = torch.tensor([[sample.ids[-1]] for sample in samples], device=log_probs.device)
            log_probs, cache = feed(model, tokens, cache, precision=precision)
            rows = numbers(log_probs)
        running = [sample for sample in samples if sample.stop is None]
        pieces = [Piece(sample.number, sample.add(rows[sample.number])) for sample in running]
        if n_drawn > 1:
            elapsed_s += time.perf_counter() - begin_s
        yield from (piece for piece in pieces if piece.text)
        for sample in running:
            if sample.stop is not None:
                yield sample.result(elapsed_s)
        if all(sample.stop is not None for sample in samples):
            return


def in_order(events: Iterable[Event]) -> Iterator[Event]:
    """Reorder what `generate` yields so that samples follow one another, the first as it is made."""
    current, waiting = 0, dict[int, deque[Event]]()
    for event in events:
        waiting.setdefault(event.sample, deque()).append(event)
        while queue := waiting.get(current):
            ready = queue.popleft()
            yield ready
            if isinstance(ready, GeneratedText):
                current += 1


# From tokens to log-probabilities


@torch.inference_mode()
def read_prompt(
    model: TransformerXL, ids: Ids, lengths: Lengths, *, precision: str = "fp32"
) -> tuple[Float[Tensor, "1 V"], KVCache]:
    """Read a prompt from its beginning, and return the log-probabilities of the next token and the cache.

    Only the end of a long prompt is read: its last segment and those that warm up the layers for it (see
    `Lengths.warm_segments`). Starting there, on the grid and at that position, changes no result.
    """
    n_segments = lengths.warm_segments(len(model.layers))
    begin = max(0, (len(ids) - 1) // lengths.tgt_len - n_segments) * lengths.tgt_len
    tokens = torch.from_numpy(np.asarray(ids[begin:], dtype=np.int64))[None].to(model.device)
    with autocast(tokens.device, precision):
        cache = model.new_cache(1, lengths, torch.tensor([begin], device=model.device))
    return feed(model, tokens, cache, precision=precision)


@torch.inference_mode()
def feed(
    model: TransformerXL, tokens: Int[Tensor, "B L"], cache: KVCache, *, precision: str = "fp32"
) -> tuple[Float[Tensor, "B V"], KVCache]:
    """Read any number of further tokens, across segments; return the log-probabilities of what follows them.

    The cache handed in must not be used again.
    """
    begin, n_tokens, tgt_len = 0, tokens.shape[1], cache.lengths.tgt_len
    with autocast(tokens.device, precision):
        while begin < n_tokens:
            room = tgt_len - cache.n_segment % tgt_len
            end = begin + min(room, _PIECE_TOKENS, n_tokens - begin)
            hidden, cache = model.extend(tokens[:, begin:end], cache)
            begin = end
        return model.log_probs(hidden[:, -1]), cache


def numbers(log_probs: Float[Tensor, "B V"]) -> Floats:
    """Return log-probabilities as float64 on the CPU; MPS has no float64, so they move first."""
    numbers: Floats = log_probs.cpu().double().numpy()
    return numbers


def _at_most(lengths: Lengths, n_tokens: int) -> Lengths:
    """Cut lengths beyond the whole text, which changes no result, so that the cache is no longer than it."""
    lengths = lengths._replace(tgt_len=min(lengths.tgt_len, n_tokens))
    if lengths.n_rows_at_start:
        return lengths
    return lengths._replace(mem_len=min(lengths.mem_len, n_tokens))


@contextmanager
def fits_in_memory(model: TransformerXL, lengths: Lengths, n_samples: int) -> Iterator[None]:
    """Word memory that runs out in the block, in which the cache of some samples is made.

    Raises:
        UserError: it did.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise UserError(_too_large(model, lengths, n_samples)) from error


def _too_large(model: TransformerXL, lengths: Lengths, n_samples: int) -> str:
    n_rows = lengths.mem_len + lengths.tgt_len
    row = 2 * len(model.layers) * model.n_head * model.d_head * model.dtype.itemsize
    return (
        f"--mem-len: {lengths.mem_len:,} rows at tgt_len {lengths.tgt_len:,} do not fit in memory; "
        f"the cache of {n_samples:,} samples takes {n_samples * n_rows * row / 1e9:,.1f} GB; "
        f"lower --mem-len, --tgt-len or --num-samples"
    )


class Sample:
    """One sample in the making.

    Args:
        number: Its number, from 0.
        tokenizer: The tokenizer.
        prompt: The text that it is told to follow.
        before: The tokens before it, at least one; of many the last `window` are enough.
        options: How to draw; seeded.
        window: How many tokens the repetition penalty looks at.
    """

    def __init__(
        self,
        number: int,
        tokenizer: Tokenizer,
        prompt: str,
        before: Ids,
        options: SamplingOptions,
        window: int,
    ) -> None:
        assert options.seed is not None
        self.number, self.tokenizer, self.prompt, self.options = number, tokenizer, prompt, options
        self.control_ids = np.array(tokenizer.control_ids, dtype=np.int64)
        self.random = random_stream(options.seed, number)
        self.recent: deque[int] = deque(map(int, before[max(0, len(before) - window) :]), maxlen=window)
        self.previous = int(before[-1])
        self.decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self.waiting = ""
        self.ids: list[int] = []
        self.logprobs: list[float] = []
        self.texts: list[str] = []
        self.stop: str | None = None

    def add(self, log_probs: Floats) -> str:
        """Draw a token, and return the text that can be shown since."""
        needs_recent = self.options.repetition_penalty != 1
        recent = np.fromiter(self.recent if needs_recent else (), dtype=np.int64)
        token = draw(distribution(log_probs, recent, self.control_ids, self.options), self.random.random())
        source = self.tokenizer.decode([token], after=self.previous)
        self.ids.append(token)
        self.logprobs.append(float(log_probs[token]))
        self.recent.append(token)
        self.previous = token

        end = None
        if token == self.tokenizer.document_end:
            end = DOCUMENT
        elif len(self.ids) == self.options.max_tokens:
            end = LENGTH
        text = self.waiting + self.decoder.decode(source, final=end is not None)
        shown, self.waiting, self.stop = split_at_stop(text, self.options.stop)
        if end is not None and self.stop is None:
            shown, self.stop = shown + self.waiting, end
        self.texts.append(shown)
        return shown

    def result(self, elapsed_s: float) -> GeneratedText:
        """Return the finished sample; `elapsed_s` is the time since the first token."""
        assert self.stop is not None
        assert self.options.seed is not None
        n_later = len(self.ids) - 1
        return GeneratedText(
            sample=self.number,
            prompt=self.prompt,
            text="".join(self.texts),
            tokens=len(self.ids),
            stop=self.stop,
            seed=self.options.seed,
            tokens_per_s=n_later / elapsed_s if n_later else None,
            logprobs=tuple(self.logprobs),
            ids=tuple(self.ids),
        )
