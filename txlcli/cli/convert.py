"""`txl convert`."""

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from txlcli.cli.app import command
from txlcli.cli.flags import JsonFlag, QuietFlag, argument, option
from txlcli.cli.signals import listening
from txlcli.files import shell_name
from txlcli.report import Screen, converted_facts, facts_table, json_text, one_line, tensors_table

if TYPE_CHECKING:
    from txlcli.convert import Converted
    from txlcli.tokenizer import Tokenizer


@command(
    examples=[
        "txl convert transfo-xl-wt103/ --out runs/wt103",
        "txl convert LM-TFM-enwik8/model.pt --vocab data/enwik8/cache.pt",
        "txl convert LM-TFM/checkpoint_best.pt --out runs/nvidia --json",
    ]
)
def convert(
    source: Annotated[
        str,
        argument(
            "SOURCE",
            help="the authors' model.pt, NVIDIA's checkpoint_*.pt, a folder of Hugging Face's TransfoXL",
        ),
    ],
    *,
    out: Annotated[
        str | None,
        option("--out", "-o", metavar="DIR", help="the run's folder, new or empty; else runs/NAME"),
    ] = None,
    vocab: Annotated[
        str | None,
        option("--vocab", metavar="FILE", help="its vocabulary; else the one beside or inside SOURCE"),
    ] = None,
    is_json: JsonFlag = False,
    is_quiet: QuietFlag = False,
) -> None:
    """Make a run of another program's checkpoint.

    Reads SOURCE without running anything of it, prints what became of every tensor and which conventions the
    run keeps, and writes the run whole or not at all.
    """
    screen, out_screen = Screen.of(sys.stderr, is_quiet=is_quiet), Screen.of(sys.stdout)
    with listening("stopping; once more to stop at once") as interruption:
        from txlcli import convert as converting
        from txlcli.run import discard_run

        screen.aside(f"reading {one_line(source)}")
        converted = converting.convert(
            Path(source), None if out is None else Path(out), vocab=None if vocab is None else Path(vocab)
        )
        if interruption():
            discard_run(converted.run)
            screen.write("stopped; nothing was written")
            interruption.leave()
    if is_json:
        out_screen.write_text(json_text(_as_json(converted), indent=1).encode() + b"\n")
    else:
        out_screen.draw(tensors_table(converted.rows, out_screen.width))
        out_screen.write("")
        out_screen.draw(facts_table(converted_facts(converted)))
    for notice in converted.notices:
        screen.note(notice)
    screen.write("")
    screen.draw(facts_table([("next" if i == 0 else "", hint) for i, hint in enumerate(_hints(converted))]))


def _hints(converted: "Converted") -> list[str]:
    """The commands to try next."""
    folder = shell_name(converted.run.folder)
    if converted.tokenizer is None:
        return [f"txl bench --run {folder}", "txl runs"]
    prompt = _prompt(converted.tokenizer)
    is_split = converted.config.data.newlines == "eos"
    return [
        f"txl eval FILE --run {folder}" + ("   (raw text: --moses)" if is_split else ""),
        f"txl generate --run {folder}" + (f" --prompt {shlex.quote(prompt)}" if prompt else ""),
        f"txl train CORPUS --init {folder}",
    ]


def _prompt(tokenizer: "Tokenizer") -> str:
    """Choose a prompt out of what the vocabulary has: Once, else its first word or letters; empty: none."""
    from txlcli.tokenizer import CorpusWordTokenizer, TableTokenizer

    if isinstance(tokenizer, CorpusWordTokenizer):
        words = [word for word in tokenizer.tokens if word.isalnum()]
        if tokenizer.is_lowered:  # a word with capital letters cannot come up
            words = [word for word in words if word == word.lower()]
        return "Once" if "Once" in words else next(iter(words), "")
    if not isinstance(tokenizer, TableTokenizer):
        return "Once"
    # A byte above 127 is part of a character only.
    symbols = [chr(p) for p in tokenizer.points if tokenizer.kind == "char" or p < 128]
    letters = [symbol for symbol in symbols if symbol.isalnum()]
    usual = (word for word in ("Once", "once") if set(word) <= set(letters))
    return next(usual, "".join(letters[:4]))


def _as_json(converted: "Converted") -> dict[str, object]:
    """The document that --json prints."""
    from txlcli.config import flatten

    return {
        "run": str(converted.run.folder),
        "kind": converted.kind,
        "source": str(converted.source),
        "step": converted.step,
        "n_vocab": converted.n_vocab,
        "n_parameters": converted.n_parameters,
        "tokenizer": None if converted.tokenizer is None else converted.tokenizer.kind,
        "tensors": [
            {"source": row.source, "target": row.target, "shape": list(row.shape), "what": row.what}
            for row in converted.rows
        ],
        "notices": list(converted.notices),
        "settings": flatten(converted.config),
    }
