"""What holds for every test: fixed seeds, one thread, no network, a folder of its own, no lucky memory."""

import functools
import gc
import inspect
import itertools
import os
import random
import re
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import jaxtyping
import numpy as np
import pytest
import torch
from hypothesis import settings

Function = TypeVar("Function", bound=Callable[..., Any])

_numbers = itertools.count()

# The suite that must always pass draws the same examples every time; `make test-long` draws new ones.
settings.register_profile("fixed", derandomize=True, deadline=None, database=None)
settings.register_profile("long", deadline=None, max_examples=2000, print_blob=True)
settings.load_profile("fixed")

# torch lists the functions that `with torch.device(...)` redirects when it first needs them; that must be
# before `_no_lucky_memory` replaces some.
with torch.device("meta"):
    torch.empty(0)


def _check_shapes(*, typechecker: Callable[[Function], Function]) -> Callable[[Function], Function]:
    """Check the types and shapes of a function's parameters and of its result, at every call.

    Stands in for `jaxtyping.jaxtyped` in the modules that `pyproject.toml` names, where that takes more than
    half of the time of a test: it checks the parameters twice and binds them by name for its messages. What
    it gives is a scope for the sizes of the axes, and a function without tensors needs none. What a check
    sees of parameters and result is their kind; kinds that have passed together are not checked again.
    """

    def check(function: Function) -> Function:
        if not inspect.isfunction(function):
            return _jaxtyped(function, typechecker=typechecker)
        if "Tensor" not in str(inspect.get_annotations(function)):
            return typechecker(function)
        passed, computed = dict[object, set[object]](), list[Any]()

        @functools.wraps(function)
        def or_computed(*args: Any, **kwargs: Any) -> Any:
            return computed.pop() if computed else function(*args, **kwargs)

        checked = typechecker(or_computed)

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            kind = _kind((args, kwargs))
            known = passed.get(kind)
            if known is not None:
                result = function(*args, **kwargs)
                if _kind(result) in known:
                    return result
                computed.append(result)
            with _axis_sizes:
                result = checked(*args, **kwargs)
            passed.setdefault(kind, set()).add(_kind(result))
            return result

        return call

    return check


def _kind(value: object) -> object:
    """Return all that a check of types and shapes sees of a value."""
    if isinstance(value, torch.Tensor):
        return type(value), value.dtype, value.shape
    if isinstance(value, (tuple, list)):
        return type(value), *map(_kind, value)
    if isinstance(value, dict):
        return type(value), *((name, _kind(item)) for name, item in value.items())
    return type(value)


_jaxtyped, _axis_sizes = jaxtyping.jaxtyped, jaxtyping.jaxtyped("context")
jaxtyping.jaxtyped = _check_shapes


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what needs a GPU where there is none."""
    if not torch.cuda.is_available():
        skip = pytest.mark.skip(reason="needs a CUDA device")
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(skip)


def pytest_collection_finish() -> None:
    """Tell Python that all there is by now stays: going through it for garbage takes as long as a test."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _fixed_seeds() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    np.random.seed(0)
    random.seed(0)


@pytest.fixture
def tmp_path(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    """Make a fresh folder. pytest's own looks through those of all earlier tests for a number."""
    name = re.sub(r"\W+", "_", request.node.name)[:30]
    folder = tmp_path_factory.getbasetemp() / f"{next(_numbers)}_{name}"
    folder.mkdir()
    return folder


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run in a fresh folder, so that `runs/` and other relative names end up there."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture(autouse=True, scope="session")
def _seeds_without_devices() -> Iterator[None]:
    """Seed the CPU alone where there is no GPU; torch keeps each seed for others, with a traceback."""
    with pytest.MonkeyPatch.context() as patch:
        if not torch.cuda.is_available():
            patch.setattr(torch, "manual_seed", torch.default_generator.manual_seed)
        yield


@pytest.fixture(autouse=True, scope="session")
def _no_waiting_for_the_disk() -> Iterator[None]:
    """Flush files no further than to the system: what a power failure leaves, no test can see."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", os.fstat)
        yield


@pytest.fixture(autouse=True)
def _no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a test tried to use the network")

    for name in ("connect", "connect_ex", "sendto"):
        monkeypatch.setattr(socket.socket, name, refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


@pytest.fixture(autouse=True)
def _no_lucky_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill what torch and the model leave uninitialized with NaN, so that reading it before writing shows."""
    # Not above: what is loaded before `_check_shapes` stands in has its shapes checked the slow way.
    from txlcli import model

    def filled(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def make_filled(*args: Any, **kwargs: Any) -> torch.Tensor:
            tensor = make(*args, **kwargs)
            if tensor.is_floating_point() and not tensor.requires_grad:
                tensor.fill_(torch.nan)
            return tensor

        return make_filled

    monkeypatch.setattr(torch, "empty", filled(torch.empty))
    monkeypatch.setattr(torch, "empty_like", filled(torch.empty_like))
    monkeypatch.setattr(torch.Tensor, "new_empty", filled(torch.Tensor.new_empty))
    monkeypatch.setattr(model, "_empty", filled(model._empty))
