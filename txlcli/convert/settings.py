"""Hyperparameters of other implementations as settings of this one.

Most have the same names, since this package took them from the authors. What differs:

    there                                        here
    n_token, vocab_size                          the vocabulary's size
    clamp_len of 0 or less                       clamp_len none
    same_length                                  mem_len; NVIDIA lets a query see one key more: mem_len+1
    pre_lnorm                                    norm pre, without a LayerNorm after the last layer
    tie_weight, tie_word_embeddings              tied
    tie_projs, one by one                        tie_projs none, tail or all; other lists: see `Settings.ties`
    memory at the start of a text                authors, NVIDIA: empty; Hugging Face: mem_len rows of zeros

The authors' file has no list of settings: they are attributes of the modules, and what is tied shows in
tensors that are the same numbers of the file. Whatever changes what the model computes and has no place here
is refused by its name.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar

from txlcli import UserError
from txlcli.config import LEAVES, Leaf, ModelConfig, SettingError, build_section, shown
from txlcli.convert.machine import Foreign
from txlcli.convert.names import Kind, Naming
from txlcli.convert.sources import CONFIG_REMEDY, Source, SourceTensor, children, show
from txlcli.model import clusters_of

T = TypeVar("T")

_LARGEST = 2**53
# No model of the family comes near it: what is larger is foreign nonsense, and would later ask for memory.
_LARGEST_SIZE = 10**6
_LEAVES: Mapping[str, Leaf] = {leaf.name: leaf for leaf in LEAVES if leaf.section == "model"}

# What a file of Hugging Face's class leaves out, its class sets so; tgt_len was a setting of its first years.
_HUGGINGFACE: Mapping[str, object] = {
    "n_token": 267_735,
    "cutoffs": [20_000, 40_000, 200_000],
    "d_model": 1024,
    "d_embed": 1024,
    "n_head": 16,
    "d_head": 64,
    "d_inner": 4096,
    "div_val": 4,
    "pre_lnorm": False,
    "n_layer": 18,
    "tgt_len": 128,
    "mem_len": 1600,
    "clamp_len": 1000,
    "same_length": True,
    "proj_share_all_but_first": True,
    "attn_type": 0,
    "sample_softmax": -1,
    "dropout": 0.1,
    "dropatt": 0.0,
    "untie_r": True,
    "init_std": 0.02,
    "proj_init_std": 0.01,
    "layer_norm_epsilon": 1e-5,
}
_OTHER_NAMES = {
    "n_token": "vocab_size",
    "d_model": "hidden_size",
    "n_head": "num_attention_heads",
    "n_layer": "num_hidden_layers",
}
# Their sizes and rates that have our names; the rest is put into words of ours by `_model`.
_SAME = ("n_layer", "d_model", "n_head", "d_head", "d_inner", "tgt_len", "mem_len", "div_val", "d_embed")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What a source says of its model.

    Attributes:
        model: In our words.
        n_vocab: Size of the vocabulary (V).
        naming: What its tensors are called.
        notices: What the user should know.
    """

    model: ModelConfig
    n_vocab: int
    naming: Naming
    notices: tuple[str, ...] = ()


def settings_of(source: Source) -> Settings:
    """Read the settings of a source.

    Raises:
        UserError: one is missing, wrong, or has no place here; or two contradict each other.
    """
    if source.kind == "huggingface":
        return _huggingface(Given(source.settings, source.place, _HUGGINGFACE, CONFIG_REMEDY))
    given = Given(source.settings, source.place)
    if source.kind == "nvidia":
        return _nvidia(given)
    # The authors' code gives older models this attribute when it loads them.
    return _authors(Given(source.settings, source.place, {"sample_softmax": -1}), source)


