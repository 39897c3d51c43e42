"""A converted run: a run folder without a training, which keeps its source's conventions as settings."""

from collections.abc import Mapping
from dataclasses import fields

from torch import Tensor

from txlcli.checkpoint import describe_weights, save_weights
from txlcli.config import LEAVES, Config, ModelConfig, build_section, dump
from txlcli.convert.settings import Settings
from txlcli.convert.sources import Source
from txlcli.convert.vocabulary import Vocabulary
from txlcli.files import write_whole
from txlcli.run import Conversion, Pointers, Run, write_conversion, write_pointers

_MODEL = {leaf.name for leaf in fields(ModelConfig)}


def config_of(source: Source, settings: Settings, vocabulary: Vocabulary) -> Config:
    """Return all settings of a converted run; those of a training are the defaults."""
    data = build_section("data", vocabulary.data_settings, source.vocabulary_place)
    return Config(data=data, model=settings.model)


def write_run(
    run: Run,
    source: Source,
    settings: Settings,
    vocabulary: Vocabulary,
    config: Config,
    weights: Mapping[str, Tensor],
) -> None:
    """Fill a new run's folder; `config.yaml`, which makes it a run, comes last.

    Raises:
        UserError: the disk refuses.
    """
    tokenizer = vocabulary.tokenizer
    newline_id = None if tokenizer is None else tokenizer.newline_id
    conversion = Conversion(
        kind=source.kind,
        n_vocab=settings.n_vocab,
        has_tokenizer=tokenizer is not None,
        # The family numbers its symbols from the most frequent on.
        start_id=0 if newline_id is None else newline_id,
    )
    write_conversion(run, conversion)
    if tokenizer is not None:
        tokenizer.save(run.tokenizer_folder)
    save_weights(run, weights, step=source.step, metadata=describe_weights(config.model, tokenizer))
    write_pointers(run, Pointers(best=source.step, last=source.step))
    write_whole(run.config_path, dump(config, _origins(source, vocabulary)).encode())


def _origins(source: Source, vocabulary: Vocabulary) -> dict[str, str]:
    """Say of each setting where it comes from."""
    of_model, of_data = f"convert: {source.kind}", "convert: vocabulary"
    return {
        leaf.name: of_model
        if leaf.name in _MODEL
        else of_data
        if leaf.name in vocabulary.data_settings
        else "default"
        for leaf in LEAVES
    }
