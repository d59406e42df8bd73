"""The image tower (MoonViT) and its projector: from patches to rows that replace media pad embeddings.

Everything that depends on an image's size (positions, rotation, masks, merging) is computed from a traced grid, so
that one compiled program serves every image of the same padded patch count and can be differentiated.
Source: the public configuration and the published description of the K3 tower; rotation over rows and columns
after RoFormer (arXiv:2104.09864).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Integer

from moe28t_jax.config import ModelConfig, VisionConfig
from moe28t_jax.model.numerics import compute_dtype, linear, rms_norm, widened
from moe28t_jax.model.parameters import Group

# Attention scores held at once, over all images and heads; with more, queries are taken in blocks.
MAX_SCORES = 2**28
_MIN_BUCKET = 256
_ROTARY_BASE = 10_000.0


class _Places(NamedTuple):
    """Where every patch of a padded batch lies: frame, row and column, and whether it is real."""

    frame_IP: Int[Array, "I P"]
    row_IP: Int[Array, "I P"]
    column_IP: Int[Array, "I P"]
    valid_IP: Bool[Array, "I P"]


def _places(grids_I3: Int[Array, "I 3"], count: int) -> _Places:
    frames, height, width = (grids_I3[:, axis, None] for axis in range(3))
    index_P = jnp.arange(count, dtype=grids_I3.dtype)[None, :]
    area = jnp.maximum(height * width, 1)
    width = jnp.maximum(width, 1)
    within = index_P % area
    valid = index_P < frames * height * grids_I3[:, 2, None]
    return _Places(index_P // area, within // width, within % width, valid)


def _between(
    index_IP: Int[Array, "I P"], size_I: Int[Array, " I"], table_size: int, dtype: jnp.dtype
) -> tuple[Int[Array, "I P"], Int[Array, "I P"], Float[Array, "I P"]]:
    """The two table entries around each index of an axis resized to `size`, and the weight of the second.

    Half-pixel centres, no antialiasing. In integers: weights are exact, and the identity where sizes agree.
    """
    doubled_I1 = 2 * jnp.maximum(size_I, 1)[:, None]
    numerator_IP = jnp.maximum((2 * index_IP + 1) * table_size - doubled_I1 // 2, 0)
    first_IP = jnp.minimum(numerator_IP // doubled_I1, table_size - 1)
    weight_IP = (numerator_IP % doubled_I1).astype(dtype) / doubled_I1.astype(dtype)
    return first_IP, jnp.minimum(first_IP + 1, table_size - 1), weight_IP


def _position(
    table_HWD: Float[Array, "H W D"], grids_I3: Int[Array, "I 3"], places: _Places
) -> Float[Array, "I P D"]:
    """Learned table resized bilinearly to the grid; clips add fixed sinusoids over time."""
    dtype = compute_dtype(table_HWD.dtype)
    table_HWD = table_HWD.astype(dtype)
    height, width, size = table_HWD.shape
    top, bottom, down_IP = _between(places.row_IP, grids_I3[:, 1], height, dtype)
    left, right, along_IP = _between(places.column_IP, grids_I3[:, 2], width, dtype)
    down_IP1, along_IP1 = down_IP[:, :, None], along_IP[:, :, None]
    upper = table_HWD[top, left] * (1 - along_IP1) + table_HWD[top, right] * along_IP1
    lower = table_HWD[bottom, left] * (1 - along_IP1) + table_HWD[bottom, right] * along_IP1
    position_IPD = upper * (1 - down_IP1) + lower * down_IP1
    half = size // 2
    omega_K = jnp.asarray(_ROTARY_BASE ** (-np.arange(half) / half), dtype)
    angle_IPK = places.frame_IP.astype(dtype)[:, :, None] * omega_K
    time_IPD = jnp.concatenate([jnp.sin(angle_IPK), jnp.cos(angle_IPK)], axis=-1)
    return jnp.where(grids_I3[:, 0, None, None] > 1, position_IPD + time_IPD, position_IPD)


def _rotary(places: _Places, head_dim: int, dtype: jnp.dtype) -> tuple[Array, Array]:
    """Cosines and sines [I, P, head_dim / 2]: pairs alternate between column and row."""
    quarter = head_dim // 4
    frequency_F = jnp.asarray(_ROTARY_BASE ** (-4.0 * np.arange(quarter) / head_dim), dtype)
    columns = places.column_IP.astype(dtype)[:, :, None] * frequency_F
    rows = places.row_IP.astype(dtype)[:, :, None] * frequency_F
    angle = jnp.stack([columns, rows], axis=-1).reshape(*columns.shape[:2], 2 * quarter)
    return jnp.cos(angle), jnp.sin(angle)


def _rotate(
    x_IPHK: Float[Array, "I P H K"], cos_IPF: Float[Array, "I P F"], sin_IPF: Float[Array, "I P F"]
) -> Float[Array, "I P H K"]:
    pairs = x_IPHK.astype(cos_IPF.dtype).reshape(*x_IPHK.shape[:-1], -1, 2)
    real, imaginary = pairs[..., 0], pairs[..., 1]
    cos, sin = cos_IPF[:, :, None, :], sin_IPF[:, :, None, :]
    rotated = jnp.stack([real * cos - imaginary * sin, real * sin + imaginary * cos], axis=-1)
    return rotated.reshape(x_IPHK.shape).astype(x_IPHK.dtype)


def _query_block(images: int, heads: int, patches: int, max_scores: int) -> int:
    """Queries per block: all, or the largest power of two whose scores stay within the bound."""
    if images * heads * patches * patches <= max_scores:
        return patches
    return 1 << max(max_scores // (images * heads * patches), 1).bit_length() - 1


def _attend(
    q_IPHK: Float[Array, "I P H K"],
    k_IPHK: Float[Array, "I P H K"],
    v_IPHK: Float[Array, "I P H K"],
    valid_IP: Bool[Array, "I P"],
    max_scores: int,
) -> Float[Array, "I P H K"]:
    """Full attention of every patch to the real patches of its own image, blockwise over queries."""
    images, patches, heads, head_dim = q_IPHK.shape
    dtype = compute_dtype(q_IPHK.dtype)
    highest: Any = {"precision": jax.lax.Precision.HIGHEST, "preferred_element_type": dtype}

    keys_and_values = widened((k_IPHK, v_IPHK))

    def block(q_IQHK: Array) -> Array:
        k_IPHK, v_IPHK = keys_and_values()
        scores_IHQP = jnp.einsum("iqhk,iphk->ihqp", q_IQHK, k_IPHK, **highest) * head_dim**-0.5
        # Finite, so that an image without any patch gives numbers, which are then replaced by zeros.
        scores_IHQP = jnp.where(valid_IP[:, None, None, :], scores_IHQP, jnp.finfo(dtype).min)
        weights_IHQP = jax.nn.softmax(scores_IHQP, axis=-1).astype(v_IPHK.dtype)
        return jnp.einsum("ihqp,iphk->iqhk", weights_IHQP, v_IPHK, **highest).astype(q_IPHK.dtype)

    size = _query_block(images, heads, patches, max_scores)
    if size >= patches:
        return block(q_IPHK)
    blocks = -(-patches // size)
    padded = jnp.pad(q_IPHK, ((0, 0), (0, blocks * size - patches), (0, 0), (0, 0)))
    q_NIQHK = jnp.moveaxis(padded.reshape(images, blocks, size, heads, head_dim), 1, 0)
    # The backward pass computes the scores again: keeping them would be the whole matrix.
    out_NIQHK = jax.lax.map(jax.checkpoint(block), q_NIQHK)
    return jnp.moveaxis(out_NIQHK, 0, 1).reshape(images, blocks * size, heads, head_dim)[:, :patches]


def _block(
    parameters: Group,
    x_IPD: Float[Array, "I P D"],
    rotary: tuple[Array, Array],
    valid_IP: Bool[Array, "I P"],
    vision: VisionConfig,
    max_scores: int,
) -> Float[Array, "I P D"]:
    heads = vision.num_heads
    dtype = compute_dtype(x_IPD.dtype)
    with jax.named_scope("attention"):
        qkv = linear(rms_norm(x_IPD, parameters["attention_norm"], vision.norm_eps), parameters["qkv"])
        qkv = qkv.reshape(*x_IPD.shape[:2], 3, heads, vision.qkv_size // heads)
        q_IPHK, k_IPHK = (_rotate(qkv[:, :, index], *rotary) for index in range(2))
        out_IPHK = _attend(q_IPHK, k_IPHK, qkv[:, :, 2], valid_IP, max_scores)
        x_IPD = x_IPD + linear(out_IPHK.reshape(*x_IPD.shape[:2], -1), parameters["out"])
    with jax.named_scope("mlp"):
        inner = linear(rms_norm(x_IPD, parameters["mlp_norm"], vision.norm_eps), parameters["up"])
        inner = jax.nn.gelu(inner.astype(dtype), approximate=True).astype(x_IPD.dtype)
        return x_IPD + linear(inner, parameters["down"])


def _merge(
    x_IPD: Float[Array, "I P D"], grids_I3: Int[Array, "I 3"], vision: VisionConfig
) -> tuple[Float[Array, "I M E"], Bool[Array, "I M"]]:
    """Neighbouring patches side by side, (dy, dx) row-major, averaged over frames; and which rows are real."""
    down, across = vision.merge_height, vision.merge_width
    images, patches, size = x_IPD.shape
    dtype = compute_dtype(x_IPD.dtype)
    frames, height, width = (grids_I3[:, axis, None] for axis in range(3))
    columns = jnp.maximum(width // across, 1)
    merged_M = jnp.arange(patches // (down * across), dtype=grids_I3.dtype)[None, :]
    row, column = merged_M // columns * down, merged_M % columns * across
    slots = [(row + dy) * width + column + dx for dy in range(down) for dx in range(across)]
    index_IMS = jnp.stack(slots, axis=-1)
    total_IMSD = jnp.zeros((*index_IMS.shape, size), dtype)
    image_I11 = jnp.arange(images, dtype=grids_I3.dtype)[:, None, None]
    for frame in range(vision.position_time):
        frame_IMS = jnp.minimum(index_IMS + (frame * height * width)[:, :, None], patches - 1)
        taken = x_IPD[image_I11, frame_IMS].astype(dtype)
        total_IMSD = total_IMSD + jnp.where((frame < frames)[:, :, None, None], taken, jnp.zeros((), dtype))
    mean_IMSD = total_IMSD / jnp.maximum(frames, 1).astype(dtype)[:, :, None, None]
    valid_IM = merged_M < (height // down) * (width // across)
    return mean_IMSD.astype(x_IPD.dtype).reshape(images, -1, down * across * size), valid_IM


def _vision(parameters: Group, config: ModelConfig) -> VisionConfig:
    vision = config.vision
    if vision is None:
        raise ValueError(
            "This configuration has no image tower, so it cannot encode images; use a model that has one."
        )
    if not hasattr(parameters, "vision"):
        raise ValueError(
            "These parameters hold no image tower (the checkpoint has none, or it was loaded with vision=False), "
            "so they cannot encode images; load a checkpoint with its vision tensors."
        )
    if vision.qkv_size % (4 * vision.num_heads):
        raise ValueError(
            f"The image tower has qkv_size {vision.qkv_size} for {vision.num_heads} heads; rotation over rows "
            "and columns needs a head size divisible by 4: change one of them."
        )
    return vision


def encode_images(
    parameters: Group,
    patches_IPC: Float[Array | np.ndarray, "I P C"],
    grids_I3: Integer[Array | np.ndarray, "_ 3"],
    config: ModelConfig,
    max_scores: int = MAX_SCORES,
) -> Float[Array, "I M D"]:
    """Features of a right-padded batch of images and clips: one row per merged patch, in reading order.

    parameters: anything with the groups `vision` and `projector`, e.g. a whole `Parameters`.
    patches_IPC: normalised pixels (x / 255 - 0.5) / 0.5, one patch per row, C = 3 * patch_size^2 in the order
    channel, row, column; frames, then rows, then columns of the grid. Rows beyond t*h*w are padding and may hold
    anything. grids_I3: frames, rows and columns (t, h, w) of patches per image; may be traced, t may be 0 for an
    empty place in the batch. max_scores: attention scores held at once.

    Returns [I, M, D] with M = P // (merge_height * merge_width) and D the text width, in the dtype of the
    parameters; rows beyond h*w // (merge_height * merge_width) are zeros. A grid that does not fit (more patches
    than P, more frames than `position_time`, sides that the merge does not divide) cannot raise while it is traced:
    all rows of that image are NaN. Raises ValueError for parameters or a configuration without a tower, and for
    patches of another size.
    """
    vision = _vision(parameters, config)
    tower, projector = parameters.vision, parameters.projector
    grids_I3, patches_IPC = jnp.asarray(grids_I3).astype(jnp.int32), jnp.asarray(patches_IPC)
    down, across = vision.merge_height, vision.merge_width
    values = 3 * vision.patch_size**2
    if patches_IPC.shape[2] != values:
        raise ValueError(
            f"Patches have {patches_IPC.shape[2]} values; this tower reads {values}, 3 channels of "
            f"{vision.patch_size} x {vision.patch_size} pixels: prepare the image with its patch size."
        )
    if patches_IPC.shape[0] != grids_I3.shape[0]:
        raise ValueError(
            f"There are patches of {patches_IPC.shape[0]} images and {grids_I3.shape[0]} grids; pass one grid each."
        )
    count = patches_IPC.shape[1]
    frames_I, height_I, width_I = grids_I3.T
    fits_I = (
        (frames_I * height_I * width_I <= count)
        & (frames_I <= vision.position_time)
        & (height_I % down == 0)
        & (width_I % across == 0)
        & (grids_I3 >= 0).all(axis=1)
    )
    dtype = tower["patch_proj"].dtype
    places = _places(grids_I3, count)
    with jax.named_scope("patch_embedding"):
        # Padding may hold anything, NaN too, and zero times NaN is NaN.
        x_IPC = jnp.where(places.valid_IP[:, :, None], patches_IPC, jnp.zeros((), patches_IPC.dtype))
        x_IPD = linear(x_IPC.astype(dtype), tower["patch_proj"])
        x_IPD = x_IPD + _position(tower["position"], grids_I3, places).astype(dtype)
    rotary = _rotary(places, vision.qkv_size // vision.num_heads, compute_dtype(dtype))
    for index in range(vision.num_layers):
        with jax.named_scope(f"vision_block_{index}"):
            block = getattr(tower.blocks, str(index))
            x_IPD = _block(block, x_IPD, rotary, places.valid_IP, vision, max_scores)
    with jax.named_scope("patch_merge"):
        x_IPD = rms_norm(x_IPD, tower["final_norm"], vision.norm_eps)
        merged_IME, valid_IM = _merge(x_IPD, grids_I3, vision)
        valid_IM = valid_IM & (frames_I > 0)[:, None]
    with jax.named_scope("projector"):
        inner_IME = linear(merged_IME, projector["inner"])
        inner_IME = jax.nn.gelu(inner_IME.astype(compute_dtype(dtype)), approximate=False).astype(dtype)
        out_IMD = rms_norm(linear(inner_IME, projector["out"]), projector["norm"], vision.projector_eps)
    out_IMD = jnp.where(valid_IM[:, :, None], out_IMD, jnp.zeros((), dtype))
    return jnp.where(fits_I[:, None, None], out_IMD, jnp.full((), jnp.nan, dtype))


def padded_patches(count: int, merged: int = 4) -> int:
    """The size that `count` patches are padded to: a power of two or one and a half times one, from 256 on, so that
    a handful of compiled programs serves all images; rounded up to whole groups of `merged` patches."""
    size = _MIN_BUCKET
    while size < count:
        size = size * 3 // 2 if size & (size - 1) == 0 else size * 4 // 3
    return -(-size // merged) * merged


@partial(jax.jit, static_argnames=("structure", "config"))
def _encode(leaves, structure, patches_IPC, grids_I3, config):
    return encode_images(jax.tree.unflatten(structure, leaves), patches_IPC, grids_I3, config)


def encode_prepared(
    parameters: Group,
    images: Iterable[tuple[np.ndarray, Sequence[int]]],
    config: ModelConfig,
) -> Float[Array, "N D"]:
    """Features of images one after another, each padded to one of a few sizes: [N, D], only the real rows, in order.

    images: (pixel values [patches, 3 * patch_size^2], grid (t, h, w)) per image, as
    `moe28t_jax.chat.images.prepare_image` makes them; an iterator is read one image at a time. No image gives [0, D].
    Raises ValueError for a grid that does not fit its patches or the tower.
    """
    vision = _vision(parameters, config)
    merge = vision.merge_height * vision.merge_width
    # Only what the tower needs: the arguments of a compiled program are walked on every call.
    tower = Group()
    for name in ("vision", "projector"):
        setattr(tower, name, getattr(parameters, name))
    leaves, structure = jax.tree.flatten(tower)
    features = [jnp.zeros((0, config.hidden_size), parameters.vision["patch_proj"].dtype)]
    for number, (pixels, grid) in enumerate(images):
        frames, height, width = (int(size) for size in grid)
        if frames * height * width != len(pixels) or len(pixels) == 0:
            raise ValueError(
                f"Image {number} has {len(pixels)} patches and the grid {(frames, height, width)}; their number must "
                "be the product of the grid, and at least one."
            )
        if frames > vision.position_time or height % vision.merge_height or width % vision.merge_width:
            raise ValueError(
                f"Image {number} has the grid {(frames, height, width)}; expected at most {vision.position_time} "
                f"frames and sides in multiples of {vision.merge_height} x {vision.merge_width} patches."
            )
        count = padded_patches(len(pixels), merge)
        patches = np.zeros((1, count, pixels.shape[1]), pixels.dtype)
        patches[0, : len(pixels)] = pixels
        grids = np.asarray([[frames, height, width]], np.int32)
        rows_1MD = _encode(leaves, structure, patches, grids, config=config)
        features.append(rows_1MD[0, : height * width // merge])
    return jnp.concatenate(features)
