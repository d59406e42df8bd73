"""Devices of a deployment that is not there: the real compilers, given the description of a chip and its wiring."""

from __future__ import annotations

import importlib.util
import os
import sys
from math import prod
from pathlib import Path
from typing import Any

from moe28t_jax.parallel.launch import set_tpu_options
from moe28t_jax.parallel.mesh_file import MeshFile

TPU_KINDS = ("v5p", "v6e", "tpu7x")
GPU_KINDS = ("h100", "h200", "b200", "gb200")

# Written by hand from the public data sheets: limits are exact, rates only steer the compiler's cost model.
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
_HOPPER = {"cores": 132, "l2": 52428800, "clock": 1.98, "major": 9}
_BLACKWELL = {"cores": 148, "bandwidth": 8000000000000, "l2": 132644864, "clock": 1.965, "major": 10}
_TARGETS = {
    "h100": _HOPPER | {"bandwidth": 3352320000000, "memory": 84978434048, "name": "NVIDIA H100 80GB HBM3"},
    "h200": _HOPPER | {"bandwidth": 4800000000000, "memory": 150754820096, "name": "NVIDIA H200"},
    "b200": _BLACKWELL | {"memory": 191500000000, "name": "NVIDIA B200"},
    "gb200": _BLACKWELL | {"memory": 186000000000, "name": "NVIDIA GB200"},
}


def gpu_target(kind: str) -> str:
    """The description of a GPU, one of `GPU_KINDS`, that XLA's compiler takes for the GPU itself (a text proto)."""
    return _TARGET.format(**_TARGETS[kind])


def prepare_environment(mesh: MeshFile) -> None:
    """Set the variables that the compiler of this deployment reads when JAX starts; before JAX is imported.

    No device is looked for: the program runs on the host's CPU, and a described CPU has as many devices as the mesh.
    """
    os.environ["JAX_PLATFORMS"] = "cpu"
    # No metadata server to ask, and no lock on a device that is not there.
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    set_tpu_options(os.environ, mesh.kind)
    # Otherwise the compiler tells on standard error that it found no device, host or type.
    os.environ.setdefault("TPU_STDERR_LOG_LEVEL", "3")
    os.environ.setdefault("TPU_MIN_LOG_LEVEL", "3")
    if mesh.kind in TPU_KINDS:
        os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
        os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v5p-8")
    if mesh.kind == "cpu" and "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
        flags = f"--xla_force_host_platform_device_count={mesh.devices}"
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flags}".strip()


def describe_devices(mesh: MeshFile) -> list[Any]:
    """The devices of the deployment, as `jax.sharding.Mesh` takes them; those of a CPU are real ones of this process.

    Raises ValueError for a chip that no compiler here knows, or a topology that it refuses; RuntimeError where the
    compiler is not installed.
    """
    import jax
    from jax.experimental import topologies

    if mesh.kind in TPU_KINDS:
        if importlib.util.find_spec("libtpu") is None and "TPU_LIBRARY_PATH" not in os.environ:
            raise RuntimeError(
                "There is no compiler for TPUs; install the package libtpu (extra `tpu`), which needs no TPU."
            )
        try:
            found = topologies.get_topology_desc(f"{mesh.kind}:{mesh.topology}", "tpu").devices
        except Exception as error:
            raise ValueError(
                f"The TPU compiler refuses {mesh.kind}:{mesh.topology} of the mesh {mesh.name!r} "
                f"({str(error).splitlines()[0]}); take a topology that exists."
            ) from error
    elif mesh.kind in GPU_KINDS:
        if not find_gpu_compiler():
            raise RuntimeError(
                "There is no compiler for GPUs; install jax-cuda13-plugin and jax-cuda13-pjrt (extra `cuda`), which "
                "need no GPU."
            )
        # The plugin registers itself when the backends are first looked for.
        jax.devices()
        if len(mesh.wiring) > 2:
            raise ValueError(
                f"The topology {mesh.topology} of the mesh {mesh.name!r} has {len(mesh.wiring)} numbers; that of GPUs "
                "is hosts x chips, such as 2x8."
            )
        *outer, chips = list(mesh.wiring)
        found = topologies.get_topology_desc(
            "", "cuda", target_config=gpu_target(mesh.kind), topology=f"1x{prod(outer)}x{chips}"
        ).devices
    elif mesh.kind == "cpu":
        found = jax.devices("cpu")
    else:
        raise ValueError(
            f"No compiler here knows the chip {mesh.kind!r} of the mesh {mesh.name!r}; the known ones are "
            f"{', '.join((*TPU_KINDS, *GPU_KINDS, 'cpu'))}."
        )
    if len(found) < mesh.devices:
        raise ValueError(
            f"The mesh {mesh.name!r} needs {mesh.devices} devices and there are {len(found)}; on a CPU set "
            f"XLA_FLAGS=--xla_force_host_platform_device_count={mesh.devices} before JAX starts."
        )
    return list(found[: mesh.devices])


def find_gpu_compiler() -> bool:
    """Whether XLA's compiler for GPUs can be loaded; one that is kept apart from the other packages is taken in."""
    apart = Path(sys.prefix) / "gpu-compiler"
    if (apart / "jax_plugins" / "xla_cuda13").is_dir() and str(apart) not in sys.path:
        sys.path.append(str(apart))
    return (
        importlib.util.find_spec("jax_plugins") is not None
        and importlib.util.find_spec("jax_plugins.xla_cuda13") is not None
    )


def implementations(mesh: MeshFile) -> tuple[str, ...]:
    """Kernels to prefer on the deployment's chip."""
    return ("tpu",) if mesh.kind in TPU_KINDS else ("gpu",) if mesh.kind in GPU_KINDS else ()
