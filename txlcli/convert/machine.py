"""The machine with a stack whose programs pickles are, with nothing that it could call.

A hostile program meets bounds before it takes anything: on its bytes, steps, containers and what it
remembers. Where a number goes in a dict or set depends on the number alone, so a file can choose many that
are all passed by whenever one more is stored; what that may cost is counted and bounded too. Where texts go
depends on a secret of the process, unless PYTHONHASHSEED tells it.
"""
# ruff: noqa: D102  # what an instruction does is said by `pickletools`

import re
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from txlcli import UserError
from txlcli.convert.allowed import ALLOWED, DTYPES, STORAGE_DTYPES, Use
from txlcli.convert.archive import Storage, StoredTensor, describe_misfit

# The largest vocabulary of the family, the 793,471 words of lm1b with their counts, takes seven million steps
# and fifty megabytes in the wordiest protocol, five million and thirty in those in use. A file that goes to
# the bounds takes about a gigabyte (ten million strings of one character).
LIMIT_PICKLE_BYTES = 64 << 20
_LIMIT_STEPS = 10_000_000
_LIMIT_REMEMBERED = 4_000_000
_LIMIT_CONTAINERS = 1_000_000
# A file that goes to it takes some seconds. One dict may have fifty thousand numbers in no order as keys, as
# GPT-2's ids would be if shuffled; old torch knew the few hundred tensors of an optimizer by their addresses.
_LIMIT_PROBES = 1_500_000_000
_LIMIT_NUMBER_BYTES = 255
_LIMIT_LINE_BYTES = 1000
_LIMIT_KEY_PARTS = 8
# What a key costs beside a number in a dict: to compare the parts of a tuple, to look at ten slots at a time.
_PART_WEIGHT, _MEMBER_WEIGHT = 32, 10
CHARACTERS_IN_ONE = 16
"""How many characters of a text cost as much as a plain value."""

_PICKLE_PROTOCOL = 5
_PYTHON_2 = {"__builtin__": "builtins", "copy_reg": "copyreg"}


@dataclass(eq=False)
class Foreign:
    """A name of foreign code, or an object that the file says was made with it; never looked up or called.

    Attributes:
        name: The global's full name, such as `argparse.Namespace`; Python 2's `__builtin__` and `copy_reg`
            have their names of today.
        args: What the object was to be made from; None for the bare name (`torch.float32`, a function).
        state: What was to become its `__dict__`; None without one.
    """

    name: str
    args: tuple[Any, ...] | None = None
    state: Any = None

    @property
    def attributes(self) -> dict[str, Any]:
        """Its attributes by name: its state where that is a dict, with those in slots; else nothing."""
        parts = self.state if isinstance(self.state, tuple) else (self.state,)
        # Names are texts; other keys might take long to store again, see `_Decoder.count_probes`.
        return {
            name: value
            for part in parts
            if isinstance(part, dict)
            for name, value in part.items()
            if type(name) is str
        }


class Damaged(UserError):
    """A file that no pickle looks like; one that asks for what it must not is another case."""


@dataclass(frozen=True, eq=False)
class Slice:
    """A storage as a tensor gets it: before torch 0.4 this could be a part of one."""

    storage: Storage
    first: int
    n_elements: int


