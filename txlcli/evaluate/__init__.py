"""Scoring text exactly: every token but the first once, whatever the number of streams.

From its second token on a text is cut into segments of tgt_len (T) targets: the segment grid. One stream
would run them in order with its memory. Several streams run neighbouring stretches of the text side by side
and give the same totals, because what a segment's outputs depend on ends somewhere:

* Memory holds the last mem_len (M) rows before a segment's start, which lie in the c = ceil(M / T) segments
  before it. From an empty start layer 1 therefore reads its true inputs after c segments, layer 2 after 2 c,
  and the last of N layers after N c. It rounds up once a layer, because memory begins at a segment's start.
* Under same_length a query sees `span` keys, itself included, wherever segments begin: layer by layer that is
  N (span - 1) tokens, ceil(N (span - 1) / T) segments.

A model whose memory ends with documents sees less, and never more.

So every stream but the first starts that many segments early, at a segment's start with an empty memory, and
the losses of those are not counted. Absolute positions restart on the same grid in every stream, or run on
through the text: then each stream begins at its place there. `lay_out` gives all streams equally many
segments to run; `choose_streams` weighs the warm-up against what streams side by side save.

Inputs go through the model's inference path, which keeps projected keys and values. Losses are float32 at
least and summed in float64, so totals do not drift with the length of a text.

`window` compares all this with a model that has no memory and runs a window of the text for every token.
"""

from txlcli.evaluate.running import Record
from txlcli.evaluate.score import EvalProgress, Score
from txlcli.evaluate.scoring import evaluate, evaluate_by_line, final_score
from txlcli.evaluate.streams import (
    Stream,
    choose_streams,
    context,
    lay_out,
    receptive_field,
)
from txlcli.evaluate.tokens import TokenNats, TokenScore, token_scores
from txlcli.evaluate.window import Draw, WindowScore, layer_macs, score_window, window_length

__all__ = [
    "Draw",
    "EvalProgress",
    "Record",
    "Score",
    "Stream",
    "TokenNats",
    "TokenScore",
    "WindowScore",
    "choose_streams",
    "context",
    "evaluate",
    "evaluate_by_line",
    "final_score",
    "lay_out",
    "layer_macs",
    "receptive_field",
    "score_window",
    "token_scores",
    "window_length",
]
