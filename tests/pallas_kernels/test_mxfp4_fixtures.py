"""Recorded MXFP4 bytes through the matmul of every implementation, those of TPU and GPU in JAX's interpreters."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.experimental.pallas import tpu as pltpu
from safetensors.numpy import load_file

from pallas_kernels.mxfp4_matmul import MXFP4Tensor, gpu, matmul, tpu

DATA = Path(__file__).parents[1] / "golden" / "data"
SIZE = 128
"""The GPU kernel reads multiples of it."""
TPU = pltpu.InterpretParams(detect_races=True, uninitialized_memory="nan")
GPU = plgpu.InterpretGPUParams(detect_races=True, uninitialized_memory="nan")
IMPLEMENTATIONS = {
    "reference": ("packed_nk", lambda x, w: matmul(x, w, implementation="reference")),
    "xla": ("packed_kn", lambda x, w: matmul(x, w, implementation="xla")),
    "tpu": ("packed_kn", lambda x, w: tpu.matmul(x, w, None, None, TPU)),
    "tpu float4": ("float4_kn", lambda x, w: tpu.matmul(x, w, None, None, TPU)),
    "gpu, hopper": ("packed_nk", lambda x, w: gpu.matmul(x, w, None, None, GPU)),
    "gpu, blackwell": ("packed_nk", lambda x, w: gpu.matmul(x, w, None, None, GPU)),
}


def padded(fixture: dict[str, np.ndarray]) -> MXFP4Tensor:
    """The recorded weight with zeros up to SIZE outputs and inputs."""
    packed, scale = fixture["weight_packed"], fixture["weight_scale"]
    added = SIZE - packed.shape[0]
    packed = np.pad(packed, ((0, added), (0, SIZE // 2 - packed.shape[1])))
    scale = np.pad(scale, ((0, added), (0, SIZE // 32 - scale.shape[1])), constant_values=127)
    return MXFP4Tensor(packed, scale, "packed_nk")


# The GPU interpreter multiplies with NumPy, which warns of what is not finite.
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("name", ["mxfp4_table", "mxfp4_quant"])
def test_rows_of_the_identity_read_the_recorded_weights(
    name: str, implementation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu, "_has_tensor_memory", lambda: "blackwell" in implementation)
    fixture = load_file(DATA / f"{name}.safetensors")
    layout, run = IMPLEMENTATIONS[implementation]
    w = jax.tree.map(jnp.asarray, padded(fixture)).to_layout(layout)
    read = np.asarray(run(jnp.eye(SIZE, dtype=jnp.float32), w)).T
    outputs, inputs = fixture["dequant"].shape
    expected = fixture["dequant"].copy()
    # A zero times what is not finite is no number: such an output has no other value.
    finite = np.isfinite(expected).all(axis=1)
    assert finite.sum() >= outputs - 4
    assert not np.isfinite(read[:outputs][~finite]).all(axis=1).any()
    # Scale byte 0 may count as zero, and subnormal weights may be flushed, as matrix units do.
    found = read[:outputs, :inputs]
    is_small = np.abs(expected) < 2.0**-124
    expected, found = (np.where(is_small, 0, x)[finite] for x in (expected, found))
    np.testing.assert_array_equal(found, expected)
    assert (np.abs(read[:outputs, :inputs])[finite] <= np.abs(fixture["dequant"])[finite]).all()
    np.testing.assert_array_equal(read[:outputs][finite, inputs:], 0)
    np.testing.assert_array_equal(read[outputs:], 0)
