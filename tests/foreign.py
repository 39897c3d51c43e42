"""Hold `txl convert` against the three code bases whose checkpoints it opens.

    python tests/foreign.py make --authors FOLDER --nvidia FOLDER --hugging-face PYTHON --out FOLDER
    python tests/foreign.py compare FOLDER

`make` lets each code base write tiny models with random weights, as files in exactly the form that it
writes, and records the log-probabilities that its own code then gives three segments with memory, and a
text. `compare` converts each file, runs our model over the same segments and text, and prints the largest
differences. It exits with 1 where one is above its bound: 1e-5 in fp32; 1e-10 in float64.

Nothing of the code bases is part of this repository. They are imported, in interpreters of their own, from

    --authors        a checkout of the Transformer-XL authors' code (kimiyoung/transformer-xl), or its folder
                     `pytorch`
    --nvidia         NVIDIA's folder PyTorch/LanguageModeling/Transformer-XL/pytorch, with mem_transformer.py
    --hugging-face   the Python of an environment with transformers 4.35, sacremoses and torch
    --old            the Python of an environment with an old torch: the authors' code writes some files with
                     it too (tried: torch 1.0.1 on Python 3.7, where their code runs as it is, and 1.4.0)

and are changed in memory only:

    authors     `torch.version.cuda` gets a value on a torch for CPUs; masks of bytes are read as booleans
    nvidia      the package `utils` is entered without its __init__, which needs an NVIDIA driver
    in float64  `Tensor.float` leaves float64 alone, since attention casts scores to float32 and back; models
                are built under a float64 default, and their sinusoids' frequencies are computed in it.
                Hugging Face's code builds float32 whatever the default, so its models are cast afterwards

Files always hold float32 (or half) weights. The float64 numbers are those of the same weights, so they hold
all that a conversion must keep.

`--only` takes names of cases. `make --golden` makes the files of tests/golden: fewer cases, and streams that
hold a class's source text (the legacy form of `torch.save`) get one line of ours in its place.

The functions of the children also run on Python 3.7.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import io
import json
import math
import os
import random
import subprocess
import sys
import tempfile
import types
import warnings
import zlib
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

N_STREAM = 2
SEGMENTS = (6, 6, 4)
TGT_LEN = 6
STEP = 40
FP32_BOUND, FP64_BOUND = 1e-5, 1e-10


# The cases


@dataclass(frozen=True)
class Case:
    """A model, and the form of its files.

    Attributes:
        name: Folder of the case; begins with its kind: `authors`, `nvidia` or `hf`.
        model: What differs from `MODEL`.
        text: What the vocabulary is made of: `words` as in WikiText-103, `lower` as in Penn Treebank, `lm1b`,
            `bytes` as in enwik8, `letters` as in text8; for Hugging Face the file it lies in; `bpe`.
        stream: Form of torch.save: `zip` or `legacy`; for Hugging Face also `safetensors` and `alias`.
        is_old: Written by the old torch.
        is_golden: Part of tests/golden.
        refused: Part of the message by which it is to be refused; None: it converts.
    """

    name: str
    model: dict[str, Any] = field(default_factory=dict)
    text: str = "words"
    stream: str = "zip"
    is_old: bool = False
    is_golden: bool = False
    refused: str | None = None

    @property
    def kind(self) -> str:
        return self.name.split("-")[0]


MODEL: dict[str, Any] = {
    "n_layer": 2,
    "n_head": 2,
    "d_model": 16,
    "d_head": 6,
    "d_inner": 20,
    "d_embed": 16,
    "div_val": 1,
    "cutoffs": [],
    "tied": True,
    "tie_projs": [False],
    "pre_lnorm": False,
    "mem_len": 8,
    "same_length": False,
    "clamp_len": -1,
    "attn_type": 0,
    # Hugging Face's alone
    "untie_r": True,
    "layer_norm_epsilon": 1e-5,
    # The authors' alone
    "is_half": False,
}
CUT = {"cutoffs": [10, 20], "tie_projs": [False, True, True]}
DIV4 = {**CUT, "div_val": 4}
NONE, ALL, ODD = [False] * 3, [True] * 3, [True, False, True]
LIMITS = {"same_length": True, "clamp_len": 5}

CASES = (
    Case("authors-plain"),
    Case("authors-plain-legacy", stream="legacy"),
    Case("authors-bytes", {**LIMITS, "mem_len": 9}, text="bytes"),
    Case("authors-letters", {"tied": False, "mem_len": 3, "same_length": True}, text="letters"),
    Case("authors-lower", {"mem_len": 6}, text="lower"),
    Case("authors-cutoffs", CUT),
    Case("authors-cutoffs-untied", {**CUT, "tied": False}, stream="legacy"),
    Case("authors-div4", DIV4),
    Case("authors-div4-limits", {**DIV4, **LIMITS}, stream="legacy", is_golden=True),
    Case("authors-div4-lm1b", {**DIV4, "tie_projs": NONE}, text="lm1b"),
    Case("authors-div4-untied", {**DIV4, "tied": False, "tie_projs": NONE}),
    Case("authors-div4-all", {**DIV4, "tie_projs": ALL}),
    Case("authors-div4-odd", {**DIV4, "tie_projs": ODD}),
    Case("authors-embed", {"d_embed": 8}),
    Case("authors-embed-tied", {"d_embed": 8, "tie_projs": [True]}),
    Case("authors-embed-cutoffs", {**CUT, "d_embed": 8}),
    Case("authors-embed-cutoffs-none", {**CUT, "d_embed": 8, "tie_projs": NONE}),
    Case(
        "authors-embed-cutoffs-untied",
        {**CUT, "d_embed": 8, "tied": False, "tie_projs": ODD, "pre_lnorm": True, "mem_len": 4},
        text="bytes",
        is_golden=True,
    ),
    Case("authors-prenorm", {"pre_lnorm": True, "mem_len": 3}),
    Case("authors-half", {**DIV4, "is_half": True}),
    Case("authors-no-memory", {"mem_len": 0}),
    Case("authors-long-memory", {"mem_len": 40, "same_length": True}),
    Case("authors-old", is_old=True),
    Case("authors-old-div4", {**DIV4, **LIMITS}, is_old=True),
    Case("authors-old-cutoffs", {**CUT, "tied": False, "is_half": True}, text="letters", is_old=True),
    Case("authors-old-prenorm", {"pre_lnorm": True, "d_embed": 8}, text="bytes", is_old=True),
    Case("authors-old-golden", {**CUT, "is_half": True}, text="letters", is_old=True, is_golden=True),
    Case("authors-shaw", {"attn_type": 1}, refused="attn_type"),
    Case("authors-absolute", {"attn_type": 2}, refused="attn_type"),
    Case("authors-div2-one-cluster", {"div_val": 2}, refused="div_val"),
    Case("nvidia-plain"),
    Case("nvidia-plain-legacy", stream="legacy"),
    Case("nvidia-cutoffs", {**CUT, "mem_len": 6}),
    Case("nvidia-cutoffs-untied", {**CUT, "tied": False}),
    Case("nvidia-div4", DIV4),
    Case("nvidia-div4-limits", {**DIV4, **LIMITS}, is_golden=True),
    Case("nvidia-div4-none", {**DIV4, "tie_projs": NONE}, text="lm1b"),
    Case("nvidia-div4-untied", {**DIV4, "tied": False, "tie_projs": NONE}),
    Case("nvidia-div4-all", {**DIV4, "tie_projs": ALL}),
    Case("nvidia-div4-odd", {**DIV4, "tie_projs": ODD}),
    Case("nvidia-embed", {"d_embed": 8}),
    Case("nvidia-embed-tied", {"d_embed": 8, "tie_projs": [True]}),
    Case("nvidia-embed-cutoffs", {**CUT, "d_embed": 8}),
    Case(
        "nvidia-embed-cutoffs-untied",
        {**CUT, "d_embed": 8, "tied": False, "pre_lnorm": True, "mem_len": 4, "same_length": True},
        stream="legacy",
        text="bytes",
        is_golden=True,
    ),
    Case("nvidia-prenorm", {"pre_lnorm": True, "mem_len": 3, "same_length": True}),
    Case("nvidia-no-memory", {"mem_len": 0}),
    Case("nvidia-bpe", {**CUT}, text="bpe"),
    Case("nvidia-shaw", {"attn_type": 1}, refused="attn_type"),
    Case("hf-div4", {**DIV4, **LIMITS}, text="vocab.pkl", stream="safetensors"),
    Case("hf-div4-bin", {**DIV4, **LIMITS}, text="vocab.pkl"),
    Case("hf-div4-legacy", {**DIV4, **LIMITS}, text="vocab.bin", stream="legacy"),
    Case(
        "hf-div4-golden",
        {**DIV4, **LIMITS, "layer_norm_epsilon": 1e-3},
        text="vocab.bin",
        stream="safetensors",
        is_golden=True,
    ),
    Case("hf-div4-alias", {**DIV4}, text="vocab.txt", stream="alias", is_golden=True),
    Case("hf-div4-none", {**DIV4, "tie_projs": NONE}, text="vocab.pkl", stream="safetensors"),
    Case("hf-div4-untied", {**DIV4, "tied": False, "tie_projs": NONE}, text="vocab.json"),
    Case("hf-div4-all", {**DIV4, "tie_projs": ALL}, text="vocab.bin", stream="safetensors"),
    Case("hf-div4-odd", {**DIV4, "tie_projs": ODD}, text="vocab.bin", stream="safetensors"),
    Case("hf-shared-bias", {"untie_r": False}, text="vocab.pkl", stream="safetensors"),
    Case("hf-shared-bias-bin", {"untie_r": False, "mem_len": 3}, text="none"),
    Case("hf-cutoffs", CUT, text="vocab.pkl", stream="safetensors"),
    Case("hf-embed", {"d_embed": 8, "tie_projs": [True]}, text="vocab.pkl", stream="safetensors"),
    Case("hf-embed-cutoffs", {**CUT, "d_embed": 8}, text="vocab.bin", stream="safetensors"),
    Case(
        "hf-embed-golden",
        {**CUT, "d_embed": 8, "untie_r": False, "pre_lnorm": True, "tied": False, "mem_len": 3},
        text="vocab.json",
        stream="legacy",
        is_golden=True,
    ),
    Case("hf-prenorm", {"pre_lnorm": True, "same_length": True}, text="vocab.pkl", stream="safetensors"),
    Case("hf-no-memory", {"mem_len": 0}, text="vocab.pkl", stream="safetensors"),
    Case("hf-long-memory", {"mem_len": 1600}, text="vocab.pkl", stream="safetensors"),
)


# The texts that vocabularies are made of, and those that are scored

# Written here; the marks are those of WikiText-103.
WORDS_LINE = (
    "the , . of and in to = a was <unk> @-@ on as for river with old bridge stone over winter boats "
    "harbor light they sailed north again"
)
WORDS = WORDS_LINE.split()


def draw_lines(text: str, n_units: int, seed: int) -> list[str]:
    """Return lines of a random text in which every unit of its vocabulary occurs, some lines empty."""
    rng = random.Random(seed)
    if text == "letters":
        letters = "abcdefghijklmnopqrstuvwxyz "
        line = "".join(rng.choices(letters, k=n_units)) + letters
        return [" ".join(line.split())]
    if text == "bytes":
        symbols = [*"abcdefghijklmnopqrstuvwxyz .", "é"]
        units = rng.choices(symbols, k=n_units) + symbols
    else:
        units = rng.choices(WORDS, weights=range(40, 40 - len(WORDS), -1), k=n_units) + WORDS
    lines = []
    while units:
        n = rng.choice((0, 3, 5, 8))
        line = ("" if text == "bytes" else " ").join(units[:n]).strip()
        lines.append(line.capitalize() if text == "lower" else line)
        units = units[n:]
    return lines


def as_published(text: str, lines: Sequence[str]) -> str:
    """Return lines in the form that the authors' preparation of a corpus gives them."""
    if text == "bytes":
        lines = [" ".join(str(byte) for byte in line.encode()) for line in lines]
    if text == "letters":
        lines = [" ".join("_" if letter == " " else letter for letter in line) for line in lines]
    return "".join(line + "\n" for line in lines)


