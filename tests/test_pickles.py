"""Foreign checkpoints: values and tensors come back, in every format; hostile ones do and take nothing."""

import argparse
import io
import itertools
import pickle
import random
import struct
import subprocess
import sys
import types
import zipfile
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from txlcli import UserError
from txlcli.convert import allowed, machine, pickles
from txlcli.convert.archive import StoredTensor
from txlcli.convert.machine import Foreign
from txlcli.convert.pickles import read_pickled

HERE = Path("file.pt")


def read(data: bytes) -> Any:
    HERE.write_bytes(data)
    return read_pickled(HERE)


def refusal(data: bytes) -> str:
    """Return the one line with which a file is refused."""
    with pytest.raises(UserError) as caught:
        read(data)
    line = str(caught.value)
    assert line.startswith("file.pt: ")
    assert line.isprintable(), line
    assert len(line) < 400
    return line


def save(value: object, *, legacy: bool = False, protocol: int = 2) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer, pickle_protocol=protocol, _use_new_zipfile_serialization=not legacy)
    return buffer.getvalue()


def assert_bits(stored: StoredTensor, tensor: Tensor) -> None:
    found = stored.read()
    assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape) == (stored.dtype, stored.shape)
    assert found.is_contiguous()
    raw = tensor.detach().contiguous()
    assert found.flatten().view(torch.uint8).tolist() == raw.flatten().view(torch.uint8).tolist()


both_formats = pytest.mark.parametrize("legacy", [False, True], ids=["zip", "stream"])


# Tensors


@both_formats
@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@pytest.mark.parametrize("name", sorted(set(allowed.DTYPES)))
def test_tensors_of_every_type_come_back_bit_for_bit(name: str, protocol: int, legacy: bool) -> None:
    dtype = allowed.DTYPES[name]
    tensor = torch.randint(0, 2 if dtype is torch.bool else 100, (3, 5)).to(dtype)
    if dtype.is_floating_point and dtype.itemsize > 1:
        tensor[0, :3] = torch.tensor([torch.nan, -torch.inf, -0.0])
    stored = read(save({"x": tensor}, legacy=legacy, protocol=protocol))["x"]
    assert_bits(stored, tensor)


@both_formats
def test_views_come_back_as_what_they_showed(legacy: bool) -> None:
    base = torch.arange(60.0).reshape(6, 10)
    views = {
        "transposed": base.t(),
        "part": base[1:5, 2:9:3],
        "row": base[3],
        "number": base[2, 3],
        "empty": base[:0],
        "backwards": base.flip(0),
        "permuted": base.reshape(3, 2, 10).permute(2, 0, 1),
    }
    stored = read(save(views, legacy=legacy))
    for name, view in views.items():
        assert_bits(stored[name], view)


@both_formats
def test_what_is_tied_shows(legacy: bool) -> None:
    weight, other = nn.Parameter(torch.randn(4, 3)), nn.Parameter(torch.randn(4, 3))
    value = {
        "a": weight,
        "b": weight,
        "c": weight.data,
        "d": other,
        "e": weight.data[:2],
        "f": weight.data.t(),
    }
    stored = read(save(value, legacy=legacy))
    assert stored["a"] is stored["b"]
    assert stored["a"].identity == stored["c"].identity
    assert len({tensor.identity for tensor in stored.values()}) == 4
    assert_bits(stored["a"], weight)


def test_reading_is_the_callers_own(tmp_path: Path) -> None:
    stored = read(save(torch.zeros(3)))
    stored.read().fill_(7)
    assert stored.read().tolist() == [0, 0, 0]


def test_a_file_that_was_cut_later_is_told() -> None:
    data = save(torch.zeros(1000))
    stored = read(data)
    HERE.write_bytes(data[:2000])
    with pytest.raises(
        UserError, match=r"^file.pt: was cut while it was read; got 1,\d+ bytes at .* 4,000; "
    ):
        stored.read()
    HERE.unlink()
    with pytest.raises(UserError, match=r"^file.pt: cannot be read; no such file or directory$"):
        stored.read()


def test_big_endian_numbers_are_turned() -> None:
    data = save({"x": torch.tensor([1.5, -2.0]), "n": torch.tensor([1, 2], dtype=torch.int16)})
    entries = unzip(data)
    swapped = {
        name: np.frombuffer(text, "u4" if len(text) == 8 else "u2").byteswap().tobytes()
        if "/data/" in name
        else text
        for name, text in entries.items()
    }
    stored = read(zipped({**swapped, "archive/byteorder": b"big"}))
    assert stored["x"].read().tolist() == [1.5, -2.0]
    assert stored["n"].read().tolist() == [1, 2]


def test_bools_of_other_bytes_are_true() -> None:
    entries = unzip(save(torch.tensor([True, False, True])))
    stored = read(zipped({**entries, "archive/data/0": b"\x07\x00\xff"}))
    assert stored.read().view(torch.uint8).tolist() == [1, 0, 1]


# Values


@both_formats
def test_checkpoints_of_plain_things(legacy: bool) -> None:
    class_of_counts = defaultdict(list)
    class_of_counts["k"].append(1)
    value = {
        "model_config": {"n_layer": 2, "cutoffs": [1, 2], "tie_projs": [False, True], "clamp_len": -1},
        "args": argparse.Namespace(lr=0.25, work_dir="LM-TFM", multi_gpu=None),
        "counter": Counter("abca"),
        "sym2idx": OrderedDict([("b", 0), ("a", 1)]),
        "default": class_of_counts,
        "set": {1, 2},
        "shape": torch.Size([2, 3]),
        "device": torch.device("cuda", 1),
        "dtype": torch.float16,
        "loss": 3.25,
        "raw": b"\x00\xff",
        "frozen": frozenset("ab"),
    }
    found = read(save(value, legacy=legacy))
    args, device, dtype = (found.pop(name) for name in ("args", "device", "dtype"))
    assert (args.name, args.args, args.attributes) == ("argparse.Namespace", (), vars(value["args"]))
    assert (device.name, device.args) == ("torch.device", ("cuda", 1))
    assert (dtype.name, dtype.args) == ("torch.float16", None)
    assert list(found["sym2idx"]) == ["b", "a"]
    for name, part in found.items():
        assert part == value[name], name
        assert type(part) in (dict, set, tuple, float, bytes), name


@both_formats
def test_a_state_dict(legacy: bool) -> None:
    module = nn.Sequential(nn.Linear(3, 2), nn.LayerNorm(2))
    found = read(save(module.state_dict(), legacy=legacy))
    assert list(found) == list(module.state_dict())
    for name, tensor in module.state_dict().items():
        assert_bits(found[name], tensor)