class Given:
    """Settings as a file has them, checked when they are taken."""

    def __init__(
        self,
        values: Mapping[str, Any],
        place: str,
        defaults: Mapping[str, object] | None = None,
        remedy: str = "take another checkpoint",
    ) -> None:
        self._values, self.place, self._defaults, self._remedy = values, place, defaults or {}, remedy

    def has(self, name: str) -> bool:
        """Whether the file has a setting."""
        return name in self._values

    def take(self, name: str) -> Any:
        """Take any value.

        Raises:
            UserError: there is none, or it has two names and two values.
        """
        return self._find(name)[1]

    def whole(self, name: str, least: int = 0, most: int = _LARGEST) -> int:
        """Take a whole number."""
        key, value = self._find(name)
        if type(value) is not int or value < least:
            raise self.wrong(f"`{key}` must be a whole number of at least {least}; got {show(value)}")
        if value > most:
            raise self.wrong(f"`{key}` is too large; got {show(value)}, at most {most:,}")
        return value

    def size(self, name: str) -> int:
        """Take a whole number within the bounds of our setting of this name."""
        leaf = _LEAVES[name]
        most = _LARGEST_SIZE if leaf.max is None else min(int(leaf.max), _LARGEST_SIZE)
        return self.whole(name, int(leaf.min or 0), most)

    def number(self, name: str, ours: str = "") -> float:
        """Take a finite number, within the bounds of our setting if it has one called `ours`."""
        key, value = self._find(name)
        leaf = _LEAVES.get(ours)
        expected = "a number" if leaf is None else leaf.expected
        most = _LARGEST if leaf is None or leaf.max is None else leaf.max
        if type(value) not in (int, float) or value != value or value < -_LARGEST:
            raise self.wrong(f"`{key}` must be {expected}; got {show(value)}")
        if value > most:
            raise self.wrong(f"`{key}` is too large; got {show(value)}, at most {most:,}")
        if leaf is not None and not _is_within(leaf, value):
            raise self.wrong(f"`{key}` must be {expected}; got {show(value)}")
        return float(value)

    def flag(self, name: str) -> bool:
        """Take a yes or no."""
        value = self.take(name)
        if type(value) is not bool:
            raise self.wrong(f"`{name}` must be true or false; got {show(value)}")
        return value

    def wholes(self, name: str) -> list[int]:
        """Take a list of whole numbers."""
        value = self.take(name)
        if not isinstance(value, (list, tuple)) or not all(type(item) is int for item in value):
            raise self.wrong(f"`{name}` must be a list of whole numbers; got {show(value)}")
        return list(value)

    def flags(self, name: str) -> list[bool]:
        """Take a list of yes and no."""
        value = self.take(name)
        if not isinstance(value, (list, tuple)) or not all(type(item) is bool for item in value):
            raise self.wrong(f"`{name}` must be a list of true and false; got {show(value)}")
        return list(value)

    def refuse(self, text: str) -> UserError:
        """Return the error for what these settings say and this package has not."""
        return UserError(f"{self.place}: {text}")

    def wrong(self, text: str) -> UserError:
        """Return the error for a value that no program of the family can have written."""
        return self.refuse(f"{text}; {self._remedy}")

    def _find(self, name: str) -> tuple[str, Any]:
        """Find a value under the name that the file has for it."""
        other = _OTHER_NAMES.get(name, name)
        found = [(key, self._values[key]) for key in dict.fromkeys((name, other)) if key in self._values]
        if not found and name not in self._defaults:
            raise UserError(f"{self.place}: has no `{name}`; not a file of the kind that it looks like")
        if len(found) == 2 and (type(found[0][1]) is not int or found[0][1] != found[1][1]):
            values = " and ".join(show(value) for _, value in found)
            raise self.wrong(f"`{name}` and `{other}` contradict each other; got {values}")
        return found[0] if found else (name, self._defaults[name])


def _is_within(leaf: Leaf, value: float) -> bool:
    return (
        (leaf.min is None or value >= leaf.min)
        and (leaf.above is None or value > leaf.above)
        and (leaf.below is None or value < leaf.below)
    )


def _huggingface(given: Given) -> Settings:
    cutoffs = given.wholes("cutoffs")
    if given.has("tie_projs"):
        ties = given.flags("tie_projs")
    else:
        ties = [False] + [given.flag("proj_share_all_but_first")] * len(cutoffs)
    tied = next((name for name in ("tie_word_embeddings", "tie_weight") if given.has(name)), None)
    return _settings(
        given,
        "huggingface",
        cutoffs=cutoffs,
        is_tied=True if tied is None else given.flag(tied),
        ties=ties,
        untie_r=given.flag("untie_r"),
        norm_eps=given.number("layer_norm_epsilon", "norm_eps"),
        init_std=given.number("init_std", "init_std"),
        proj_init_std=given.number("proj_init_std", "proj_init_std"),
        notices=[]
        if given.has("tgt_len")
        else [f"{given.place}: has no tgt_len; took segments of {_HUGGINGFACE['tgt_len']} tokens"],
    )


def _nvidia(given: Given) -> Settings:
    _refuse_extended(given)
    return _settings(
        given,
        "nvidia",
        cutoffs=given.wholes("cutoffs"),
        is_tied=given.flag("tie_weight"),
        ties=given.flags("tie_projs"),
    )


