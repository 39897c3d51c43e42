"""One setting: its declaration, its values as text and in Python, and the words of its errors."""

import dataclasses
import difflib
import itertools
import math
import re
import types
import typing
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal, Union

import yaml

from txlcli import UserError

FLAG = "flag"
DEFAULT = "default"

# Beyond 2^53 a float no longer counts by ones; no count of this package gets near it.
_LARGEST_INT = 2**53


def option(
    default: object,
    help: str,
    *,
    min: float | None = None,
    max: float | None = None,
    above: float | None = None,
    below: float | None = None,
    metavar: str | None = None,
    more: str = "",
    is_planned: bool = False,
    may_change: bool = False,
    shapes_weights: bool = False,
) -> Any:  # a dataclass field stands where its value's type is declared
    """Declare one setting.

    Args:
        default: Its value where neither plan nor file nor flag sets it.
        help: A noun phrase with unit and paper symbol.
        min: Smallest value.
        max: Largest value.
        above: Lower bound that is not itself a value.
        below: Upper bound that is not itself a value.
        metavar: The word that stands for the value in help.
        more: Further sentences for `txl config KEY`.
        is_planned: The plan decides it where there is no configuration file.
        may_change: May be given anew when a run is resumed.
        shapes_weights: Decides names, shapes or meaning of the weights, so `--init` takes it from its run.
    """
    metadata = {
        "help": help,
        "more": more,
        "min": min,
        "max": max,
        "above": above,
        "below": below,
        "metavar": metavar,
        "is_planned": is_planned,
        "may_change": may_change,
        "shapes_weights": shapes_weights,
    }
    return field(default=default, metadata=metadata)


Kind = Literal["int", "float", "bool", "str", "choice", "paths", "ints"]


@dataclass(frozen=True)
class Sourced:
    """A value and where it comes from: `flag`, `default`, `runs/a/config.yaml:7`, `plan: <rule>`."""

    value: object
    origin: str


Settings = dict[str, Sourced]
"""What has been set, by leaf name; absent: not set."""


@dataclass(frozen=True)
class Leaf:
    """One setting, as flags, YAML and help see it; the arguments of `option` say what the fields mean."""

    name: str
    section: str
    panel: str
    kind: Kind
    is_optional: bool
    default: object
    choices: tuple[str, ...]
    help: str
    more: str
    min: float | None
    max: float | None
    above: float | None
    below: float | None
    metavar: str
    is_planned: bool
    may_change: bool
    shapes_weights: bool

    @property
    def flag(self) -> str | None:
        """`--n-layer`; None for the corpus, which is the command's argument."""
        return None if self.name == "corpus" else "--" + self.name.replace("_", "-")

    @property
    def negative_flag(self) -> str | None:
        """`--no-tied` for a yes/no setting, else None."""
        return "--no-" + self.name.replace("_", "-") if self.kind == "bool" else None

    def flag_for(self, value: object) -> str | None:
        """The flag that gives this value: `--no-tied` for False."""
        return self.negative_flag if value is False else self.flag

    @property
    def key(self) -> str:
        """`model.n_layer`."""
        return f"{self.section}.{self.name}"

    @property
    def expected(self) -> str:
        """What a value must be, in words: `a whole number of at least 1`."""
        if self.kind == "choice":
            return f"one of {', '.join(self.choices)}"
        words = {"bool": "true or false", "str": "a text", "paths": "a list of paths"}
        if self.kind in words:
            return words[self.kind]
        if self.kind == "ints":
            return " or ".join(["ascending whole numbers such as 2000,8000", "none", *self.choices])
        bounds = [
            f"{word} {_number_text(bound)}"
            for word, bound in (("of at least", self.min), ("above", self.above), ("below", self.below))
            if bound is not None
        ]
        if self.max is not None:
            bounds.append(f"at most {_number_text(self.max)}")
        noun = "a whole number" if self.kind == "int" else "a number"
        return f"{noun} {' and '.join(bounds)}" if bounds else noun

    @property
    def default_text(self) -> str:
        """The default as help shows it."""
        value = "none" if self.default in (None, ()) else scalar_text(self.default).strip('"')
        return f"by plan, else {value}" if self.is_planned else value

    @property
    def option_help(self) -> str:
        """Help with the default, one line."""
        return f"{self.help} [default: {self.default_text}]"

    def explain(self) -> str:
        """Say all about the setting in a few lines, for `txl config KEY`."""
        flag = "the command's argument" if self.flag is None else self.flag
        flags = flag if self.negative_flag is None else f"{flag} / {self.negative_flag}"
        lines = [
            f"{self.key}: {self.help}",
            f"  flag     {flags}",
            f"  value    {self.expected}{', or none' if self.is_optional else ''}",
            f"  default  {self.default_text}",
        ]
        if self.may_change:
            lines.append("  resume   may be given with --resume")
        if self.shapes_weights:
            lines.append("  init     taken from the run that --init names")
        return "\n".join([*lines, *([f"  {self.more}"] if self.more else [])])


