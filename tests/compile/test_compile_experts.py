"""One layer's routed experts of the 2.8T configuration, compiled for a pod of 64 chips by the real compiler.

Nothing gathers expert weights, nothing unpacks or copies them in memory, and little more travels than has to.
"""

import functools
import re
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import topologies as jax_topologies
from jax.sharding import NamedSharding, PartitionSpec

from moe28t_jax.config import ModelConfig
from moe28t_jax.config.declaration import declare_layer
from moe28t_jax.model.moe import mixture_of_experts
from moe28t_jax.model.parameters import Group, attach
from moe28t_jax.parallel.experts import GROUP, expert_parallel
from moe28t_jax.parallel.mesh import make_mesh
from moe28t_jax.parallel.rules import batch_layout, partition
from pallas_kernels._dispatch import prefer
from pallas_kernels.mxfp4_matmul import MXFP4Tensor
from tests.compile import topologies

POD = topologies.CHIPS["v5p"].replace("2x2x1", "4x4x4")
AXES = {"expert": 8, "tensor": 8}
LAYERS = 4
BYTES = {"u8": 1, "s8": 1, "pred": 1, "bf16": 2, "f16": 2, "s32": 4, "u32": 4, "f32": 4}


@functools.cache
def config() -> ModelConfig:
    return ModelConfig.preset("moe28t")