def write_corpus(folder: Path, text: str) -> None:
    """Write what the authors' scripts download and prepare."""
    for seed, name in enumerate(("train", "valid", "test")):
        lines = draw_lines(text, 600 if name == "train" else 60, seed)
        (folder / (name + ".txt")).write_text(as_published(text, lines), encoding="utf-8")
    (folder / "1b_word_vocab.txt").write_text(
        "".join(word + "\n" for word in ["<S>", "<UNK>", *(w for w in WORDS if w != "<unk>")]),
        encoding="utf-8",
    )


DATASETS = {"words": "wt103", "lower": "ptb", "lm1b": "lm1b", "bytes": "enwik8", "letters": "text8"}


def vocabulary_options(text: str, folder: Path) -> dict[str, Any]:
    """Return what the authors' code makes its vocabulary with, data set by data set."""
    if text in ("words", "lower"):
        return {"special": ["<eos>"], "lower_case": text == "lower"}
    if text == "lm1b":
        return {"special": [], "lower_case": False, "vocab_file": str(folder / "1b_word_vocab.txt")}
    return {}


# What the children share


def randomize(model: Any) -> None:
    """Draw weights that make every term matter."""
    import torch

    with torch.no_grad():
        for name, weight in model.named_parameters():
            is_norm = "layer_norm" in name and name.endswith("weight")
            weight.normal_(1.0 if is_norm else 0.0, 0.2 if is_norm else 0.25)


