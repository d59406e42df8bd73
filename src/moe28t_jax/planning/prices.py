"""Price tables: what a chip costs per hour."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib import resources
from pathlib import Path


@dataclass(frozen=True)
class Prices:
    """Price per chip and hour by kind of chip; `note` says where they are from."""

    currency: str
    note: str
    per_chip_hour: Mapping[str, float | int]


def load_prices(path: str | Path | None = None) -> Prices:
    """Read a price table (TOML, as the one that ships); None is the one that ships, whose figures are illustrative.

    Raises ValueError, naming the key, for anything that is no price table.
    """
    if path is None:
        return _shipped()
    shown = str(path)
    try:
        text = Path(path).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise FileNotFoundError(
            f"There is no price table {shown!r}; copy {str(resources.files('moe28t_jax.planning') / 'prices.toml')!r} "
            "and write your prices into it."
        ) from None
    except UnicodeDecodeError as error:
        raise ValueError(f"The price table {shown!r} is not UTF-8 text (byte {error.start}).") from None
    return _parse(shown, text)


@lru_cache
def _shipped() -> Prices:
    text = (resources.files("moe28t_jax.planning") / "prices.toml").read_text("utf-8")
    return _parse("prices.toml", text)


def _parse(shown: str, text: str) -> Prices:
    try:
        document = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # also numbers and tables beyond what Python reads
        raise ValueError(f"The price table {shown!r} is not TOML that can be read: {error}.") from None
    known = {"currency": str, "note": str, "per_chip_hour": dict}
    for key in document:
        if key not in known:
            raise ValueError(
                f"The price table {shown!r} has the unknown key {key}; it may have {', '.join(known)}."
            )
    for key, kind in known.items():
        default = {"currency": "USD", "note": ""}.get(key)
        value = document.setdefault(key, default) if default is not None else document.get(key)
        if not isinstance(value, kind):
            word = "a table of prices" if kind is dict else "a text"
            raise ValueError(f"The price table {shown!r} has {key} = {value!r}, where {word} is expected.")
    for kind, price in document["per_chip_hour"].items():
        if isinstance(price, bool) or not isinstance(price, int | float) or not 0 <= price < math.inf:
            raise ValueError(
                f"The price table {shown!r} has per_chip_hour.{kind} = {price!r}; a price is a number from 0 on."
            )
    table = {kind: float(price) for kind, price in document["per_chip_hour"].items()}
    return Prices(document["currency"], document["note"], table)
