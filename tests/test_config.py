import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from txlcli import UserError
from txlcli.config import (
    FLAG,
    LEAVES,
    LENGTHS,
    Config,
    DataConfig,
    Leaf,
    MachineConfig,
    ModelConfig,
    OptimConfig,
    Sourced,
    build,
    build_section,
    check,
    dump,
    find_preset,
    flatten,
    from_flags,
    leaf,
    load,
    override,
    parse,
    presets,
    read_origins,
    read_settings,
    yaml_file,
)
from txlcli.config.sections import SECTIONS, TrainConfig
from txlcli.sources import VALID_BYTES_MAX, VALID_FRACTION

quick = settings(deadline=None, max_examples=40)
# Lone surrogates stand for file names that are not UTF-8.
texts = st.text(st.characters(exclude_characters="\0", exclude_categories=()), min_size=1, max_size=12)
special_texts = {
    "device": st.sampled_from(["auto", "cpu", "cuda", "cuda:3", "mps"]),
    "encoding": st.sampled_from(["utf-8", "latin-1", "gb18030"]),
}


def values_of(leaf: Leaf) -> st.SearchStrategy[Any]:
    """All values that one setting may have."""
    if leaf.kind == "int":
        values: st.SearchStrategy[Any] = st.integers(int(leaf.min or 0), int(leaf.max or 2**53))
    elif leaf.kind == "float":
        low = leaf.above if leaf.min is None else leaf.min
        high = leaf.max if leaf.below is None else leaf.below
        values = st.floats(
            low, high, exclude_min=leaf.min is None, exclude_max=leaf.below is not None, allow_infinity=False
        )
    elif leaf.kind == "bool":
        values = st.booleans()
    elif leaf.kind == "choice":
        values = st.sampled_from(leaf.choices)
    elif leaf.kind == "ints":
        numbers = st.sets(st.integers(1, 2**53), max_size=4)
        values = numbers.map(lambda items: tuple(sorted(items))) | st.sampled_from(leaf.choices)
    else:
        values = special_texts.get(
            leaf.name, texts | st.sampled_from(["none", "null", "~", "off", "1e-3", "# x"])
        )
        if leaf.kind == "paths":
            values = st.lists(values, max_size=3).map(tuple)
    return values | st.none() if leaf.is_optional else values


@st.composite
def configs(draw: st.DrawFn) -> Config:
    """Any config that keeps the rules between settings."""
    values = {leaf.name: draw(values_of(leaf)) for leaf in LEAVES}
    length = draw(st.sampled_from(LENGTHS))
    values.update({name: None for name in LENGTHS if name != length})
    values["d_model"] += values["d_model"] % 2
    values["d_head"] = values["d_head"] or draw(st.integers(1, 1000))
    values["accumulate"] = min(values["accumulate"], 2**40)
    values["batch_size"] = values["accumulate"] * draw(st.integers(1, 100))
    values["lr_end"] = min(values["lr"], values["lr_end"])
    if (values["d_embed"] or values["d_model"]) < values["div_val"] ** len(values["cutoffs"]):
        values["div_val"] = 1
    if values["same_length"] == "mem_len":
        values["mem_len"] = max(values["mem_len"], 1)
    if values["norm"] != "pre":
        values["final_norm"] = True
    if values["position"] != "relative":
        values["untie_r"] = False
    if values["position"] != "shaw":
        values.update(max_relative_position=None, shaw_values=True)
    elif values["max_relative_position"] is None:
        values["max_relative_position"] = 5
    if values["position"] != "sinusoid":
        values["absolute_positions"] = "restart"
    if values["position"] in ("sinusoid", "learned"):
        values["clamp_len"] = None
    if values["tokenizer"] not in ("byte", "char"):
        values["spaces"] = "keep"
    if values["document_separator"] is not None:
        values["document_separator"] = draw(st.sampled_from([r"\n\n", "<|end|>", r"\t\\\r", "\n"]))
    rules = [name for name in ("text_field", "document_separator", "document_per_file") if values[name]]
    values.update({name: False if name == "document_per_file" else None for name in rules[1:]})
    if not rules:
        values.update(valid_every=None, reset_memory_at_documents=False)
    if values["valid_every"] is not None:
        values.update(valid=None, valid_fraction=None)
    values["newlines"] = {"drop": "keep"}.get(values["newlines"], values["newlines"])
    if values["tokenizer"] != "word":
        values["newlines"] = "keep" if values["tokenizer"] == "sentencepiece" else "drop"
    return build({name: Sourced(value, "test") for name, value in values.items()})


