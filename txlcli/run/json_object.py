"""JSON objects of strangers, read strictly, and our own, written so that equal ones are equal bytes."""

import json
import math
from collections.abc import Mapping
from typing import Any

from txlcli import UserError
from txlcli.files import json_fault

_MOST_DIGITS = 40


def parse_json(data: bytes | str, place: object) -> dict[str, Any]:
    """Parse a JSON object; `Any` because JSON's values are, and whoever reads one checks it.

    Raises:
        UserError: it is not JSON, or no object; the message begins with `place`.
    """
    try:
        values = json.loads(data, parse_constant=_refuse_constant, parse_float=_finite, parse_int=_whole)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{place}: damaged, not valid JSON; {json_fault(error)}") from error
    if not isinstance(values, dict):
        raise UserError(f"{place}: damaged; must hold a JSON object, got {type(values).__name__}")
    return values


def _whole(digits: str) -> int:
    if len(digits) > _MOST_DIGITS:  # so that it can be made a float
        raise ValueError(f"a whole number of more than {_MOST_DIGITS} digits")
    return int(digits)


def _finite(digits: str) -> float:
    number = float(digits)
    if not math.isfinite(number):
        raise ValueError(f"{digits:.20} is too large a number")
    return number


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no number in JSON")


def dump_json(values: Mapping[str, object]) -> bytes:
    """Write a JSON object with sorted keys, so that equal values give equal bytes."""
    return (json.dumps(values, sort_keys=True, allow_nan=False, ensure_ascii=False, indent=1) + "\n").encode()
