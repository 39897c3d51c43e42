"""Settings as YAML files: reading, writing, and the presets shipped with the package.

The YAML is data and nothing else: two levels of mappings with scalars, and plain lists. It is read
from the parser's events and never composed; anchors, aliases, tags, deeper nesting and files above 1 MB are
refused.
"""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import yaml

from txlcli import UserError
from txlcli.config.sections import LEAVES, SECTIONS, Config, build
from txlcli.config.setting import (
    Leaf,
    Settings,
    Sourced,
    check,
    parse,
    quoted,
    scalar_text,
    shown,
    suggestion,
)

_YAML_LIMIT_BYTES = 1 << 20
_LEAF_OF = {leaf.name: leaf for leaf in LEAVES}


def dump(config: Config, origins: Mapping[str, str] | None = None) -> str:
    """Write a config as YAML, complete, every value on a line of its own with its origin as a comment.

    `load` of it gives an equal config.
    """
    origins = origins or {}
    return dump_settings(
        {
            leaf.name: Sourced(getattr(getattr(config, leaf.section), leaf.name), origins.get(leaf.name, ""))
            for leaf in LEAVES
        }
    )


def dump_settings(settings: Settings) -> str:
    """Write what is set as YAML, as `dump` writes all; `read_settings` of it gives the same values."""
    lines = []
    for section in SECTIONS:
        own = [leaf for leaf in LEAVES if leaf.section == section and leaf.name in settings]
        lines += [f"{section}:"] * bool(own)
        for leaf in own:
            value, origin = settings[leaf.name].value, settings[leaf.name].origin
            comment = f"  # {_comment(origin)}" if origin else ""
            lines.append(f"  {leaf.name}: {scalar_text(value)}{comment}")
    return "\n".join(lines) + "\n"


def _comment(origin: str) -> str:
    return origin if origin.isprintable() else ascii(origin)[1:-1]


def load(path: Path) -> Config:
    """Read a YAML file as a config: what it leaves out takes the default."""
    return build(read_settings(path))


def read_settings(path: Path) -> Settings:
    """Read the settings of a YAML file; each origin is `path:line`.

    Raises:
        UserError: missing, unreadable, too large or not YAML; an unknown, misplaced or repeated key;
            a wrong value.
    """
    text = _read_text(path)
    return {
        entry.leaf.name: Sourced(entry.value, f"{path}:{entry.line}") for entry in _entries(text, str(path))
    }


def read_origins(path: Path) -> dict[str, str]:
    """Read back the origins that `dump` wrote as comments, by leaf name."""
    text = _read_text(path)
    lines = re.split("\r\n|[\r\n\x85\u2028\u2029]", text)  # as YAML counts lines
    rests = {e.leaf.name: lines[e.end_line][e.end_column :].strip() for e in _entries(text, str(path))}
    return {name: rest[1:].strip() for name, rest in rests.items() if rest.startswith("#")}


def _read_text(path: Path) -> str:
    try:
        with path.open("rb") as file:
            data = file.read(_YAML_LIMIT_BYTES + 1)
    except FileNotFoundError:
        raise UserError(f"{path}: no such file") from None
    except IsADirectoryError:
        inside = path / "config.yaml"
        hint = f"; its settings are in {inside}" if _is_there(inside) else "; give a YAML file"
        raise UserError(f"{path}: is a folder{hint}") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise UserError(f"{path}: cannot be read; {reason.lower()}") from None
    if len(data) > _YAML_LIMIT_BYTES:
        raise UserError(f"{path}: larger than {_YAML_LIMIT_BYTES >> 20} MB; is this a settings file?")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise UserError(f"{path}:{line}: not UTF-8 at byte {error.start}; save the file as UTF-8") from None


