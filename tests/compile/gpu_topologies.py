"""Compiles for GPUs that are not there: the real compiler, given the description of a chip.

The compiler keeps the first chip it met in a process, so every chip has a process of its own.
"""

import contextlib
import functools
import importlib.util
import io
import multiprocessing
import os
import platform
import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

_TARGET = """
gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32
  shared_memory_per_block: 49152 shared_memory_per_core: 233472 shared_memory_per_block_optin: 232448
  threads_per_core_limit: 2048 core_count: {cores} fpus_per_core: 128
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: {bandwidth} l2_cache_size: {l2} clock_rate_ghz: {clock} device_memory_size: {memory}
  cuda_compute_capability {{ major: {major} minor: 0 }}
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 12 }}
runtime_version {{ major: 13 minor: 0 }}
device_description_str: "{name}"
"""

# Written by hand from the public data sheets: limits are exact, rates only steer the compiler's cost model.
CHIPS = {
    "h100": _TARGET.format(
        cores=132,
        bandwidth=3352320000000,
        l2=52428800,
        clock=1.98,
        memory=84978434048,
        major=9,
        name="NVIDIA H100 80GB HBM3",
    ),
    "h200": _TARGET.format(
        cores=132,
        bandwidth=4800000000000,
        l2=52428800,
        clock=1.98,
        memory=150754820096,
        major=9,
        name="NVIDIA H200",
    ),
    "b200": _TARGET.format(
        cores=148,
        bandwidth=8000000000000,
        l2=132644864,
        clock=1.965,
        memory=191500000000,
        major=10,
        name="NVIDIA B200",
    ),
}
ARCHITECTURES = {"h100": "sm_90a", "h200": "sm_90a", "b200": "sm_100a"}
SHARED_MEMORY_LIMIT = 232448
"""Bytes of shared memory one thread block may ask for, the same on all of them."""

_COMPILER = Path(sys.prefix) / "gpu-compiler"
"""Where the compiler is kept apart: beside the other packages it would be found by every program."""

needs_gpu_compiler = pytest.mark.skipif(
    sys.platform != "linux" or platform.machine() != "x86_64",
    reason="XLA's compiler for GPUs is locked for Linux x86-64 only",
)


def _is_compiler_installed() -> bool:
    return (_COMPILER / "jax_plugins" / "xla_cuda13").is_dir() or (
        importlib.util.find_spec("jax_plugins") is not None
        and importlib.util.find_spec("jax_plugins.xla_cuda13") is not None
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
    # The plugin registers itself when the backends are first looked for.
    jax.devices()
    os.environ.update(MOSAIC_GPU_DUMP_PTXAS="1", MOSAIC_GPU_DUMP_RESOURCES="1")
    # A function that was lowered before tells nothing of its kernels' resources.
    jax.clear_caches()
    topology = topologies.get_topology_desc("", "cuda", target_config=CHIPS[chip], topology="1x1x1")
    mesh = Mesh(np.array(topology.devices[:1]), ("device",), axis_types=(AxisType.Auto,))
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


def _find_compiler() -> None:
    if _COMPILER.is_dir():
        sys.path.append(str(_COMPILER))


@functools.cache
def _process(chip: str) -> ProcessPoolExecutor:
    del chip
    os.environ["JAX_PLATFORMS"] = "cpu"
    return ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), _find_compiler)


def compile_for_gpu(
    chip: str, function: Callable[..., Any], *arguments: Any, donate: tuple[int, ...] = ()
) -> Program:
    """`function` of arrays like `arguments` (trees of `jax.ShapeDtypeStruct`), compiled for one GPU of `chip`.

    `function` is a function of a module, or a `functools.partial` of one: it goes to another process. Raises
    whatever the compiler raises, a request for too much shared memory included.
    """
    if not _is_compiler_installed():
        raise RuntimeError(
            f"There is no compiler for GPUs in {_COMPILER}; `make test` installs it, and it needs no GPU."
        )
    return _process(chip).submit(_compile, chip, function, arguments, donate).result()