def draw_tokens(n_vocab: int) -> Any:
    """Draw the tokens of all streams, one more than is run: [B, sum of the segments + 1]."""
    import torch

    return torch.randint(0, n_vocab, (N_STREAM, sum(SEGMENTS) + 1))


def run_segments(step: Callable[..., Any], tokens: Any, lengths: Sequence[int]) -> Any:
    """Run segments one after the other; `step(tokens, memory)` returns log-probabilities and memory."""
    import torch

    parts, memory, begin = [], None, 0
    with torch.no_grad():
        for length in lengths:
            log_probs, memory = step(tokens[:, begin : begin + length], memory)
            parts.append(log_probs)
            begin += length
    return torch.cat(parts, dim=1)


def grid(n_targets: int) -> list[int]:
    """Return the lengths of the segments that a text is cut into."""
    return [min(TGT_LEN, n_targets - begin) for begin in range(0, n_targets, TGT_LEN)]


def record(
    folder: Path, case: Case, tokens: Any, text_ids: Any | None, steps: dict[str, Callable[..., Any]]
) -> None:
    """Write what a code base computes: for each type the segments' log-probabilities, the text's loss."""
    import numpy as np
    import torch

    arrays: dict[str, Any] = {"tokens": tokens.numpy().astype(np.int16)}
    for name, step in steps.items():
        arrays[name] = run_segments(step, tokens, SEGMENTS).numpy()
        assert abs(float(np.exp(arrays[name]).sum(-1).max()) - 1) < 1e-4, "no probabilities"
        if text_ids is not None:
            log_probs = run_segments(step, text_ids[None, :-1], grid(len(text_ids) - 1))[0]
            arrays["text_" + name] = -log_probs.gather(1, text_ids[1:, None]).squeeze(1).numpy()
    np.savez_compressed(str(folder / "expected.npz"), **arrays)
    facts = {
        **asdict(case),
        "model": {**MODEL, **case.model},
        "python": sys.version.split()[0],
        "torch": str(torch.__version__),
    }
    (folder / "case.json").write_text(json.dumps(facts, indent=1, sort_keys=True) + "\n", encoding="utf-8")