def _is_there(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:  # a folder that is closed to us, a name too long
        return False


class _Entry(NamedTuple):
    """A setting of a file: its value and where it stands (`end_line` counts from 0, `line` from 1)."""

    leaf: Leaf
    value: object
    line: int
    end_line: int
    end_column: int


def _entries(text: str, place: str) -> Iterator[_Entry]:
    """Walk a settings file: a mapping of sections, each a mapping of settings."""
    events = _Events(text, place)
    lines: dict[str, int] = {}
    if not events.open_document():
        return
    for section, line in events.keys("the file"):
        if section not in SECTIONS:
            home = _LEAF_OF.get(section)
            hint = f"; it belongs under `{home.section}:`" if home else suggestion(section, SECTIONS)
            raise UserError(f"{place}:{line}: unknown section {quoted(section)}{hint}")
        _once(lines, section, line, place)
        if events.skip_null():
            continue
        for name, name_line in events.keys(f"section `{section}`"):
            found = _section_leaf(section, name, f"{place}:{name_line}")
            _once(lines, found.key, name_line, place)
            yield events.setting(found, name_line)
    events.close_document()


def _once(lines: dict[str, int], key: str, line: int, place: str) -> None:
    if key in lines:
        raise UserError(f"{place}:{line}: `{key}` is set twice, first in line {lines[key]}; keep one")
    lines[key] = line


def _section_leaf(section: str, name: str, place: str) -> Leaf:
    found = _LEAF_OF.get(name)
    if found is None:
        near = suggestion(name.replace("-", "_"), _LEAF_OF)
        raise UserError(f"{place}: unknown setting `{section}.{shown(name)}`{near}")
    if found.section != section:
        raise UserError(
            f"{place}: `{name}` does not belong under `{section}:`; it belongs under `{found.section}:`"
        )
    return found


class _Events:
    """The parser's events, taken one by one, so that nothing deeper than two mappings is ever built."""

    def __init__(self, text: str, place: str):
        self._events = yaml.parse(text, Loader=yaml.SafeLoader)
        self._place = place
        self._next: yaml.Event | None = None

    def _peek(self) -> yaml.Event:
        if self._next is None:
            try:
                self._next = next(self._events)
            except yaml.MarkedYAMLError as error:
                mark = error.problem_mark or error.context_mark
                line = mark.line + 1 if mark else 1
                raise UserError(f"{self._place}:{line}: not YAML: {shown(error.problem)}") from None
            except yaml.YAMLError as error:
                raise UserError(f"{self._place}: not YAML: {shown(str(error).splitlines()[0])}") from None
            self._refuse_indirection(self._next)
        return self._next

    def _take(self) -> yaml.Event:
        event = self._peek()
        self._next = None
        return event

    def _refuse_indirection(self, event: yaml.Event) -> None:
        tag = getattr(event, "tag", None)
        if getattr(event, "anchor", None) is not None:
            raise UserError(
                f"{self._place}:{_line(event)}: anchors and aliases are refused; write the value out"
            )
        if tag is not None:
            raise UserError(
                f"{self._place}:{_line(event)}: tags such as `{shown(tag)}` are refused; remove it"
            )

    def open_document(self) -> bool:
        """Step into the document; False: there is none, or it is empty."""
        self._take()
        if isinstance(self._peek(), yaml.StreamEndEvent):
            return False
        self._take()
        return not self.skip_null()

    def close_document(self) -> None:
        """Refuse anything after the document."""
        self._take()
        if isinstance(self._peek(), yaml.DocumentStartEvent):
            raise UserError(f"{self._place}:{_line(self._peek())}: a second document; keep one")

    def skip_null(self) -> bool:
        """Step over an empty value, if one comes next."""
        event = self._peek()
        is_null = isinstance(event, yaml.ScalarEvent) and _is_null(event)
        if is_null:
            self._take()
        return is_null

    def keys(self, what: str) -> Iterator[tuple[str, int]]:
        """Each key of the mapping that comes next, with its line; the caller takes the key's value."""
        if not isinstance(self._peek(), yaml.MappingStartEvent):
            raise UserError(f"{self._place}:{_line(self._peek())}: {what} must hold `name: value` lines")
        self._take()
        while not isinstance(self._peek(), yaml.MappingEndEvent):
            key = self._take()
            line = _line(key)
            if not isinstance(key, yaml.ScalarEvent):
                raise UserError(f"{self._place}:{line}: a key must be a name")
            yield key.value, line
        self._take()

    def setting(self, found: Leaf, line: int) -> _Entry:
        """Take the value that comes next and parse it for its setting."""
        origin = f"{self._place}:{line}"
        first = last = self._take()
        if isinstance(first, yaml.ScalarEvent):
            # Quotes make a text of what would else be `none` or a number.
            is_text = first.style is not None and found.kind in ("str", "paths")
            value = None if _is_null(first) else first.value
            typed = check(found, value, origin) if is_text else parse(found, value, origin)
        elif isinstance(first, yaml.SequenceStartEvent) and found.kind in ("paths", "ints"):
            items = []
            while isinstance(last := self._take(), yaml.ScalarEvent):
                items.append(last.value)
            if not isinstance(last, yaml.SequenceEndEvent):
                raise UserError(f"{origin}: {found.name} must be {found.expected}; got a list within it")
            is_text = found.kind == "paths"
            typed = (
                check(found, items, origin) if is_text else parse(found, ",".join(items) or "none", origin)
            )
        else:
            got = "a list" if isinstance(first, yaml.SequenceStartEvent) else "a mapping"
            raise UserError(f"{origin}: {found.name} must be {found.expected}; got {got}")
        end = last.end_mark
        assert end is not None, "the parser marks every event"
        return _Entry(found, typed, line, end.line, end.column)


def _line(event: yaml.Event) -> int:
    assert event.start_mark is not None, "the parser marks every event"
    return event.start_mark.line + 1


def _is_null(event: yaml.ScalarEvent) -> bool:
    return event.style is None and event.value in ("", "~", "null", "Null", "NULL")


def presets() -> dict[str, Path]:
    """The settings files shipped with the package, by name."""
    package = Path(__file__).resolve().parent.parent
    # A wheel carries them inside the package; a source checkout has them beside it.
    folder = next((f for f in (package / "configs", package.parent / "configs") if f.is_dir()), package)
    return {path.stem: path for path in sorted(folder.glob("*.yaml"))}


def find_preset(name_or_path: str) -> Path:
    """Find the file that `--config NAME|FILE` means: a preset's name first, else a path.

    Raises:
        UserError: neither; the message suggests the nearest preset.
    """
    known = presets()
    if name_or_path in known:
        return known[name_or_path]
    path = Path(name_or_path)
    if path.suffix in (".yaml", ".yml") or _is_there(path) or len(path.parts) > 1:
        return path
    near = suggestion(name_or_path, known)
    raise UserError(
        f"--config: no preset {quoted(name_or_path)}{near}; presets: {', '.join(known)}; or give a YAML file"
    )
