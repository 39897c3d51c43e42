"""Generation: read a prompt into the cache, then draw one token after the other at constant cost.

Position 0 is the prompt's first token, and segments of tgt_len are counted from there, as scoring counts them
from a text's first token. A token sees the memory as it was at its segment's start and everything since, so
nothing depends on the pieces in which a prompt is read, and the log-probabilities reported are those that
scoring the same tokens gives.

From the model's log-probabilities log p to the distribution that a token is drawn from, in this order, in
float64:

    control tokens get probability 0
    repetition penalty    see `penalize`
    temperature           p_i^(1/temperature), normalized; 0: all of it on the most probable token
    top-k, top-p, min-p   see `keep_top_k`, `keep_top_p`, `keep_min_p`

A sample ends with the document if its tokenizer has a token for that and it is drawn.

Every sample has a random stream of its own, a function of the seed and the sample's number, and takes one
number from it for each token.
"""

from txlcli.generate.decode import (
    DOCUMENT,
    LENGTH,
    Event,
    GeneratedText,
    Piece,
    feed,
    generate,
    in_order,
    read_prompt,
)
from txlcli.generate.dialogue import Dialogue
from txlcli.generate.joined import joined
from txlcli.generate.options import SamplingOptions
from txlcli.generate.sampling import (
    distribution,
    draw,
    keep_min_p,
    keep_top_k,
    keep_top_p,
    penalize,
    random_stream,
)
from txlcli.generate.text import Prompt, encode_prompt, split_at_stop, to_bytes

__all__ = [
    "DOCUMENT",
    "LENGTH",
    "Dialogue",
    "Event",
    "GeneratedText",
    "Piece",
    "Prompt",
    "SamplingOptions",
    "distribution",
    "draw",
    "encode_prompt",
    "feed",
    "generate",
    "in_order",
    "joined",
    "keep_min_p",
    "keep_top_k",
    "keep_top_p",
    "penalize",
    "random_stream",
    "read_prompt",
    "split_at_stop",
    "to_bytes",
]
