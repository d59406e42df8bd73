"""The image tower: against a naive reference, alone and in batches, in chunks of a prompt, on two devices."""

import functools
import math
import os
import re
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moe28t_jax.config import ModelConfig, VisionConfig
from moe28t_jax.engine import Steps, generate_ids
from moe28t_jax.engine import steps as engine_steps
from moe28t_jax.model import abstract, initialize
from moe28t_jax.model.parameters import Parameters
from moe28t_jax.model.vision import MAX_SCORES, _attend, encode_images, encode_prepared, padded_patches
from tests.model.conftest import DATA

VISION = VisionConfig(
    patch_size=2, num_layers=2, hidden_size=16, intermediate_size=24, num_heads=3, qkv_size=24, position_height=5,
    position_width=7, position_time=3,
)  # fmt: skip
GRIDS = [(1, 4, 6), (3, 2, 4), (1, 8, 2), (1, 2, 2), (0, 0, 0)]
COUNT = 28  # more than any of them has


@functools.cache
def config(**fields: Any) -> ModelConfig:
    """Two text layers and a tower whose sizes all differ."""
    small = {
        "attention_kinds": ("kda", "mla"), "mlp_kinds": ("dense", "dense"), "media_pad_id": 250,
        "initializer_range": 0.3, "vision": VISION,
    }  # fmt: skip
    return ModelConfig.from_hf(DATA / "k3_tiny_bf16", small).override(fields)


@functools.cache
def tower(dtype: str = "float32") -> Parameters:
    """Random parameters of which none is at a neutral value."""
    with jax.enable_x64(dtype == "float64"):
        parameters = initialize(config(), jax.random.key(0), jnp.dtype(dtype))
        noise = np.random.default_rng(1)
        leaves, structure = jax.tree.flatten(parameters)
        moved = [leaf + 0.2 * noise.normal(size=leaf.shape).astype(leaf.dtype) for leaf in leaves]
        return jax.tree.unflatten(structure, moved)


def images(dtype: str = "float32") -> list[np.ndarray]:
    rng = np.random.default_rng(2)
    return [rng.uniform(-1, 1, (math.prod(grid), 12)).astype(dtype) for grid in GRIDS]


def padded(count: int = COUNT, dtype: str = "float32", fill: float = np.nan) -> np.ndarray:
    batch = np.full((len(GRIDS), count, 12), fill, dtype)
    for row, pixels in zip(batch, images(dtype), strict=True):
        row[: len(pixels)] = pixels
    return batch


def tokens(grid: tuple[int, int, int]) -> int:
    return grid[1] * grid[2] // 4


