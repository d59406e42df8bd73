"""Meshes and the table of rules: what is accepted, what is refused, and that sizes are the planner's."""

import dataclasses
import inspect
import math
import subprocess
import sys
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

from moe28t_jax import load
from moe28t_jax.config import ModelConfig
from moe28t_jax.model import abstract, init_cache, pipeline
from moe28t_jax.parallel import (
    AXES,
    RULES,
    batch_layout,
    cache_shardings,
    check_mesh,
    config_on,
    constrain,
    current_mesh,
    load_mesh_file,
    make_mesh,
    mesh_file_names,
    parameter_shardings,
    partition,
    shard_abstract,
)
from moe28t_jax.parallel.formats import device_layout
from moe28t_jax.planning.inventory import stages
from moe28t_jax.planning.memory import cache_bytes, divide_work, trained_parameters, weight_bytes


def abstract_mesh(**sizes: int) -> AbstractMesh:
    axes = tuple(sizes.get(axis, 1) for axis in AXES)
    return AbstractMesh(axes, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def test_a_mesh_has_the_axes_of_its_file_and_one_device_needs_no_mesh() -> None:
    mesh = make_mesh({"data": 1})
    assert mesh.axis_names == AXES and set(mesh.axis_types) == {AxisType.Auto}
    assert current_mesh() is None
    with jax.set_mesh(mesh):
        assert current_mesh() is None
        x = jnp.zeros((2, 3))
        assert constrain(x, "batch", "token") is x
    assert batch_layout(4) is None


def test_meshes_that_cannot_be_are_refused() -> None:
    with pytest.raises(
        ValueError, match=r"The mesh expert 4 x tensor 2 needs 8 devices and there are 1; .*=8 before"
    ):
        make_mesh("cpu-8")
    with pytest.raises(
        ValueError, match=r"has the axes data, stage, expert, tensor, context; model is none of them"
    ):
        make_mesh({"model": 2})
    for size in (0, -1, True):
        with pytest.raises(ValueError, match=rf"axis expert is {size}; it is a positive whole number of dev"):
            make_mesh({"expert": size})
    with pytest.raises(ValueError, match=r"The mesh is 'cpu-8'; expected a jax\.sharding\.Mesh: .*make_mesh"):
        check_mesh("cpu-8")
    with pytest.raises(
        ValueError, match=r"has the axes data and lacks stage, expert, tensor, context; make one with"
    ):
        check_mesh(jax.sharding.Mesh(jax.devices(), ("data",)))
    explicit = jax.make_mesh((1,) * 5, AXES, axis_types=(AxisType.Explicit,) * 5)
    with pytest.raises(ValueError, match=r"axes data, stage, .* are not of type Auto"):
        check_mesh(explicit)


@pytest.mark.parametrize(
    ("kind", "platform", "expected"),
    [
        ("cpu", "cpu", ("packed_kn", False)),
        ("TPU v6 lite", "tpu", ("packed_kn", True)),
        ("TPU7x", "tpu", ("float4_kn", True)),
        ("NVIDIA H200", "gpu", ("packed_nk", True)),
    ],
)
def test_a_device_alone_gets_the_form_that_its_kernels_read(kind, platform, expected) -> None:
    assert device_layout(SimpleNamespace(device_kind=kind, platform=platform)) == expected


def test_expert_carries_rows_where_they_divide_and_tokens_otherwise() -> None:
    mesh = abstract_mesh(data=2, expert=4, context=2)
    many, few, one = (batch_layout(batch, mesh) for batch in (16, 6, 1))
    assert many is not None and few is not None and one is not None
    assert (many.rows, many.tokens) == (("data", "expert"), ("context",))
    assert (few.rows, few.tokens) == (("data",), ("expert", "context"))
    assert (one.rows, one.tokens) == ((), ("expert", "context"))
    assert one.token_axes(64) == ("expert", "context") and one.token_axes(1) == one.token_axes(12) == ()
    assert one.token_axes(16, least=3) == ()


@pytest.mark.parametrize(("axes", "shape", "message"), [
    (("vocab", "mlp"), (8, 8), r"w: the logical axes 'vocab' and 'mlp' both claim the mesh axis 'tensor'"),
    (("expert", "mlp"), (8, 8), r"w: the logical axes 'expert' and 'mlp' both claim the mesh axis 'tensor'"),
    (("mla_heads",), (6,), r"w has 6 along 'mla_heads', which the mesh axes tensor 4 do not divide"),
    (("expert",), (4,), r"w has 4 along 'expert', which the mesh axes expert 2 x tensor 4 do not divide"),
    (("heads",), (8,), r"w has the logical axis 'heads', for which there is no rule; known are expert, kda_heads"),
    (("mlp",), (8, 8), r"w has shape \(8, 8\) and the 1 logical axes"),
])  # fmt: skip
def test_rules_that_collide_or_do_not_divide_are_refused(axes, shape, message) -> None:
    with pytest.raises(ValueError, match=message):
        partition(axes, shape, abstract_mesh(expert=2, tensor=4), "w")


def test_partitions_name_the_mesh_axes_larger_than_one() -> None:
    mesh = abstract_mesh(expert=2, tensor=4)
    assert partition(("expert", "expert_in", "expert_mlp"), (8, 3, 5), mesh) == P(
        ("expert", "tensor"), None, None
    )
    assert partition(("vocab", "embed"), (8, 3), mesh) == P("tensor", None)
    assert partition(("batch", "token", None), (2, 3, 4), mesh) == P("expert", None, None)
    assert set(axis for axes in RULES.values() for axis in axes) <= set(AXES)


@pytest.mark.parametrize("preset", ["moe28t", "kimi-k3"])
@pytest.mark.parametrize("name", [name for name in mesh_file_names() if name != "cpu-8"])
def test_weights_and_caches_take_the_bytes_that_were_planned(preset: str, name: str) -> None:
    file = load_mesh_file(name)
    mesh = abstract_mesh(**file.axes)
    config = config_on(file, ModelConfig.preset(preset))
    parameters = abstract(config)
    where = parameter_shardings(parameters, config, mesh)

    def held(tree, shardings) -> int:
        sizes = jax.tree.map(
            lambda x, s: math.prod(s.shard_shape(x.shape)) * x.dtype.itemsize, tree, shardings
        )
        return sum(jax.tree.leaves(sizes))

    planned = sum(weight_bytes(stages(config, 1)[0], dict(mesh.shape)).values())
    assert held(parameters, where) == planned
    masters = abstract(dataclasses.replace(config, expert_quantization=None), jnp.float32, vision=False)
    where_masters = parameter_shardings(masters, config, mesh, masters=True)
    assert held(masters, where_masters) == 4 * trained_parameters(config, stages(config, 1)[0], file.axes)
    for batch, spread in ((file.batch, "batch"), (1, "context")):
        cache = jax.eval_shape(
            lambda batch=batch: init_cache(config, batch, file.context, jnp.bfloat16, True)
        )
        work = divide_work(config, file.axes, "decode", batch, file.context, 1, spread)
        planned = cache_bytes(config, stages(config, 1)[0], file.axes, work)
        assert held(cache, cache_shardings(cache, mesh)) == pytest.approx(planned, rel=1e-6)
    leaf = jax.tree.leaves(shard_abstract(parameters, where))[0]
    assert leaf.sharding.mesh == mesh


def test_a_model_that_the_mesh_tears_is_refused() -> None:
    config = ModelConfig.preset("moe28t")
    with pytest.raises(
        ValueError, match=r"experts\.down has 896 along 'expert', which the mesh axes expert 3 x tensor 8"
    ):
        parameter_shardings(abstract(config), config, abstract_mesh(expert=3, tensor=8))


def test_stages_need_stacked_layers_that_divide() -> None:
    config = ModelConfig.preset("moe28t")
    with pytest.raises(
        ValueError, match=r"with 2 pipeline stages needs stacked layers, and these are one by one"
    ):
        parameter_shardings(abstract(config, stacked=False), config, abstract_mesh(stage=2))
    with pytest.raises(ValueError, match=r"has 22 along 'layer', which the mesh axes stage 4 do not divide"):
        parameter_shardings(abstract(config), config, abstract_mesh(stage=4))


def test_mesh_files_are_read_without_jax() -> None:
    code = (
        "import sys; from moe28t_jax.parallel import load_mesh_file; load_mesh_file('cpu-8'); "
        "assert 'jax' not in sys.modules; from moe28t_jax.parallel import make_mesh; assert 'jax' in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_microbatches_are_dealt_without_moving_rows() -> None:
    """Row r goes to microbatch r mod M, so that every device's run of rows has a part in each."""
    assert [pipeline.num_microbatches(rows, 4, 2) for rows in (1, 2, 6, 8, 7)] == [1, 2, 3, 4, 1]
    assert pipeline.num_microbatches(8, 4, 1) == 1
    x = jnp.arange(3 * 8 * 2).reshape(3, 8, 2)
    parts = [pipeline._pick(x, 1, 4, jnp.int32(number)) for number in range(4)]
    for number, part in enumerate(parts):
        assert (part == x[:, number::4]).all()
    found = x * 0
    for number, part in enumerate(parts):
        found = pipeline._put(found, 1, 4, jnp.int32(number), part)
    assert (found == x).all()
    # Two ticks before the first microbatch arrives.
    ticks = jnp.stack([parts[0] * 0 - 1, parts[0] * 0 - 1, *parts])
    assert (pipeline._gather(ticks, 1, 4, 2) == x).all()


def test_a_mesh_without_devices_holds_no_model() -> None:
    with pytest.raises(ValueError, match="The mesh is an AbstractMesh, which has no devices to load onto"):
        # Tests check types, which users' programs do not.
        inspect.unwrap(load)("nano", mesh=abstract_mesh())  # pyright: ignore[reportArgumentType]
