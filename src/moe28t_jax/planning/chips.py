"""Accelerators: what one device can hold and how fast it is. Peaks of the vendor; no program reaches all of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

GIB = 2**30


@dataclass(frozen=True)
class Chip:
    """One kind of chip; every figure is per DEVICE as JAX counts devices (a chip may be two).

    memory_bytes: what the compiler lets one program use. peak_flops: operations per second by dtype, dense.
    memory_bandwidth, link_bandwidth, network_bandwidth: bytes per second; of links and network in one direction.
    wiring: `torus` (links to neighbours, so that an all-to-all pays for every hop) or `switch` (all devices of a
    domain at full speed). domain: devices that the links reach; beyond them it is the network.
    """

    kind: str
    name: str
    devices_per_chip: int
    memory_bytes: int
    peak_flops: Mapping[str, float]
    memory_bandwidth: float
    link_bandwidth: float
    network_bandwidth: float
    wiring: Literal["torus", "switch"]
    domain: int

    @property
    def cache_lanes(self) -> int:
        """Of how many channels a row of latents takes a multiple; a TPU's memory holds whole rows of lanes."""
        return 128 if self.wiring == "torus" else 1

    @property
    def compute_flops(self) -> float:
        """Peak of the dtype that the matmuls run in, bfloat16: MXFP4 weights are unpacked to it."""
        return self.peak_flops["bfloat16"]


# TPU memory: the limit in the out-of-memory message of the real compiler (libtpu 0.0.50.1), read by compiling a program
# that is too large for v5p:2x2x1 (95.73 GiB), v6e:2x2 (31.24 GiB) and tpu7x:2x2x1 (94.74 GiB per device).
# TPU rates: Google's pages "TPU v5p", "TPU v6e" and "TPU7x (Ironwood)", per chip: 459 / 918 / 2,307 TFLOP/s in bfloat16
# (int8 1,836 on v6e, float8 4,614 on TPU7x), HBM 2,765 / 1,638 / 7,380 GB/s, interconnect 1,200 / 800 / 1,200 GB/s in
# both directions together, data-center network 50 Gbit/s on v5p and 100 Gbit/s taken for the others. A TPU7x chip is
# two devices that share its links.
# GPU memory: `device_memory_size` of the compiler's target description (the size that the driver reports), of which JAX
# can be given 95% (XLA_CLIENT_MEM_FRACTION=.95; its own default is 75%). GB200: the data sheet's 186 GB.
# GPU rates: NVIDIA's data sheets, dense (half of the figures "with sparsity"), and NVLink in one direction (half of the
# quoted 900 and 1,800 GB/s); one 400 Gbit/s network port per GPU, as the vendors' eight-GPU hosts have.
_GPU_SHARE = 0.95


def _tpu(
    kind: str,
    name: str,
    per_chip: int,
    gib: float,
    flops: dict[str, float],
    memory: int,
    link: int,
    network: int,
) -> Chip:
    return Chip(
        kind, name, per_chip, int(gib * GIB), {k: v * 1e12 / per_chip for k, v in flops.items()},
        memory * 1e9 / per_chip, link * 1e9 / 2 / per_chip, network * 1e9 / 8 / per_chip, "torus", 1 << 20,
    )  # fmt: skip


def _gpu(
    kind: str,
    name: str,
    memory_bytes: int,
    flops: dict[str, float],
    memory: int,
    link: int,
    domain: int = 8,
) -> Chip:
    return Chip(
        kind, name, 1, int(memory_bytes * _GPU_SHARE), {k: v * 1e12 for k, v in flops.items()},
        memory * 1e9, link * 1e9 / 2, 50e9, "switch", domain,
    )  # fmt: skip


_HOPPER = {"bfloat16": 989.0, "float8": 1979.0}
CHIPS: Mapping[str, Chip] = {
    chip.kind: chip
    for chip in (
        _tpu("v5p", "TPU v5p", 1, 95.73, {"bfloat16": 459.0}, 2765, 1200, 50),
        _tpu("v6e", "TPU v6e (Trillium)", 1, 31.24, {"bfloat16": 918.0, "int8": 1836.0}, 1638, 800, 100),
        _tpu("tpu7x", "TPU7x (Ironwood)", 2, 94.74, {"bfloat16": 2307.0, "float8": 4614.0}, 7380, 1200, 100),
        _gpu("h100", "NVIDIA H100 SXM 80 GB", 84_978_434_048, _HOPPER, 3350, 900),
        _gpu("h200", "NVIDIA H200 SXM", 150_754_820_096, _HOPPER, 4800, 900),
        _gpu(
            "b200", "NVIDIA B200 SXM 180 GB", 191_500_000_000,
            {"bfloat16": 2250.0, "float8": 4500.0, "float4": 9000.0}, 8000, 1800,
        ),
        _gpu(
            "gb200", "NVIDIA GB200 NVL72", 186_000_000_000,
            {"bfloat16": 2500.0, "float8": 5000.0, "float4": 10000.0}, 8000, 1800, domain=72,
        ),
        # Virtual devices of one host, for tests: nominal figures of a small part of a server, not of any machine.
        Chip("cpu", "nominal CPU device", 1, 2 * GIB, {"bfloat16": 25e9, "float32": 35e9}, 5e9, 1e9, 1e9, "switch", 64),
    )
}  # fmt: skip
"""Known chips by kind, the word that mesh files and `--chips` use."""


def chip(kind: str) -> Chip:
    """The chip of a kind. Raises ValueError, listing the kinds, for any other."""
    if kind not in CHIPS:
        raise ValueError(f"There is no chip {kind!r}; the known ones are {', '.join(CHIPS)}.")
    return CHIPS[kind]
