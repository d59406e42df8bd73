"""What fits where, how fast it can be and what it costs; and whether a licence allows the use. Needs no JAX."""

from moe28t_jax.planning.chips import CHIPS, Chip, chip
from moe28t_jax.planning.licence import (
    LicenceError,
    LicenceResult,
    UsageProfile,
    accept,
    check_licence,
    licence_hash,
    require_licence,
)
from moe28t_jax.planning.memory import PHASES, DeviceBytes, StateBytes, state_bytes
from moe28t_jax.planning.plan import Plan, make_plan, search
from moe28t_jax.planning.prices import Prices, load_prices
from moe28t_jax.planning.roofline import Cost, Roofline

__all__ = [
    "CHIPS",
    "PHASES",
    "Chip",
    "Cost",
    "DeviceBytes",
    "LicenceError",
    "LicenceResult",
    "Plan",
    "Prices",
    "Roofline",
    "StateBytes",
    "UsageProfile",
    "accept",
    "check_licence",
    "chip",
    "licence_hash",
    "load_prices",
    "make_plan",
    "require_licence",
    "search",
    "state_bytes",
]