@contextlib.contextmanager
def float64() -> Iterator[None]:
    """Build in float64, and let nothing cast it to float32."""
    import torch

    cast = torch.Tensor.float

    def keep(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        return tensor if tensor.dtype is torch.float64 else cast(tensor, *args, **kwargs)

    torch.set_default_dtype(torch.float64)
    torch.Tensor.float = keep
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)
        torch.Tensor.float = cast


def in_float64(step: Callable[..., Any]) -> Callable[..., Any]:
    """Run a step in float64."""

    @functools.wraps(step)
    def run(tokens: Any, memory: Any) -> Any:
        with float64():
            return step(tokens, memory)

    return run


def save(value: Any, path: Path, stream: str) -> None:
    """Call torch.save with the form of stream asked for; an old torch has the legacy form only."""
    import torch

    has_forms = tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (1, 6)
    options = {"_use_new_zipfile_serialization": stream != "legacy"} if has_forms else {}
    with path.open("wb") as file:
        torch.save(value, file, **options)


def hide_sources() -> None:
    """Let torch.save find, for every class, one line of ours as its source text."""
    import torch

    line = "# The source text of this class is left out.\n"
    if hasattr(torch.serialization, "get_source_lines_and_file"):
        torch.serialization.get_source_lines_and_file = lambda _: ([line], 1, "source.py")
    else:
        stand_in = types.SimpleNamespace(getsourcefile=lambda _: "source.py", getsource=lambda _: line)
        torch.serialization.inspect = stand_in


# The authors' code, and NVIDIA's


def make_authors(folder: Path, out: Path, cases: Sequence[Case], is_golden: bool) -> None:
    """Let the authors' code write its cases."""
    import torch

    inside = folder / "pytorch"
    folder = inside if (inside / "mem_transformer.py").exists() else folder
    sys.path[:0] = [str(folder), str(folder / "utils")]
    torch.version.cuda = torch.version.cuda or "0.0"
    if hasattr(torch.Tensor, "bool"):
        for name in ("masked_fill", "masked_fill_"):
            setattr(torch.Tensor, name, with_bool_mask(getattr(torch.Tensor, name)))
    import data_utils
    from mem_transformer import MemTransformerLM

    for case in cases:
        torch.manual_seed(zlib.crc32(case.name.encode()))
        target = out / case.name
        target.mkdir(parents=True)
        with tempfile.TemporaryDirectory() as name:
            write_corpus(Path(name), case.text)
            corpus = data_utils.Corpus(name, DATASETS[case.text], **vocabulary_options(case.text, Path(name)))
            if corpus.vocab.vocab_file is not None:
                corpus.vocab.vocab_file = "1b_word_vocab.txt"
            text_ids = encode_text(target, case, corpus.vocab, Path(name))
        save(corpus, target / "cache.pt", case.stream)
        n_vocab = len(corpus.vocab)
        options = peer_options(case, n_vocab)
        model = MemTransformerLM(**options).eval()
        randomize(model)
        values = {name: value.clone() for name, value in model.state_dict().items()}
        if case.model.get("is_half"):
            # But for the frequencies of sinusoids, which a conversion computes anew.
            for name in values:
                if name != "pos_emb.inv_freq":
                    values[name] = values[name].half().float()
            model.half()
        save(model, target / "model.pt", case.stream)
        if not is_golden:
            save(torch.optim.Adam(model.parameters()).state_dict(), target / "optimizer.pt", case.stream)
            (target / "log.txt").write_text(
                "".join(f"    - {name} : {value}\n" for name, value in options.items())
            )
        if case.refused is not None:
            record(target, case, draw_tokens(n_vocab), None, {})
            continue
        model.float()
        record(
            target, case, draw_tokens(n_vocab), text_ids, both_types(MemTransformerLM, options, model, values)
        )


def with_bool_mask(fill: Callable[..., Any]) -> Callable[..., Any]:
    """Let a method of tensors that takes a mask take one of bytes."""

    @functools.wraps(fill)
    def fill_by_bool(tensor: Any, mask: Any, value: Any) -> Any:
        return fill(tensor, mask.bool(), value)

    return fill_by_bool


