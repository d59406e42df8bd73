"""Recorded outputs of the image tower and projector, recorded patches, and planted mistakes."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moe28t_jax.chat.images import open_image, prepare_image
from moe28t_jax.config import ModelConfig, VisionConfig
from moe28t_jax.config.declaration import declare_vision
from moe28t_jax.model import vision
from moe28t_jax.model.parameters import Group, Weight
from tests.golden.fixtures import DATA, _stored_value, assert_close, assert_noticed, read, recorded_weights

pytestmark = pytest.mark.golden

TOLERANCE = 5e-5
RECORDINGS = ("vision_k3", "vision_k3_video")
# Recorded output, and the eps of the tower's norms that gave it.
EPS = {"projector_out_eps_f32": VisionConfig().norm_eps, "projector_out": 2.0**-7}


@functools.cache
def tower(name: str) -> tuple[ModelConfig, Group]:
    tensors, meta = read(name)
    weights, recorded = recorded_weights(tensors), meta["vision_config"]
    sizes = VisionConfig(
        patch_size=recorded["patch_size"],
        num_layers=recorded["vt_num_hidden_layers"],
        hidden_size=recorded["vt_hidden_size"],
        intermediate_size=recorded["vt_intermediate_size"],
        num_heads=recorded["vt_num_attention_heads"],
        qkv_size=recorded["qkv_hidden_size"],
        position_height=recorded["init_pos_emb_height"],
        position_width=recorded["init_pos_emb_width"],
        position_time=recorded["init_pos_emb_time"],
        projector_eps=recorded["projector_ln_eps"],
    )
    config = ModelConfig.from_hf(DATA / "k3_tiny_bf16").override(
        {"vision": sizes, "hidden_size": meta["text_hidden_size"]}
    )
    root, used = Group(), set()
    for parameter in declare_vision(sizes, config.hidden_size):
        owner = root
        *path, leaf = parameter.name.split(".")
        for part in path:
            if not hasattr(owner, part):
                setattr(owner, part, Group())
            owner = getattr(owner, part)
        setattr(owner, leaf, Weight(jnp.asarray(_stored_value(parameter, weights, parameter.stored_name))))
        used.add(parameter.stored_name)
    assert used == set(weights)
    return config, root


def batch(name: str) -> tuple[np.ndarray, np.ndarray]:
    """All recorded images as one right-padded batch; padding is not a number."""
    tensors, _ = read(name)
    grids = tensors["grid_thws"]
    counts = grids.prod(axis=1)
    pixels = tensors["pixel_values"].reshape(counts.sum(), -1)
    padded = np.full((len(grids), -(-counts.max() // 4) * 4 + 4, pixels.shape[1]), np.nan, np.float32)
    for index, start in enumerate(np.cumsum(counts) - counts):
        padded[index, : counts[index]] = pixels[start : start + counts[index]]
    return padded, grids


def features(name: str, overrides: dict[str, Any] | None = None) -> np.ndarray:
    """Real rows of the batch by a new program, so that what is patched takes effect."""
    config, parameters = tower(name)
    config = config.override(overrides or {})
    patches, grids = batch(name)
    program = jax.jit(lambda *arguments: vision.encode_images(*arguments, config))
    found = np.asarray(program(parameters, patches, grids))
    counts = grids[:, 1] * grids[:, 2] // 4
    assert all(not found[index, count:].any() for index, count in enumerate(counts))
    return np.concatenate([found[index, :count] for index, count in enumerate(counts)])


@pytest.mark.parametrize("name", RECORDINGS)
@pytest.mark.parametrize("output", EPS)
def test_features(name: str, output: str) -> None:
    tensors, _ = read(name)
    assert_close(features(name, {"vision.norm_eps": EPS[output]}), tensors[output], TOLERANCE, output)


@pytest.mark.parametrize("index", [0, 1])
def test_patches_are_exact(index: int) -> None:
    tensors, meta = read("vision_k3")
    recorded = meta["images"][index]
    image = prepare_image(
        open_image(DATA / recorded["file"]), patch_limit=meta["image_processor"]["in_patch_limit"]
    )
    assert image.size == tuple(recorded["size_wh"]) and image.grid == tuple(recorded["grid_thw"])
    np.testing.assert_array_equal(image.patches_u8, tensors[f"image{index}_patches_u8"])


def test_from_a_file_to_its_features() -> None:
    tensors, meta = read("vision_k3")
    config, parameters = tower("vision_k3")
    limit = meta["image_processor"]["in_patch_limit"]
    images = [prepare_image(open_image(DATA / one["file"]), patch_limit=limit) for one in meta["images"]]
    pairs = [(image.pixel_values(), image.grid) for image in images]
    found = vision.encode_prepared(parameters, pairs, config.override({"vision.norm_eps": 2.0**-7}))
    expected = np.concatenate([tensors["image0_features"], tensors["image1_features"]])
    assert sum(image.num_tokens for image in images) == len(expected)
    assert_close(found, expected, TOLERANCE, "features of two files")


# -- planted mistakes ----------------------------------------------------------------------------------------------
def wrong(name: str = "vision_k3", overrides: dict[str, Any] | None = None) -> float:
    tensors, _ = read(name)
    return float(np.abs(features(name, overrides) - tensors["projector_out_eps_f32"]).max())


def test_the_other_eps_is_noticed() -> None:
    assert_noticed(wrong(overrides={"vision.norm_eps": 2.0**-7}), TOLERANCE, "eps of the tower's norms")


def test_rows_and_columns_swapped_in_the_rotation_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    right = vision._rotary

    def swapped(places: Any, head_dim: int, dtype: Any) -> Any:
        return right(places._replace(row_IP=places.column_IP, column_IP=places.row_IP), head_dim, dtype)

    monkeypatch.setattr(vision, "_rotary", swapped)
    assert_noticed(wrong(), TOLERANCE, "rotation by rows first")


def test_rotated_halves_instead_of_pairs_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def halves(x: Any, cos: Any, sin: Any) -> Any:
        first, second = jnp.split(x, 2, axis=-1)
        cos, sin = cos[:, :, None, :], sin[:, :, None, :]
        return jnp.concatenate([first * cos - second * sin, first * sin + second * cos], axis=-1)

    monkeypatch.setattr(vision, "_rotate", halves)
    assert_noticed(wrong(), TOLERANCE, "rotation of halves")


@pytest.mark.parametrize("mistake", ["antialias", "corners"])
def test_another_interpolation_is_noticed(mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _, grids = batch("vision_k3")

    def resized(table: Any, traced: Any, places: Any) -> Any:
        rows = []
        for _, height, width in grids:
            if mistake == "antialias":
                small = jax.image.resize(table, (height, width, table.shape[2]), "bilinear", antialias=True)
            else:
                along = [
                    np.linspace(0, have - 1, want)
                    for have, want in zip(table.shape, (height, width), strict=False)
                ]
                places_2 = jnp.stack(
                    jnp.meshgrid(*(jnp.asarray(a, jnp.float32) for a in along), indexing="ij")
                )
                small = jax.vmap(
                    lambda plane, at=places_2: jax.scipy.ndimage.map_coordinates(plane, list(at), 1), 2, 2
                )(table)
            flat = small.reshape(height * width, -1)
            rows.append(jnp.pad(flat, ((0, places.row_IP.shape[1] - len(flat)), (0, 0))))
        return jnp.stack(rows)

    monkeypatch.setattr(vision, "_position", resized)
    assert_noticed(wrong(), TOLERANCE, mistake)


def test_the_order_of_merged_patches_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    right = vision._merge

    def transposed(x: Any, grids: Any, sizes: VisionConfig) -> Any:
        merged, valid = right(x, grids, sizes)
        slots = merged.reshape(*merged.shape[:2], 2, 2, -1).swapaxes(2, 3)
        return slots.reshape(merged.shape), valid

    monkeypatch.setattr(vision, "_merge", transposed)
    assert_noticed(wrong(), TOLERANCE, "merging columns first")


def test_a_clip_without_time_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    right = vision._position

    def still(table: Any, grids: Any, places: Any) -> Any:
        return right(table, grids.at[:, 0].set(1), places)

    monkeypatch.setattr(vision, "_position", still)
    assert_noticed(wrong("vision_k3_video"), TOLERANCE, "no position in time")


def test_the_harness_plants_nothing_by_itself() -> None:
    assert wrong() <= TOLERANCE and wrong("vision_k3_video") <= TOLERANCE
