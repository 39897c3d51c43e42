"""Runs that were not trained but made of another program's checkpoint, and what such a run may lack."""

from dataclasses import asdict, dataclass

from txlcli import UserError
from txlcli.files import look_at, read_bounded, write_whole
from txlcli.run.folder import Run
from txlcli.run.json_object import dump_json, parse_json
from txlcli.tokenizer import Tokenizer, load_tokenizer

MAKERS = {"huggingface": "Hugging Face", "authors": "the authors", "nvidia": "NVIDIA"}
"""Whose checkpoints become converted runs, by the kind that converted.json says."""
_CONVERSION_LIMIT_BYTES = 4096


@dataclass(frozen=True)
class Conversion:
    """What a converted run knows in place of a training.

    Attributes:
        kind: Whose checkpoint it was made of: `huggingface`, `authors` or `nvidia`.
        n_vocab: Size of the model's vocabulary.
        has_tokenizer: Whether text can be turned into its ids.
        start_id: What an empty prompt starts from.
    """

    kind: str
    n_vocab: int
    has_tokenizer: bool
    start_id: int


def write_conversion(run: Run, conversion: Conversion) -> None:
    """Write what only a converted run has."""
    write_whole(run.conversion_path, dump_json(asdict(conversion)))


def read_conversion(run: Run) -> Conversion | None:
    """Read what only a converted run has; None: this run was trained.

    Raises:
        UserError: the file is damaged.
    """
    path = run.conversion_path
    if look_at(path) is None:
        return None
    values = parse_json(read_bounded(path, _CONVERSION_LIMIT_BYTES), path)
    kinds = {"kind": str, "n_vocab": int, "has_tokenizer": bool, "start_id": int}
    is_sound = values.keys() == kinds.keys() and all(
        type(values[name]) is kind for name, kind in kinds.items()
    )
    if not is_sound or values["kind"] not in MAKERS or not 0 <= values["start_id"] < values["n_vocab"]:
        raise UserError(f"{path}: damaged; must hold {', '.join(kinds)}; convert the checkpoint again")
    return Conversion(**values)


def refuse_converted(run: Run, what: str) -> None:
    """Refuse what a converted run cannot do, since it was not trained here.

    Args:
        run: Any run.
        what: What is missing; and what to do: `which has no held-out text; name a FILE`.

    Raises:
        UserError: the run was converted.
    """
    conversion = read_conversion(run)
    if conversion is not None:
        raise UserError(f"{run.folder}: was converted from a checkpoint of {MAKERS[conversion.kind]}, {what}")


def refuse_without_tokenizer(run: Run) -> None:
    """Refuse a converted run whose ids nobody can turn into text.

    Raises:
        UserError: it is one.
    """
    conversion = read_conversion(run)
    if conversion is not None and not conversion.has_tokenizer:
        raise UserError(
            f"{run.folder}: has no tokenizer, since its source had none that txl can use; "
            "text can be neither read nor written with it"
        )


def load_run_tokenizer(run: Run) -> Tokenizer:
    """Load a run's tokenizer.

    Raises:
        UserError: a file is missing or damaged, or this run has no tokenizer.
    """
    refuse_without_tokenizer(run)
    return load_tokenizer(run.tokenizer_folder)


def vocabulary_size(run: Run) -> int:
    """Return the number of ids of a run's model.

    Raises:
        UserError: a file is missing or damaged.
    """
    conversion = read_conversion(run)
    return load_tokenizer(run.tokenizer_folder).n_vocab if conversion is None else conversion.n_vocab
