"""All settings, one line each, and how what is set becomes a config."""

import dataclasses
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from txlcli import UserError
from txlcli.config.encoding import check_separator, codec_of
from txlcli.config.setting import (
    DEFAULT,
    FLAG,
    Leaf,
    Settings,
    Sourced,
    check,
    fault_at,
    is_file_line,
    leaves_of,
    option,
    parse,
    quoted,
    scalar_text,
    shown,
    suggestion,
)

MAX_CUTOFFS = 64

_GIVE_DOCUMENTS = "give text_field, document_separator or document_per_file too"

SCHEMES_OF: Mapping[str, tuple[str, ...]] = {
    "untie_r": ("relative",),
    "max_relative_position": ("shaw",),
    "shaw_values": ("shaw",),
    "absolute_positions": ("sinusoid",),
    "clamp_len": ("relative", "shaw"),
}
"""Settings that not every scheme of positions has; elsewhere they keep their default."""


class SettingError(UserError):
    """A rule broken by one setting, or by several together: which ones, and the fault without its place.

    `build` turns it into a `UserError` at the flag or file line that brought the fault in. Settings that the
    remedy names are flags to whoever gave a flag.
    """

    def __init__(self, names: Sequence[str], text: str, remedy: str = ""):
        self.names, self.text, self.remedy = tuple(names), text, remedy
        super().__init__(f"{names[0]}: {self.told(as_flags=False)}")

    def told(self, *, as_flags: bool) -> str:
        """The fault and its remedy, without the place."""
        if not self.remedy:
            return self.text
        flags = re.sub("[a-z]+(_[a-z]+)+", lambda match: str(leaf(match[0]).flag), self.remedy)
        return f"{self.text}; {flags if as_flags else self.remedy}"


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """The text, its split and its tokenizer."""

    corpus: tuple[str, ...] = option((), "text files, folders, or - for standard input", metavar="CORPUS...")
    include: tuple[str, ...] = option(
        (),
        "of files in folders, only those whose path within matches this; may be repeated",
        metavar="GLOB",
        more="Patterns are those of shells, in which * stands for / too: *.txt, books/*, */chapter-?.md.",
    )
    exclude: tuple[str, ...] = option(
        (),
        "of files in folders, none whose path within matches this; may be repeated",
        metavar="GLOB",
        more="As include, and stronger. A folder that matches is not looked into.",
    )
    packed: Literal["unpack", "keep"] = option(
        "unpack",
        "how files packed with gzip, xz, bz2 or zstd are read",
        more="unpack: what they hold, also with tokenizer byte; they are told by content, not by name. "
        "keep: their own bytes.",
    )
    text_field: str | None = option(
        None,
        "files are JSON lines; the field that holds each document's text",
        metavar="NAME",
    )
    document_separator: str | None = option(
        None,
        r"text that stands between documents and belongs to none; \n is a newline",
        more=r"\n, \t, \r and \\ stand for a newline, a tab, a carriage return and a backslash: "
        r"\n\n, or <|endoftext|>. A file's end ends a document too.",
    )
    document_per_file: bool = option(False, "each file is one document")
    tokenizer: Literal["byte", "char", "word", "sentencepiece"] = option(
        "sentencepiece", "unit of the vocabulary", is_planned=True, shapes_weights=True
    )
    vocab_size: int | None = option(
        None,
        "upper bound of the vocabulary",
        min=1,
        is_planned=True,
        shapes_weights=True,
        more="The text may allow fewer; the size reached is printed. None: all units of the training text.",
    )
    encoding: str = option("utf-8", "encoding of the text files", metavar="NAME")
    encoding_errors: Literal["strict", "replace"] = option("strict", "bytes that the encoding does not allow")
    newlines: Literal["keep", "drop", "eos"] = option(
        "keep",
        "what a newline is: a symbol, nothing, or <eos> among words",
        shapes_weights=True,
        more="drop (enwik8 as published): newlines are left out and not scored; byte and char only. "
        "eos (WikiText-103): words are what white space separates, a newline is the word <eos>; word only.",
    )
    spaces: Literal["keep", "underscore"] = option(
        "keep",
        "what a space is: a space, or an underscore",
        shapes_weights=True,
        more="underscore (text8 as published): spaces are read as underscores, also in prompts.",
    )
    valid: str | None = option(None, "held-out text file", metavar="FILE")
    valid_fraction: float | None = option(
        None,
        "share of the corpus held out, from its end; none: 5 %, at most 5 MB",
        min=0,
        below=1,
        metavar="F",
        more="0: nothing is held out, and the last checkpoint counts as best. Where the text has documents, "
        "the part begins with one, if that makes it neither under half nor over twice as long.",
    )
    valid_every: int | None = option(
        None,
        "hold out every so many-th document, in place of the corpus' end",
        min=2,
        more="Needs documents: text_field, document_separator or document_per_file.",
    )
    test: str | None = option(None, "text file kept apart for `txl eval --split test`", metavar="FILE")
    init: str | None = option(None, "run whose weights and tokenizer to start from", metavar="RUN")

    def __post_init__(self) -> None:
        _check_fields(self)
        try:
            codec_of(self.encoding)
        except ValueError as error:
            raise SettingError(["encoding"], str(error)) from None
        kinds = {"drop": ("byte", "char"), "eos": ("word",)}.get(self.newlines, (self.tokenizer,))
        if self.tokenizer not in kinds:
            raise SettingError(
                ["newlines", "tokenizer"],
                f"newlines {self.newlines} needs tokenizer {' or '.join(kinds)}; got {self.tokenizer}",
            )
        if self.spaces == "underscore" and self.tokenizer not in ("byte", "char"):
            raise SettingError(
                ["spaces", "tokenizer"],
                f"spaces underscore needs tokenizer byte or char; got {self.tokenizer}",
            )
        self._check_documents()

    @property
    def has_documents(self) -> bool:
        """Whether the text is made of documents."""
        return bool(self._document_rules())

    def _document_rules(self) -> list[str]:
        return [name for name in DOCUMENT_RULES if getattr(self, name) not in (None, False)]

    def _check_documents(self) -> None:
        rules = self._document_rules()
        if len(rules) > 1:
            raise SettingError(rules, f"{rules[0]} cannot go with {rules[1]}; give one rule for documents")
        if self.document_separator is not None:
            try:
                check_separator(unescape(self.document_separator), self.encoding)
            except ValueError as error:
                raise SettingError(["document_separator", "encoding"], str(error)) from None
        if self.valid_every is not None:
            if not rules:
                raise SettingError(["valid_every"], "needs documents", _GIVE_DOCUMENTS)
            for name in ("valid", "valid_fraction"):
                if getattr(self, name) is not None:
                    raise SettingError(
                        ["valid_every", name], f"valid_every cannot go with {name}; give one of them"
                    )