class Decoder:
    """Interpreter of one or several pickles, one after another; the bounds are for all together."""

    def __init__(self, path: Path, data: bytes, file_size: int) -> None:
        self.path = path
        self.data = data
        self.file_size = file_size
        self.position = 0
        self.storages: dict[str, Storage] = {}
        self.stack: list[Any] = []
        self.outer: list[list[Any]] = []
        self.memo: dict[str, Any] = {}
        self.scattered: dict[int, dict[Any, Any] | set[Any]] = {}
        self.n_steps = 0
        self.n_containers = 0
        self.n_probes = 0

    def decode(self) -> Any:
        """Run the pickle that begins here up to its end, and return what it made."""
        self.stack, self.outer, self.memo = [], [], {}
        try:
            while True:
                self.n_steps += 1
                if self.n_steps > _LIMIT_STEPS:
                    raise too_large(self.path, _LIMIT_STEPS, "steps")
                code = self.data[self.position]
                self.position += 1
                if code == _STOP:
                    break
                do = _OPCODES.get(code)
                if do is None:
                    raise ValueError("what is no instruction of a pickle")
                do(self)
            (value,) = self.stack
        except (IndexError, KeyError, ValueError) as error:
            if self.position < len(self.data):
                is_missing = isinstance(error, (IndexError, KeyError))
                found = "an instruction that misses something" if is_missing else _say(error)
                raise self.damaged(found) from error
            if len(self.data) == LIMIT_PICKLE_BYTES < self.file_size:
                raise too_large(self.path, LIMIT_PICKLE_BYTES, "bytes of pickle") from error
            raise self.damaged("its end") from error
        self.stack, self.outer, self.memo = [], [], {}
        return value

    def damaged(self, found: str) -> Damaged:
        """Return the refusal of a file that no pickle of torch or Python looks like."""
        return Damaged(
            f"{self.path}: damaged, cut short, or no checkpoint; got {found} at byte {self.position:,} "
            "of its pickle; fetch the file again"
        )

    # Bounds

    def spend(self, n_steps: int) -> None:
        self.n_steps += n_steps
        if self.n_steps > _LIMIT_STEPS:
            raise too_large(self.path, _LIMIT_STEPS, "steps")

    def count_container(self) -> None:
        self.n_containers += 1
        if self.n_containers > _LIMIT_CONTAINERS:
            raise too_large(self.path, _LIMIT_CONTAINERS, "containers")

    def count_probes(self, target: dict[Any, Any] | set[Any], key: Any, weight: int) -> None:
        """Count what it may cost at most to store a key whose hash the file can choose.

        At most it passes by every key that is there, and so again when the table grows. Nothing need be
        counted for numbers that are the only keys of a dict and come as n, n + 1, n + 2, ...: there are more
        slots than keys, so each finds its own free.
        """
        if type(target) is dict and type(key) is int and key >= 0 and id(target) not in self.scattered:
            last = next(reversed(target), None)
            if not target or (type(last) is int and last == key - 1):
                return
        self.scattered[id(target)] = target  # kept, so that none other gets its id
        self.n_probes += len(target) * weight * (1 if type(target) is dict else _MEMBER_WEIGHT)
        if self.n_probes > _LIMIT_PROBES:
            raise too_large(self.path, _LIMIT_PROBES, "steps between keys that collide")

    def push_container(self, value: Any) -> None:
        self.count_container()
        self.stack.append(value)

    def take(self, n_bytes: int) -> bytes:
        end = self.position + n_bytes
        if end > len(self.data):
            self.position = len(self.data)
            raise ValueError("cut short")
        part = self.data[self.position : end]
        self.position = end
        return part

    def take_number(self, n_bytes: int) -> int:
        return int.from_bytes(self.take(n_bytes), "little")

    def take_line(self, limit_bytes: int = _LIMIT_LINE_BYTES) -> bytes:
        end = self.data.find(b"\n", self.position, self.position + limit_bytes + 1)
        if end < 0:
            self.position = min(len(self.data), self.position + limit_bytes)
            raise ValueError("a line without an end")
        line = self.data[self.position : end]
        self.position = end + 1
        return line

    # Values

    def push_int(self, n_bytes: int) -> None:
        if n_bytes > _LIMIT_NUMBER_BYTES:
            raise ValueError("a number of many bytes")
        self.stack.append(int.from_bytes(self.take(n_bytes), "little", signed=True))

    def push_int_line(self) -> None:
        line = self.take_line()
        booleans = {b"00": False, b"01": True}
        self.stack.append(booleans[line] if line in booleans else _read_number(int, line))

    def push_text(self, n_length_bytes: int, encoding: str) -> None:
        self.stack.append(self.take(self.take_number(n_length_bytes)).decode(encoding))

    def push_bytes(self, n_length_bytes: int) -> None:
        self.stack.append(self.take(self.take_number(n_length_bytes)))

    def push_text_line(self) -> None:
        text = self.take_line(len(self.data)).decode("raw-unicode-escape")
        text.encode()  # half a surrogate pair is no text
        self.stack.append(text)

    def push_quoted_line(self) -> None:
        line = self.take_line(len(self.data))
        if len(line) < 2 or line[:1] != line[-1:] or line[:1] not in (b"'", b'"'):
            raise ValueError("a string without quotes")
        self.stack.append(_ESCAPE.sub(_unescape, line[1:-1]).decode("latin-1"))

    def begin(self, protocol: int) -> None:
        if protocol > _PICKLE_PROTOCOL:
            raise self.damaged(f"pickle protocol {protocol}")

    def begin_frame(self, n_bytes: int) -> None:
        if n_bytes > len(self.data) - self.position:
            self.position = len(self.data)
            raise ValueError("cut short")

    # Containers

    def mark(self) -> None:
        self.count_container()
        self.outer.append(self.stack)
        self.stack = []

    def pop_mark(self) -> list[Any]:
        items, self.stack = self.stack, self.outer.pop()
        return items

    def pop(self) -> None:
        if self.stack:
            self.stack.pop()
        else:
            self.pop_mark()

    def pop_last(self, n: int) -> list[Any]:
        if len(self.stack) < n:
            raise IndexError("too few values")
        items = self.stack[-n:]
        del self.stack[-n:]
        return items

    def push_tuple(self, n_items: int) -> None:
        self.push_container(tuple(self.pop_last(n_items)))

    def extend_list(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if type(target) is not list:
            raise ValueError("items for what is no list")
        target.extend(items)

    def extend_set(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if type(target) is not set:
            raise ValueError("members for what is no set")
        self.store_members(target, items)

    def store_members(self, target: set[Any], members: list[Any]) -> set[Any]:
        for member in members:
            self.store(target, member)
        return target

    def store(self, target: dict[Any, Any] | set[Any], key: Any, value: Any = None) -> None:
        """Store an item of a dict or a member of a set, at a cost that is counted.

        One by one, so that a signal is heard in between.
        """
        weight, is_salted = _weigh_key(key)
        if not is_salted:
            self.count_probes(target, key, weight)
        n_before = len(target)
        if isinstance(target, dict):
            target[key] = value
        else:
            target.add(key)
        if len(target) == n_before:
            # No program stores a key twice. The two were compared to their ends.
            self.spend(weight)

    def extend_dict(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if type(target) is not dict or len(items) % 2:
            raise ValueError("items for what is no dict")
        for key, value in zip(items[::2], items[1::2], strict=True):
            self.store(target, key, value)

    def push_dict(self, items: list[Any]) -> None:
        self.push_container({})
        self.extend_dict(items)

    def remember(self, index: int) -> None:
        self.memo[str(index)] = self.stack[-1]  # a text: the file can choose where a number goes
        if len(self.memo) > _LIMIT_REMEMBERED:
            raise too_large(self.path, _LIMIT_REMEMBERED, "remembered values")

    def recall(self, index: int) -> None:
        self.stack.append(self.memo[str(index)])

    # Names and objects

    def push_name(self, module: object, name: object) -> None:
        if type(module) is not str or type(name) is not str:
            raise ValueError("a name that is no text")
        full_name = f"{_PYTHON_2.get(module, module)}.{name}"
        if full_name not in ALLOWED:
            shown = ascii(full_name[:100])[1:-1][:100]
            raise UserError(
                f"{self.path}: asks for `{shown}`, which no checkpoint of the family "
                f"needs; got it at byte {self.position:,} of its pickle; nothing was run; "
                "load it elsewhere only if you trust it"
            )
        self.push_container(Foreign(full_name))

    def take_name(self) -> str:
        name = self.take_line().decode("ascii")
        if " " in name:  # a sentence that begins with the letter of this instruction
            raise ValueError("a name that is none")
        return name

    def call_line(self) -> None:
        """Do what Python 2 does for an object of an old class: its name is in the instruction."""
        args = tuple(self.pop_mark())
        self.push_name(self.take_name(), self.take_name())
        self.call(self.stack.pop(), args)

    def call_marked(self) -> None:
        name, *args = self.pop_mark()
        self.call(name, tuple(args))

    def call(self, name: Any, args: Any) -> None:
        """Push what stands for `name(*args)`."""
        if type(name) is not Foreign or name.args is not None or type(args) is not tuple:
            raise ValueError("a call of what is no name")
        use = ALLOWED[name.name]
        if use is Use.RECORD:
            return self.push_container(Foreign(name.name, args))
        match use, args:
            case Use.DICT, () | (Foreign(),):
                made: Any = {}
            case Use.DICT, (dict() as items,):
                made = items
            case Use.DICT, (list() as pairs,):
                self.spend(len(pairs))
                made = {}
                for pair in pairs:
                    if type(pair) not in (list, tuple) or len(pair) != 2:
                        raise ValueError("a pair that is none")
                    self.store(made, *pair)
            case Use.SET, ():
                made = set()
            case Use.SET, (list() as items,):
                self.spend(len(items))
                made = self.store_members(set(), items)
            case Use.TUPLE, (tuple() as made,):
                pass
            case Use.BYTES, ():
                made = b""
            case Use.BYTES, (str() as text, "latin1" | "latin-1"):
                self.spend(len(text))
                made = text.encode("latin-1")
            case Use.OBJECT, (Foreign(args=None) as of, Foreign(name="builtins.object", args=None), None):
                return self.call(of, ())
            case Use.TENSOR, (Slice() as numbers, first, tuple() as shape, tuple() as strides, *rest):
                made = self.tensor(numbers, numbers.storage.dtype, first, shape, strides, rest[2:])
            case Use.TYPED_TENSOR, (Slice() as numbers, first, tuple() as shape, tuple() as strides, *rest):
                made = self.typed_tensor(numbers, first, shape, strides, rest)
            case Use.PARAMETER, (StoredTensor() as made, *_):
                pass
            case _:
                raise self.damaged(f"`{name.name}` called with what it does not take")
        return self.push_container(made)

    def set_state(self) -> None:
        """Give the object on the stack the state above it."""
        state = self.stack.pop()
        target = self.stack[-1]
        if type(target) is dict:
            return  # attributes of an OrderedDict
        if type(target) is not Foreign or target.args is None or target.state is not None:
            raise ValueError("a state for what has none")
        target.state = state

    # Tensors

    def refer(self, reference: Any) -> None:
        """Push what the pickle refers to outside itself: a storage, or a class with its source text."""
        match reference:
            case ("module", Foreign() as name, _, _):
                self.stack.append(name)
            case ("storage", Foreign() as kind, str() as key, str(), int() as n_elements, *rest):
                self.push_container(self.slice(kind.name, key, n_elements, rest))
            case _:
                raise self.damaged("a reference to neither a storage nor a module")

    def slice(self, kind: str, key: str, n_elements: int, rest: list[Any]) -> Slice:
        dtype = STORAGE_DTYPES.get(kind)
        if dtype is None or n_elements < 0 or len(key) > _LIMIT_LINE_BYTES:
            raise self.damaged("a reference to no storage")
        if n_elements * dtype.itemsize > self.file_size:
            raise self.damaged(
                f"a storage of {n_elements * dtype.itemsize:,} bytes in a file of {self.file_size:,}"
            )
        storage = self.storages.setdefault(key, Storage(key, dtype, n_elements))
        if (storage.dtype, storage.n_elements) != (dtype, n_elements):
            raise self.damaged("two sizes or types of one storage")
        match rest:
            case [] | [None]:
                return Slice(storage, 0, n_elements)
            case [(str(), int() as first, int() as n_part)] if 0 <= first <= first + n_part <= n_elements:
                return Slice(storage, first, n_part)
        raise self.damaged("a part of a storage that is outside it")

    def tensor(
        self, numbers: Slice, dtype: torch.dtype, first: Any, shape: Any, strides: Any, metadata: list[Any]
    ) -> StoredTensor:
        """Return the tensor, if its place is within its storage."""
        if metadata not in ([], [None], [{}]):
            raise self.damaged("a tensor with marks, to be negated or conjugated")
        storage = numbers.storage
        n_elements = numbers.n_elements * storage.dtype.itemsize // dtype.itemsize
        misfit = describe_misfit(shape, strides, first, n_elements)
        if misfit is not None:
            raise self.damaged(misfit)
        return StoredTensor(self.path, dtype, shape, strides, numbers.first + first, storage)

    def typed_tensor(
        self, numbers: Slice, first: Any, shape: Any, strides: Any, rest: list[Any]
    ) -> StoredTensor:
        match rest:
            case [_, _, Foreign(name=name, args=None), *metadata] if name in DTYPES and numbers.first == 0:
                return self.tensor(numbers, DTYPES[name], first, shape, strides, metadata)
        raise self.damaged("a tensor without a known type")


def _weigh_key(key: Any) -> tuple[int, bool]:
    """Return what it costs to compare a key with an equal one, and whether its hash is the process's own.

    An empty text's is not. A tuple's is computed anew from all that is in it, so that a few nested ones would
    take for ever; and whole numbers from 2^61 - 1 on hash like smaller ones.

    Raises:
        ValueError: it can be no key.
    """
    if type(key) is str and key:
        return 1 + len(key) // CHARACTERS_IN_ONE, True
    is_tuple = type(key) is tuple and len(key) <= _LIMIT_KEY_PARTS
    parts: Sequence[Any] = key if is_tuple else (key,)
    weight = 1 + is_tuple * _PART_WEIGHT * len(parts)
    n_salted = 0
    for part in parts:
        if type(part) not in _KEY_TYPES or (type(part) is int and abs(part) >= 1 << 60):
            raise ValueError("a key that is no plain value")
        if type(part) in (str, bytes) and part:
            weight += len(part) // CHARACTERS_IN_ONE
            n_salted += 1
    return weight, 0 < len(parts) == n_salted


def _read_number(kind: Callable[[bytes], Any], line: bytes) -> Any:
    try:
        return kind(line)
    except ValueError:
        raise ValueError("a number that is none") from None


def _say(error: Exception) -> str:
    return "a text that is none" if isinstance(error, UnicodeError) else str(error)


_KEY_TYPES = (str, int, bytes, float, bool, type(None))
_ESCAPE = re.compile(rb"\\(x[0-9a-fA-F]{2}|[\\'\"nrt])")


def _unescape(match: "re.Match[bytes]") -> bytes:
    code = match[1]
    if code[:1] == b"x":
        return bytes([int(code[1:], 16)])
    return {b"n": b"\n", b"r": b"\r", b"t": b"\t"}.get(code, code)


def too_large(path: Path, limit: int, things: str) -> UserError:
    """Word the refusal of a file that goes beyond a bound."""
    return UserError(
        f"{path}: too large for a checkpoint; got more than {limit:,} {things}; name another file"
    )


# The instructions, by code, as `pickletools` describes them.

_STOP = ord(".")

_OPCODES: dict[int, Callable[[Decoder], None]] = {
    # plain values
    ord("N"): lambda decoder: decoder.stack.append(None),
    0x88: lambda decoder: decoder.stack.append(True),
    0x89: lambda decoder: decoder.stack.append(False),
    ord("K"): lambda decoder: decoder.stack.append(decoder.take_number(1)),
    ord("M"): lambda decoder: decoder.stack.append(decoder.take_number(2)),
    ord("J"): lambda decoder: decoder.push_int(4),
    0x8A: lambda decoder: decoder.push_int(decoder.take_number(1)),
    0x8B: lambda decoder: decoder.push_int(decoder.take_number(4)),
    ord("I"): lambda decoder: decoder.push_int_line(),
    ord("L"): lambda decoder: decoder.stack.append(_read_number(int, decoder.take_line().rstrip(b"L"))),
    ord("G"): lambda decoder: decoder.stack.append(struct.unpack(">d", decoder.take(8))[0]),
    ord("F"): lambda decoder: decoder.stack.append(_read_number(float, decoder.take_line())),
    # text and bytes, behind their lengths
    0x8C: lambda decoder: decoder.push_text(1, "utf-8"),
    ord("X"): lambda decoder: decoder.push_text(4, "utf-8"),
    0x8D: lambda decoder: decoder.push_text(8, "utf-8"),
    ord("U"): lambda decoder: decoder.push_text(1, "latin-1"),
    ord("T"): lambda decoder: decoder.push_text(4, "latin-1"),
    ord("V"): lambda decoder: decoder.push_text_line(),
    ord("S"): lambda decoder: decoder.push_quoted_line(),
    ord("C"): lambda decoder: decoder.push_bytes(1),
    ord("B"): lambda decoder: decoder.push_bytes(4),
    0x8E: lambda decoder: decoder.push_bytes(8),
    0x96: lambda decoder: decoder.push_bytes(8),
    # containers
    ord("("): lambda decoder: decoder.mark(),
    ord("1"): lambda decoder: decoder.pop_mark().clear(),
    ord("0"): lambda decoder: decoder.pop(),
    ord("2"): lambda decoder: decoder.stack.append(decoder.stack[-1]),
    ord(")"): lambda decoder: decoder.push_container(()),
    0x85: lambda decoder: decoder.push_tuple(1),
    0x86: lambda decoder: decoder.push_tuple(2),
    0x87: lambda decoder: decoder.push_tuple(3),
    ord("t"): lambda decoder: decoder.push_container(tuple(decoder.pop_mark())),
    ord("]"): lambda decoder: decoder.push_container([]),
    ord("l"): lambda decoder: decoder.push_container(decoder.pop_mark()),
    ord("a"): lambda decoder: decoder.extend_list([decoder.stack.pop()]),
    ord("e"): lambda decoder: decoder.extend_list(decoder.pop_mark()),
    ord("}"): lambda decoder: decoder.push_container({}),
    ord("d"): lambda decoder: decoder.push_dict(decoder.pop_mark()),
    ord("s"): lambda decoder: decoder.extend_dict(decoder.pop_last(2)),
    ord("u"): lambda decoder: decoder.extend_dict(decoder.pop_mark()),
    0x8F: lambda decoder: decoder.push_container(set()),
    0x91: lambda decoder: decoder.push_container(decoder.store_members(set(), decoder.pop_mark())),
    0x90: lambda decoder: decoder.extend_set(decoder.pop_mark()),
    # what is remembered
    ord("p"): lambda decoder: decoder.remember(_read_number(int, decoder.take_line())),
    ord("q"): lambda decoder: decoder.remember(decoder.take_number(1)),
    ord("r"): lambda decoder: decoder.remember(decoder.take_number(4)),
    0x94: lambda decoder: decoder.remember(len(decoder.memo)),
    ord("g"): lambda decoder: decoder.recall(_read_number(int, decoder.take_line())),
    ord("h"): lambda decoder: decoder.recall(decoder.take_number(1)),
    ord("j"): lambda decoder: decoder.recall(decoder.take_number(4)),
    # names and objects
    ord("c"): lambda decoder: decoder.push_name(decoder.take_name(), decoder.take_name()),
    0x93: lambda decoder: decoder.push_name(*decoder.pop_last(2)),
    ord("R"): lambda decoder: decoder.call(*decoder.pop_last(2)),
    0x81: lambda decoder: decoder.call(*decoder.pop_last(2)),
    ord("i"): lambda decoder: decoder.call_line(),
    ord("o"): lambda decoder: decoder.call_marked(),
    ord("b"): lambda decoder: decoder.set_state(),
    ord("Q"): lambda decoder: decoder.refer(decoder.stack.pop()),
    # framing, which only tells where to read ahead
    0x80: lambda decoder: decoder.begin(decoder.take_number(1)),
    0x95: lambda decoder: decoder.begin_frame(decoder.take_number(8)),
}