def leaves_of(section: str, panel: str, cls: type[Any]) -> list[Leaf]:
    """Derive the settings of one section from its dataclass."""
    hints = typing.get_type_hints(cls)
    return [_leaf_of(section, panel, f, hints[f.name]) for f in dataclasses.fields(cls)]


def _leaf_of(section: str, panel: str, f: "dataclasses.Field[Any]", hint: Any) -> Leaf:
    parts = typing.get_args(hint) if typing.get_origin(hint) in (Union, types.UnionType) else (hint,)
    inner = next(part for part in parts if part is not types.NoneType)
    choices: tuple[str, ...] = next(
        (typing.get_args(part) for part in parts if typing.get_origin(part) is Literal), ()
    )
    kinds: dict[Any, Kind] = {
        int: "int",
        float: "float",
        bool: "bool",
        str: "str",
        tuple[str, ...]: "paths",
        tuple[int, ...]: "ints",
    }
    kind: Kind = kinds.get(inner, "choice")
    metavars = {
        "int": "N",
        "float": "X",
        "choice": "|".join(choices),
        "str": "TEXT",
        "paths": "PATH...",
        "ints": "LIST",
        "bool": "",
    }
    values = dict(f.metadata)
    values["metavar"] = values["metavar"] or metavars[kind]
    return Leaf(
        name=f.name,
        section=section,
        panel=panel,
        kind=kind,
        is_optional=f.default is None,
        default=f.default,
        choices=choices,
        **values,
    )


def parse(leaf: Leaf, value: object, origin: str) -> object:
    """Turn a flag's text, a plain YAML scalar or a Python value into the setting's typed value.

    A text `none` unsets a setting that may be unset.

    Raises:
        UserError: not such a value, or out of bounds; the place is the flag or the file's line.
    """
    if isinstance(value, str):
        if leaf.is_optional and value.lower() == "none":
            return None
        value = _from_text(leaf, value)
    return check(leaf, value, origin)


def check(leaf: Leaf, value: object, origin: str = "") -> object:
    """Check a Python value against the setting's type and bounds, and give it in that type.

    Raises:
        UserError: as `parse`.
    """
    typed = _typed(leaf, value)
    if typed is None and not (value is None and leaf.is_optional):
        near = suggestion(str(value), leaf.choices) if leaf.choices else ""
        if leaf.kind == "ints" and isinstance(value, (tuple, list)):
            value = ",".join(map(str, value))
        raise fault_at(leaf, origin, f"must be {leaf.expected}; got {quoted(value)}{near}")
    return typed


def _typed(leaf: Leaf, value: object) -> object:
    """The value in the setting's type; None: it is not such a value."""
    if leaf.kind == "paths":
        items = (value,) if isinstance(value, str) else value
        is_list = isinstance(items, (tuple, list)) and all(_is_text(item) for item in items)
        return tuple(items) if is_list and isinstance(items, (tuple, list)) else None
    if leaf.kind == "ints":
        return value if value in leaf.choices else _ascending(() if value is None else value)
    if leaf.kind == "bool":
        return value if isinstance(value, bool) else None
    if leaf.kind == "str":
        return value if _is_text(value) else None
    if leaf.kind == "choice":
        return value if value in leaf.choices else None
    if isinstance(value, bool) or not isinstance(value, (int, float) if leaf.kind == "float" else int):
        return None
    if isinstance(value, int) and abs(value) > max(_LARGEST_INT, leaf.max or 0):
        return None
    number = float(value) if leaf.kind == "float" else value
    is_inside = (
        math.isfinite(number)
        and (leaf.min is None or number >= leaf.min)
        and (leaf.max is None or number <= leaf.max)
        and (leaf.above is None or number > leaf.above)
        and (leaf.below is None or number < leaf.below)
    )
    return number if is_inside else None