@both_formats
@pytest.mark.filterwarnings("ignore:Couldn't retrieve source code")
def test_a_module_saved_whole(legacy: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The class is made up for the moment of writing; the reader knows neither it nor its module."""
    fake = types.ModuleType("mem_transformer")
    model_class = type("MemTransformerLM", (nn.Module,), {"__module__": "mem_transformer"})
    fake.MemTransformerLM = model_class  # type: ignore[attr-defined]
    model = model_class()
    model.n_layer, model.drop = 2, nn.Dropout(0.1)
    model.layers = nn.ModuleList([nn.Sequential(nn.Linear(3, 2, bias=False), nn.ReLU(inplace=True))])
    model.bias = nn.Parameter(torch.randn(2))
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "mem_transformer", fake)
        data = save(model, legacy=legacy)
    found = read(data)
    assert "mem_transformer" not in sys.modules
    assert (found.name, found.args) == ("mem_transformer.MemTransformerLM", ())
    assert found.attributes["n_layer"] == 2
    assert_bits(found.attributes["_parameters"]["bias"], model.bias)
    inner = found.attributes["_modules"]["layers"].attributes["_modules"]["0"].attributes["_modules"]["0"]
    assert inner.name == "torch.nn.modules.linear.Linear"
    assert_bits(inner.attributes["_parameters"]["weight"], model.layers[0][0].weight)


scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(1 << 70), 1 << 70)
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary()
)
keys = st.none() | st.booleans() | st.integers(-(1 << 59), 1 << 59) | st.text() | st.binary()
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(keys, inner) | st.sets(keys),
    max_leaves=20,
)


@given(values, st.integers(0, 5))
def test_plain_pickles_of_every_protocol(value: object, protocol: int) -> None:
    found = read(pickle.dumps(value, protocol))
    assert found == value
    assert repr(found) == repr(value) or "{" in repr(value)  # the order of a set is nobody's


@pytest.mark.parametrize("protocol", range(6))
def test_one_object_stays_one_object(protocol: int) -> None:
    shared = ["word"]
    found = read(pickle.dumps({"a": shared, "b": (shared, shared)}, protocol))
    assert found["a"] is found["b"][0] is found["b"][1]


def test_objects_with_slots_and_other_states() -> None:
    found = read(b"\x80\x02cargparse\nNamespace\n)\x81N}X\x01\x00\x00\x00aK\x01s\x86b.")
    assert found.attributes == {"a": 1}
    assert Foreign("a.b", (), "text").attributes == {}
    assert Foreign("a.b").attributes == {}


PYTHON_2 = {
    "words in protocol 0": (
        b"(dp0\nS'it\\'s \\xc3\\xa9\\n'\np1\nI1\nsS\"it's\"\np2\nL5L\nsVa\\u00e9\np3\nF1.5\nsS'b'\nI01\ns.",
        {"it's Ã©\n": 1, "it's": 5, "aé": 1.5, "b": True},
    ),
    "words in protocol 2": (b"\x80\x02]q\x00(U\x02\xc3\xa9q\x01T\x01\x00\x00\x00bK\x02e.", ["Ã©", "b", 2]),
    "ordered": (
        b"\x80\x02ccollections\nOrderedDict\nq\x00]q\x01(]q\x02(U\x01bK\x00e]q\x03(U\x01aK\x01ee\x85q\x04Rq\x05.",
        {"b": 0, "a": 1},
    ),
    "counted": (b"\x80\x02ccollections\nCounter\nq\x00}q\x01U\x01aK\x05s\x85Rq\x02.", {"a": 5}),
    "a set": (b"c__builtin__\nset\np0\n((lp1\nI1\naI2\natp2\nRp3\n.", {1, 2}),
}


@pytest.mark.parametrize("name", PYTHON_2)
def test_pickles_of_python_2(name: str) -> None:
    data, value = PYTHON_2[name]
    found = read(data)
    assert found == value
    assert str(found) == str(value)


def test_objects_of_python_2() -> None:
    by_line = b"(ivocabulary\nVocab\np0\n(dp1\nS'max_size'\nI3\nsb."
    on_stack = b"(cvocabulary\nVocab\no}U\x08max_sizeK\x03sb."
    rebuilt = (
        b"ccopy_reg\n_reconstructor\n(cvocabulary\nVocab\nc__builtin__\nobject\nNtR}U\x08max_sizeK\x03sb."
    )
    for data in (by_line, on_stack, rebuilt):
        found = read(data)
        assert (found.name, found.args, found.attributes) == ("vocabulary.Vocab", (), {"max_size": 3})


def test_arrays_are_records() -> None:
    found = read(pickle.dumps({"train": np.arange(3), "vocab": ["a"]}, 2))
    assert found["vocab"] == ["a"]
    assert found["train"].name.endswith("multiarray._reconstruct")


# Old torch


def stream(value: bytes, storages: dict[str, bytes], n_elements: list[int], keys: object = None) -> bytes:
    """Write the stream format around a pickle that was written by hand."""
    parts = [pickle.dumps(part, 2) for part in (0x1950A86A20F9469CFC6C, 1001, {"little_endian": True})]
    parts += [value, pickle.dumps(list(storages) if keys is None else keys, 2)]
    for n, data in zip(n_elements, storages.values(), strict=True):
        parts += [struct.pack("<q", n), data]
    return b"".join(parts)


class Op:
    """Pieces of pickles, written by hand."""

    @staticmethod
    def name(module: str, name: str) -> bytes:
        return f"c{module}\n{name}\n".encode()

    @staticmethod
    def value(value: object) -> bytes:
        return pickle.dumps(value, 2)[2:-1]

    @classmethod
    def tuple(cls, *parts: bytes) -> bytes:
        return b"(" + b"".join(parts) + b"t"

    @classmethod
    def call(cls, module: str, name: str, *args: bytes) -> bytes:
        return cls.name(module, name) + cls.tuple(*args) + b"R"

    @classmethod
    def storage(cls, key: object = "0", n: object = 6, kind: str = "FloatStorage", *rest: bytes) -> bytes:
        parts = (
            cls.value("storage"),
            cls.name("torch", kind),
            cls.value(key),
            cls.value("cuda:0"),
            cls.value(n),
        )
        return cls.tuple(*parts, *rest) + b"Q"

    @classmethod
    def tensor(
        cls, shape: object = (2, 3), strides: object = (3, 1), first: object = 0, storage: bytes | None = None
    ) -> bytes:
        tail = [
            cls.value(first),
            cls.value(shape),
            cls.value(strides),
            b"\x89",
            cls.call("collections", "OrderedDict"),
        ]
        return cls.call("torch._utils", "_rebuild_tensor_v2", storage or cls.storage(), *tail)


def pickled(body: bytes) -> bytes:
    return b"\x80\x02" + body + b"."


NUMBERS = struct.pack("<6f", *range(6))


def in_stream(body: bytes) -> bytes:
    return stream(pickled(body), {"0": NUMBERS}, [6])


def in_zip(body: bytes) -> bytes:
    return zipped({"archive/data.pkl": pickled(body), "archive/version": b"3\n", "archive/data/0": NUMBERS})


def test_parts_of_a_storage_as_before_torch_0_4() -> None:
    part = Op.storage("0", 6, "FloatStorage", Op.value(("7", 2, 3)))
    whole = Op.storage("0", 6, "FloatStorage", b"N")
    tensors = Op.tensor((2,), (1,), 1, part), Op.tensor(storage=whole)
    stored = read(in_stream(Op.tuple(*tensors)))
    assert stored[0].read().tolist() == [3, 4]
    assert stored[1].read().flatten().tolist() == list(range(6))
    assert stored[0].storage is stored[1].storage
    for bad in ((4, 3), (-1, 2), (0, -1), (2, 5)):
        outside = Op.storage("0", 6, "FloatStorage", Op.value(("7", *bad)))
        assert "a part of a storage that is outside it" in refusal(
            in_stream(Op.tensor((1,), (1,), 0, outside))
        )
    assert "a tensor of 2 numbers at 2 in a storage of 3" in refusal(
        in_stream(Op.tensor((2,), (1,), 2, part))
    )


def test_parameters_and_modules_as_in_torch_0_4() -> None:
    parameter = Op.call("torch.nn.parameter", "Parameter", Op.tensor(), b"\x88")
    assert read(in_stream(parameter)).shape == (2, 3)
    old = Op.call("torch._utils", "_rebuild_tensor", Op.storage(), *map(Op.value, (0, (6,), (1,))))
    assert read(in_stream(old)).read().tolist() == list(range(6))
    backend = Op.call("torch.nn.backends.thnn", "_get_thnn_function_backend")
    assert read(pickled(backend)).name == "torch.nn.backends.thnn._get_thnn_function_backend"


def test_a_stream_must_keep_its_word() -> None:
    good = pickled(Op.tensor())
    assert "got more after its end" in refusal(stream(good, {"0": NUMBERS}, [6]) + b"x")
    assert "got 5 numbers for a storage of 6" in refusal(stream(good, {"0": NUMBERS}, [5]))
    assert "got -6 numbers for a storage of 6" in refusal(stream(good, {"0": NUMBERS}, [-6]))
    whole = stream(good, {"0": NUMBERS}, [6])
    for n_cut in (1, 24, 25, 31, 32):
        assert refusal(whole[:-n_cut]) == (
            f"file.pt: ends too early; got {len(whole) - n_cut:,} bytes, its tensors need {len(whole):,}; "
            "fetch the file again"
        )
    others = "got a list of other storages than its tensors have"
    for keys in ([], ["1"], ["0", "0"], ["0", "1"], [0], [["0"]], {"0": 1}, 7):
        assert others in refusal(stream(good, {"0": NUMBERS, "1": NUMBERS}, [6, 6], keys)), keys
    magic = pickle.dumps(0x1950A86A20F9469CFC6C, 2)
    assert "got another version of torch's format" in refusal(magic + pickle.dumps(1002, 2))


# Zip archives


def unzip(data: bytes) -> dict[str, bytes]:
    with zipfile.ZipFile(io.BytesIO(data)) as file:
        return {f"archive/{name.split('/', 1)[1]}": file.read(name) for name in file.namelist()}


def zipped(entries: dict[str, bytes], method: int = zipfile.ZIP_STORED) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", method) as file:
        for name, data in entries.items():
            file.writestr(zipfile.ZipInfo(name), data, method)
    return buffer.getvalue()


GOOD = {"archive/data.pkl": pickled(Op.tensor()), "archive/version": b"3\n", "archive/data/0": NUMBERS}


def test_archives_that_torch_does_not_write() -> None:
    assert read(zipped(GOOD)).read().flatten().tolist() == list(range(6))
    assert "a compressed entry 'archive/data.pkl'" in refusal(zipped(GOOD, zipfile.ZIP_DEFLATED))
    bomb = {**GOOD, "archive/data/0": bytes(10 << 20)}
    assert "a compressed entry" in refusal(zipped(bomb, zipfile.ZIP_DEFLATED))
    strange = [
        "archive/../x",
        "../archive/x",
        "/etc/passwd",
        "archive//x",
        "archive/a\\b",
        "b/data/0",
        "x",
        "archive/\n",
    ]
    for name in strange:
        assert "no archive of torch.save; got an entry" in refusal(zipped({**GOOD, name: b""}))
    assert "got no entry data.pkl" in refusal(zipped({"archive/version": b"3"}))
    without = {name: data for name, data in GOOD.items() if name != "archive/data/0"}
    assert "got no entry for storage '0'" in refusal(zipped(without))
    assert "got 20 bytes for storage '0' of 24" in refusal(zipped({**GOOD, "archive/data/0": NUMBERS[:20]}))
    assert "got 28 bytes for storage '0' of 24" in refusal(
        zipped({**GOOD, "archive/data/0": NUMBERS + b"1234"})
    )
    assert "a TorchScript program" in refusal(zipped({**GOOD, "archive/constants.pkl": b""}))
    for version in (b"", b"0", b"11", b"x", b"-1", b"9" * 30):
        assert "another version of torch's archives" in refusal(zipped({**GOOD, "archive/version": version}))
    assert "another byteorder than there is" in refusal(zipped({**GOOD, "archive/byteorder": b"middle"}))
    assert "got more after its end" in refusal(zipped({**GOOD, "archive/data.pkl": pickled(b"N") + b"N"}))


def entry_fields(data: bytes) -> tuple[int, int]:
    """Return where the list of entries and the end record of an archive begin."""
    end = data.rindex(b"PK\x05\x06")
    return int.from_bytes(data[end + 16 : end + 20], "little"), end


def patched(data: bytes, at: int, new: bytes) -> bytes:
    return data[:at] + new + data[at + len(new) :]


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_archives_that_lie() -> None:
    data = zipped(GOOD)
    first, end = entry_fields(data)
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as file:
        for name in (*GOOD, "archive/data/0"):
            file.writestr(name, GOOD[name])
    assert "got two entries 'archive/data/0'" in refusal(buffer.getvalue())
    assert "an encrypted entry" in refusal(patched(data, first + 8, b"\x01"))
    assert "a compressed entry" in refusal(patched(data, first + 10, b"\x08"))
    assert "a compressed entry" in refusal(patched(data, 8, b"\x08"))  # only the local header says so
    assert "a compressed entry" in refusal(patched(data, first + 20, b"\xff\xff\xff\x7f"))
    larger = patched(patched(data, first + 20, b"\xff\xff\xff\x7f"), first + 24, b"\xff\xff\xff\x7f")
    assert "larger than the file" in refusal(larger)
    missing = b"\xff" * 4
    assert "without its size" in refusal(patched(patched(data, first + 20, missing), first + 24, missing))
    assert "no entry 'archive/data.pkl' where the list has it" in refusal(patched(data, first + 42, b"\x01"))
    assert "no entry 'archive/data.pkl' where the list has it" in refusal(
        patched(data, first + 42, b"\0\0\0\x7f")
    )
    assert "no entry" in refusal(patched(data, 30, b"b"))
    assert "a list of entries that ends early" in refusal(patched(data, end + 10, b"\x04"))
    assert "larger than the file" in refusal(patched(data, end + 12, b"\xff\xff\xff\x7f"))
    assert "larger than the file" in refusal(patched(data, end + 16, b"\xff\xff\xff\x7f"))
    assert "bytes behind the end" in refusal(data + b"x")
    assert "no list of its entries" in refusal(b"PK\x03\x04")
    within = zipped({**GOOD, "archive/data/0": GOOD_INNER})
    assert "entries within one another" in refusal(entries_within(within))


GOOD_INNER = zipped({"archive/data/1": NUMBERS})


def entries_within(data: bytes) -> bytes:
    """Add the entry of an archive that lies in an archive to the list of the outer one."""
    first, end = entry_fields(data)
    at = data.index(b"PK\x03\x04", data.index(b"archive/data/0"))
    inner_first, inner_end = entry_fields(GOOD_INNER)
    header = patched(GOOD_INNER[inner_first:inner_end], 42, struct.pack("<I", at))
    listed = data[first:end] + header
    return data[:first] + listed + struct.pack("<4s4H2IH", b"PK\x05\x06", 0, 0, 4, 4, len(listed), first, 0)


def large_zip(entries: dict[str, bytes]) -> bytes:
    """Write an archive as for more than 4 GB: all sizes in 64 bits, in extra fields."""
    body, listed = b"", b""
    for name, data in entries.items():
        at, none = len(body), 0xFFFFFFFF
        title = name.encode()
        sizes = struct.pack("<HHQQQ", 1, 24, len(data), len(data), at)
        checksum = crc32(data)
        body += (
            struct.pack("<4s5H3I2H", b"PK\x03\x04", 45, 0, 0, 0, 0, checksum, none, none, len(title), 20)
            + title
        )
        body += struct.pack("<HHQQ", 1, 16, len(data), len(data)) + data
        head = struct.pack(
            "<4s6H3I5H2I",
            b"PK\x01\x02",
            45,
            45,
            0,
            0,
            0,
            0,
            checksum,
            none,
            none,
            len(title),
            33,
            0,
            0,
            0,
            0,
            none,
        )
        listed += head + title + struct.pack("<HHB", 9, 1, 7) + sizes
    n, at = len(entries), len(body) + len(listed)
    record = struct.pack("<4sQ2H2I4Q", b"PK\x06\x06", 44, 45, 45, 0, 0, n, n, len(listed), len(body))
    locator = struct.pack("<4sIQI", b"PK\x06\x07", 0, at, 1)
    none = 0xFFFFFFFF
    return (
        body
        + listed
        + record
        + locator
        + struct.pack("<4s4H2IH", b"PK\x05\x06", 0, 0, 0xFFFF, 0xFFFF, none, none, 0)
    )


def test_archives_of_more_than_4_gb_have_their_sizes_elsewhere() -> None:
    data = large_zip(GOOD)
    with zipfile.ZipFile(io.BytesIO(data)) as file:
        assert file.read("archive/data/0") == NUMBERS
    assert read(data).read().flatten().tolist() == list(range(6))
    many = data.rindex(b"PK\x06\x06") + 32
    assert "got 1,099,511,627,776 in" in refusal(patched(data, many, struct.pack("<Q", 1 << 40)))
    assert "larger than the file" in refusal(patched(data, many + 8, struct.pack("<Q", 1 << 63)))
    where = data.rindex(b"PK\x06\x07") + 8
    assert "no list of its entries where it should be" in refusal(
        patched(data, where, struct.pack("<Q", 1 << 63))
    )


# Hostile files


COMMAND = "touch pwned"
RUNS = {
    "os.system": Op.call("os", "system", Op.value(COMMAND)),
    "posix.system": Op.call("posix", "system", Op.value(COMMAND)),
    "nt.system": Op.call("nt", "system", Op.value(COMMAND)),
    "builtins.eval": Op.call("builtins", "eval", Op.value("open('pwned', 'w')")),
    "builtins.exec": Op.call("__builtin__", "exec", Op.value("open('pwned', 'w')")),
    "builtins.open": Op.call("builtins", "open", Op.value("pwned"), Op.value("w")),
    "builtins.getattr": Op.call(
        "builtins", "getattr", Op.name("argparse", "Namespace"), Op.value("__base__")
    ),
    "subprocess.Popen": Op.call("subprocess", "Popen", Op.value(["touch", "pwned"])),
    "torch.load": Op.call("torch", "load", Op.value("other.pt"), b"N", Op.name("pickle", "Unpickler")),
    "torch.hub.load": Op.call("torch.hub", "load", Op.value("a/b"), Op.value("c")),
    "torch.storage._load_from_bytes": Op.call("torch.storage", "_load_from_bytes", Op.value(b"x")),
    "torch.jit._load": Op.call("torch.jit", "_load", Op.value("x")),
    "torch._tensor._rebuild_from_type_v2": Op.name("torch._tensor", "_rebuild_from_type_v2"),
    "numpy.load": Op.call("numpy", "load", Op.value("x"), b"N", b"\x88"),
    "functools.partial": Op.call("functools", "partial", Op.name("os", "system"), Op.value(COMMAND)),
    "operator.attrgetter": Op.call("operator", "attrgetter", Op.value("system")),
    "importlib.import_module": Op.call("importlib", "import_module", Op.value("antigravity")),
    "torch.nn.modules.linear.Linear.__init__": Op.name("torch.nn.modules.linear", "Linear.__init__"),
    "collections.OrderedDict.__reduce__": Op.name("collections", "OrderedDict.__reduce__"),
    "mem_transformer.os.system": b"\x8c\x0fmem_transformer\x8c\tos.system\x93"
    + Op.tuple(Op.value(COMMAND))
    + b"R",
    "pickle.loads": b"(" + Op.value(b"x") + b"ipickle\nloads\n",
    "shutil.rmtree": b"(" + Op.name("shutil", "rmtree") + Op.value(".") + b"o",
    "runpy.run_path": Op.name("runpy", "run_path") + Op.value(("x",)) + b"\x81",
    "webbrowser.open": Op.value("webbrowser") + Op.value("open") + b"\x93" + Op.tuple(Op.value("x")) + b"R",
    "a.b": Op.name("a", "b") + b")}\x92",
}
CONTAINERS = {"pickle": pickled, "stream": in_stream, "zip": in_zip}


@pytest.mark.parametrize("container", CONTAINERS)
@pytest.mark.parametrize("name", RUNS)
def test_what_would_run_is_refused_by_name(name: str, container: str) -> None:
    line = refusal(CONTAINERS[container](RUNS[name]))
    assert f"asks for `{name}`, which no checkpoint" in line
    assert "nothing was run" in line
    assert not Path("pwned").exists()


def test_the_hostile_files_are_real() -> None:
    pickle.loads(pickled(RUNS["posix.system" if sys.platform != "win32" else "nt.system"]))
    assert Path("pwned").exists()


def test_a_pickle_in_front_of_the_value_is_refused_too() -> None:
    parts = [pickle.dumps(part, 2) for part in (0x1950A86A20F9469CFC6C, 1001, {})]
    bad = pickled(RUNS["posix.system"])
    for i in range(len(parts)):
        assert "asks for `posix.system`" in refusal(b"".join([*parts[:i], bad, *parts[i + 1 :]]))
    assert "asks for `posix.system`" in refusal(b"".join([*parts, pickled(b"N"), bad]))


def test_strange_names_are_shown_harmlessly() -> None:
    line = refusal(pickled(Op.value("\x1b[31m\n") + Op.value("é" * 1000) + b"\x93"))
    assert line.startswith("file.pt: asks for `\\x1b[31m\\n.\\xe9")
    assert "got a name that is no text" in refusal(pickled(b"K\x01" + Op.value("x") + b"\x93"))


def test_calls_of_allowed_names_are_records_or_refused() -> None:
    namespace = Op.name("argparse", "Namespace")
    record = read(pickled(namespace + Op.tuple(Op.value(COMMAND)) + b"R"))
    assert (record.name, record.args) == ("argparse.Namespace", (COMMAND,))
    tricks = {
        "a state of a name": namespace + b"}b",
        "two states": namespace + b")R}b}b",
        "a state of a list": b"]}b",
        "a call of a record": namespace + b")R)R",
        "a call of a text": Op.value("os.system") + b")R",
        "a call with a list": namespace + b"]R",
        "a call of a storage class": Op.name("torch", "FloatStorage") + Op.value((1,)) + b"R",
        "a call of a type": Op.name("torch", "float32") + b")R",
        "an object of another base": Op.call(
            "copyreg", "_reconstructor", namespace, Op.name("builtins", "list"), b"]"
        ),
        "an object of a record": Op.call(
            "copyreg", "_reconstructor", namespace + b")R", Op.name("builtins", "object"), b"N"
        ),
        "bytes of another encoding": Op.call("_codecs", "encode", Op.value("a"), Op.value("rot13")),
        "bytes of bytes": Op.call("_codecs", "encode", Op.value(b"a"), Op.value("latin1")),
        "bytes beyond latin-1": Op.call("_codecs", "encode", Op.value("€"), Op.value("latin1")),
        "a set of a number": Op.call("builtins", "set", b"K\x05"),
        "a set of lists": Op.call("builtins", "set", b"](]e"),
        "a shape of a list": Op.call("torch", "Size", b"]"),
        "a dict of texts": Op.call("collections", "OrderedDict", Op.value(["ab"])),
        "a dict of numbers": Op.call("collections", "OrderedDict", Op.value([1])),
        "a parameter of a text": Op.call("torch._utils", "_rebuild_parameter", Op.value("x"), b"\x88"),
        "items for a record": namespace + b")R" + Op.value("a") + b"a",
        "entries for a record": namespace + b")R" + Op.value("a") + b"Ns",
        "members for a list": b"](K\x01\x90",
        "half an entry": b"}(K\x01u",
        "an extension": b"\x82\x01",
        "a buffer from outside": b"\x97",
        "a reference by a line": b"Pstorage\n",
        "a reference to something": Op.value(("file", "/etc/passwd")) + b"Q",
        "protocol 6": b"\x80\x06N",
        "a frame larger than the file": b"\x95" + b"\xff" * 8 + b"N",
        "what was not remembered": b"h\x07",
        "nothing": b"",
        "two values": b"NN",
        "an end within": b"(",
        "too short a tuple": b"N\x87",
        "half a character": b"X\x01\x00\x00\x00\xc3",
        "half a pair": b"V\\ud800\n",
        "a text without quotes": b"Sabc\n",
        "a number that is none": b"Iabc\n",
        "a long number": b"\x8b\x00\x10\x00\x00" + b"x" * 4096,
        "a long line": b"I" + b"1" * 5000 + b"\n",
    }
    for name, body in tricks.items():
        with pytest.raises(UserError):
            pytest.fail(f"read {name}: {read(pickled(body))}")
    assert "got a state for what has none" in refusal(in_stream(Op.tensor() + b"}b"))
    for body in (
        Op.storage(),
        Op.tuple(b"N", Op.storage()),
        Op.call("torch", "Size", Op.tuple(Op.storage())),
    ):
        assert "got a storage that is no tensor's" in refusal(in_stream(body))


BAD_TENSORS = {
    "more numbers than there are": Op.tensor((2, 4), (4, 1)),
    "past the end": Op.tensor((6,), (1,), 1),
    "far past the end": Op.tensor((2,), (1 << 62,)),
    "by strides": Op.tensor((3, 2), (3, 1)),
    "10^12 numbers by a stride of zero": Op.tensor((10**12,), (0,)),
    "10^12 numbers by their shape": Op.tensor((10**6, 10**6), (10**6, 1)),
    "10^12 numbers in their storage": Op.tensor((10**12,), (1,), 0, Op.storage("0", 10**12)),
    "2^64 numbers": Op.tensor((1 << 32, 1 << 32), (1, 1)),
    "a product that is zero in 64 bits": Op.tensor((1 << 62, 4, 0), (1, 1, 1), 7),
    "a negative stride": Op.tensor((2, 3), (-3, 1), 5),
    "a negative offset": Op.tensor((2, 3), (3, 1), -1),
    "a negative shape": Op.tensor((-2, -3), (3, 1)),
    "other strides than dimensions": Op.tensor((2, 3), (1,)),
    "many dimensions": Op.tensor((1,) * 17, (1,) * 17),
    "a shape of floats": Op.tensor((2.0, 3.0), (3, 1)),
    "a shape of bools": Op.tensor((True,), (1,)),
    "a shape of texts": Op.tensor(("2",), (1,)),
    "a shape as a list": Op.tensor([2, 3], (3, 1)),
    "an offset that is none": Op.tensor((2,), (1,), None),
    "no storage": Op.tensor((2,), (1,), 0, Op.value("0")),
    "another class of storage": Op.tensor((2,), (1,), 0, Op.storage("0", 6, "float32")),
    "a negative storage": Op.tensor((2,), (1,), 0, Op.storage("0", -6)),
    "a storage of a fraction": Op.tensor((2,), (1,), 0, Op.storage("0", 6.0)),
    "a key that is a number": Op.tensor((2,), (1,), 0, Op.storage(0, 6)),
    "two sizes": Op.tuple(Op.tensor(), Op.tensor((2,), (1,), 0, Op.storage("0", 5))),
    "two types": Op.tuple(Op.tensor(), Op.tensor((2,), (1,), 0, Op.storage("0", 6, "IntStorage"))),
    "another storage than there is": Op.tensor((2,), (1,), 0, Op.storage("1", 6)),
    "marks": Op.tensor()[:-2] + Op.value({"neg": True}) + b"tR",
}


@pytest.mark.parametrize("container", ["stream", "zip"])
@pytest.mark.parametrize("name", BAD_TENSORS)
def test_tensors_that_are_not_there(name: str, container: str) -> None:
    refusal(CONTAINERS[container](BAD_TENSORS[name]))


def test_typed_tensors_that_are_not_there() -> None:
    def typed(*rest: bytes, n: int = 24) -> bytes:
        head = Op.storage("0", n, "UntypedStorage"), *map(Op.value, (0, (3,), (1,)))
        return in_zip(Op.call("torch._utils", "_rebuild_tensor_v3", *head, b"\x89", b"}", *rest))

    assert read(typed(Op.name("torch", "uint64"))).shape == (3,)
    for rest in (
        [],
        [b"N"],
        [Op.value("torch.uint16")],
        [Op.name("torch", "FloatStorage")],
        [Op.name("torch", "uint64") + b")R"],
    ):
        refusal(typed(*rest))
    assert "asks for `torch.complex128`" in refusal(typed(Op.name("torch", "complex128")))
    assert "a tensor of 3 numbers at 0 in a storage of 2" in refusal(typed(Op.name("torch", "int64"), n=23))


@pytest.mark.parametrize("container", CONTAINERS)
def test_a_file_cut_at_any_byte_is_refused(container: str) -> None:
    body = (
        Op.value({"a": [1, 2.5, "é", None]})
        if container == "pickle"
        else Op.tuple(Op.tensor(), Op.value("x"))
    )
    data = CONTAINERS[container](body)
    read(data)
    for n in range(len(data)):
        refusal(data[:n])


@both_formats
def test_mutations_are_read_or_refused(legacy: bool) -> None:
    """Bytes changed, cut out or doubled at random: a tree or one line, nothing else, and no other file."""
    value = {"a": torch.arange(4.0), "args": argparse.Namespace(x=1), "c": Counter("ab"), "s": {1, "b"}}
    data, draw, n_read = save(value, legacy=legacy), random.Random(0), 0
    for _ in range(500):
        mutant = bytearray(data)
        for _ in range(draw.randint(1, 4)):
            at = draw.randrange(len(mutant))
            length = draw.choice([0, 1, 1, 1, 4, 30])
            mutant[at : at + length] = draw.choice(
                [draw.randbytes(length), draw.randbytes(1), data[at : at + 8]]
            )
        HERE.write_bytes(mutant)
        try:
            found = read_pickled(HERE)
        except UserError:
            continue
        n_read += 1
        str(found)
        for part in found.values() if type(found) is dict else ():
            if isinstance(part, StoredTensor):
                part.read()
    assert 0 < n_read < 500
    assert [path.name for path in Path.cwd().iterdir()] == ["file.pt"]


# Bounds


DEEP = 100_000
NESTED = {
    "lists": b"]" * DEEP + b"a" * (DEEP - 1),
    "lists by marks": b"(" * DEEP + b"l" * DEEP,
    "tuples": b")" + b"\x85" * DEEP,
    "dicts": b"}" + b"(K\x00}" * DEEP + b"u" * DEEP,
    "records": (Op.name("argparse", "Namespace") + b"(") * DEEP + b"tR" * DEEP,
}


@pytest.mark.parametrize("name", NESTED)
def test_deep_nesting_is_refused(name: str) -> None:
    assert "got more than 200 values within one another" in refusal(pickled(NESTED[name]))


def test_depth_up_to_the_bound_is_read() -> None:
    assert repr(read(pickled(b"]" * 200 + b"a" * 199))) == "[" * 200 + "]" * 200


def test_what_is_shared_exponentially_is_refused() -> None:
    doubling = b"".join(b"q%c0h%ch%c\x86" % (i, i, i) for i in range(100))
    assert "got more than 16,777,216 values where what is shared" in refusal(pickled(b")" + doubling))
    few = b"".join(b"q%c0h%ch%c\x86" % (i, i, i) for i in range(10))
    assert str(read(pickled(b")" + few))).count("()") == 1024
    tensors = b"](" + Op.tensor() + b"q\x00" + b"h\x00" * 170_000 + b"e"
    assert "got more than 16,777,216 values where what is shared" in refusal(in_stream(tensors))
    long = Op.value("x" * 10_000) + b"q\x00" + b"0](" + b"h\x00" * 30_000 + b"e"
    assert "got more than 16,777,216 values where what is shared" in refusal(pickled(long))


def test_keys_that_take_for_ever_are_refused() -> None:
    doubling = b"".join(b"q%c0h%ch%c\x86" % (i, i, i) for i in range(100))
    no_key = "got a key that is no plain value"
    assert no_key in refusal(pickled(b"})" + doubling + b"Ns"))
    assert no_key in refusal(pickled(b"\x8f()" + doubling + b"\x90"))
    assert no_key in refusal(pickled(b"}" + Op.value(2**61 - 1) + b"Ns"))
    assert no_key in refusal(pickled(b"}" + Op.value(tuple(range(9))) + b"Ns"))
    assert no_key in refusal(pickled(b"}" + Op.value([]) + b"Ns"))
    pairs = {("a", "b"): 0, ("b",): 1, (1, None): 2}
    assert read(pickle.dumps(pairs)) == pairs


def slots_passed(key: int, table: set[int], n_bits: int) -> int:
    """Count the taken slots of a dict of 2^n_bits that Python looks at before it finds a free one."""
    mask, perturb, n = (1 << n_bits) - 1, key, 0
    slot = key & mask
    while slot in table:
        n, perturb = n + 1, perturb >> 5
        slot = (5 * slot + perturb + 1) & mask
    return n


def chain() -> tuple[list[int], list[int]]:
    """Return 1,200 numbers, each in the slot looked at after that before it, and 50 that pass by them."""
    keys = [1]
    for _ in range(1199):
        keys.append((5 * keys[-1] + 1) % 2048)
    far = (i for i in range(2048, 1 << 30, 2047) if slots_passed(i, {*keys}, 11) > 1000)
    return keys, [*itertools.islice(far, 50)]


def in_dict(keys: Iterable[object]) -> bytes:
    """Write a dict of one batch, which may have keys again."""
    return b"}(" + b"".join(Op.value(key) + b"N" for key in keys) + b"u"


COLLIDING: dict[str, Callable[[list[int], list[int]], bytes]] = {
    "one key again and again": lambda keys, far: in_dict(keys + far[:1] * 1000),
    "many keys": lambda keys, far: in_dict(keys + far * 20),
    "many keys once": lambda keys, far: in_dict([*keys, *far, *(key + (1 << 40) for key in keys)]),
    "behind consecutive ones": lambda keys, far: in_dict([*range(1200), *far * 30]),
    "floats": lambda keys, far: in_dict(map(float, keys + far * 20)),
    "tuples": lambda keys, far: in_dict((key,) for key in range(600)),
    "tuples of a text and a number": lambda keys, far: in_dict(("a", key) for key in range(600)),
    "tuples of a long text": lambda keys, far: (
        b"}(" + Op.value(("x" * 100_000, 1)) + b"N" + b"h\x01N" * 300 + b"u"
    ),
    "members of a set": lambda keys, far: b"\x8f(" + b"".join(map(Op.value, keys)) + b"\x90",
    "members of a frozenset": lambda keys, far: b"(" + b"".join(map(Op.value, keys)) + b"\x91",
    "members of a set of a list": lambda keys, far: Op.call("builtins", "set", Op.value(keys)),
    "pairs": lambda keys, far: Op.call(
        "collections", "OrderedDict", Op.value([[key, 0] for key in keys + far * 20])
    ),
    "one by one": lambda keys, far: b"}" + b"".join(Op.value(key) + b"Ns" for key in keys + far * 20),
    "in many dicts": lambda keys, far: b"](" + in_dict(range(0, 400, 2)) * 100 + b"e",
    "nothing, again and again": lambda keys, far: in_dict([*keys, *[None, True, ""] * 400]),
}


@pytest.mark.parametrize("name", COLLIDING)
def test_keys_that_collide_are_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each may take as many steps as there are keys, without one instruction more."""
    keys, far = chain()
    assert len(far) == 50
    monkeypatch.setattr(machine, "_LIMIT_PROBES", 1_500_000)
    assert "got more than 1,500,000 steps between keys that collide" in refusal(
        pickled(COLLIDING[name](keys, far))
    )


def test_keys_of_checkpoints_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many texts, pairs of texts, and numbers one after another, in a dict of their own."""
    words = [f"word {i}" for i in range(1000)]
    shuffled = random.Random(0).sample(range(1000), 1000)
    addresses = {"state": {140_000_000_000_000 + 64 * i: {"step": i} for i in shuffled}}
    found = read(pickle.dumps({"ids": dict(zip(shuffled, words, strict=True)), **addresses}, 2))
    assert found == {"ids": dict(zip(shuffled, words, strict=True)), **addresses}
    monkeypatch.setattr(machine, "_LIMIT_PROBES", 0)
    for value in (
        dict(enumerate(words)),
        dict(enumerate(words, 1)),
        dict(enumerate(words, 267_735)),
        Counter(words),
        dict.fromkeys(itertools.pairwise(words), 1),
        {*words},
        {"state": {0: {1: "a", 2: "b"}, 1: {None: 0}}, b"bytes": {True: 0}},
    ):
        for protocol in (0, 2, 4):
            assert read(pickle.dumps(value, protocol)) == value


def test_long_texts_are_not_compared_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two that are equal are compared to their ends, each time that one is stored in place of the other."""
    monkeypatch.setattr(machine, "_LIMIT_STEPS", 10_000)
    long = Op.value("x" * 50_000)
    twice = long + b"q\x000" + long + b"q\x010}h\x00Ns"
    read(pickled(twice + b"h\x01Ns"))
    assert "got more than 10,000 steps" in refusal(pickled(twice + b"h\x01Ns" * 5))
    assert "got a reference to no storage" in refusal(in_stream(Op.storage("x" * 1001)))


def test_places_to_remember_are_not_the_files_to_choose() -> None:
    decoder = machine.Decoder(HERE, pickled(b"N"), 0)
    decoder.stack.append("a")
    decoder.remember(5)
    decoder.recall(5)
    assert decoder.stack == ["a", "a"]
    assert [type(place) for place in decoder.memo] == [str]


def test_attributes_are_those_with_names() -> None:
    assert Foreign("a.b", (), ({"a": 1, 2: 3}, {"c": 4, None: 5})).attributes == {"a": 1, "c": 4}


def test_values_that_contain_themselves_are_refused() -> None:
    circle: list[Any] = []
    circle.append({"again": circle})
    assert "got a value that contains itself" in refusal(pickle.dumps(circle))
    assert "got a value that contains itself" in refusal(
        pickled(Op.name("argparse", "Namespace") + b")Rq\x00h\x00b")
    )


def test_copies_count_as_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """A short pickle may ask for many copies of what it made once."""
    monkeypatch.setattr(machine, "_LIMIT_STEPS", 50_000)
    items, pairs, text = b"](" + b"N" * 1000 + b"e", b"](" + b"NN\x86" * 1000 + b"e", Op.value("x" * 1000)
    of = {
        "set": Op.name("builtins", "set"),
        "dict": Op.name("collections", "OrderedDict"),
        "bytes": Op.name("_codecs", "encode"),
    }
    for what, args in (
        ("set", items + b"\x85"),
        ("dict", pairs + b"\x85"),
        ("bytes", text + Op.value("latin1") + b"\x86"),
    ):
        body = args + b"q\x00" + of[what] + b"q\x01" + b"h\x01h\x00R" * 1000
        assert "got more than 50,000 steps" in refusal(pickled(body))


def test_every_bound_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, limit in (("STEPS", 1000), ("REMEMBERED", 100), ("CONTAINERS", 100)):
        monkeypatch.setattr(machine, f"_LIMIT_{name}", limit)
    assert "got more than 1,000 steps" in refusal(pickled(b"N0" * 600))
    assert "got more than 100 remembered values" in refusal(pickled(b"N" + b"\x94" * 101))
    for op in (b"]", b"}", b"(", b")", b"\x8f", b"N\x85", Op.name("torch", "float32")):
        assert "got more than 100 containers" in refusal(pickled(op * 101))
    for module in (machine, pickles):
        monkeypatch.setattr(module, "LIMIT_PICKLE_BYTES", 100)
    data = in_zip(Op.value("x" * 200))
    assert "got more than 100 bytes of pickle" in refusal(data)
    assert "got more than 100 bytes of pickle" in refusal(pickled(Op.value("x" * 200)))


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="asks Linux for the size of the process")
def test_claims_take_no_memory(tmp_path: Path) -> None:
    """A process with a quarter of a gigabyte to spare refuses what claims terabytes."""
    claims = {
        "numbers in a stream": in_stream(BAD_TENSORS["10^12 numbers in their storage"]),
        "numbers in a zip": in_zip(BAD_TENSORS["10^12 numbers in their storage"]),
        "numbers by strides": in_zip(BAD_TENSORS["10^12 numbers by a stride of zero"]),
        "numbers in a count": stream(pickled(Op.tensor()), {"0": NUMBERS}, [10**12]),
        "text": b"\x80\x04\x8d" + struct.pack("<Q", 10**12) + b"x",
        "bytes": b"\x80\x04\x8e" + struct.pack("<Q", 10**12) + b"x",
        "a bytearray": b"\x80\x05\x96" + struct.pack("<Q", 10**12) + b"x",
        "a frame": b"\x80\x04\x95" + struct.pack("<Q", 10**12) + b"N.",
        "a number": b"\x80\x02\x8b\xff\xff\xff\x7f" + b"x",
        "a string of Python 2": b"T\xff\xff\xff\xff" + b"x",
        "a remembered place": b"\x80\x02Nr\xff\xff\xff\xff0j\xfe\xff\xff\xff.",
        "lists": pickled(b"]" * 1_100_000),
        "marks": pickled(b"(" * 1_100_000),
        "tuples": pickled(b")" + b"\x85" * 1_100_000),
        "depth": pickled(NESTED["lists by marks"]),
    }
    for name, data in claims.items():
        (tmp_path / f"{name}.bin").write_bytes(data)
    with (tmp_path / "a hole.bin").open("wb") as file:
        file.write(b"\x80\x02X\xff\xff\xff\x7f")
        file.truncate(1 << 40)
    code = (
        "import resource, sys\n"
        "from pathlib import Path\n"
        "from txlcli import UserError\n"
        "from txlcli.convert.pickles import read_pickled\n"
        "size = int(open('/proc/self/statm').read().split()[0]) * resource.getpagesize()\n"
        "resource.setrlimit(resource.RLIMIT_AS, (size + (256 << 20),) * 2)\n"
        "for path in sorted(Path(sys.argv[1]).glob('*.bin')):\n"
        "    try:\n"
        "        read_pickled(path)\n"
        "    except UserError:\n"
        "        print(path.stem)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.stderr == ""
    assert done.stdout.splitlines() == sorted([*claims, "a hole"])


# Other files


def test_other_formats_are_told() -> None:
    assert "a tar archive, as torch 0.1.10" in refusal(
        b"sys_info".ljust(257, b"\0") + b"ustar\x0000".ljust(300, b"\0")
    )
    assert "only a pointer of Git LFS" in refusal(
        b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n"
    )
    remedy = "name a file that torch.save or pickle wrote"
    for data, told in {
        b"": "an empty file, not a checkpoint; got 0 bytes",
        b"<!DOCTYPE html>\n<html>": "a web page, not a checkpoint; got '<!DOCTYPE html>'",
        b"First Citizen:\nBefore": "a text file, not a checkpoint; got 'First Citizen:'",
        b"call me Ishmael\nsome years\n": "a text file, not a checkpoint; got 'call me Ishmael'",
        "(Grönl".encode() + b"\xc3": "a text file, not a checkpoint; got '(Gr\\xf6nl\\ufffd'",
        "Text".encode(
            "utf-16"
        ): "a text file, not a checkpoint; got '\\ufffd\\ufffdT\\x00e\\x00x\\x00t\\x00'",
        b'{"a": 1}': "a JSON file, not a checkpoint; got '{\"a\": 1}'",
        b"\x93NUMPY\x01\0": "a NumPy array, not a checkpoint; got '\\ufffdNUMPY\\x01\\x00'",
        b"\x02\0\0\0\0\0\0\0{}": "a safetensors file without .safetensors at the end of its name, "
        "not a checkpoint; got '\\x02\\x00\\x00\\x00\\x00\\x00\\x00\\x00{}'",
    }.items():
        assert refusal(data) == f"file.pt: {told}; {remedy}"
    other = "file.pt: a zip archive, but no archive of torch.save; got"
    assert refusal(zipped({"arr_0.npy": b"x"})) == (
        f"{other} an entry 'arr_0.npy'; name a file that torch.save wrote"
    )
    assert refusal(zipped({})) == f"{other} no entry data.pkl; name a file that torch.save wrote"


def test_faults_of_values_are_told_in_plain_words() -> None:
    for body, fault in {
        b"N0F1.x\n.": "a number that is none",
        b"N0Ione\n.": "a number that is none",
        b"N0gx\n.": "a number that is none",
        b"N0\x8c\x01\xff.": "a text that is none",
    }.items():
        assert f"no checkpoint; got {fault} at byte " in refusal(b"\x80\x02" + body + b"N")


def test_files_that_cannot_be_opened() -> None:
    assert "got tensors whose numbers are in no file" in refusal(pickled(Op.tensor()))
    assert "got more after its end" in refusal(pickled(b"N") + b"N")
    for path, fault in (
        (Path("no.pt"), "cannot be read; no such file"),
        (Path(), "is a folder, not a file"),
    ):
        with pytest.raises(UserError, match=f"^{path}: {fault}"):
            read_pickled(path)


def test_the_table_of_names_is_harmless_and_unique() -> None:
    names = [name for _, _, group in allowed._GROUPS for name in group]
    assert len(names) == len(set(names)), sorted(name for name in names if names.count(name) > 1)
    roots = {name.split(".")[0] for name in names}
    assert not roots & {
        "os",
        "posix",
        "nt",
        "subprocess",
        "sys",
        "shutil",
        "pickle",
        "importlib",
        "io",
        "functools",
    }
    functions = {name for name in names if name.startswith(("builtins.", "torch.")) and name.count(".") == 1}
    assert functions <= {
        *(
            "builtins.dict",
            "builtins.set",
            "builtins.frozenset",
            "builtins.bytes",
            "builtins.list",
            "builtins.object",
        ),
        *("torch.Size", "torch.device", *allowed.STORAGE_DTYPES, *allowed.DTYPES),
    }
    assert all(reason for reason, _, _ in allowed._GROUPS)
