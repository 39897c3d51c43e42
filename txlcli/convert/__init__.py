"""Checkpoints of other Transformer-XL implementations as runs; no code of theirs is needed, none is run.

    SOURCE --sources--> Source --settings--> Settings --weights--> Matched --writing--> Run
                           |                     |
                        pickles                names: what is called what

A source's settings become settings of the run, which so keeps its conventions: how memory begins, the rule
of same_length, what LayerNorm adds, what a newline is. Whatever decides what its model computes and cannot be
said here is refused by its name, as is a tensor that is missing, left over, of another shape or not finite.
So a converted model computes what its source does.
"""

from dataclasses import dataclass
from pathlib import Path

from txlcli import UserError
from txlcli.config import Config
from txlcli.convert.names import Kind
from txlcli.convert.settings import settings_of
from txlcli.convert.sources import is_usual_name, open_source
from txlcli.convert.vocabulary import vocabulary_of
from txlcli.convert.weights import Row, match
from txlcli.convert.writing import config_of, write_run
from txlcli.files import describe_error, is_folder
from txlcli.run import Run, discard_run, new_run
from txlcli.tokenizer import Tokenizer

__all__ = ["Converted", "Kind", "Row", "convert"]


@dataclass(frozen=True, kw_only=True)
class Converted:
    """A checkpoint that has become a run.

    Attributes:
        run: The run.
        kind: Whose checkpoint it was.
        source: The file of its weights.
        step: Steps of training that it told of; 0: it did not.
        config: The run's settings.
        n_vocab: Size of the vocabulary.
        n_parameters: Weights of the run, each tensor counted once.
        tokenizer: Text to ids; None: the run has no text.
        rows: What became of every tensor.
        notices: What the user should know, one line each.
    """

    run: Run
    kind: Kind
    source: Path
    step: int
    config: Config
    n_vocab: int
    n_parameters: int
    tokenizer: Tokenizer | None
    rows: tuple[Row, ...]
    notices: tuple[str, ...]


def convert(source: Path, out: Path | None = None, *, vocab: Path | None = None) -> Converted:
    """Make a run of another program's checkpoint, whole or not at all.

    Args:
        source: Its file or folder.
        out: The run's folder, absent or empty; None: one under `runs/` with the source's name.
        vocab: File of its vocabulary; None: the one in its usual place, if any.

    Raises:
        UserError: it is not one that is known, damaged, or has something that this package has not; or the
            run's folder is in use. Nothing is left behind.
    """
    if out is not None:
        _refuse_in_use(out)
    found = open_source(source, vocab)
    settings = settings_of(found)
    matched = match(found, settings)
    vocabulary = vocabulary_of(found.vocabulary, found.vocabulary_place, settings.n_vocab)
    config = config_of(found, settings, vocabulary)
    run = new_run(out, _stem(source))
    try:
        weights = matched.read()
        write_run(run, found, settings, vocabulary, config, weights)
    except BaseException:
        discard_run(run)
        raise
    return Converted(
        run=run,
        kind=found.kind,
        source=found.path,
        step=found.step,
        config=config,
        n_vocab=settings.n_vocab,
        n_parameters=sum(tensor.numel() for tensor in weights.values()),
        tokenizer=vocabulary.tokenizer,
        rows=matched.rows(),
        notices=tuple(
            map(
                _on_one_line,
                (*found.notices, *settings.notices, *matched.notices(), *vocabulary.notices),
            )
        ),
    )


def _stem(source: Path) -> str:
    """Name a run after its source: a folder's name, a file's without its ending if it says something."""
    if is_folder(source):
        return source.resolve().name
    folder = source.resolve().parent.name if is_usual_name(source.name) else ""
    return folder or source.stem


def _refuse_in_use(out: Path) -> None:
    """Refuse a folder with something in it before anything is read: a conversion has no continuation."""
    try:
        is_empty = not is_folder(out) or next(out.iterdir(), None) is None
    except OSError as error:
        raise UserError(f"--out: `{out}` cannot be read; {describe_error(error)}; name another") from error
    if not is_empty:
        raise UserError(f"--out: `{out}` exists and is not empty; name a new or empty folder")


def _on_one_line(text: str) -> str:
    """Escape what is no printable character: a name may hold line ends and control codes."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)
