"""The weights of a source under our names: checked against its settings, then read once, in float32."""

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from txlcli import UserError
from txlcli.checkpoint import least_numbers
from txlcli.config import shown
from txlcli.convert.names import Piece, Rows, Shape
from txlcli.convert.settings import Settings
from txlcli.convert.sources import Source
from txlcli.files import look_at
from txlcli.model import TransformerXL

_LEAST_BYTES = 2
"""Bytes of a number in the narrowest type that weights are kept in."""

_NARROWEST = 2**-7
"""How far bfloat16's rounding, the coarsest that a source may have, puts a number from its value, at most."""


@dataclass(frozen=True)
class Row:
    """What became of a tensor of the source, or of some of its rows.

    Attributes:
        source: Its name there.
        target: Ours; None: it was dropped.
        shape: Of what was taken or dropped.
        what: `as is`, or what was done.
    """

    source: str
    target: str | None
    shape: Shape
    what: str


@dataclass(frozen=True)
class Group:
    """A tensor of the source: the name that is read, further names of the same, and who takes its rows."""

    name: str
    duplicates: tuple[str, ...]
    pieces: tuple[Piece, ...]


@dataclass(frozen=True)
class Matched:
    """A source whose tensors are exactly those that its settings call for.

    Attributes:
        source: It.
        shapes: Names and shapes of our weights.
        groups: Its tensors.
        dropped: Those that are computed here.
    """

    source: Source
    shapes: Mapping[str, Shape]
    groups: tuple[Group, ...]
    dropped: tuple[str, ...]

    def rows(self) -> tuple[Row, ...]:
        """List what becomes of every tensor."""
        tensors = self.source.tensors
        taken = [
            Row(group.name, piece.target, _taken_shape(piece), _say(piece, self.shapes[piece.target]))
            for group in self.groups
            for piece in group.pieces
        ]
        duplicates = [
            Row(name, None, tensors[name].shape, f"dropped: the same as {group.name}")
            for group in self.groups
            for name in group.duplicates
        ]
        computed = [Row(name, None, tensors[name].shape, "dropped: computed here") for name in self.dropped]
        return (*taken, *duplicates, *computed)

    def notices(self) -> tuple[str, ...]:
        """Say which types of numbers become another."""
        others = _types(self.source, [group.name for group in self.groups]) - {"float32"}
        rounded = _types(self.source, self.dropped) - {"float32", "float64"}
        notices = []
        if others:
            notices.append(f"{self.source.path}: weights in {' and '.join(sorted(others))} became float32")
        if rounded:
            notices.append(
                f"{self.source.path}: the frequencies of its sinusoids are rounded to {' '.join(rounded)}; "
                "here they are exact, so scores differ a little from the source's"
            )
        return tuple(notices)

    def read(self) -> dict[str, Tensor]:
        """Read the weights.

        Raises:
            UserError: some are not finite, or two that should be the same are not.
        """
        weights = {name: torch.empty(shape) for name, shape in self.shapes.items()}
        for group in self.groups:
            stored = self.source.tensors[group.name]
            tensor = stored.read()
            for name in group.duplicates:
                other = self.source.tensors[name]
                is_same = other.identity == stored.identity or (
                    other.dtype == stored.dtype and torch.equal(other.read(), tensor)
                )
                if not is_same:
                    raise UserError(
                        f"{self.source.path}: `{group.name}` and `{name}` differ, but {self.source.place} "
                        "ties them; not converted"
                    )
            tensor = tensor.to(torch.float32)
            if not bool(torch.isfinite(tensor).all()):
                raise UserError(
                    f"{self.source.path}: `{group.name}` is not finite in float32; not converted; take an "
                    "earlier checkpoint"
                )
            for piece in group.pieces:
                rows = weights[piece.target][slice(*piece.target_rows)]
                rows.copy_(piece.cut(tensor).reshape(rows.shape))
        self._check_frequencies()
        return weights

    def _check_frequencies(self) -> None:
        """Refuse frequencies of sinusoids that are not the paper's, since they are not taken over."""
        for name in self.dropped:
            found = self.source.tensors[name].read().double()
            exponents = torch.arange(len(found), dtype=torch.float64) / len(found)
            # As rounded in the type that the source keeps them in.
            if not torch.allclose(found, 10000.0**-exponents, rtol=_NARROWEST, atol=0.0):
                raise UserError(
                    f"{self.source.path}: `{name}` is not 10000^(-2t/d_model); "
                    "other sinusoids have no place here"
                )


