"""Which form of the attention operation a model takes on a machine, and why."""

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from txlcli import UserError
from txlcli.attention import fused, sdpa, skew
from txlcli.attention.demands import Demands
from txlcli.attention.eager import relative_attention

AttentionBackend = Callable[..., Tensor]


class Backend(NamedTuple):
    """A form of the attention operation.

    Attributes:
        attend: A function with the signature of `relative_attention`.
        refuses: Returns why the form cannot do what is demanded; None: it can.
    """

    attend: AttentionBackend
    refuses: Callable[[Demands], str | None]


def _refuses_nothing(demands: Demands) -> str | None:
    return None


BACKENDS: dict[str, Backend] = {
    "eager": Backend(relative_attention, _refuses_nothing),
    "skew": Backend(skew.skewed_attention, skew.refuses),
    "sdpa": Backend(sdpa.sdpa_attention, sdpa.refuses),
    "triton": Backend(fused.attend, fused.refuses),
}

BY_DEVICE: dict[str, tuple[str, ...]] = {"cpu": ("skew",), "cuda": ("triton", "sdpa")}
"""The backends that `auto` tries on a kind of device, the fastest first; then eager."""


class BackendChoice(NamedTuple):
    """A backend and why it was taken."""

    name: str
    attend: AttentionBackend
    reason: str


def choose_backend(name: str, demands: Demands | None = None) -> BackendChoice:
    """Return the backend for a requested name; `auto` takes the fastest that can do what is demanded.

    Args:
        name: A backend's name, or `auto`. One that cannot do what is demanded gives way to what `auto`
            takes, and the reason says why.
        demands: What the model and its machine ask for; None: the least.

    Raises:
        UserError: there is no backend of that name.
    """
    demands = demands or Demands()
    if name == "auto":
        return _fastest(demands)
    if name not in BACKENDS:
        raise UserError(
            f"--attention: unknown backend; got `{name}`; choose from auto, {', '.join(BACKENDS)}"
        )
    reason = BACKENDS[name].refuses(demands)
    if reason is not None:
        return _fastest(demands)._replace(reason=reason)
    return BackendChoice(name, BACKENDS[name].attend, "asked for")


def _fastest(demands: Demands) -> BackendChoice:
    """Return the first backend for a kind of device that can do what is demanded."""
    reasons = []
    for name in (*BY_DEVICE.get(demands.device.type, ()), "eager"):
        reason = BACKENDS[name].refuses(demands)
        if reason is None:
            break
        reasons.append(reason)
    return BackendChoice(name, BACKENDS[name].attend, "; ".join(reasons) or "the fastest here")


def fall_back(name: str, demands: Demands) -> str | None:
    """Say why another backend than the named one is taken; None: it is the named one.

    For `auto` that is the fastest on the machine for any model.
    """
    choice = choose_backend(name, demands)
    wanted = choose_backend("auto", Demands(demands.device)).name if name == "auto" else name
    return None if choice.name == wanted else f"{choice.reason}, using {choice.name}"


def cannot_run(name: str, choice: BackendChoice) -> UserError:
    """Return the refusal of a backend that was asked for by name and gave way to `choice`."""
    return UserError(
        f"--attention: cannot run here; got `{name}`; {choice.reason}; leave it out, or give {choice.name}"
    )