def _authors(top: Given, source: Source) -> Settings:
    """Collect the settings from the modules of the authors' model."""
    _refuse_extended(top)
    _refuse_other_models(top)
    embed, head = _child(top, "word_emb"), _child(top, "crit")
    layers = [Given(child.attributes, f"{top.place}.layers.{name}") for name, child in _layers(top).items()]
    if not layers:
        raise top.refuse("has no layers; not a model of the authors")
    attentions = [_child(layer, "dec_attn") for layer in layers]
    feedforwards = [_child(layer, "pos_ff") for layer in layers]
    for feedforward in feedforwards:
        _check_relu(feedforward)
    for attention in attentions:
        if not math.isclose(attention.number("scale"), attention.whole("d_head", 1) ** -0.5):
            raise attention.refuse(f"scale must be 1 / sqrt(d_head); got {attention.number('scale'):g}")
    if not math.isclose(embed.number("emb_scale"), top.whole("d_model", 1) ** 0.5):
        raise embed.refuse(f"emb_scale must be sqrt(d_model); got {embed.number('emb_scale'):g}")
    blocks = attentions + feedforwards
    cutoffs = _common([embed, head], "cutoffs", Given.wholes)
    n_token = _common([top, embed, head], "n_token", Given.whole)
    if cutoffs[-1:] != [n_token]:
        raise embed.refuse(f"cutoffs must end with n_token {n_token:,}; got {show(cutoffs)}")
    dropouts = [
        *(_child(owner, "drop") for owner in (top, *attentions)),
        *(
            _child(_child(feedforward, "CoreNet"), name)
            for feedforward in feedforwards
            for name in ("2", "4")
        ),
    ]
    values = {
        **{name: top.take(name) for name in ("tgt_len", "mem_len", "clamp_len", "same_length", "n_layer")},
        "n_token": n_token,
        "attn_type": 0,
        "sample_softmax": -1,
        "d_model": _common([top, *blocks], "d_model", Given.whole),
        "d_embed": _common([top, embed, head], "d_embed", Given.whole),
        "n_head": _common([top, *attentions], "n_head", Given.whole),
        "d_head": _common([top, *attentions], "d_head", Given.whole),
        "d_inner": _common(feedforwards, "d_inner", Given.whole),
        "div_val": _common([embed, head], "div_val", Given.whole),
        "pre_lnorm": _common(blocks, "pre_lnorm", Given.flag),
        "dropout": _common(dropouts, "p", Given.number),
        "dropatt": _common([_child(attention, "dropatt") for attention in attentions], "p", Given.number),
    }
    norms = [_child(block, "layer_norm") for block in blocks]
    is_one_table = values["div_val"] == 1 or len(cutoffs) == 1
    n_tables, n_clusters = 1 if is_one_table else len(cutoffs), len(cutoffs)
    tables = [
        _are_same(source.tensors, f"word_emb.emb_layers.{i}.weight", f"crit.out_layers.{i}.weight")
        for i in range(n_tables)
    ]
    ties = [
        _are_same(source.tensors, f"word_emb.emb_projs.{0 if is_one_table else i}", f"crit.out_projs.{i}")
        for i in range(n_clusters)
    ]
    notices = []
    if any(tables) and not all(tables):
        shared = ", ".join(str(i) for i, is_same in enumerate(tables) if is_same)
        notices.append(
            f"{source.path}: only the tables of clusters {shared} serve input and output; each side has its "
            "own here, equal until it is trained"
        )
    return _settings(
        Given(values, top.place),
        "authors",
        cutoffs=cutoffs[:-1],
        is_tied=all(tables),
        ties=ties,
        norm_eps=_common(norms, "eps", lambda norm, name: norm.number(name, "norm_eps")),
        notices=notices,
    )


