"""The model that is measured: a run's, or one that settings describe."""

from dataclasses import dataclass
from pathlib import Path

import torch

from txlcli import UserError
from txlcli.adaptive import Clusters
from txlcli.checkpoint import find_checkpoint, load_weights, remedied
from txlcli.config import (
    Config,
    SettingError,
    Settings,
    blame,
    build,
    find_preset,
    override,
    presets,
    read_settings,
)
from txlcli.model import Lengths, TransformerXL, clusters_of
from txlcli.run import Run, step_of, vocabulary_size

# Vocabularies where nothing says how large one is; that of char holds all bytes beside its alphabet. Among
# words clusters tell: the published vocabularies end about a third beyond the start of the last one.
_N_VOCAB = {"byte": 256, "char": 256 + 96, "sentencepiece": 8192, "word": 32_768}

# The published vocabularies of presets that take the words of any text.
_PUBLISHED = {"wt103-base": 267_735, "wt103-large": 267_735}


@dataclass(frozen=True, kw_only=True)
class Subject:
    """What is measured.

    Attributes:
        name: The run's folder, the preset or the file.
        config: The settings; those of `model` are what the weights were made for.
        lengths: Lengths to measure at.
        n_vocab: Size of the vocabulary.
        is_assumed: Nobody said how large the vocabulary is.
        checkpoint: Folder of the weights; None: fresh ones.
        step: The checkpoint's step.
        notice: What to say of how it was found; None: nothing.
    """

    name: str
    config: Config
    lengths: Lengths
    n_vocab: int
    is_assumed: bool = False
    checkpoint: Path | None = None
    step: int | None = None
    notice: str | None = None

    @property
    def clusters(self) -> Clusters:
        """The division of the vocabulary."""
        return clusters_of(self.config.model, self.n_vocab)

    def build(self, device: torch.device) -> TransformerXL:
        """Make the model in evaluation mode, with its own weights or fresh ones."""
        model = TransformerXL(self.config.model, self.n_vocab)
        if self.checkpoint is not None:
            load_weights(self.checkpoint, model)
        model.lengths = self.lengths
        return model.to(device).eval()


def run_subject(run: Run, changes: Settings) -> Subject:
    """Take the best checkpoint of a run.

    Args:
        run: The run; it is only read.
        changes: Lengths and streams to measure at in place of its own.

    Raises:
        UserError: the run is damaged, has no checkpoint, or the changes make no sense.
    """
    with remedied("put it back, or measure another run"):
        path, notice = find_checkpoint(run)
    settings = read_settings(run.config_path)
    trained, changed = build(settings), build(override(settings, changes))
    return Subject(
        name=str(run.folder),
        # The sizes of the weights, some of which follow from the lengths of training.
        config=Config(
            data=trained.data,
            model=trained.model,
            optim=changed.optim,
            train=trained.train,
            machine=trained.machine,
        ),
        lengths=Lengths.of(changed.model),
        n_vocab=vocabulary_size(run),
        checkpoint=path,
        step=step_of(path),
        notice=notice,
    )


def preset_subject(name: str, settings: Settings, n_vocab: int | None) -> Subject:
    """Take settings, with fresh weights.

    Args:
        name: The preset or file.
        settings: What it sets, flags laid over it.
        n_vocab: Size of the vocabulary; None: as published or set, else by the kind of tokenizer.

    Raises:
        UserError: the settings contradict each other or do not fit the vocabulary.
    """
    config = build(settings)
    given = n_vocab or config.data.vocab_size
    n_assumed = _N_VOCAB[config.data.tokenizer]
    if config.data.tokenizer == "byte":
        given = given or n_assumed
    elif (published := _published_vocabulary(name)) is not None:
        n_assumed = published
    elif config.model.cutoffs not in ((), "auto"):
        n_assumed = max(n_assumed, config.model.cutoffs[-1] * 4 // 3)  # type: ignore[operator]  # numbers
    subject = Subject(
        name=name,
        config=config,
        lengths=Lengths.of(config.model),
        n_vocab=given or n_assumed,
        is_assumed=given is None,
    )
    try:
        config.model.check_vocabulary(subject.n_vocab)
    except SettingError as error:
        if config.model.cutoffs == "auto":
            raise UserError(
                f"{name}: cutoffs auto is settled when a run is planned; name a run of it with --run"
            ) from None
        raise blame(error, settings) from None
    return subject


def _published_vocabulary(name: str) -> int | None:
    """Return the published size of a preset's vocabulary; a file of somebody's own has none."""
    path = find_preset(name)
    is_ours = path.resolve() == presets().get(path.stem)
    return _PUBLISHED.get(path.stem) if is_ours else None
