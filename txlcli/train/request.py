"""What was asked for, and what is known before the text is looked at."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from txlcli.attention import Demands, cannot_run, choose_backend, fall_back
from txlcli.checkpoint import load_model, remedied
from txlcli.config import DOCUMENT_RULES, FLAG, Settings, Sourced, build, fault_at, leaf, value_of
from txlcli.device import choose_device, choose_precision
from txlcli.plan import Facts, plan_text, take_from_run
from txlcli.run import Run, open_run, refuse_without_tokenizer
from txlcli.tokenizer import Tokenizer
from txlcli.train.cost import Interrupted
from txlcli.train.events import Notice
from txlcli.train.optim import refuse_missing_muon
from txlcli.train.session import INIT_REMEDY

_ANY_TEXT = Facts(
    n_bytes=2_000_000,
    n_characters=2_000_000,
    alphabet_size=100,
    script="latin",
    device_kind="cpu",
    has_bf16=False,
    has_muon=False,
)


@dataclass(frozen=True)
class Request:
    """What was asked for, and what is known before the text is looked at."""

    settings: Settings
    is_from_file: bool
    device: torch.device
    attention: str
    init: Run | None
    started: float
    should_stop: Callable[[], bool]
    notices: tuple[Notice, ...]

    @classmethod
    def of(
        cls, settings: Settings, is_from_file: bool, started: float, should_stop: Callable[[], bool]
    ) -> "Request":
        """Look at what can be refused at once."""
        name = value_of(settings, "init")
        if is_from_file:
            build(settings)
        elif name is None:
            # What contradicts itself does so for any text: refused before a long one is read.
            plan_text(settings, _ANY_TEXT)
        init, notices = None if name is None else open_run(str(name)), tuple[Notice, ...]()
        if init is not None:
            refuse_without_tokenizer(init)
            with remedied(INIT_REMEDY):
                loaded = load_model(init)  # what cannot be read is refused before anything is made
            settings = take_from_run(settings, loaded.config, str(name))
            _check_documents(settings, loaded.tokenizer, str(name))
            if loaded.damage is not None:
                notices = (Notice(loaded.damage, is_damage=True),)
        device = choose_device(str(value_of(settings, "device")))
        choose_precision(str(value_of(settings, "precision")), device, training=True)
        if value_of(settings, "optimizer") == "muon":
            refuse_missing_muon()
        attention, told = choose_attention(settings)
        if told is not None:
            settings = settings | {"attention": Sourced(attention, f"plan: {told}")}
            notices += (Notice(f"attention: {told}"),)
        return cls(settings, is_from_file, device, attention, init, started, should_stop, notices)

    def pause(self) -> None:
        """End the preparation if the user wants to stop."""
        if self.should_stop():
            raise Interrupted


def choose_attention(settings: Settings) -> tuple[str, str | None]:
    """Choose the form of attention for a model, and say why where it is not the one asked for, else None.

    Raises:
        UserError: one named on the command line cannot run this model here.
    """
    name = value_of(settings, "attention")
    demands = Demands(
        choose_device(value_of(settings, "device")),
        value_of(settings, "d_head") or Demands().d_head,
        has_values=value_of(settings, "position") == "shaw" and value_of(settings, "shaw_values"),
        dropout=value_of(settings, "dropatt"),
    )
    choice, told = choose_backend(name, demands), fall_back(name, demands)
    if told is not None and name != "auto" and settings["attention"].origin == FLAG:
        raise cannot_run(name, choice)
    return choice.name, told


def _check_documents(settings: Settings, tokenizer: Tokenizer, run: str) -> None:
    """Refuse documents where the vocabulary of the run to start from has nothing that ends one."""
    rule = next((name for name in DOCUMENT_RULES if value_of(settings, name) not in (None, False)), None)
    if rule is not None and tokenizer.document_end is None:
        raise fault_at(
            leaf(rule),
            settings[rule].origin,
            f"needs a vocabulary with an end of documents, and that of {run} has none; leave it out, "
            "or train without --init",
        )
