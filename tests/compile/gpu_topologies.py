"""Compiles for GPUs that are not there: the real compiler, given the description of a chip.

The compiler keeps the first chip it met in a process, so every chip has a process of its own.
"""

import contextlib
import functools
import io
import multiprocessing
import os
import platform
import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from moe28t_jax.planning.compile import topology

ARCHITECTURES = {"h100": "sm_90a", "h200": "sm_90a", "b200": "sm_100a"}
SHARED_MEMORY_LIMIT = 232448
"""Bytes of shared memory one thread block may ask for, the same on all of them."""

needs_gpu_compiler = pytest.mark.skipif(
    sys.platform != "linux" or platform.machine() != "x86_64",
    reason="XLA's compiler for GPUs is locked for Linux x86-64 only",
)


class Kernel(NamedTuple):
    """What one Mosaic GPU kernel takes, by the account of the assembler in the plugin and of the lowering."""

    name: str
    architecture: str
    registers: int
    """Per thread."""
    spilled_bytes: int
    """Stored to or loaded from a thread's own memory for want of registers; counted once per instruction."""
    stack_bytes: int
    """Of a thread: spilled registers, and arrays that are indexed at run time."""
    shared_memory_bytes: int
    """Scratch of a thread block, without its barriers."""


class Program(NamedTuple):
    """What the compiler made of a function, for one device."""

    text: str
    """Optimised HLO."""
    temporary_bytes: int
    """Device memory beyond arguments and results."""
    alias_bytes: int
    """Results that take the memory of donated arguments."""
    kernels: tuple[Kernel, ...]
    """Every Mosaic GPU kernel once."""


_INFO = re.compile(
    r"Compiling entry function '(?P<name>\S+)' for '(?P<architecture>\w+)'.*?(?P<stack>\d+) bytes stack frame, "
    r"(?P<stores>\d+) bytes spill stores, (?P<loads>\d+) bytes spill loads.*?Used (?P<registers>\d+) registers",
    re.S,
)
_known: dict[str, Kernel] = {}
"""By hash: a process assembles a kernel once, and tells of it once."""


@contextlib.contextmanager
def _printed(found: list[str]) -> Iterator[None]:
    """Appends to `found` what is printed meanwhile, by Python or past Python's streams."""
    with tempfile.TemporaryFile("w+") as file, contextlib.redirect_stdout(io.StringIO()) as printed:
        saved = [(descriptor, os.dup(descriptor)) for descriptor in (1, 2)]
        try:
            for descriptor, _ in saved:
                os.dup2(file.fileno(), descriptor)
            yield
        finally:
            for descriptor, copy in saved:
                os.dup2(copy, descriptor)
                os.close(copy)
        file.seek(0)
        found.append(printed.getvalue() + file.read())


def _compile(chip: str, function: Callable[..., Any], arguments: Any, donate: tuple[int, ...]) -> Program:
    # In this process alone: the compiler is kept apart because every program that sees it loads it.
    if not topology.find_gpu_compiler():
        raise RuntimeError("There is no compiler for GPUs; `make test` installs it, and it needs no GPU.")
    # The plugin registers itself when the backends are first looked for.
    jax.devices()
    os.environ.update(MOSAIC_GPU_DUMP_PTXAS="1", MOSAIC_GPU_DUMP_RESOURCES="1")
    # A function that was lowered before tells nothing of its kernels' resources.
    jax.clear_caches()
    target = topology.gpu_target(chip)
    devices = topologies.get_topology_desc("", "cuda", target_config=target, topology="1x1x1").devices
    mesh = Mesh(np.array(devices[:1]), ("device",), axis_types=(AxisType.Auto,))
    sharding = NamedSharding(mesh, PartitionSpec())
    placed = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), arguments)
    printed: list[str] = []
    # A kernel that depends on the chip asks for the mesh in use: no device would tell.
    with _printed(printed), jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        compiled = jax.jit(function, donate_argnums=donate).lower(*placed).compile()
    text, analysis = compiled.as_text(), compiled.memory_analysis()
    assert text is not None and analysis is not None
    hashes = list(dict.fromkeys(re.findall(r'kernel_hash = "(.*?)", module', text, re.S)))
    new = [found for found in hashes if found not in _known]
    infos = list(_INFO.finditer(printed[0]))
    shared = dict(zip(hashes, re.findall(r"Resources\(smem_scratch_bytes=(\d+)", printed[0]), strict=True))
    for key, info in zip(new, infos, strict=True):
        _known[key] = Kernel(
            info["name"],
            info["architecture"],
            int(info["registers"]),
            int(info["stores"]) + int(info["loads"]),
            int(info["stack"]),
            int(shared[key]),
        )
    return Program(
        text,
        analysis.temp_size_in_bytes,
        analysis.alias_size_in_bytes,
        tuple(_known[key] for key in hashes),
    )


@functools.cache
def _process(chip: str) -> ProcessPoolExecutor:
    del chip
    os.environ["JAX_PLATFORMS"] = "cpu"
    return ProcessPoolExecutor(1, multiprocessing.get_context("spawn"))


def compile_for_gpu(
    chip: str, function: Callable[..., Any], *arguments: Any, donate: tuple[int, ...] = ()
) -> Program:
    """`function` of arrays like `arguments` (trees of `jax.ShapeDtypeStruct`), compiled for one GPU of `chip`.

    `function` is a function of a module, or a `functools.partial` of one: it goes to another process. Raises
    whatever the compiler raises, a request for too much shared memory included.
    """
    return _process(chip).submit(_compile, chip, function, arguments, donate).result()
