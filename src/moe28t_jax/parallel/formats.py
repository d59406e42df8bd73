"""In which form weights lie on the devices of a mesh: what the loader writes and programs are compiled for."""

from __future__ import annotations

from typing import Any

_LAYOUTS = {"tpu7x": "float4_kn", "TPU7x": "float4_kn"}
_GPU_KINDS = ("h100", "h200", "b200", "gb200")


def expert_layout(device: str) -> str:
    """The layout of packed expert weights that a chip's kernel reads (`MXFP4Tensor.layout`).

    device: the kind of a mesh file (`tpu7x`, `h200`) or the `device_kind` of a JAX device (`TPU7x`, `NVIDIA H200`).
    """
    if device in _GPU_KINDS or device.startswith("NVIDIA"):
        return "packed_nk"
    return _LAYOUTS.get(device, "packed_kn")


def device_layout(device: Any) -> tuple[str, bool]:
    """(layout of packed experts, whether repeated layers are stacked and scanned) on a `jax.Device`: accelerators
    compile one body for all repeats; a CPU is faster without."""
    return expert_layout(device.device_kind), device.platform != "cpu"


def mesh_layout(mesh: Any) -> tuple[str, bool]:
    """The same for the devices of a `jax.sharding.Mesh`; pipeline stages need stacks, on a CPU too."""
    layout, stacked = device_layout(mesh.devices.flat[0])
    return layout, stacked or mesh.shape["stage"] > 1