@quick
@given(config=configs())
def test_load_of_dump_is_the_same_config(config: Config, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("c") / "config.yaml"
    path.write_text(dump(config), encoding="utf-8")
    assert load(path) == config
    assert dump(load(path)) == dump(config)


@quick
@given(config=configs())
def test_any_yaml_reader_sees_the_same_values(config: Config) -> None:
    seen = yaml.safe_load(dump(config))
    flat = {name: value for section in seen.values() for name, value in section.items()}
    assert list(seen) == list(SECTIONS)
    assert flat == {k: list(v) if isinstance(v, tuple) else v for k, v in flatten(config).items()}


@pytest.mark.parametrize("leaf", LEAVES, ids=lambda leaf: leaf.name)
@settings(deadline=None, max_examples=10)
@given(data=st.data())
def test_flags_yaml_and_python_agree(leaf: Leaf, data: st.DataObject, tmp_path_factory: Any) -> None:
    value = data.draw(values_of(leaf))
    python = check(leaf, value)
    assert python == value
    assert type(python) is type(value)

    path = tmp_path_factory.mktemp("c") / "one.yaml"
    path.write_text(f"{leaf.section}:\n{dump_line(leaf, value)}\n", encoding="utf-8")
    assert read_settings(path) == {leaf.name: Sourced(value, f"{path}:2")}

    if leaf.kind == "paths":
        assert from_flags({leaf.name: list(value)}).get(leaf.name, Sourced((), FLAG)).value == value
    elif leaf.kind == "ints" and value != "auto":
        text = ",".join(map(str, value)) or "none"
        assert from_flags({leaf.name: text}) == {leaf.name: Sourced(value, FLAG)}
    elif value != "none":  # on the command line this text unsets; a file of that name is ./none
        text = value if isinstance(value, bool) else "none" if value is None else str(value)
        assert from_flags({leaf.name: text}) == {leaf.name: Sourced(value, FLAG)}


def dump_line(leaf: Leaf, value: object) -> str:
    """The line that `dump` writes for one value, taken from a config that has it."""
    section = SECTIONS[leaf.section]
    held = object.__new__(section)
    for other in dataclasses.fields(section):
        object.__setattr__(held, other.name, other.default)
    object.__setattr__(held, leaf.name, value)
    whole = Config()
    object.__setattr__(whole, leaf.section, held)  # with rules between sections left aside, too
    text = dump(whole)
    return next(line for line in text.split("\n") if line.startswith(f"  {leaf.name}: "))


def test_defaults_are_a_config() -> None:
    assert build({}) == Config()
    assert Config().model.d_head == 40
    assert Config().model.d_inner == 640


def test_widths_left_out_follow_the_width_given() -> None:
    assert ModelConfig(d_model=96, n_head=3).d_head == 32
    assert ModelConfig(d_model=96, n_head=3).d_inner == 384
    free = ModelConfig(d_model=10, n_head=4, d_head=7, d_inner=5)
    assert (free.d_head, free.d_inner) == (7, 5)


def test_whole_numbers_become_the_settings_type() -> None:
    assert type(OptimConfig(lr=1).lr) is float


def test_build_section_makes_what_asdict_took_apart() -> None:
    model = ModelConfig(n_layer=3, clamp_len=5)
    assert build_section("model", dataclasses.asdict(model), "x") == model
    with pytest.raises(UserError, match=r"^x: unknown setting `n_layers` in `model`$"):
        build_section("model", {"n_layers": 3}, "x")
    with pytest.raises(
        UserError,
        match=r"^x: model.n_layer: must be a whole number of at least 1 and at most 10000; got `3`$",
    ):
        build_section("model", {"n_layer": "3"}, "x")


def test_origins_are_kept_beside_the_values(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    origins = {"n_layer": "plan: 4 layers # on a CPU", "corpus": "flag", "test": "default"}
    config = Config(data=DataConfig(corpus=("a # b", "c"), test="x  # y"))
    path.write_text(dump(config, origins))
    assert read_origins(path) == origins
    assert load(path) == config
    assert read_settings(path)["corpus"].origin == f"{path}:2"


@quick
@given(origin=st.text(min_size=1).map(str.strip).filter(lambda text: text != "" and text.isprintable()))
def test_any_printable_origin_returns(origin: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("c") / "config.yaml"
    path.write_text(dump(Config(), {leaf.name: origin for leaf in LEAVES}), encoding="utf-8")
    assert read_origins(path) == {leaf.name: origin for leaf in LEAVES}


def test_an_origin_of_several_lines_cannot_forge_a_setting(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(dump(Config(), {"n_layer": "a\n  n_head: 1"}))
    assert load(path) == Config()


def test_a_length_flag_replaces_the_length_of_the_file() -> None:
    base = {"steps": Sourced(5, "f:1"), "valid": Sourced("v.txt", "f:2"), "lr": Sourced(0.1, "f:3")}
    changed = override(base, from_flags({"minutes": "2", "valid_fraction": "0.1", "lr": None}))
    assert changed == {
        "minutes": Sourced(2.0, FLAG),
        "valid_fraction": Sourced(0.1, FLAG),
        "lr": Sourced(0.1, "f:3"),
    }


def test_another_scheme_of_positions_replaces_what_the_file_has_of_its_own() -> None:
    file = {
        "position": Sourced("shaw", "f:1"),
        "max_relative_position": Sourced(16, "f:2"),
        "shaw_values": Sourced(False, "f:3"),
        "clamp_len": Sourced(8, "f:4"),
        "n_layer": Sourced(3, "f:5"),
    }
    relative = override(file, from_flags({"position": "relative"}))
    assert set(relative) == {"position", "clamp_len", "n_layer"}
    sinusoid = override(file, from_flags({"position": "sinusoid"}))
    assert set(sinusoid) == {"position", "n_layer"}
    assert build(sinusoid).model.position == "sinusoid"
    same = override(file, from_flags({"position": "shaw", "mem_len": "4"}))
    assert build(same).model.max_relative_position == 16
    with pytest.raises(UserError, match=r"^--clamp-len: clamp_len 3 needs position relative or shaw"):
        build(override(file, from_flags({"position": "learned", "clamp_len": "3"})))


@pytest.mark.parametrize(
    ("tgt_len", "mem_len", "largest"),
    [(64, 64, 64), (64, 0, 63), (1, 0, 0), (1, 5, 5), (8, 100, 100), (9, 1, 9)],
)
def test_rows_of_distances_end_where_training_does(tgt_len: int, mem_len: int, largest: int) -> None:
    config = ModelConfig(position="shaw", tgt_len=tgt_len, mem_len=mem_len)
    assert config.max_relative_position == largest
    assert largest <= tgt_len + mem_len - 1


def test_only_sinusoids_need_an_even_width() -> None:
    for position in ("shaw", "learned"):
        assert ModelConfig(d_model=15, n_head=3, position=position).d_model == 15


@pytest.mark.parametrize("text", ["[]", "none", "null", "~", ""])
def test_every_way_to_write_none_is_no_cutoffs(text: str, tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(f"model:\n  cutoffs: {text}\n")
    assert load(path).model.cutoffs == ()


def test_false_and_zero_are_set_and_none_is_not() -> None:
    flags = from_flags({"tied": False, "mem_len": "0", "n_layer": None, "corpus": []})
    assert {name: sourced.value for name, sourced in flags.items()} == {"tied": False, "mem_len": 0}


def test_none_unsets_on_the_command_line() -> None:
    assert from_flags({"clamp_len": "none"}) == {"clamp_len": Sourced(None, FLAG)}


BAD_FLAGS = [
    ({"n_layer": "0"}, "--n-layer: must be a whole number of at least 1 and at most 10000; got `0`"),
    ({"n_layer": "1e3"}, "--n-layer: must be a whole number of at least 1 and at most 10000; got `1e3`"),
    ({"n_layer": "none"}, "--n-layer: must be a whole number of at least 1 and at most 10000; got `none`"),
    ({"n_layer": "4"}, None),
    ({"n_layer": "٤"}, "--n-layer: must be a whole number of at least 1 and at most 10000; got `٤`"),
    ({"steps": "9" * 5000}, f"--steps: must be a whole number of at least 1; got `{'9' * 57}...`"),
    ({"seed": str(2**63)}, "--seed: must be a whole number of at least 0 and at most 9223372036854775807; "
                           "got `9223372036854775808`"),
    ({"lr": "nan"}, "--lr: must be a number above 0; got `nan`"),
    ({"lr": "1e999"}, "--lr: must be a number above 0; got `inf`"),
    ({"lr": "0"}, "--lr: must be a number above 0; got `0.0`"),
    ({"epochs": "1e300"}, "--epochs: must be a number above 0 and at most 1000000000; got `1e+300`"),
    ({"dropout": "1"}, "--dropout: must be a number of at least 0 and below 1; got `1.0`"),
    ({"norm": "pst"}, "--norm: must be one of post, pre; got `pst`; did you mean `post`?"),
    ({"norm": "\x1b[31m"}, r"--norm: must be one of post, pre; got `\x1b[31m`"),
    ({"tied": "maybe"}, "--tied: must be true or false; got `maybe`"),
    ({"valid": ""}, "--valid: must be a text; got ``"),
    ({"corpus": ["a", ""]}, "CORPUS...: must be a list of paths; got `['a', '']`"),
    ({"steps": "5", "minutes": "1"}, "--minutes: cannot go with --steps; give one of them"),
    ({"valid": "v", "valid_fraction": "0.1"}, "--valid-fraction: cannot go with --valid; give one of them"),
    ({"n_layers": "3"}, "n_layers: unknown setting; did you mean `n_layer`?"),
]  # fmt: skip


@pytest.mark.parametrize(("flags", "message"), BAD_FLAGS)
def test_bad_flags(flags: Mapping[str, object], message: str | None) -> None:
    if message is None:
        from_flags(flags)
        return
    with pytest.raises(UserError) as error:
        from_flags(flags)
    assert str(error.value) == message


BAD_TOGETHER = [
    ({"d_model": "162"}, "--d-model: n_head 4 does not divide d_model 162; change one or give --d-head"),
    ({"n_head": "3"}, "--n-head: n_head 3 does not divide d_model 160; change one or give --d-head"),
    ({"d_model": "161"}, "--d-model: must be even, for pairs of sine and cosine; got 161; try 162"),
    (
        {"accumulate": "3"},
        "--accumulate: accumulate 3 does not divide batch_size 16; "
        "every part takes the same number of streams",
    ),
    (
        {"lr": "1e-4", "lr_end": "1e-3"},
        "--lr-end: lr_end 0.001 is above lr 0.0001; the rate falls from lr to lr_end",
    ),
    ({"device": "gpu"}, "--device: must be one of auto, cpu, cuda, cuda:N, mps; got `gpu`"),
    (
        {"position": "learned", "untie_r": True},
        "--untie-r: untie_r true needs position relative; got learned",
    ),
    (
        {"position": "shaw", "absolute_positions": "continue"},
        "--absolute-positions: absolute_positions continue needs position sinusoid; got shaw",
    ),
    (
        {"position": "learned", "absolute_positions": "continue"},
        "--absolute-positions: absolute_positions continue needs position sinusoid; got learned",
    ),
    (
        {"position": "sinusoid", "clamp_len": "9"},
        "--clamp-len: clamp_len 9 needs position relative or shaw; got sinusoid",
    ),
    (
        {"max_relative_position": "9"},
        "--max-relative-position: max_relative_position 9 needs position shaw; got relative",
    ),
    (
        {"same_length": "mem_len", "mem_len": "0"},
        "--same-length: same_length mem_len leaves no key to see at mem_len 0; "
        "give off or mem_len+1, or a memory",
    ),
    (
        {"d_model": "15", "n_head": "3", "position": "sinusoid"},
        "--d-model: must be even, for pairs of sine and cosine; got 15; try 16",
    ),
    ({"shaw_values": False}, "--no-shaw-values: shaw_values false needs position shaw; got relative"),
    (
        {"cutoffs": "10,5"},
        "--cutoffs: must be ascending whole numbers such as 2000,8000 or none or auto; got `10,5`",
    ),
    (
        {"cutoffs": "0"},
        "--cutoffs: must be ascending whole numbers such as 2000,8000 or none or auto; got `0`",
    ),
    (
        {"cutoffs": ",".join(map(str, range(1, 66)))},
        "--cutoffs: must be 64 at most; got 65",
    ),
    (
        {"cutoffs": "10,20,30,40", "div_val": "4"},
        "--div-val: div_val 4 leaves no width for cluster 4 of d_embed 160; "
        "give a smaller one, or fewer cutoffs",
    ),
    (
        {"newlines": "drop", "tokenizer": "word"},
        "--newlines: newlines drop needs tokenizer byte or char; got word",
    ),
    ({"newlines": "eos"}, "--newlines: newlines eos needs tokenizer word; got sentencepiece"),
    ({"spaces": "underscore"}, "--spaces: spaces underscore needs tokenizer byte or char; got sentencepiece"),
    (
        {"encoding": "utf-9"},
        "--encoding: must be an encoding; got `utf-9`; did you mean `utf-8`?",
    ),
    (
        {"encoding": "hex"},
        "--encoding: must be an encoding; got `hex`; for example utf-8, utf-16, cp1252, gb18030",
    ),
]


def test_help_names_what_is_held_out_by_default():
    told = f"none: {100 * VALID_FRACTION:g} %, at most {VALID_BYTES_MAX / 1e6:g} MB"
    assert told in leaf("valid_fraction").help


@pytest.mark.parametrize(("flags", "message"), BAD_TOGETHER)
def test_settings_that_contradict_each_other(flags: Mapping[str, object], message: str) -> None:
    with pytest.raises(UserError) as error:
        build(from_flags(flags))
    assert str(error.value) == message


def test_contradictions_are_told_where_they_were_said_last(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("optim:\n  lr: 0.01\n  lr_end: 0.005\nmodel:\n  n_head: 5\n")
    file = read_settings(path)
    with pytest.raises(UserError) as error:
        build(override(file, from_flags({"lr": "0.001"})))
    assert str(error.value) == "--lr: lr_end 0.005 is above lr 0.001; the rate falls from lr to lr_end"
    with pytest.raises(UserError) as error:
        build(override(file, {"d_model": Sourced(12, "plan: small")}))
    assert str(error.value).startswith(f"{path}:5: n_head 5 does not divide d_model 12")
    path.write_text("model:\n  d_model: 5\n")
    with pytest.raises(UserError) as error:
        load(path)
    assert str(error.value) == f"{path}:2: d_model must be even, for pairs of sine and cosine; got 5; try 6"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: ModelConfig(n_layer=0),
            "model.n_layer: must be a whole number of at least 1 and at most 10000; got `0`",
        ),
        (lambda: ModelConfig(n_head=True), "model.n_head: must be a whole number of at least 1; got `True`"),
        (
            lambda: ModelConfig(n_layer=4.0),
            "model.n_layer: must be a whole number of at least 1 and at most 10000; got `4.0`",
        ),
        (lambda: ModelConfig(tied=None), "model.tied: must be true or false; got none"),
        (
            lambda: TrainConfig(steps=1, minutes=1),
            "steps: steps and minutes each set the length; give one of them",
        ),
        (lambda: DataConfig(corpus=3), "data.corpus: must be a list of paths; got `3`"),
        (
            lambda: MachineConfig(threads=0),
            "machine.threads: must be a whole number of at least 1 and at most 4096; got `0`",
        ),
    ],
)
def test_python_is_checked_like_flags(make: Any, message: str) -> None:
    with pytest.raises(UserError) as error:
        make()
    assert str(error.value) == message


BAD_YAML = [
    ("model:\n  n_layers: 4\n", ":2: unknown setting `model.n_layers`; did you mean `n_layer`?"),
    ("model:\n  n_layer: 0\n", ":2: n_layer must be a whole number of at least 1 and at most 10000; got `0`"),
    (
        "\r\n\r\nmodel:\r\n  n_layer: x\r\n",
        ":4: n_layer must be a whole number of at least 1 and at most 10000; got `x`",
    ),
    ("n_layer: 3\n", ":1: unknown section `n_layer`; it belongs under `model:`"),
    ("modle:\n  n_layer: 3\n", ":1: unknown section `modle`; did you mean `model`?"),
    ("data:\n  n_layer: 3\n", ":2: `n_layer` does not belong under `data:`; it belongs under `model:`"),
    ("model: 4\n", ":1: section `model` must hold `name: value` lines"),
    ("- model\n", ":1: the file must hold `name: value` lines"),
    ("model:\n  n_layer: 3\n  n_layer: 4\n", ":3: `model.n_layer` is set twice, first in line 2; keep one"),
    ("model:\n  n_layer: 3\noptim:\nmodel:\n", ":4: `model` is set twice, first in line 1; keep one"),
    ("model: &a\n  n_layer: 3\n", ":1: anchors and aliases are refused; write the value out"),
    ("model: *a\n", ":1: anchors and aliases are refused; write the value out"),
    ("model: !!map\n  n_layer: 3\n", ":1: tags such as `tag:yaml.org,2002:map` are refused; remove it"),
    ("a: !!python/object/apply:os.system [x]\n",
     ":1: unknown section `a`"),
    ("model: !!python/object/apply:os.system [x]\n",
     ":1: tags such as `tag:yaml.org,2002:python/object/apply:os.system` are refused; remove it"),
    (
        "model:\n  n_layer: [3]\n",
        ":2: n_layer must be a whole number of at least 1 and at most 10000; got a list",
    ),
    ("model:\n  norm: {a: b}\n", ":2: norm must be one of post, pre; got a mapping"),
    ("data:\n  corpus: [[a]]\n", ":2: corpus must be a list of paths; got a list within it"),
    ("data:\n  corpus: {a: b}\n", ":2: corpus must be a list of paths; got a mapping"),
    ("? [a]\n: b\n", ":1: a key must be a name"),
    ("model:\n\tn_layer: 3\n", ":2: not YAML: found character '\\t' that cannot start any token"),
    ("model:\n  n_layer: 3\n---\noptim:\n", ":3: a second document; keep one"),
    ("model:\n  tied: 1\n", ":2: tied must be true or false; got `1`"),
    ("model:\n  n_layer:\n", ":2: n_layer must be a whole number of at least 1 and at most 10000; got none"),
    ("train:\n  steps: 3\n  epochs: 2\n", ":2: steps and epochs each set the length; give one of them"),
    ("\0", ": not YAML: unacceptable character #x0000: special characters are not..."),
]  # fmt: skip


@pytest.mark.parametrize(("text", "message"), BAD_YAML)
def test_bad_yaml(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_bytes(text.encode())
    with pytest.raises(UserError) as error:
        load(path)
    assert str(error.value) == f"{path}{message}"


@pytest.mark.parametrize(
    "text", ["", "\n", "# only a comment\n", "---\n...\n", "model:\noptim: null\n", "{}", "~"]
)
def test_a_file_without_settings_is_all_defaults(text: str, tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(text)
    assert load(path) == Config()


def test_yaml_spellings(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(
        "\ufeffmodel:\n  same_length: off\n  tied: no\n  clamp_len: none\noptim:\n  lr: 1e-3\n"
        "data:\n  corpus: one.txt\n  test: 'none'\n  valid: ~\ntrain: {steps: 3}\n",
        encoding="utf-8",
    )
    config = load(path)
    assert (config.model.same_length, config.model.tied, config.model.clamp_len) == ("off", False, None)
    assert (config.optim.lr, config.train.steps) == (0.001, 3)
    assert (config.data.corpus, config.data.test, config.data.valid) == (("one.txt",), "none", None)


def test_corpus_as_a_list_of_lines(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("data:\n  corpus:\n    - a.txt\n    - ~\n    - 3\n")
    assert load(path).data.corpus == ("a.txt", "~", "3")


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    cases: dict[Path, str] = {
        tmp_path / "no.yaml": "no such file",
        tmp_path: "is a folder; give a YAML file",
        tmp_path / "latin.yaml": "not UTF-8 at byte 9; save the file as UTF-8",
        tmp_path / "big.yaml": "larger than 1 MB; is this a settings file?",
    }
    (tmp_path / "latin.yaml").write_bytes(b"# a\n# caf\xe9\n")
    (tmp_path / "big.yaml").write_bytes(b"#" * (1 << 20) + b"\n")
    for path, message in cases.items():
        with pytest.raises(UserError) as error:
            read_settings(path)
        line = ":2" if path.name == "latin.yaml" else ""
        assert str(error.value) == f"{path}{line}: {message}"
    (tmp_path / "config.yaml").write_text("")
    with pytest.raises(UserError, match=r"is a folder; its settings are in .*config\.yaml$"):
        read_settings(tmp_path)


def test_hostile_files_cost_nothing(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    for text in ("[" * 100_000, "{a: " * 100_000, "model: {n_layer: " + "[" * 100_000, "- " * 100_000):
        path.write_text(text)
        with pytest.raises(UserError):
            read_settings(path)


@quick
@given(data=st.binary(max_size=60) | texts.map(lambda text: text.encode("utf-8", "surrogatepass")))
def test_any_bytes_are_settings_or_a_user_error(data: bytes, tmp_path_factory: Any) -> None:
    read_or_refuse(data, tmp_path_factory.mktemp("c") / "c.yaml")


@settings(deadline=None, max_examples=100)
@given(data=st.data())
def test_damaged_settings_are_read_or_refused(data: st.DataObject, tmp_path_factory: Any) -> None:
    good = dump(Config(data=DataConfig(corpus=("a b", "c"))), {"lr": "flag"}).encode()
    start = data.draw(st.integers(0, len(good)))
    stop = data.draw(st.integers(start, min(len(good), start + 20)))
    scrap = data.draw(
        st.sampled_from([b"", b"[", b"{", b"'", b'"', b": ", b"- ", b"\n", b"|\n", b"&a ", b"\x85", b"\xff"])
    )
    read_or_refuse(good[:start] + scrap + good[stop:], tmp_path_factory.mktemp("c") / "c.yaml")


def read_or_refuse(data: bytes, path: Path) -> None:
    path.write_bytes(data)
    for read in (load, read_origins):
        said = ""
        try:
            read(path)
        except UserError as error:
            said = str(error)
        assert said == "" or said.startswith(str(path))
        assert "\n" not in said


def test_every_setting_is_documented_and_reachable_by_name() -> None:
    for item in LEAVES:
        assert item.help
        assert not item.help.endswith(".")
        assert item.option_help.count("\n") == 0
        for name in (item.name, item.key, item.flag or item.name, item.name.replace("_", "-")):
            assert leaf(name) is item
        assert parse(item, check(item, item.default), "x") == item.default
    flags = [flag for item in LEAVES for flag in (item.flag, item.negative_flag) if flag]
    assert len(set(flags)) == len(flags)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("n_layers", "n_layers: unknown setting; did you mean `n_layer`?"),
        ("data.n_layer", "data.n_layer: unknown setting; did you mean `n_layer`?"),
        ("x" * 100, f"{'x' * 57}...: unknown setting"),
    ],
)
def test_unknown_names(name: str, message: str) -> None:
    with pytest.raises(UserError) as error:
        leaf(name)
    assert str(error.value) == message


def test_help_of_one_key() -> None:
    assert leaf("--tied").explain() == (
        "model.tied: one table for input and output embeddings\n"
        "  flag     --tied / --no-tied\n"
        "  value    true or false\n"
        "  default  true\n"
        "  init     taken from the run that --init names"
    )
    assert leaf("clamp_len").explain().splitlines()[2] == "  value    a whole number of at least 0, or none"
    assert leaf("corpus").explain().splitlines()[1] == "  flag     the command's argument"


def test_each_preset_opens_with_four_lines_and_builds() -> None:
    assert {"tiny-char", "laptop-char", "laptop-sentencepiece"} <= set(presets())
    for path in presets().values():
        lines = path.read_text(encoding="utf-8").splitlines()
        heads = [line.partition(":")[0] for line in lines[:4]]
        assert heads == ["# Reproduces", "# Command", "# Expected", "# Hardware, time"], path
        load(path)


def test_presets_are_found_in_a_wheel_and_in_a_checkout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = tmp_path / "txlcli" / "config" / "yaml_file.py"
    monkeypatch.setattr(yaml_file, "__file__", str(module))
    assert presets() == {}
    checkout = tmp_path / "configs"
    checkout.mkdir()
    (checkout / "a.yaml").write_text("")
    assert presets() == {"a": checkout / "a.yaml"}
    wheel = tmp_path / "txlcli" / "configs"
    wheel.mkdir(parents=True)
    (wheel / "b.yaml").write_text("")
    assert presets() == {"b": wheel / "b.yaml"}


def test_find_preset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert find_preset("tiny-char") == presets()["tiny-char"]
    assert find_preset("mine.yaml") == Path("mine.yaml")
    assert find_preset("runs/a/config.yaml") == Path("runs/a/config.yaml")
    with pytest.raises(UserError) as error:
        find_preset("tiny-chr")
    assert str(error.value) == (
        "--config: no preset `tiny-chr`; did you mean `tiny-char`?; "
        f"presets: {', '.join(presets())}; or give a YAML file"
    )
    Path("plain").write_text("")
    assert find_preset("plain") == Path("plain")