def match(source: Source, settings: Settings) -> Matched:
    """Find our weights among a source's tensors, by names, shapes and types alone.

    Raises:
        UserError: a tensor is missing, left over or of another shape than the settings say, or the file is
            too small for the model. Nothing large has been allocated.
    """
    _check_layers(source, settings)
    _check_size(source, settings)
    # Shapes without numbers: whatever the settings claim, this costs nothing.
    with torch.device("meta"):
        state = TransformerXL(settings.model, settings.n_vocab).state_dict()
    shapes = {name: tuple(tensor.shape) for name, tensor in state.items()}
    groups = tuple(_groups(source, settings, settings.naming.pieces(shapes)))
    frequencies = settings.naming.frequencies
    dropped = (frequencies,) if frequencies in source.tensors else ()
    for name in dropped:
        _check(source, name, (settings.model.d_model // 2,))
    names = {name for group in groups for name in (group.name, *group.duplicates)}
    left = sorted(source.tensors.keys() - names - set(dropped))
    if left:
        listed = ", ".join(f"`{shown(name)}`" for name in left[:3])
        raise UserError(
            f"{source.path}: {len(left):,} of its tensors have no place in the model that {source.place} "
            f"describes; {listed}{', ...' if len(left) > 3 else ''}; not converted"
        )
    _check_claim(source, [*names, *dropped])
    return Matched(source, shapes, groups, dropped)


def _groups(source: Source, settings: Settings, pieces: Sequence[Piece]) -> Iterator[Group]:
    by_names: dict[tuple[str, ...], list[Piece]] = {}
    for piece in pieces:
        by_names.setdefault(piece.names, []).append(piece)
    for names, takers in by_names.items():
        found = [name for name in names if name in source.tensors]
        if not found:
            others = f" or `{names[1]}`" if len(names) > 1 else ""
            raise UserError(
                f"{source.path}: has no tensor `{names[0]}`{others}, which the model that {source.place} "
                f"describes needs for {takers[0].target}; not converted"
            )
        for name in found:
            _check(source, name, takers[0].shape)
        yield Group(found[0], tuple(found[1:]), tuple(takers))


def _check(source: Source, name: str, shape: Shape) -> None:
    tensor = source.tensors[name]
    if tuple(tensor.shape) != shape:
        raise UserError(
            f"{source.path}: `{name}` has another shape than {source.place} says; got {list(tensor.shape)}, "
            f"expected {list(shape)}; not converted"
        )
    if not tensor.dtype.is_floating_point:
        raise UserError(
            f"{source.path}: `{name}` must hold floating point numbers; got {tensor.dtype}; not converted"
        )


def _check_layers(source: Source, settings: Settings) -> None:
    form = re.compile(rf"{re.escape(settings.naming.prefix)}layers\.(\d{{1,9}})\.", re.ASCII)
    found = {int(match[1]) for name in source.tensors if (match := form.match(name))}
    if len(found) != settings.model.n_layer:
        raise UserError(
            f"{source.path}: holds {len(found):,} layers, {source.place} says n_layer "
            f"{settings.model.n_layer:,}; not converted"
        )


def _check_size(source: Source, settings: Settings) -> None:
    least, size = _LEAST_BYTES * least_numbers(settings.model, settings.n_vocab), _size(source)
    if size < least:
        raise UserError(
            f"{source.path}: too small for the model that {source.place} describes; got {size:,} bytes, the "
            f"weights take {least:,} at least; not converted"
        )


def _check_claim(source: Source, names: Sequence[str]) -> None:
    """Refuse tensors that show fewer numbers than they claim to have, one many times over."""
    tensors = {source.tensors[name].identity: source.tensors[name] for name in names}
    claim = sum(math.prod(tensor.shape) * tensor.dtype.itemsize for tensor in tensors.values())
    if claim > _size(source):
        raise UserError(
            f"{source.path}: its tensors claim {claim:,} bytes, more than the file's {_size(source):,}; "
            "damaged; fetch the file again"
        )


def _types(source: Source, names: Iterable[str]) -> set[str]:
    return {str(source.tensors[name].dtype).removeprefix("torch.") for name in names}


def _size(source: Source) -> int:
    status = look_at(source.path)
    return 0 if status is None else status.st_size


def _taken_shape(piece: Piece) -> Shape:
    return (piece.rows[1] - piece.rows[0], *piece.shape[1:])


def _say(piece: Piece, shape: Shape) -> str:
    """Say what is done to the rows of a piece on their way into a tensor of a shape."""
    done = []
    if piece.rows != (0, piece.shape[0]):
        done.append(f"cut: rows {_say_rows(piece.rows)} of {piece.shape[0]:,}")
    if piece.target_rows != (0, shape[0]):
        done.append(f"joined: as rows {_say_rows(piece.target_rows)} of {shape[0]:,}")
    if piece.is_flipped:
        done.append("flipped")
    if piece.is_copy:
        done.append("copied")
    return ", ".join(done) or "as is"


def _say_rows(rows: Rows) -> str:
    return f"{rows[0]:,} to {rows[1] - 1:,}"