def peer_options(case: Case, n_vocab: int) -> dict[str, Any]:
    """Return what the authors' and NVIDIA's model is built with."""
    model = {**MODEL, **case.model}
    same = ("n_layer", "n_head", "d_model", "d_head", "d_inner", "d_embed", "div_val", "tie_projs")
    same += ("pre_lnorm", "mem_len", "cutoffs", "same_length", "attn_type", "clamp_len")
    return {
        "n_token": n_vocab,
        **{name: model[name] for name in same},
        "tie_weight": model["tied"],
        "dropout": 0.1,
        "dropatt": 0.0,
        "tgt_len": TGT_LEN,
        "ext_len": 0,
        "sample_softmax": -1,
    }


def encode_text(target: Path, case: Case, vocab: Any, folder: Path) -> Any:
    """Write a text to score, as a user has it, and return its ids as the code base would read them."""
    lines = draw_lines(case.text, 40, seed=7)
    if case.text == "letters":
        (target / "text.txt").write_text(lines[0], encoding="utf-8")
    else:
        (target / "text.txt").write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    path = folder / "scored.txt"
    path.write_text(as_published(case.text, lines), encoding="utf-8")
    if case.text == "lm1b":
        import torch

        # Sentences begin and end with <S>, and of two in a row one is read: one stands where a newline is.
        return torch.cat([vocab.convert_to_tensor([*vocab.tokenize(line), "<S>"]) for line in lines])
    with contextlib.redirect_stdout(io.StringIO()):
        return vocab.encode_file(str(path), ordered=True, add_eos=case.text in ("words", "lower"))


def all_log_probs(crit: Any, hidden: Any, n_vocab: int) -> Any:
    """Ask a loss for the log-probability of every token: [T, B, D] to [B, T, V]."""
    import torch

    rows = hidden.reshape(-1, hidden.size(-1))
    every = [
        -crit(rows, torch.full((rows.size(0),), token, dtype=torch.int64), keep_order=True)
        for token in range(n_vocab)
    ]
    log_probs = torch.stack(every, dim=-1)
    return log_probs.view(hidden.size(0), hidden.size(1), n_vocab).transpose(0, 1)


def both_types(
    model_class: Callable[..., Any], options: dict[str, Any], model: Any, values: dict[str, Any]
) -> dict[str, Callable[..., Any]]:
    """Return how a model of the authors or NVIDIA with these weights runs a segment, in float32 and 64."""
    values = {name: value.clone() for name, value in values.items()}
    model.load_state_dict(values)
    with float64():
        exact = model_class(**options).eval()
        frequencies = exact.pos_emb.inv_freq.clone()
        exact.load_state_dict(values)
        exact.pos_emb.inv_freq.copy_(frequencies)
    return {"fp32": peer_step(model), "fp64": in_float64(peer_step(exact))}


def peer_step(model: Any) -> Callable[..., Any]:
    """Return how a model of the authors or NVIDIA runs a segment."""

    def step(tokens: Any, memory: Any) -> Any:
        hidden, memory = model._forward(
            tokens.t().contiguous(), mems=model.init_mems() if memory is None else memory
        )
        return all_log_probs(model.crit, hidden, model.n_token), memory

    return step


def make_nvidia(folder: Path, out: Path, cases: Sequence[Case], is_golden: bool) -> None:
    """Let NVIDIA's code write its cases."""
    import torch

    sys.path.insert(0, str(folder))
    package = types.ModuleType("utils")
    package.__path__ = [str(folder / "utils")]
    sys.modules["utils"] = package
    from mem_transformer import MemTransformerLM
    from utils.vocabulary import Vocab

    for case in cases:
        torch.manual_seed(zlib.crc32(case.name.encode()))
        target = out / case.name
        target.mkdir(parents=True)
        text = "words" if case.text == "bpe" else case.text
        with tempfile.TemporaryDirectory() as name, contextlib.redirect_stdout(io.StringIO()):
            write_corpus(Path(name), text)
            vocab = Vocab(**vocabulary_options(text, Path(name)))
            for part in ("train", "valid", "test")[: 1 if text == "words" else 3]:
                vocab.count_file(str(Path(name, part + ".txt")))
            vocab.build_vocab()
            if vocab.vocab_file is not None:
                vocab.vocab_file = "1b_word_vocab.txt"
            text_ids = encode_text(target, case, vocab, Path(name))
        n_vocab = len(vocab)
        options = {**peer_options(case, n_vocab), "dtype": None}
        model = MemTransformerLM(**options).eval()
        randomize(model)
        tokens = draw_tokens(n_vocab)
        checkpoint = nvidia_checkpoint(case, model, options, vocab, tokens, is_golden)
        save(checkpoint, target / "checkpoint_best.pt", case.stream)
        if case.refused is not None:
            record(target, case, tokens, None, {})
            continue
        {name: value.clone() for name, value in model.state_dict().items()}
        steps = both_types(MemTransformerLM, options, model, model.state_dict())
        record(target, case, tokens, None if case.text == "bpe" else text_ids, steps)