def shaping_leaves(model: "ModelConfig") -> list[Leaf]:
    """List the settings that decide names, shapes or meaning of a model's weights."""
    # A learned table has one row for each position of a segment.
    has_table = model.position == "learned"
    return [item for item in LEAVES if item.shapes_weights or (has_table and item.name == "tgt_len")]


def unescape(text: str) -> str:
    r"""Read `\n`, `\t`, `\r` and `\\` in a separator of documents.

    Raises:
        SettingError: another character follows a backslash.
    """
    known = {"n": "\n", "t": "\t", "r": "\r", "\\": "\\"}
    parts = re.split(r"\\(.?)", text, flags=re.DOTALL)
    for escape in parts[1::2]:
        if escape not in known:
            raise SettingError(
                ["document_separator"],
                rf"must have \n, \t, \r or \\ where a backslash is; got {quoted(text)}; write \\ for one",
            )
    return "".join(known[part] if index % 2 else part for index, part in enumerate(parts))


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The Transformer-XL's sizes and rules (Dai et al. 2019)."""

    n_layer: int = option(4, "layers (N)", min=1, max=10_000, is_planned=True, shapes_weights=True)
    d_model: int = option(
        160, "width of the hidden states", min=2, max=10**6, is_planned=True, shapes_weights=True
    )
    n_head: int = option(4, "attention heads", min=1, is_planned=True, shapes_weights=True)
    d_head: int = option(
        None, "width of one head; none: d_model / n_head", min=1, is_planned=True, shapes_weights=True
    )
    d_inner: int = option(
        None,
        "inner width of the feed-forward layer; none: 4 x d_model",
        min=1,
        is_planned=True,
        shapes_weights=True,
    )
    dropout: float = option(0.0, "dropout of hidden states and embeddings", min=0, below=1, metavar="F")
    dropatt: float = option(0.0, "dropout of attention probabilities", min=0, below=1, metavar="F")
    tgt_len: int = option(64, "segment: tokens predicted at once per stream (L)", min=1, is_planned=True)
    mem_len: int = option(
        64,
        "memory: cached positions per layer (M)",
        min=0,
        is_planned=True,
        more="A query sees mem_len positions before its segment and all of the segment up to itself.",
    )
    norm: Literal["post", "pre"] = option(
        "pre", "place of layer normalization; the paper's is post", is_planned=True, shapes_weights=True
    )
    final_norm: bool = option(
        True, "layer normalization after the last layer, with norm pre", shapes_weights=True
    )
    norm_eps: float = option(
        1e-5,
        "what layer normalization adds to the variance",
        above=0,
        max=1,
        metavar="F",
        shapes_weights=True,
    )
    position: Literal["relative", "shaw", "sinusoid", "learned"] = option(
        "relative",
        "how positions enter: relative, shaw, sinusoid or learned",
        metavar="SCHEME",
        shapes_weights=True,
        more="relative: Dai et al. 2019. shaw: learned rows of distances, Shaw et al. 2018. "
        "sinusoid, learned: absolute positions added to the input, Vaswani et al. 2017.",
    )
    untie_r: bool = option(
        False, "query biases (u, v) for each layer, with position relative", shapes_weights=True
    )
    max_relative_position: int | None = option(
        None,
        "largest distance with rows of its own (k), with position shaw; none: tgt_len or mem_len",
        min=0,
        max=10**6,
        shapes_weights=True,
        more="None: the larger of the two, as far as training sees. Farther keys share its row.",
    )
    shaw_values: bool = option(
        True, "rows of distances on the values too, with position shaw", shapes_weights=True
    )
    absolute_positions: Literal["restart", "continue"] = option(
        "restart",
        "whether they start anew in each segment, with position sinusoid",
        more="restart: each segment counts from 0, so rows of memory carry the same positions as the "
        "segment. continue: positions count on through the text, to some that no training reached.",
    )
    clamp_len: int | None = option(None, "distances beyond this share one encoding", min=0, is_planned=True)
    memory_start: Literal["empty", "zeros"] = option(
        "empty",
        "what memory holds before the first segment: nothing, or mem_len rows of zeros",
        more="zeros, as in TensorFlow and Hugging Face: every layer begins with inputs of 0, which are "
        "attended to like any other.",
    )
    same_length: Literal["off", "mem_len", "mem_len+1"] = option(
        "off",
        "keys that every query sees, itself included",
        more="off: all of memory and the segment up to itself, so later queries of a segment see more. "
        "mem_len: so many keys, as the authors' PyTorch code has it. mem_len+1: one more, as in TensorFlow.",
    )
    reset_memory_at_documents: bool = option(
        False,
        "attention sees nothing before the start of a token's document",
        more="Exactly, in memory and inside a segment; the corpus must be made of documents. A document's "
        "end belongs to the document that it ends, so the first token of the next is predicted from there. "
        "Absolute positions do not restart with a document.",
    )
    tied: bool = option(True, "one table for input and output embeddings", shapes_weights=True)
    d_embed: int | None = option(
        None, "width of the embeddings; none: d_model", min=1, max=10**6, shapes_weights=True
    )
    cutoffs: tuple[int, ...] | Literal["auto"] = option(
        (),
        "ids at which the adaptive softmax and input begin a new cluster",
        is_planned=True,
        shapes_weights=True,
        more="none: one softmax over all. auto: derived from the vocabulary's real size, none for small "
        "ones. Clusters pay where frequent tokens have small ids: in vocabularies of words.",
    )
    div_val: int = option(
        1, "each cluster's embeddings are this many times narrower", min=1, max=1024, shapes_weights=True
    )
    tie_projs: Literal["none", "tail", "all"] = option(
        "tail",
        "clusters whose output projection is their input's; tail: all but the first",
        shapes_weights=True,
        more="There are projections where a cluster's width is not d_model, and with div_val above 1.",
    )
    proj_same_dim: bool = option(
        True, "with div_val, also a projection where a cluster is as wide as d_model", shapes_weights=True
    )
    init_std: float = option(0.02, "standard deviation of the first weights", above=0, max=10)
    proj_init_std: float = option(
        0.01, "standard deviation of the first projections of embeddings", above=0, max=10
    )

    def __post_init__(self) -> None:
        _check_fields(self)
        if self.d_model % 2 and self.position in ("relative", "sinusoid"):
            raise SettingError(
                ["d_model"],
                f"must be even, for pairs of sine and cosine; got {self.d_model}; try {self.d_model + 1}",
            )
        if self.d_head is None:
            if self.d_model % self.n_head:
                raise SettingError(
                    ["n_head", "d_model"],
                    f"n_head {self.n_head} does not divide d_model {self.d_model}",
                    "change one or give d_head",
                )
            object.__setattr__(self, "d_head", self.d_model // self.n_head)
        if self.d_inner is None:
            object.__setattr__(self, "d_inner", 4 * self.d_model)
        if self.same_length == "mem_len" and self.mem_len == 0:
            raise SettingError(
                ["same_length", "mem_len"],
                "same_length mem_len leaves no key to see at mem_len 0; give off or mem_len+1, or a memory",
            )
        if not self.final_norm and self.norm != "pre":
            raise SettingError(["final_norm", "norm"], f"final_norm false needs norm pre; got {self.norm}")
        self._check_positions()
        n_tail = 0 if self.cutoffs == "auto" else len(self.cutoffs)
        if n_tail > MAX_CUTOFFS:
            raise SettingError(["cutoffs"], f"must be {MAX_CUTOFFS} at most; got {n_tail:,}")
        d_embed = self.d_embed or self.d_model
        if d_embed < self.div_val**n_tail:
            raise SettingError(
                ["div_val", "cutoffs", "d_embed"],
                f"div_val {self.div_val} leaves no width for cluster {n_tail} of d_embed {d_embed}; "
                "give a smaller one, or fewer cutoffs",
            )

    def _check_positions(self) -> None:
        """Refuse what a scheme of positions does not have, and settle the rows of shaw."""
        for name, schemes in SCHEMES_OF.items():
            if getattr(self, name) != _BY_NAME[name].default and self.position not in schemes:
                raise SettingError(
                    [name, "position"],
                    f"{name} {scalar_text(getattr(self, name))} needs position {' or '.join(schemes)}; "
                    f"got {self.position}",
                )
        if self.position == "shaw" and self.max_relative_position is None:
            # Never beyond the largest distance of training, whose row would stay as it was drawn.
            largest = min(max(self.tgt_len, self.mem_len), self.tgt_len + self.mem_len - 1)
            object.__setattr__(self, "max_relative_position", largest)

    def check_vocabulary(self, n_vocab: int) -> None:
        """Refuse cut-offs that do not fit a vocabulary of `n_vocab`.

        Raises:
            SettingError: they lie beyond it, or are still to be derived.
        """
        if self.cutoffs == "auto":
            raise SettingError(["cutoffs"], "auto is settled when a run is planned; give numbers or none")
        if self.cutoffs and self.cutoffs[-1] >= n_vocab:
            listed = shown(",".join(map(str, self.cutoffs)))
            raise SettingError(
                ["cutoffs"],
                f"must stay below the vocabulary of {n_vocab:,}; got {listed}; "
                "give smaller ones, or auto to derive them",
            )


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """The optimizer, its rate over the steps, and the seed."""

    batch_size: int = option(
        16,
        "streams per step, over the whole job",
        min=1,
        is_planned=True,
        more="Counted before accumulation: --accumulate splits these streams and does not multiply them.",
    )
    accumulate: int = option(
        1, "equal parts in which the streams of a step are run; same result, less memory", min=1
    )
    lr: float = option(
        0.004,
        "peak learning rate",
        above=0,
        is_planned=True,
        more="With muon, matrices take ten times this rate and all other weights this rate under AdamW.",
    )
    lr_end: float = option(0.0, "learning rate at the last step", min=0, is_planned=True)
    warmup: int = option(50, "steps over which the rate rises to its peak", min=0, is_planned=True)
    schedule: Literal["cosine", "linear", "inv_sqrt", "constant"] = option(
        "cosine", "shape of the learning rate after warm-up", is_planned=True
    )
    optimizer: Literal["adam", "adamw", "sgd", "muon"] = option("adamw", "optimizer", is_planned=True)
    weight_decay: float = option(0.0, "weight decay", min=0)
    clip: float = option(0.25, "largest norm of the gradient; 0: no clipping", min=0)
    seed: int = option(0, "seed of initialization, dropout and tokenizer training", min=0, max=2**63 - 1)

    def __post_init__(self) -> None:
        _check_fields(self)
        if self.batch_size % self.accumulate:
            raise SettingError(
                ["accumulate", "batch_size"],
                f"accumulate {self.accumulate} does not divide batch_size {self.batch_size}; "
                "every part takes the same number of streams",
            )
        if self.lr_end > self.lr:
            raise SettingError(
                ["lr_end", "lr"],
                f"lr_end {self.lr_end:g} is above lr {self.lr:g}; the rate falls from lr to lr_end",
            )


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """How long to train and how often to look, save and log; every count is in optimizer steps."""

    steps: int | None = option(None, "length in optimizer steps", min=1, is_planned=True, may_change=True)
    epochs: float | None = option(
        None, "length in passes over the training text", above=0, max=10**9, may_change=True
    )
    minutes: float | None = option(
        None,
        "length in minutes of this machine, measured once and kept as steps",
        above=0,
        max=10**7,
        metavar="M",
        may_change=True,
    )
    eval_every: int | None = option(
        None, "steps between evaluations on held-out text", min=1, is_planned=True, may_change=True
    )
    save_every: int | None = option(
        None, "steps between checkpoints", min=1, is_planned=True, may_change=True
    )
    log_every: int | None = option(
        None, "steps between lines of metrics.jsonl", min=1, is_planned=True, may_change=True
    )
    eval_tokens: int | None = option(
        None,
        "held-out tokens that a periodic evaluation scores, from the first; none: all",
        min=2,
        is_planned=True,
    )
    patience: int | None = option(None, "evaluations without a new best after which training ends", min=1)
    keep: int = option(2, "newest checkpoints kept, besides the best", min=1, may_change=True)

    def __post_init__(self) -> None:
        _check_fields(self)
        given = [name for name in LENGTHS if getattr(self, name) is not None]
        if len(given) > 1:
            raise SettingError(given, f"{' and '.join(given)} each set the length; give one of them")


@dataclass(frozen=True, kw_only=True)
class MachineConfig:
    """Where and how the arithmetic runs."""

    device: str = option(
        "auto", "auto, cpu, cuda, cuda:N or mps", metavar="DEVICE", is_planned=True, may_change=True
    )
    precision: Literal["auto", "fp32", "bf16", "fp16"] = option(
        "auto",
        "arithmetic of matrix products in training",
        is_planned=True,
        may_change=True,
        more="Softmax, loss and stored memory are fp32 in every precision.",
    )
    attention: Literal["auto", "eager", "skew", "sdpa", "triton"] = option(
        "auto",
        "form of the attention operation",
        is_planned=True,
        may_change=True,
        more="eager: the formula. skew: for CPUs; no dropatt. sdpa: PyTorch's kernels; no shaw_values. "
        "triton: fused kernels for CUDA; neither of the two. All give the same result to rounding.",
    )
    threads: int | None = option(
        None, "CPU threads; none: as torch finds them", min=1, max=4096, may_change=True
    )
    deterministic: bool = option(False, "only operations that repeat bit for bit", may_change=True)
    compile: bool = option(
        False,
        "compile the model with torch.compile; results may differ in the last digits",
        may_change=True,
        more="Takes up to minutes before the first step. Where it fails, training goes on without.",
    )

    def __post_init__(self) -> None:
        _check_fields(self)
        if not re.fullmatch(r"auto|cpu|mps|cuda(:[0-9]{1,4})?", self.device):
            raise SettingError(
                ["device"], f"must be one of auto, cpu, cuda, cuda:N, mps; got {quoted(self.device)}"
            )


@dataclass(frozen=True, kw_only=True)
class Config:
    """The whole experiment as data."""

    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    machine: MachineConfig = field(default_factory=MachineConfig)

    def __post_init__(self) -> None:
        if self.model.reset_memory_at_documents and not self.data.has_documents:
            raise SettingError(["reset_memory_at_documents"], "needs documents", _GIVE_DOCUMENTS)


SECTIONS: Mapping[str, type[Any]] = {
    "data": DataConfig,
    "model": ModelConfig,
    "optim": OptimConfig,
    "train": TrainConfig,
    "machine": MachineConfig,
}
PANELS: Mapping[str, str] = {
    "data": "Text and tokenizer",
    "model": "Model",
    "optim": "Optimization",
    "train": "Length, evaluation and checkpoints",
    "machine": "Machine",
}
LENGTHS = ("steps", "epochs", "minutes")
DOCUMENT_RULES = ("text_field", "document_separator", "document_per_file")
# Of each group one is given; a flag replaces whichever a file gives.
_EXCLUSIVE = (
    LENGTHS,
    ("valid", "valid_fraction", "valid_every"),
    DOCUMENT_RULES,
)

LEAVES: tuple[Leaf, ...] = tuple(
    leaf for section, cls in SECTIONS.items() for leaf in leaves_of(section, PANELS[section], cls)
)
_BY_NAME: Mapping[str, Leaf] = {leaf.name: leaf for leaf in LEAVES}
assert len(_BY_NAME) == len(LEAVES), "leaf names are unique over all sections"


def leaf(name: str) -> Leaf:
    """Find a setting by `n_layer`, `model.n_layer`, `n-layer` or `--n-layer`.

    Raises:
        UserError: no such setting; the message suggests the nearest.
    """
    plain = name.removeprefix("--").replace("-", "_")
    section, _, last = plain.rpartition(".")
    found = _BY_NAME.get(last)
    if found is None or section not in ("", found.section):
        raise UserError(f"{shown(name)}: unknown setting{suggestion(last, _BY_NAME)}")
    return found


def value_of(settings: Settings, name: str) -> Any:  # Any: a setting's own type, which its name decides
    """Return what a setting is set to, else its default."""
    return settings[name].value if name in settings else leaf(name).default


def _check_fields(section_config: Any) -> None:
    """Check every field of a section as it is made, and store each in the setting's own type."""
    for f in dataclasses.fields(section_config):
        value = check(_BY_NAME[f.name], getattr(section_config, f.name))
        object.__setattr__(section_config, f.name, value)


def from_flags(values: Mapping[str, object]) -> Settings:
    """Take what the command line set: by leaf name its text or typed value; None or no path: not given.

    Raises:
        UserError: a value is wrong, or two flags say the same thing (`--steps` and `--minutes`).
    """
    given = {name: value for name, value in values.items() if value is not None and value not in ((), [])}
    settings = {name: Sourced(parse(leaf(name), value, FLAG), FLAG) for name, value in given.items()}
    for group in _EXCLUSIVE:
        clash = [name for name in group if _is_given(settings, name)]
        if len(clash) > 1:
            raise UserError(f"{leaf(clash[1]).flag}: cannot go with {leaf(clash[0]).flag}; give one of them")
    return settings


def _is_given(settings: Settings, name: str) -> bool:
    """Whether a setting leaves no room for those that exclude it; a yes/no that is no does."""
    return name in settings and settings[name].value is not False


def override(base: Settings, changes: Settings) -> Settings:
    """Lay changes over settings.

    A length replaces any other length, a way to hold out text any other, a rule for documents any other, and
    a scheme of positions what another had of its own.
    """
    dropped = {
        name for group in _EXCLUSIVE if any(_is_given(changes, name) for name in group) for name in group
    }
    if "position" in changes:
        position = changes["position"].value
        dropped |= {name for name, schemes in SCHEMES_OF.items() if position not in schemes}
    return {name: value for name, value in base.items() if name not in dropped} | changes


def build(settings: Settings) -> Config:
    """Make a config of what is set and the defaults of what is not.

    Raises:
        UserError: a value is wrong or settings contradict each other; the place is the flag or file line.
    """
    values: dict[str, dict[str, object]] = {section: {} for section in SECTIONS}
    for name, sourced in settings.items():
        found = leaf(name)
        values[found.section][found.name] = check(found, sourced.value, sourced.origin)
    try:
        return Config(**{section: cls(**values[section]) for section, cls in SECTIONS.items()})
    except SettingError as error:
        raise blame(error, settings) from None


def blame(error: SettingError, settings: Settings) -> UserError:
    """Return an error of settings with its place: what was said last, a flag, a file's line, the setting."""
    blamed = max(error.names, key=lambda name: _weight(settings.get(name)))
    origin = settings[blamed].origin if blamed in settings else DEFAULT
    text = error.told(as_flags=origin == FLAG)
    if len(error.names) == 1:
        return fault_at(leaf(blamed), origin, text)
    return UserError(f"{_place(leaf(blamed), settings.get(blamed))}: {text}")


def _weight(sourced: Sourced | None) -> int:
    if sourced is None or sourced.origin == DEFAULT:
        return 0
    return 3 if sourced.origin == FLAG else 2 if is_file_line(sourced.origin) else 1


def _place(leaf: Leaf, sourced: Sourced | None) -> str:
    if sourced is None:
        return leaf.key
    if sourced.origin == FLAG:
        return leaf.flag_for(sourced.value) or leaf.metavar
    return sourced.origin if is_file_line(sourced.origin) else leaf.key


def build_section(section: str, values: Mapping[str, object], place: str) -> Any:
    """Make one section of plain values, such as the model settings that a checkpoint carries.

    Args:
        section: A key of `SECTIONS`.
        values: By leaf name, as `dataclasses.asdict` gives them; what is missing takes its default.
        place: What the values were read from, for errors.

    Raises:
        UserError: an unknown setting, a wrong value or a contradiction, at `place`.
    """
    try:
        known = {f.name for f in dataclasses.fields(SECTIONS[section])}
        for name in values:
            if name not in known:
                raise UserError(f"unknown setting {quoted(name)} in `{section}`")
        return SECTIONS[section](**values)
    except UserError as error:
        raise UserError(f"{place}: {error}") from None


def flatten(config: Config) -> dict[str, object]:
    """All values by leaf name, in the order of `LEAVES`."""
    return {leaf.name: getattr(getattr(config, leaf.section), leaf.name) for leaf in LEAVES}
