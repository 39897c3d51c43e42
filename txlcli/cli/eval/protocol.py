"""What the numbers rest on, and what a reader of them should know."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from txlcli.cli.eval.request import Request
from txlcli.cli.eval.text import Text
from txlcli.report import one_line

if TYPE_CHECKING:
    from txlcli.api import LanguageModel
    from txlcli.config import ModelConfig
    from txlcli.evaluate import Score, WindowScore
    from txlcli.tokenizer import CorpusWordTokenizer

_NEWLINES = {
    "keep": "part of the text, scored like every other token",
    "drop": "left out of the text, neither scored nor counted",
    "eos": "the word {newline}, scored like every other token",
}
_MEMORY_STARTS = {"empty": "empty memory", "zeros": "a memory of zeros"}
SPACES = {"keep": "part of the text", "underscore": "read as underscores"}


def text_protocol(
    request: Request, lm: "LanguageModel", text: Text, precision: str, checkpoint: str, score: "Score"
) -> dict[str, object]:
    """What the numbers depend on beside the text and the weights."""
    model = lm.config.model
    start = _MEMORY_STARTS[lm.model.lengths.memory_start]
    by_line = f"each line from {start} after a newline token, its first token scored"
    whole = f"from {start} over the whole text, every token but the first scored"
    return {
        "memory_start": lm.model.lengths.memory_start,
        "scoring": by_line if request.is_by_line else whole,
        "newlines": _NEWLINES[lm.config.data.newlines].format(newline=_newline_word(lm)),
        "words": _words(request, lm),
        "documents": _documents(request, lm, text),
        "n_documents": text.n_documents,
        "reset_memory_at_documents": lm.model.document_end is not None,
        "spaces": SPACES[lm.config.data.spaces],
        "position": _position(model),
        # As asked for: a row at mem_len 0 may have had to do without it, which its notice says.
        "same_length": request.same_length or lm.model.lengths.same_length,
        "clamp_len": score.lengths.clamp_len,
        "norm_eps": model.norm_eps,
        "checkpoint": checkpoint,
        "tokenizer": lm.tokenizer.kind,
        "n_vocab": lm.tokenizer.n_vocab,
        "encoding": "raw bytes" if _reads_bytes(lm, text) else text.encoding,
        "precision": precision,
        "device": str(lm.device),
        "attention": lm.model.attention_name,
        "is_lower_bound": bool(losses(request, lm, text)),
        "unknown_tokens": text.info.n_unknown,
    }


def window_protocol(lm: "LanguageModel", window: "WindowScore") -> dict[str, object]:
    """What the numbers of the sliding window rest on."""
    from txlcli.evaluate import layer_macs

    per_token, per_key = layer_macs(lm.model)
    return {
        "window": "without memory: for each token all layers anew over the tokens before it, as many as are "
        "seen at most with memory, fewer at the text's beginning",
        "sample": f"{window.tokens:,} tokens, one drawn from each of as many equal stretches of the text; "
        "both losses are theirs",
        "nll_difference_se": "the standard error of the difference of the losses",
        "speed": "medians of pieces timed in turn, memory full, each side in its fastest batch size; the "
        "vocabulary once a scored token",
        "ideal": f"w (C + a w/2) / (C + a w), w the window; multiply-adds of a layer: C = {per_token:,} a "
        f"token, a = {per_key:,} a key",
        "share": "ratio / ideal; above 1 where a text or sample is too short to be timed, or hidden keys "
        "are computed",
        "batch_sizes": "windows and streams in a step",
        "macs_per_token": per_token,
        "macs_per_key": per_key,
    }


def _reads_bytes(lm: "LanguageModel", text: Text) -> bool:
    """Whether the text's bytes are read as they are; JSON is text, whatever the tokenizer."""
    return lm.tokenizer.kind == "byte" and text.documents.text_field is None


def _newline_word(lm: "LanguageModel") -> str:
    """The word that a newline is, for a vocabulary that has one."""
    words = _corpus_words(lm)
    return "" if words is None else words.newline


def _is_lowered(lm: "LanguageModel") -> bool:
    words = _corpus_words(lm)
    return words is not None and words.is_lowered