def _ascending(value: object) -> tuple[int, ...] | None:
    """The value as ascending whole numbers above 0; None: it is no such list."""
    if not isinstance(value, (tuple, list)):
        return None
    is_good = all(type(item) is int and 0 < item <= _LARGEST_INT for item in value) and all(
        low < high for low, high in itertools.pairwise(value)
    )
    return tuple(value) if is_good else None


def _from_text(leaf: Leaf, text: str) -> object:
    """Read numbers or a yes/no out of their text; any other text stays as it is."""
    if leaf.kind == "ints":
        items = [] if text.lower() == "none" else [item.strip() for item in text.split(",")]
        are_numbers = all(re.fullmatch(r"[0-9]{1,30}", item) for item in items)
        return tuple(int(item) for item in items) if are_numbers else text
    if leaf.kind in ("int", "float"):
        number = read_number(text, int if leaf.kind == "int" else float)
        return text if number is None else number
    if leaf.kind == "bool":
        return {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}.get(
            text.lower(), text
        )
    return text


def read_number(text: str, kind: type[int] | type[float]) -> int | float | None:
    """Read a number as flags and settings write it: ASCII digits, no underscores; None: it is none.

    Plain exponents such as 1e-3, which YAML 1.1 takes for text, are numbers here.
    """
    if kind is int:
        return int(text) if re.fullmatch(r"[+-]?[0-9]{1,30}", text) else None
    is_number = re.fullmatch(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?", text)
    return float(text) if is_number else None


def _is_text(value: object) -> bool:
    return isinstance(value, str) and value != "" and "\0" not in value


def scalar_text(value: object) -> str:
    """One YAML value on one line, which YAML 1.1 readers and `read_settings` both take for the value."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        mantissa, mark, exponent = repr(value).partition("e")
        return (mantissa if "." in mantissa or not mark else f"{mantissa}.0") + mark + exponent
    if isinstance(value, tuple):
        return f"[{', '.join(scalar_text(item) for item in value)}]"
    text = str(value)
    is_plain = (
        re.fullmatch(r"[A-Za-z0-9_./+:-]+", text) and yaml.safe_load(text) == text and text.lower() != "none"
    )
    if not isinstance(value, str) or is_plain:
        return text
    quoted: str = yaml.safe_dump(text, default_style='"', allow_unicode=True, width=math.inf)
    return quoted.rstrip("\n")


def fault_at(leaf: Leaf, origin: str, text: str) -> UserError:
    """An error about one setting, at the flag or line that set it."""
    if origin == FLAG:
        return UserError(f"{leaf.flag or leaf.metavar}: {text}")
    if is_file_line(origin):
        return UserError(f"{origin}: {leaf.name} {text}")
    return UserError(f"{leaf.key}: {text}")


def is_file_line(origin: str) -> bool:
    """Whether an origin is `path:line`."""
    return re.search(r":[0-9]+$", origin) is not None


def shown(value: object, longest: int = 60) -> str:
    """A value on one line of at most so many characters, control characters escaped."""
    text = str(value)
    text = text if text.isprintable() else ascii(text)[1:-1]
    return text if len(text) <= longest else text[: longest - 3] + "..."


def quoted(value: object) -> str:
    """A value as errors show it."""
    return "none" if value is None else f"`{shown(value)}`"


def _number_text(number: float) -> str:
    return f"{number:d}" if isinstance(number, int) else f"{number:g}"


def suggestion(name: str, known: Iterable[str]) -> str:
    """The end of an error about an unknown name: the known one nearest to it, if any is near."""
    near = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean `{near[0]}`?" if near else ""