def compile_experts(batch: int, tokens: int, **options: Any) -> jax.stages.Compiled:
    moe = config().moe
    assert moe is not None and moe.latent_size is not None
    mesh = make_mesh(AXES, jax_topologies.get_topology_desc(POD, "tpu").devices)
    layout = batch_layout(batch, mesh)
    assert layout is not None
    where = (layout.rows, layout.token_axes(tokens))

    def like(shape: tuple[int, ...], dtype: Any, *spec: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, PartitionSpec(*spec)))

    def stack(inputs: int, outputs: int) -> MXFP4Tensor:
        shapes = ((LAYERS, moe.num_experts, inputs // per, outputs) for per in (2, 32))
        codes, scales = (like(shape, jnp.uint8, None, GROUP) for shape in shapes)
        return MXFP4Tensor(codes, scales, "packed_kn")

    width, inner, top_k = moe.latent_size, moe.intermediate_size, moe.num_experts_per_token
    experts = {"gate": stack(width, inner), "up": stack(width, inner), "down": stack(inner, width)}

    def run(x: Any, chosen: Any, weights: Any, valid: Any, experts: Any, layer: Any) -> Any:
        return expert_parallel(
            x, chosen, weights, valid, experts, config(), layer, implementation="tpu", **options
        )[0]

    with jax.set_mesh(mesh):
        return (
            jax.jit(run)
            .lower(
                like((batch, tokens, width), jnp.bfloat16, *where, "tensor"),
                like((batch, tokens, top_k), jnp.int32, *where),
                like((batch, tokens, top_k), jnp.float32, *where),
                like((batch, tokens), jnp.bool_, *where),
                experts,
                like((), jnp.int32),
            )
            .compile()
        )


def size_of(shape: str) -> int:
    [(kind, sizes)] = re.findall(r"^(\w+)\[([\d,]*)\]", shape)
    return BYTES[kind] * prod(int(size) for size in sizes.split(",") if size)


def exchanges(text: str) -> list[tuple[str, str, int]]:
    """Of every all-to-all: its kind, its name in the program, and the bytes it may send to others per device."""
    shapes = dict(re.findall(r"^\s*(?:ROOT )?(%[\w.-]+) = (\w+\[[\d,]*\])", text, re.MULTILINE))
    found = []
    pattern = r" (ragged-all-to-all|all-to-all)(?:-start)?\((%[^)]*)\).*?op_name=\"([^\"]*)\""
    for kind, operands, name in re.findall(pattern, text):
        # A ragged one has the array that is sent and the array that is written to before its sizes. What all devices
        # send is what all receive, and neither is more than there is room for.
        arrays = re.findall(r"%[\w.-]+", operands)[: 2 if kind == "ragged-all-to-all" else 1]
        sent = min(size_of(shapes[array]) for array in arrays)
        ranks = prod(AXES.values()) if kind == "ragged-all-to-all" else AXES["tensor"]
        found.append((kind, name, sent * (ranks - 1) // ranks))
    return found


def least_bytes(tokens_per_rank: int) -> float:
    """There and back: each token's latent once to each distinct destination under uniform routing; and its way to
    and from its owner, since the latent's projections are divided over `tensor`."""
    moe = config().moe
    assert moe is not None and moe.latent_size is not None
    ranks, tensor = prod(AXES.values()), AXES["tensor"]
    others = (ranks - 1) * (1 - (1 - 1 / ranks) ** moe.num_experts_per_token)
    return 2 * tokens_per_rank * moe.latent_size * 2 * (others + (tensor - 1) / tensor)


def check(compiled: jax.stages.Compiled, tokens_per_rank: int, fetches: bool) -> None:
    text = compiled.as_text()
    assert text is not None and text.count("mxfp4_grouped_glu") and text.count("mxfp4_grouped_matmul")
    moe = config().moe
    assert moe is not None and moe.latent_size is not None
    width, inner = moe.latent_size, moe.intermediate_size

    unpacked = rf"(?:bf16|f32|f16|f8\w+|f4\w+)\[(?:\d+,)*(?:{width},{inner}|{inner},{width})\]"
    assert not re.findall(unpacked, text), "an expert's weight is unpacked in memory"

    packed = "|".join(
        f"{inputs // per},{outputs}"
        for inputs, outputs in ((width, inner), (inner, width))
        for per in (2, 32)
    )
    weights = rf"u8\[(?:\d+,)*(?:{packed})\]"
    made = re.findall(rf"= {weights}(\S*) ([\w-]+)\(", text)
    # On-chip memory, S(1), is where what is read next is fetched to.
    makers = {name for layout, name in made if "S(1)" not in layout}
    makers -= {"parameter", "bitcast", "get-tuple-element"}
    allowed = {"ragged-all-to-all", "ragged-all-to-all-done", "broadcast"} if fetches else set()
    assert makers <= allowed, f"expert weights are made again by {makers - allowed}"
    assert not re.search(r"= u8\S* (all-gather|all-reduce|collective-permute|all-to-all)", text)
    gathered = [size_of(shape) for shape in re.findall(r"= (\w+\[[\d,]*\])\S* all-gather(?:-start)?\(", text)]
    assert sum(gathered) <= 2**20

    sent = sum(size for _, name, size in exchanges(text) if "fetch_experts" not in name)
    ratio = sent / least_bytes(tokens_per_rank)
    assert 1.0 <= ratio <= 1.2, (ratio, exchanges(text))
    assert any(kind == "ragged-all-to-all" for kind, _, _ in exchanges(text))


def test_decode() -> None:
    """64 rows, one new token each: a token per device, whose experts all stay at home."""
    compiled = compile_experts(64, 1)
    check(compiled, 1, fetches=False)
    analysis = compiled.memory_analysis()
    assert analysis is not None and analysis.temp_size_in_bytes <= 2**25


@pytest.mark.slow
def test_prefill() -> None:
    """A chunk of 8,192 tokens, 128 per device; every device may hold copies of as many experts as are its own."""
    compiled = compile_experts(1, 8192)
    check(compiled, 128, fetches=True)
    analysis = compiled.memory_analysis()
    repeated = 14 * 3 * 3584 * 3072 * (1 / 2 + 1 / 32)
    assert analysis is not None and analysis.temp_size_in_bytes <= repeated + 3 * 2**27


@pytest.mark.slow
def test_dense_exchange_is_noticed() -> None:
    """The padded exchange sends every token to every device, which the measure must show."""
    text = compile_experts(64, 1, exchange="dense").as_text()
    assert text is not None
    sent = sum(size for _, _, size in exchanges(text))
    assert sent > 2 * np.float64(least_bytes(1))


def compile_layer(batch: int, tokens: int) -> str:
    """Schedule of one whole layer's mixture of experts: router, latent, experts, shared experts."""
    mesh = make_mesh(AXES, jax_topologies.get_topology_desc(POD, "tpu").devices)
    layout = batch_layout(batch, mesh)
    assert layout is not None

    def like(shape: tuple[int, ...], dtype: Any, spec: PartitionSpec) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))

    group = Group()
    for parameter in declare_layer(config(), 2):
        owner, _, name = parameter.name.partition(".")
        if owner != "mlp":
            continue
        spec = partition(parameter.axes, parameter.shape, mesh, parameter.name)
        value: Any = like(parameter.shape, jnp.dtype(parameter.dtype), spec)
        if parameter.quantizable:
            experts, inputs, outputs = parameter.shape
            shapes = [(LAYERS, experts, inputs // per, outputs) for per in (2, 32)]
            codes, scales = (like(shape, jnp.uint8, PartitionSpec(None, *spec)) for shape in shapes)
            value = MXFP4Tensor(codes, scales, "packed_kn")
        attach(group, name, value)

    def run(group: Group, x: Any, valid: Any, layer: Any) -> Any:
        return mixture_of_experts(group, x, valid, config(), layer)[0]

    where = PartitionSpec(layout.rows, layout.token_axes(tokens))
    with jax.set_mesh(mesh), prefer("tpu"):
        compiled = (
            jax.jit(run)
            .lower(
                group,
                like((batch, tokens, config().hidden_size), jnp.bfloat16, where),
                like((batch, tokens), jnp.bool_, where),
                like((), jnp.int32, PartitionSpec()),
            )
            .compile()
        )
    text = compiled.as_text()
    assert text is not None and "is_scheduled=true" in text
    entry = re.search(r"^ENTRY .*?\n(.*?)^}", text, re.DOTALL | re.MULTILINE)
    assert entry
    return entry[1]


@pytest.mark.slow
def test_shared_experts_are_at_work_while_tokens_travel() -> None:
    """In decoding their time is that of reading their weights, which arrive on the chip meanwhile."""
    lines = compile_layer(64, 1).splitlines()
    names = [match[1] if (match := re.match(r"\s*(?:ROOT )?(%[\w.-]+) = ", line)) else "" for line in lines]
    at = {name: index for index, name in enumerate(names) if name}

    def interval(done: int) -> tuple[int, int]:
        start = re.search(r"-done\((%[\w.-]+)", lines[done])
        assert start
        return at[start[1]], done

    travels = [
        interval(index)
        for index, line in enumerate(lines)
        if " ragged-all-to-all-done(" in line and "moe_dispatch" in line
    ]
    work = []
    for index, line in enumerate(lines):
        if "moe_shared/dot_general" not in line or " fusion(" not in line:
            continue
        work.append((index, index))
        for name in re.findall(r"%copy-done[\w.-]*", line.split(" fusion(")[1].split(")")[0]):
            result = lines[at[name]].split(" = ")[1]
            if size_of(result) > 2**20:  # a weight, not what it multiplies
                work.append(interval(at[name]))
    assert travels and work
    assert any(first < done and last > start for start, done in travels for first, last in work)