def _corpus_words(lm: "LanguageModel") -> "CorpusWordTokenizer | None":
    from txlcli.tokenizer import CorpusWordTokenizer, MosesTokenizer

    words = lm.tokenizer.words if isinstance(lm.tokenizer, MosesTokenizer) else lm.tokenizer
    return words if isinstance(words, CorpusWordTokenizer) else None


def _words(request: Request, lm: "LanguageModel") -> str | None:
    """How a vocabulary of corpus words finds them; None: it has other units."""
    if lm.config.data.newlines != "eos":
        return None
    split = "what white space separates; raw text needs --moses"
    raw = "raw text, split by Moses' rules; bytes, characters and words counted are the raw text's"
    return raw if request.is_raw else split


def _documents(request: Request, lm: "LanguageModel", text: Text) -> str | None:
    """How documents were told apart, and what that does to the score; None: as in the run there are none."""
    rule = text.documents
    if rule.text_field is not None:
        what = f"JSON lines, field {one_line(rule.text_field)}; what else stands in them is not counted"
    elif rule.document_separator is not None:
        what = f"separated by {one_line(rule.document_separator)}, whose bytes count with a document's end"
    elif rule.document_per_file:
        what = "one per file"
    else:
        return None if lm.tokenizer.document_end is None else "none, the whole is one text"
    if text.n_documents is None:
        return f"{what}; they run into one another, since the vocabulary has no token for their end"
    memory = "ends with each" if lm.model.document_end is not None else "goes on through them"
    return f"{text.n_documents:,} · {what} · a token for each end is scored too · memory {memory}"


def _position(model: "ModelConfig") -> str:
    """The scheme of positions, and for absolute ones where they start."""
    is_absolute = model.position in ("sinusoid", "learned")
    return f"{model.position}, {model.absolute_positions}" if is_absolute else model.position


def losses(request: Request, lm: "LanguageModel", text: Text) -> list[str]:
    """Say what of the text is counted that the tokens do not tell, or may not: then bits are lower bounds."""
    data, info, found = lm.config.data, text.info, list[str]()
    if not lm.tokenizer.is_lossless and info.n_unknown:
        found.append(f"{info.n_unknown / info.n_tokens:.2%} of the tokens are unknown words")
    if data.newlines == "eos":
        more = ", and other characters are as Moses' rules write them" if request.is_raw else ""
        found.append(f"of the white space only newlines are scored{more}")
    if _is_lowered(lm):
        found.append("capital letters are read as small ones")
    if data.spaces == "underscore":
        found.append("spaces and underscores are one character")
    what = "the run's text" if request.file is None else one_line(text.name)
    if info.n_replaced:
        are = "byte of {} is not {} and is" if info.n_replaced == 1 else "bytes of {} are not {} and are"
        found.append(f"{info.n_replaced:,} {are.format(what, text.encoding)} read as U+FFFD")
    elif info.n_replaced is None and data.encoding_errors == "replace" and not _reads_bytes(lm, text):
        found.append(f"bytes of {what} that are not {text.encoding}, not counted here, are read as U+FFFD")
    return found


def notices_of(
    request: Request,
    lm: "LanguageModel",
    text: Text,
    checkpoint: str,
    scores: "Sequence[Score]",
    *,
    has_offsets: bool,
) -> tuple[str, ...]:
    """What a reader of the table should know, each sentence once."""
    from txlcli.run import read_pointers

    notices = [*([] if lm.damage is None else [lm.damage]), *lm.notices, *text.notices]
    if (
        request.file is None
        and request.split == "valid"
        and checkpoint == "best"
        and read_pointers(lm.run).best
    ):
        notices.append("this text chose the checkpoint, so a fresh one may score a little worse")
    if any(score.is_beyond_training for score in scores):
        trained = lm.model.lengths
        notices.append(f"* longer than in training: mem_len {trained.mem_len}, tgt_len {trained.tgt_len}")
    if has_offsets and not text.has_offsets:
        notices.append("byte offsets are left out: not all that stands between the tokens is counted")
    elif request.is_raw and has_offsets:
        notices.append("byte offsets beside characters that Moses' rules replaced are a guess")
    notices.extend(
        f"{loss}, so bits per byte and character are lower bounds" for loss in losses(request, lm, text)
    )
    notices.extend(notice for score in scores for notice in score.notices)
    return tuple(dict.fromkeys(notices))
