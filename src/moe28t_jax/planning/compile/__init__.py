"""Steps compiled ahead of time for deployments that are not there, and what the compilers made of them.

The compilers are real: XLA for TPU with Mosaic, XLA for GPU. They prove that a program lowers, compiles and fits, and
their schedules tell what it moves; they prove nothing about numbers and speed on the device.
"""

from moe28t_jax.planning.compile.collectives import Assumptions, Collective
from moe28t_jax.planning.compile.hlo import parse
from moe28t_jax.planning.compile.report import CHUNK, Analysis, CompileReport, analyze, compile_step
from moe28t_jax.planning.compile.topology import describe_devices, prepare_environment
from moe28t_jax.planning.compile.traffic import Share, Traffic, traffic
from moe28t_jax.planning.compile.weights import Movement, Weight, movements

__all__ = [
    "CHUNK",
    "Analysis",
    "Assumptions",
    "Collective",
    "CompileReport",
    "Movement",
    "Share",
    "Traffic",
    "Weight",
    "analyze",
    "compile_step",
    "describe_devices",
    "movements",
    "parse",
    "prepare_environment",
    "traffic",
]