# -- a reference that knows nothing of padding, batches or tracing ----------------------------------------------------
def naive(parameters: Parameters, pixels: np.ndarray, grid: tuple[int, int, int]) -> np.ndarray:
    """One image, patch by patch and head by head, in float64."""
    frames, height, width = grid
    weights = {
        name: np.asarray(parameters.vision[name], np.float64)
        for name in ("patch_proj", "position", "final_norm")
    }
    x = pixels.astype(np.float64) @ weights["patch_proj"]
    where = [(t, y, x_) for t in range(frames) for y in range(height) for x_ in range(width)]

    def norm(x: np.ndarray, gain: Any, eps: float) -> np.ndarray:
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * np.asarray(gain, np.float64)

    def around(index: int, want: int, have: int) -> list[tuple[int, float]]:
        centre = min(max((index + 0.5) * have / want - 0.5, 0.0), have - 1.0)
        low = math.floor(centre)
        return [(low, 1 - (centre - low)), (min(low + 1, have - 1), centre - low)]

    size = VISION.hidden_size
    for place, (t, row, column) in enumerate(where):
        for y, down in around(row, height, VISION.position_height):
            for x_, along in around(column, width, VISION.position_width):
                x[place] += down * along * weights["position"][y, x_]
        if frames > 1:
            omega = 10000.0 ** (-np.arange(size // 2) / (size // 2))
            x[place] += np.concatenate([np.sin(t * omega), np.cos(t * omega)])

    head = VISION.qkv_size // VISION.num_heads

    def rotate(vector: np.ndarray, row: int, column: int) -> np.ndarray:
        turned = vector.copy()
        for pair in range(head // 2):
            angle = (row if pair % 2 else column) * 10000.0 ** (-4 * (pair // 2) / head)
            value = complex(vector[2 * pair], vector[2 * pair + 1]) * complex(
                math.cos(angle), math.sin(angle)
            )
            turned[2 * pair : 2 * pair + 2] = value.real, value.imag
        return turned

    def gelu(x: np.ndarray, exact: bool) -> np.ndarray:
        if exact:
            return x * 0.5 * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))
        return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))

    for index in range(VISION.num_layers):
        block = getattr(parameters.vision.blocks, str(index))
        w = {name: np.asarray(block[name], np.float64) for name in ("qkv", "out", "up", "down")}
        qkv = (norm(x, block["attention_norm"], VISION.norm_eps) @ w["qkv"]).reshape(
            len(x), 3, VISION.num_heads, head
        )
        out = np.zeros((len(x), VISION.num_heads, head))
        for h in range(VISION.num_heads):
            q, k = (np.stack([rotate(qkv[i, j, h], *where[i][1:]) for i in range(len(x))]) for j in range(2))
            scores = np.exp(q @ k.T / math.sqrt(head))
            out[:, h] = scores / scores.sum(-1, keepdims=True) @ qkv[:, 2, h]
        x = x + out.reshape(len(x), -1) @ w["out"]
        x = x + gelu(norm(x, block["mlp_norm"], VISION.norm_eps) @ w["up"], False) @ w["down"]
    x = norm(x, weights["final_norm"], VISION.norm_eps).reshape(frames, height, width, size).mean(0)
    rows = [
        np.concatenate([x[2 * r + dy, 2 * c + dx] for dy in range(2) for dx in range(2)])
        for r in range(height // 2) for c in range(width // 2)
    ]  # fmt: skip
    inner = gelu(np.stack(rows) @ np.asarray(parameters.projector["inner"], np.float64), True)
    return norm(
        inner @ np.asarray(parameters.projector["out"], np.float64), parameters.projector["norm"], 1e-5
    )


@functools.partial(jax.jit, static_argnames=("config", "max_scores"))
def program(
    parameters: Any, patches: Any, grids: Any, config: ModelConfig, max_scores: int = MAX_SCORES
) -> Any:
    return encode_images(parameters, patches, grids, config, max_scores)


@pytest.mark.parametrize(("dtype", "tolerance"), [("float64", 1e-9), ("float32", 5e-5)])
def test_a_batch_with_padding_is_the_reference_of_each(dtype: str, tolerance: float) -> None:
    with jax.enable_x64(dtype == "float64"):
        found = program(tower(dtype), padded(dtype=dtype), np.array(GRIDS, np.int32), config())
        assert found.dtype == dtype and found.shape == (len(GRIDS), COUNT // 4, config().hidden_size)
        found = np.asarray(found)
    for row, pixels, grid in zip(found, images(dtype), GRIDS, strict=True):
        assert not row[tokens(grid) :].any()
        if grid[0]:
            expected = naive(tower(dtype), pixels, grid)
            np.testing.assert_allclose(row[: tokens(grid)], expected, rtol=0, atol=tolerance)


def test_images_alone_are_as_in_the_batch_and_sizes_share_programs() -> None:
    batch = np.asarray(program(tower(), padded(), np.array(GRIDS, np.int32), config()))
    pairs = [(pixels, grid) for pixels, grid in zip(images(), GRIDS, strict=True) if grid[0]]
    found = np.asarray(encode_prepared(tower(), pairs, config()))
    expected = np.concatenate([row[: tokens(grid)] for row, grid in zip(batch, GRIDS, strict=True)])
    np.testing.assert_allclose(found, expected, rtol=0, atol=2e-5)
    assert encode_prepared(tower(), [], config()).shape == (0, config().hidden_size)


def test_blocks_of_queries_change_nothing() -> None:
    """In float64: bounds that give blocks of 8, 2 and 1 queries, values and gradients."""
    with jax.enable_x64(True):
        patches, grids = padded(dtype="float64"), jnp.asarray(GRIDS, jnp.int32)
        per_query = len(GRIDS) * VISION.num_heads * COUNT

        @functools.partial(jax.jit, static_argnames="max_scores")
        def both(parameters: Any, max_scores: int) -> Any:
            def total(parameters: Any) -> Any:
                features = encode_images(parameters, patches, grids, config(), max_scores)
                return jnp.sum(jnp.sin(features)), features

            gradients, features = jax.grad(total, has_aux=True)(parameters)
            return features, jax.tree.leaves(gradients)

        whole, gradients = both(tower("float64"), MAX_SCORES)
        assert all(np.isfinite(leaf).all() for leaf in gradients)
        for queries in (8, 3, 0):
            blocked, same = both(tower("float64"), per_query * queries)
            np.testing.assert_allclose(blocked, whole, rtol=0, atol=1e-12)
            for a, b in zip(same, gradients, strict=True):
                np.testing.assert_allclose(a, b, rtol=0, atol=1e-10)


def test_gradients_of_the_tower_are_those_of_differences() -> None:
    with jax.enable_x64(True):
        parameters, grids = tower("float64").vision, np.array(GRIDS, np.int32)
        whole = tower("float64")

        def total(position: Any) -> Any:
            leaves, structure = jax.tree.flatten(whole)
            copy = jax.tree.unflatten(structure, leaves)
            copy.vision.position.set_value(position)
            return jnp.sum(jnp.sin(encode_images(copy, padded(dtype="float64"), grids, config())))

        position = parameters["position"]
        direction = np.random.default_rng(3).normal(size=position.shape)
        gradient = jax.jit(jax.grad(total))(position)
        compiled, step = jax.jit(total), 1e-5
        difference = (compiled(position + step * direction) - compiled(position - step * direction)) / (
            2 * step
        )
        np.testing.assert_allclose(np.sum(gradient * direction), difference, rtol=1e-6)


@pytest.mark.parametrize("grid", [(1, 6, 6), (4, 2, 2), (1, 3, 4), (1, 4, 3), (1, -2, 2)])
def test_grids_that_do_not_fit_give_no_numbers(grid: tuple[int, int, int]) -> None:
    found = np.asarray(program(tower(), padded()[:2], np.array([GRIDS[0], grid], np.int32), config()))
    assert np.isfinite(found[0]).all() and np.isnan(found[1]).all()


def test_bfloat16() -> None:
    parameters = jax.tree.map(lambda x: x.astype(jnp.bfloat16), tower())
    grids = np.array(GRIDS, np.int32)
    found = program(parameters, padded(), grids, config())
    assert found.dtype == jnp.bfloat16
    exact = program(jax.tree.map(lambda x: x.astype(jnp.float32), parameters), padded(), grids, config())
    assert float(jnp.abs(found.astype(jnp.float32) - exact).max()) < 0.1 * float(jnp.abs(exact).max())


def test_refusals() -> None:
    grids = np.array([GRIDS[0]], np.int32)
    text = ModelConfig.from_hf(DATA / "k3_tiny_bf16")
    with pytest.raises(ValueError, match="configuration has no image tower"):
        encode_images(tower(), padded()[:1], grids, text)
    with pytest.raises(ValueError, match="parameters hold no image tower"):
        encode_images(tower().text_only(), padded()[:1], grids, config())
    with pytest.raises(ValueError, match="11 values; this tower reads 12"):
        encode_images(tower(), padded()[:1, :, :11], grids, config())
    with pytest.raises(ValueError, match="patches of 2 images and 1 grids"):
        encode_images(tower(), padded()[:2], grids, config())
    pixels = images()[0]
    for wrong, message in [
        ((pixels, (1, 4, 4)), "24 patches and the grid"),
        ((pixels[:0], (1, 0, 4)), "at least one"),
        ((pixels, (1, 3, 8)), "multiples of 2 x 2"),
        ((pixels[:16], (4, 2, 2)), "at most 3 frames"),
    ]:
        with pytest.raises(ValueError, match=message):
            encode_prepared(tower(), [wrong], config())
    with pytest.raises(ValueError, match="head size divisible by 4"):
        encode_images(tower(), padded()[:1], grids, config().override({"vision.qkv_size": 18}))


def test_padded_sizes() -> None:
    sizes = sorted({padded_patches(count) for count in range(1, 67_269)})
    assert sizes[:5] == [256, 384, 512, 768, 1024] and len(sizes) == 18
    assert all(count <= padded_patches(count) <= max(256, 1.5 * count) for count in range(1, 70_000, 13))
    assert all(padded_patches(count, 9) % 9 == 0 for count in range(1, 3000, 7))


def test_text_parameters_are_the_same_with_and_without_a_tower() -> None:
    key = jax.random.key(5)
    text = initialize(config().override({"vision": None}), key)
    assert not text.has_vision and text.text_only() is text
    view = initialize(config(), key).text_only()
    assert jax.tree.structure(view) == jax.tree.structure(text)
    for a, b in zip(jax.tree.leaves(view), jax.tree.leaves(text), strict=True):
        np.testing.assert_array_equal(a, b)


def test_the_public_tower_lowers_with_bounded_temporaries() -> None:
    whole = ModelConfig.preset("moe28t")
    parameters = abstract(whole)
    patches, grids = (
        jax.ShapeDtypeStruct((1, 65_536, 588), jnp.float32),
        jax.ShapeDtypeStruct((1, 3), jnp.int32),
    )
    lowered = jax.jit(encode_images, static_argnames="config").lower(parameters, patches, grids, config=whole)
    assert lowered.out_info.shape == (1, 16_384, 7168)
    sizes = [
        math.prod(map(int, dimensions[:-1].split("x")))
        for dimensions in re.findall(r"tensor<((?:\d+x)+)[a-z]\w*>", lowered.as_text())
    ]
    # The largest are queries, keys and values; 65,536 x 65,536 scores of 12 heads would be 5e10.
    assert max(sizes) == 65_536 * 3 * 1536
    count = whole.parameter_count().by_group
    stored = jax.tree.leaves(parameters.vision) + jax.tree.leaves(parameters.projector)
    assert sum(leaf.size for leaf in stored) == count["vision"] + count["projector"]


# -- features inside prompts ---------------------------------------------------------------------------------------
def prompts() -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Two prompts with pads in several places; the same with other tokens in their stead, whose embeddings are the
    features; lengths; features. Padding holds pads too."""
    rng = np.random.default_rng(4)
    ids = rng.integers(0, 200, (2, 200)).astype(np.int32)
    text = ids.copy()
    lengths = np.array([200, 130], np.int32)
    for row, places in enumerate([[0, 1, 2, 62, 63, 64, 65, 130, 199], [5, *range(60, 129)]]):
        ids[row, places] = config().media_pad_id
    ids[1, 130:] = config().media_pad_id
    real = (ids == config().media_pad_id) & (np.arange(200) < lengths[:, None])
    return ids, text, lengths, np.asarray(tower()["embedding"])[text[real]]


def prefill(chunk: int, ids: np.ndarray, lengths: np.ndarray, features: Any) -> np.ndarray:
    steps = Steps(tower(), config(), chunk)
    return np.asarray(steps.prefill(ids, lengths, steps.new_cache(2, 256), features)[0])


def test_chunks_take_their_own_features() -> None:
    ids, text, lengths, features = prompts()
    expected = prefill(256, text, lengths, None)
    for chunk in (64, 128, 256):
        found = prefill(chunk, ids, lengths, features)
        np.testing.assert_allclose(found, expected, rtol=0, atol=2e-4)
    # Features in another order are noticed.
    assert np.abs(prefill(64, ids, lengths, features[::-1]) - expected).max() > 1e-2


def test_text_never_meets_the_program_for_images() -> None:
    compiled: Any = engine_steps.FORWARD.on("cpu")
    ids, text, lengths, features = prompts()
    prefill(64, text, lengths, None)
    before = compiled._cache_size()
    prefill(64, text, lengths, np.zeros((0, config().hidden_size), np.float32))
    assert compiled._cache_size() == before
    prefill(64, ids, lengths, features)
    with_images = compiled._cache_size()
    prefill(64, ids[:, ::-1].copy(), np.array([200, 200]), np.concatenate([features, features[:70]]))
    assert compiled._cache_size() == with_images
    # The tower is no argument of the text's programs.
    assert len(Steps(tower(), config())._leaves) == len(jax.tree.leaves(tower().text_only()))


def test_features_are_counted() -> None:
    ids, _, lengths, features = prompts()
    for wrong in (features[:-1], np.concatenate([features, features[:1]])):
        with pytest.raises(ValueError, match=f"79 media pad tokens and there are {len(wrong)} rows"):
            prefill(64, ids, lengths, wrong)
    with pytest.raises(ValueError, match="7 values per row; this model's embeddings have"):
        prefill(64, ids, lengths, features[:, :7])
    steps = Steps(tower(), config())
    prompt = ids[0].tolist()
    with pytest.raises(ValueError, match="9 media pad tokens and there are 10 rows"):
        list(generate_ids(steps, prompt, 2, image_features=features[:10]))
    without = Steps(tower(), config().override({"media_pad_id": None}))
    with pytest.raises(ValueError, match="no media pad token"):
        list(generate_ids(without, prompt, 2, image_features=features[:9]))


def test_generation_reads_the_features() -> None:
    ids, text, _, features = prompts()
    steps = Steps(tower(), config(), 64)
    found = list(generate_ids(steps, ids[0].tolist(), 4, image_features=features[:9]))
    assert found == list(generate_ids(steps, text[0].tolist(), 4))
    assert found != list(generate_ids(steps, ids[0].tolist(), 4, image_features=-features[:9]))


# -- two devices ---------------------------------------------------------------------------------------------------
_ON_TWO = """
import jax, numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from moe28t_jax.config.declaration import declare_vision
from tests.model.test_vision import GRIDS, config, padded, program, tower
assert len(jax.devices()) == 2
mesh = jax.make_mesh((2,), ("tensor",), axis_types=(jax.sharding.AxisType.Auto,))
expected = np.asarray(program(tower(), padded(), np.array(GRIDS, np.int32), config()))
parameters, sharded = tower(), 0
for parameter in declare_vision(config().vision, config().hidden_size):
    owner = parameters
    *path, leaf = parameter.name.split(".")
    for part in path:
        owner = getattr(owner, part)
    split = ("vision_heads", "vision_mlp")
    spec = PartitionSpec(*("tensor" if axis in split else None for axis in parameter.axes))
    sharded += any(spec)
    getattr(owner, leaf).set_value(jax.device_put(owner[leaf], NamedSharding(mesh, spec)))
assert sharded == 4 * config().vision.num_layers + 2
everywhere = NamedSharding(mesh, PartitionSpec())
patches, grids = jax.device_put((padded(), np.array(GRIDS, np.int32)), everywhere)
towers = {name: getattr(parameters, name) for name in ("vision", "projector")}
from moe28t_jax.model.parameters import Group
only = Group()
[setattr(only, name, value) for name, value in towers.items()]
found = program(only, patches, grids, config())
assert len(found.sharding.device_set) == 2
np.testing.assert_allclose(np.asarray(found), expected, rtol=0, atol=2e-5)
print("same")
"""


def test_two_devices_with_sharded_parameters_give_the_same() -> None:
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=2"
    result = subprocess.run(
        [sys.executable, "-c", _ON_TWO],
        env=os.environ | {"XLA_FLAGS": flags, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        cwd=DATA.parents[2],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0 and result.stdout == "same\n", result.stderr[-2000:]


def test_gradients_of_many_queries_are_added_up_in_float32() -> None:
    """A sum of bfloat16 stops growing at 256 times its terms: here a block of one query after the other."""
    patches = 700
    x = 1 + 0.1 * np.random.default_rng(7).standard_normal((3, 1, patches, 1, 4))
    q, k, v = (jnp.asarray(each, jnp.bfloat16) for each in x)
    valid = jnp.arange(patches)[None] < 4

    def gradient(q: Any, k: Any, v: Any) -> Any:
        return jax.jit(
            jax.grad(lambda k, v: jnp.sum(_attend(q, k, v, valid, 1), dtype=jnp.float32), argnums=(0, 1))
        )(k, v)

    expected = gradient(*(each.astype(jnp.float32) for each in (q, k, v)))
    for a, b in zip(gradient(q, k, v), expected, strict=True):
        assert a.dtype == jnp.bfloat16
        np.testing.assert_allclose(a.astype(jnp.float32), b, rtol=0.03, atol=0.3)
    assert float(jnp.max(expected[1])) > 150
