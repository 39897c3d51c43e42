"""All rows and what they rest on, as a table and as JSON."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from txlcli.cli.eval.protocol import SPACES
from txlcli.config import leaf
from txlcli.report import Screen, column_names, eval_table, window_table

if TYPE_CHECKING:
    from txlcli.evaluate import Score, WindowScore


@dataclass(frozen=True, kw_only=True)
class Result:
    """All rows and what they rest on."""

    run: str
    step: int
    file: str | None
    split: str | None
    n_bytes: int
    protocol: dict[str, object]
    mem_lens: tuple[int, ...]
    scores: "tuple[Score, ...]"
    windows: "tuple[WindowScore, ...]"
    notices: tuple[str, ...]

    def as_json(self) -> dict[str, object]:
        """The document that --json prints."""
        rows = [
            {
                "mem_len": length,
                "tgt_len": score.lengths.tgt_len,
                "same_length": score.lengths.same_length,
                "context_min": score.context_min,
                "context_max": score.context_max,
                "receptive_field": score.receptive_field,
                "is_beyond_training": score.is_beyond_training,
                "tokens": score.tokens,
                "nll": score.nll,
                "total_nll": score.total_nll,
                "perplexity": score.perplexity,
                "bytes_scored": score.n_bytes,
                "chars_scored": score.n_characters,
                "words_scored": score.n_words,
                "bits_per_byte": score.bits_per_byte,
                "bits_per_char": score.bits_per_char,
                "word_perplexity": score.word_perplexity,
                "tokens_per_s": score.tokens_per_s,
            }
            for length, score in zip(self.mem_lens, self.scores, strict=True)
        ]
        windows = [
            {
                "mem_len": length,
                "tgt_len": window.lengths.tgt_len,
                "attention_length": window.attention_length,
                "tokens": window.tokens,
                "nll": window.nll,
                "nll_with_memory": window.nll_with_memory,
                "nll_difference_se": window.nll_difference_se,
                "tokens_per_s": window.tokens_per_s,
                "tokens_per_s_with_memory": window.tokens_per_s_with_memory,
                "ratio": window.ratio,
                "ideal_ratio": window.ideal_ratio,
                "share_of_ideal": window.share_of_ideal,
                "batch_size": window.batch_size,
                "batch_size_with_memory": window.batch_size_with_memory,
            }
            for length, window in zip(self.mem_lens if self.windows else (), self.windows, strict=True)
        ]
        return {
            "run": self.run,
            "step": self.step,
            "file": self.file,
            "split": self.split,
            "bytes": self.n_bytes,
            "protocol": self.protocol,
            "rows": rows,
            "sliding_window": windows,
            "notices": list(self.notices),
        }


def write_table(result: Result, out: Screen) -> None:
    """Print the table, then what its numbers rest on."""
    out.draw(eval_table(result.scores, result.mem_lens, out.width))
    shown: list[str] = []
    if result.windows:
        out.write("")
        windows = window_table(result.windows, result.mem_lens, out.width)
        out.draw(windows)
        shown = column_names(windows)
    protocol = result.protocol
    clamp = "no clamp_len" if protocol["clamp_len"] is None else f"clamp_len {protocol['clamp_len']}"
    eps = protocol["norm_eps"]
    eps_rule = "" if eps == leaf("norm_eps").default else f"norm_eps {eps:g} · "
    machine = f"{protocol['precision']} on {protocol['device']} · attention {protocol['attention']}"
    text = result.file if result.file is not None else f"{result.split} text of the run"
    facts = [
        ("text", f"{text} · {result.n_bytes:,} bytes · {protocol['encoding']}"),
        ("model", f"{result.run} · step {result.step:,} ({protocol['checkpoint']})"),
        ("scored", str(protocol["scoring"])),
        *([("documents", str(protocol["documents"]))] if protocol["documents"] is not None else []),
        ("newlines", str(protocol["newlines"])),
        *([("words", str(protocol["words"]))] if protocol["words"] is not None else []),
        *([("spaces", str(protocol["spaces"]))] if protocol["spaces"] != SPACES["keep"] else []),
        (
            "rules",
            f"position {protocol['position']} · same_length {protocol['same_length']} · {clamp} · "
            f"{eps_rule}{machine}",
        ),
        *_window_facts(protocol["sliding_window"], shown),
        *(("note" if i == 0 else "", notice) for i, notice in enumerate(result.notices)),
    ]
    out.write("")
    out.explain(facts)


def _window_facts(protocol: object, shown: Sequence[str]) -> list[tuple[str, str]]:
    """What the sliding window's table rests on; what explains a column only where that is shown."""
    if not isinstance(protocol, dict):
        return []
    lines = [("window", "window"), ("sample", "sample"), ("±", "nll_difference_se"), ("speed", "speed")]
    lines += [("ideal", "ideal"), ("share", "share"), ("side by side", "batch_sizes")]
    is_column = {"±", "side by side"}
    return [(name, protocol[key]) for name, key in lines if name in shown or name not in is_column]