def nvidia_checkpoint(
    case: Case, model: Any, options: dict[str, Any], vocab: Any, tokens: Any, is_golden: bool
) -> dict[str, Any]:
    """Return what NVIDIA's training saves, after a step of it."""
    import torch

    values = {name: value.clone() for name, value in model.state_dict().items()}
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100, eta_min=0.001)
    rows = tokens[:, : TGT_LEN + 1].t().contiguous()
    loss, memory = model(rows[:-1], rows[1:], None)
    if not is_golden:
        loss.mean().backward()
        optimizer.step()
        scheduler.step()
        model.load_state_dict(values)
    if case.text == "bpe":
        vocab = gpt2_vocabulary()
    names = ("n_layer", "n_head", "d_model", "d_head", "d_inner", "d_embed", "div_val", "pre_lnorm")
    arguments = {name: options[name] for name in (*names, "tgt_len", "mem_len", "ext_len", "clamp_len")}
    arguments.update(
        {
            "dataset": "wt103",
            "data": "data",
            "work_dir": "LM-TFM",
            "vocab": "word",
            "tied": options["tie_weight"],
        }
    )
    return {
        "args": argparse.Namespace(**arguments),
        "model_config": options,
        "model_state": model.state_dict(),
        "optimizer_state": optimizer.state_dict(),
        "scheduler_state": scheduler.state_dict(),
        "rng_states": [torch.get_rng_state()[:64] if is_golden else torch.get_rng_state()],
        "memory": [[memory]],
        "vocab": vocab,
        "amp_state": None,
        "epoch": 1,
        "batch": 3,
        "last_iter": 12,
        "train_step": STEP,
        "best_val_loss": 3.25,
    }


def gpt2_vocabulary() -> Any:
    """Return NVIDIA's vocabulary of byte pairs around a tokenizer with the names of pytorch-transformers."""
    from utils.vocabulary import OpenAIVocab

    module = types.ModuleType("pytorch_transformers.tokenization_gpt2")
    tokenizer_class = type("GPT2Tokenizer", (), {"__module__": module.__name__})
    module.GPT2Tokenizer = tokenizer_class
    sys.modules["pytorch_transformers"] = types.ModuleType("pytorch_transformers")
    sys.modules[module.__name__] = module
    vocab = OpenAIVocab.__new__(OpenAIVocab)
    vocab.tokenizer = tokenizer_class()
    vocab.tokenizer.encoder = {"<|endoftext|>": 0, "a": 1}
    vocab.tokenizer.added_tokens_encoder = {"madeupword000000000": 2}
    vocab.EOT, vocab.max_size, vocab.vocab_file = 0, None, None
    return vocab


# Hugging Face's


def make_hugging_face(out: Path, cases: Sequence[Case]) -> None:
    """Let Hugging Face's code write its cases."""
    import torch

    warnings.simplefilter("ignore")
    from transformers import TransfoXLConfig, TransfoXLLMHeadModel

    for case in cases:
        torch.manual_seed(zlib.crc32(case.name.encode()))
        target = out / case.name
        target.mkdir(parents=True)
        symbols = ["<eos>", *WORDS]
        model_options = {**MODEL, **case.model}
        for name in ("is_half", "tie_projs"):
            del model_options[name]
        config = TransfoXLConfig(
            vocab_size=len(symbols),
            tie_word_embeddings=model_options.pop("tied"),
            dropout=0.1,
            dropatt=0.0,
            trainer_compatible=True,
            **model_options,
        )
        config.tie_projs = {**MODEL, **case.model}["tie_projs"]
        config.architectures = ["TransfoXLLMHeadModel"]
        model = TransfoXLLMHeadModel(config).eval()
        randomize(model)
        write_hugging_face(target, case, model)
        write_vocabulary(target, case.text, symbols)
        text_ids = None
        if case.text != "none":
            lines = draw_lines("words", 40, seed=7)
            (target / "text.txt").write_text("".join(line + "\n" for line in lines), encoding="utf-8")
            ids = [symbols.index(word) for line in lines for word in [*line.split(), "<eos>"]]
            text_ids = torch.tensor(ids)
        exact = TransfoXLLMHeadModel(config).eval()
        exact.load_state_dict(model.state_dict())
        exact.double()
        exponents = torch.arange(0, config.d_model, 2, dtype=torch.float64) / config.d_model
        exact.transformer.pos_emb.inv_freq = 1 / 10000**exponents
        steps = {"fp32": hugging_face_step(model), "fp64": in_float64(hugging_face_step(exact))}
        record(target, case, draw_tokens(len(symbols)), text_ids, steps)


def hugging_face_step(model: Any) -> Callable[..., Any]:
    """Return how Hugging Face's model runs a segment."""

    def step(tokens: Any, memory: Any) -> Any:
        out = model(tokens, mems=memory)
        return out.prediction_scores, out.mems

    return step