def _settings(
    given: Given,
    kind: Kind,
    *,
    cutoffs: Sequence[int],
    is_tied: bool,
    ties: Sequence[bool],
    untie_r: bool = False,
    notices: Iterable[str] = (),
    **values: object,
) -> Settings:
    """Put settings into our words.

    Args:
        given: Those with their names there.
        kind: Whose.
        cutoffs: Without the vocabulary's size at the end.
        is_tied: Input tables are the output's.
        ties: For each cluster whether its output projection is its input's; those it leaves out are not.
        untie_r: A pair of biases for each layer.
        notices: What was found so far.
        values: Settings by our names, as they are.
    """
    _refuse_other_models(given)
    n_vocab, same_length, pre_lnorm = (
        given.whole("n_token", 1),
        given.flag("same_length"),
        given.flag("pre_lnorm"),
    )
    clamp_len = given.number("clamp_len")
    if clamp_len > 0:
        values["clamp_len"] = given.whole("clamp_len")
    n_clusters = len(cutoffs) + 1
    ties = (*ties, *(False,) * n_clusters)[:n_clusters]
    values |= {name: given.size(name) for name in _SAME} | {
        "dropout": given.number("dropout", "dropout"),
        "dropatt": given.number("dropatt", "dropatt"),
        "cutoffs": list(cutoffs),
        "tied": is_tied,
        "untie_r": untie_r,
        "norm": "pre" if pre_lnorm else "post",
        "final_norm": not pre_lnorm,
        "same_length": "off" if not same_length else "mem_len+1" if kind == "nvidia" else "mem_len",
        "memory_start": "zeros" if kind == "huggingface" else "empty",
        "position": "relative",
        "proj_same_dim": True,
        "tie_projs": "tail",  # as far as there is no projection
    }
    if values["mem_len"] == 0 and values["same_length"] == "mem_len":
        raise given.refuse("same_length at mem_len 0 leaves no key to see")
    model: ModelConfig = build_section("model", values, given.place)
    try:
        clusters = clusters_of(model, n_vocab)
    except SettingError as error:
        raise given.refuse(str(error)) from None
    if model.div_val > 1 and not cutoffs and model.d_embed == model.d_model:
        raise given.refuse(
            f"div_val {model.div_val} without cutoffs projects d_embed {model.d_embed} to a d_model just as "
            "wide; there is no place for that projection here"
        )
    ties = tuple(tie and clusters.has_projection(i) for i, tie in enumerate(ties))
    if any(map(clusters.has_projection, range(n_clusters))):
        model = replace(model, tie_projs=_tie_projs(ties))
    shared = [i for i in clusters.output_projections(model.tie_projs) if ties[i]]
    notices = list(notices)
    if shared:
        listed = ", ".join(map(str, shared))
        notices.append(
            f"{given.place}: only the projections of clusters {listed} serve input and output; each side has "
            "its own here, equal until it is trained"
        )
    naming = Naming(
        kind=kind,
        clusters=clusters,
        n_layer=model.n_layer,
        is_tied=model.tied,
        is_untied_r=model.untie_r,
        ties=ties,
    )
    return Settings(model=model, n_vocab=n_vocab, naming=naming, notices=tuple(notices))


def _tie_projs(ties: Sequence[bool]) -> Literal["none", "tail", "all"]:
    """Name the rule that a list of ties follows; `none` where it follows no rule."""
    first, *tail = ties
    if all(tail):
        return "all" if first else "tail"
    return "none"


def _refuse_other_models(given: Given) -> None:
    if given.take("attn_type") != 0:
        raise given.refuse(
            f"attn_type must be 0, the attention of the paper; got {show(given.take('attn_type'))}; "
            "the others have no place here"
        )
    if given.number("sample_softmax") > 0:
        raise given.refuse(
            f"sample_softmax must be off; got {show(given.take('sample_softmax'))}; "
            "its output layer has no place here"
        )


def _refuse_extended(given: Given) -> None:
    if given.whole("ext_len") > 0:
        raise given.refuse(
            f"ext_len must be 0; got {given.whole('ext_len'):,}; context that is run again has no place here"
        )


def _layers(top: Given) -> dict[str, Foreign]:
    """Return the authors' layers by number."""
    container = _child_of(top, "layers")
    found = children(container)
    if list(found) != [str(i) for i in range(len(found))]:
        raise top.refuse("its layers are not numbered 0, 1, ...; damaged")
    return found


def _check_relu(feedforward: Given) -> None:
    steps = [child.name.rpartition(".")[2] for child in children(_child_of(feedforward, "CoreNet")).values()]
    if steps != ["Linear", "ReLU", "Dropout", "Linear", "Dropout"]:
        raise feedforward.refuse(
            f"CoreNet must be Linear, ReLU, Dropout, Linear, Dropout; got {shown(', '.join(steps))}"
        )


def _child_of(module: Given, name: str) -> Foreign:
    modules = module.take("_modules")
    child = modules.get(name) if isinstance(modules, dict) else None
    if not isinstance(child, Foreign):
        raise module.refuse(f"has no module `{name}`; not a model of the authors")
    return child


def _child(module: Given, name: str) -> Given:
    return Given(_child_of(module, name).attributes, f"{module.place}.{name}")


def _common(modules: Sequence[Given], name: str, take: Callable[[Given, str], T]) -> T:
    """Take a setting that several modules have.

    Raises:
        UserError: they have it differently.
    """
    values = [take(module, name) for module in modules]
    for module, value in zip(modules, values, strict=True):
        if value != values[0]:
            raise module.refuse(
                f"`{name}` must be the same everywhere; got {show(value)} here and {show(values[0])} at "
                f"{modules[0].place}"
            )
    return values[0]


def _are_same(tensors: Mapping[str, SourceTensor], name: str, other: str) -> bool:
    """Whether two names are the same numbers of the file."""
    return name in tensors and other in tensors and tensors[name].identity == tensors[other].identity