def write_hugging_face(target: Path, case: Case, model: Any) -> None:
    """Write a folder of weights and settings."""
    if case.stream == "safetensors":
        model.save_pretrained(target, safe_serialization=True)
        return
    if case.stream == "zip":
        model.save_pretrained(target, safe_serialization=False)
        return
    state = model.state_dict()
    model.config.save_pretrained(target)
    if case.stream == "legacy":
        save(state, target / "pytorch_model.bin", "legacy")
        # As in folders of 2019: other names, and no trace of what came later.
        path = target / "config.json"
        values = json.loads(path.read_text(encoding="utf-8"))
        values["n_token"] = values.pop("vocab_size")
        for name in ("transformers_version", "model_type", "trainer_compatible", "architectures"):
            values.pop(name, None)
        path.write_text(json.dumps(values, indent=2), encoding="utf-8")
        return
    # Of each pair of tied names the one that `save_pretrained` leaves out.
    from safetensors.torch import save_file

    kept: dict[int, str] = {}
    for name, tensor in state.items():
        kept[tensor.data_ptr()] = name
    alias = {name: state[name].contiguous().clone() for name in kept.values()}
    assert any(name.startswith("crit.out_layers") and name.endswith("weight") for name in alias)
    save_file(alias, str(target / "model.safetensors"), metadata={"format": "pt"})


def write_vocabulary(target: Path, name: str, symbols: list[str]) -> None:
    """Write a vocabulary in one of the forms that folders hold."""
    if name == "vocab.pkl":
        from transformers import TransfoXLTokenizer

        tokenizer = TransfoXLTokenizer(special=["<eos>"])
        tokenizer.counter = Counter({word: 100 - i for i, word in enumerate(symbols[1:])})
        tokenizer.build_vocab()
        assert tokenizer.idx2sym == symbols
        tokenizer.save_pretrained(target)
        return
    ids = OrderedDict((symbol, i) for i, symbol in enumerate(symbols))
    if name == "vocab.bin":
        values = {
            "counter": Counter({word: 100 - i for i, word in enumerate(symbols[1:])}),
            "special": ["<eos>"],
            "min_freq": 0,
            "max_size": None,
            "lower_case": False,
            "delimiter": None,
            "vocab_file": None,
            "idx2sym": symbols,
            "sym2idx": ids,
            "eos_idx": 0,
        }
        save(values, target / name, "legacy")
    if name == "vocab.json":
        (target / name).write_text(json.dumps(ids), encoding="utf-8")
    if name == "vocab.txt":
        (target / name).write_text("".join(symbol + "\n" for symbol in symbols), encoding="utf-8")


def serve(job: dict[str, Any]) -> None:
    """Be a child: write the cases of one code base."""
    import torch

    torch.set_num_threads(1)
    # Folders of this script's own interpreter must not be found: `tests` is one of its names, `utils` not.
    sys.path[:] = [path for path in sys.path if Path(path) != Path(__file__).resolve().parent]
    cases = [Case(**case) for case in job["cases"]]
    out, folder = Path(job["out"]), Path(job["folder"] or ".")
    if job["is_golden"]:
        hide_sources()
    if job["kind"] == "authors":
        make_authors(folder, out, cases, job["is_golden"])
    elif job["kind"] == "nvidia":
        make_nvidia(folder, out, cases, job["is_golden"])
    else:
        make_hugging_face(out, cases)


# The parent


def make(options: argparse.Namespace) -> None:
    """Let every code base that was given write its cases."""
    here = sys.executable
    sides: list[tuple[str, bool, str | None, Path | None]] = [
        ("authors", False, here if options.authors else None, options.authors),
        ("authors", True, options.old if options.authors else None, options.authors),
        ("nvidia", False, here if options.nvidia else None, options.nvidia),
        ("hf", False, options.hugging_face, None),
    ]
    for kind, is_old, python, folder in sides:
        cases = [
            case
            for case in CASES
            if case.kind == kind
            and case.is_old == is_old
            and (case.is_golden or not options.golden)
            and (not options.only or case.name in options.only)
        ]
        if python is None or not cases:
            continue
        job = {
            "kind": kind,
            "cases": [asdict(case) for case in cases],
            "out": str(options.out.absolute()),
            "folder": None if folder is None else str(folder.absolute()),
            "is_golden": options.golden,
        }
        say(f"{kind}: {len(cases)} cases with {python}")
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": "", "PYTHONDONTWRITEBYTECODE": "1"}
        subprocess.run([python, __file__, "--child", json.dumps(job)], check=True, env=environment)


def compare(options: argparse.Namespace) -> int:
    """Convert every case and print how far our numbers are from its own; return the exit status."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from txlcli import UserError

    rows, n_bad = [], 0
    with tempfile.TemporaryDirectory(prefix="foreign-") as name:
        for path in sorted(options.folder.glob("*/case.json")):
            facts = json.loads(path.read_text(encoding="utf-8"))
            if options.only and facts["name"] not in options.only:
                continue
            try:
                found = differences(path.parent, facts, Path(name, facts["name"]))
            except UserError as error:
                verdict = "as it should be" if facts["refused"] and facts["refused"] in str(error) else "NO"
                rows.append([facts["name"], "", "", "", "", f"refused, {verdict}: {error}"])
                n_bad += verdict == "NO"
                continue
            fine = (
                facts["refused"] is None
                and max(found["fp32"], found["cache"]) <= FP32_BOUND
                and found["fp64"] <= FP64_BOUND
                and found.get("text", 0) <= FP32_BOUND
            )
            n_bad += not fine
            numbers = [
                format(found[key], ".1e") if key in found else "" for key in ("fp32", "cache", "fp64", "text")
            ]
            rows.append([facts["name"], *numbers, "" if fine else "NO"])
    header = ["case", "fp32", "fp32, cache", "float64", "text, per token", ""]
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]
    for row in [header, *rows]:
        line = "  ".join(cell.ljust(width) for cell, width in zip(row, widths))  # noqa: B905
        sys.stdout.write(line.rstrip() + "\n")
    return 1 if n_bad else 0


def differences(folder: Path, facts: dict[str, Any], out: Path) -> dict[str, float]:
    """Convert a case; return the largest difference of log-probabilities by way of computing them.

    Keys: `fp32` and `fp64` by the forward of training, `cache` in fp32 by that of inference, `text` the
    difference of a text's mean loss through the command line.
    """
    import numpy as np
    import torch

    from txlcli.checkpoint import load_weights
    from txlcli.convert import convert
    from txlcli.model import TransformerXL

    converted = convert(source_of(folder), out)
    model = TransformerXL(converted.config.model, converted.n_vocab).eval()
    load_weights(converted.run.checkpoint_path(converted.step), model)
    expected = np.load(folder / "expected.npz")
    tokens = torch.from_numpy(expected["tokens"][:, :-1].astype(np.int64))
    found: dict[str, float] = {}

    def largest(values: Any, name: str) -> float:
        return float((values - torch.from_numpy(expected[name])).abs().max())

    found["fp32"] = largest(run_segments(our_step(model), tokens, SEGMENTS), "fp32")
    found["cache"] = largest(run_segments(our_cached_step(model), tokens, SEGMENTS), "fp32")
    found["fp64"] = largest(run_segments(our_step(model.double()), tokens, SEGMENTS), "fp64")
    if "text_fp64" in expected:
        found["text"] = abs(text_loss(out, folder / "text.txt") - float(expected["text_fp64"].mean()))
    return found


def source_of(folder: Path) -> Path:
    """Return what a user would hand to `txl convert`."""
    checkpoint = folder / "checkpoint_best.pt"
    return checkpoint if checkpoint.exists() else folder


def our_step(model: Any) -> Callable[..., Any]:
    """Return how our model runs a segment in training."""

    def step(tokens: Any, memory: Any) -> Any:
        hidden, memory = model.hidden_states(tokens, memory)
        return model.log_probs(hidden), memory

    return step


def our_cached_step(model: Any) -> Callable[..., Any]:
    """Return how our model runs a segment in inference."""

    def step(tokens: Any, cache: Any) -> Any:
        if cache is None:
            cache = model.new_cache(len(tokens), model.lengths._replace(tgt_len=TGT_LEN))
        hidden, cache = model.extend(tokens, cache)
        return model.log_probs(hidden), cache

    return step


def text_loss(run: Path, text: Path) -> float:
    """Score a text through the command line; return nats per token."""
    from typer.testing import CliRunner

    from txlcli.cli import main

    command = ["eval", str(text), "--run", str(run), "--json", "--tgt-len", str(TGT_LEN)]
    command += ["--device", "cpu", "--precision", "fp32", "--checkpoint", "last"]
    result = CliRunner().invoke(main, command)
    if result.exit_code:
        return math.nan
    values = json.loads(result.stdout)
    return float(values["rows"][0]["nll"])


def say(text: str) -> None:
    """Tell how far we are."""
    sys.stderr.write(text + "\n")


def main() -> int:
    """Read the command line; in a child, write the cases."""
    if sys.argv[1:2] == ["--child"]:
        serve(json.loads(sys.argv[2]))
        return 0
    parser = argparse.ArgumentParser(description="Hold txl convert against the code bases it reads.")
    commands = parser.add_subparsers(dest="command", required=True)
    maker = commands.add_parser("make", help="let the code bases write files and numbers")
    maker.add_argument("--authors", type=Path, metavar="FOLDER")
    maker.add_argument("--nvidia", type=Path, metavar="FOLDER")
    maker.add_argument("--hugging-face", metavar="PYTHON")
    maker.add_argument("--old", metavar="PYTHON", help="an interpreter with an old torch")
    maker.add_argument("--golden", action="store_true", help="the cases of tests/golden")
    maker.add_argument("--out", type=Path, required=True, metavar="FOLDER")
    comparer = commands.add_parser("compare", help="convert the files and compare the numbers")
    comparer.add_argument("folder", type=Path, metavar="FOLDER")
    for command in (maker, comparer):
        command.add_argument("--only", nargs="+", metavar="CASE", help="these cases alone")
    options = parser.parse_args()
    if options.command == "make":
        make(options)
        return 0
    return compare(options)


if __name__ == "__main__":
    sys.exit(main())
