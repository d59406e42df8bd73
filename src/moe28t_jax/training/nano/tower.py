"""The image tower by itself: it learns to tell a picture's attributes apart before the language model reads it."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from moe28t_jax.config import ModelConfig
from moe28t_jax.model.parameters import Parameters
from moe28t_jax.model.vision import encode_images
from moe28t_jax.training.nano.optimization import Flat, assemble
from moe28t_jax.training.nano.pictures import COLOURS, COUNTS, POSITIONS, SHAPES, draw_scene, paint, patches

BATCH = 64
_CLASSES: dict[str, tuple[Any, ...]] = {
    "shape": SHAPES,
    "colour": tuple(COLOURS),
    "count": COUNTS,
    "position": tuple(POSITIONS),
}
_WIDTH = sum(map(len, _CLASSES.values()))


def tower_batch(seed: int, step: int, held_out: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """Pictures [64, 64, 588] and the numbers of their attributes' classes [64, 4]."""
    random = np.random.default_rng((seed, step, held_out))
    images, labels = [], []
    for _ in range(BATCH):
        scene = draw_scene(random, held_out)
        images.append(patches(paint(scene, random)))
        labels.append([values.index(getattr(scene, name)) for name, values in _CLASSES.items()])
    return np.stack(images), np.asarray(labels, np.int32)


def _loss(weights, rest, images, labels, template, config):
    parameters = assemble(template, {**rest, **weights["tower"]}, quantized=False)
    grids_I3 = jnp.broadcast_to(jnp.asarray([1, 8, 8], jnp.int32), (images.shape[0], 3))
    features_IMD = encode_images(parameters, images, grids_I3, config)
    logits = jnp.mean(features_IMD, axis=1) @ weights["head"]
    total, right, start = jnp.float32(0), [], 0
    for index, values in enumerate(_CLASSES.values()):
        part = logits[:, start : start + len(values)]
        start += len(values)
        total += jnp.mean(optax.softmax_cross_entropy_with_integer_labels(part, labels[:, index]))
        right.append(jnp.mean((jnp.argmax(part, axis=-1) == labels[:, index]).astype(jnp.float32)))
    return total, jnp.stack(right)


@partial(jax.jit, static_argnames=("config", "optimizer"), donate_argnums=(0, 1))
def _step(weights, state, rest, images, labels, template, config, optimizer):
    (loss, right), gradients = jax.value_and_grad(_loss, has_aux=True)(
        weights, rest, images, labels, template, config
    )
    with jax.numpy_dtype_promotion("standard"):  # optax relies on implicit promotion
        updates, state = optimizer.update(gradients, state, weights)
    return optax.apply_updates(weights, updates), state, loss, right


_evaluate = jax.jit(_loss, static_argnames=("config",))


def train_tower(
    arrays: Flat, config: ModelConfig, template: Parameters, steps: int, seed: int
) -> tuple[Flat, list[dict[str, Any]]]:
    """All arrays with tower and projector trained, and a report every 100 steps.

    A linear head, thrown away afterwards, names shape, colour, count and position from the mean of a picture's
    features: so every attribute, the position too, lies in the features themselves.
    """
    names = [name for name in arrays if name.startswith((".vision", ".projector"))]
    rest = {name: value for name, value in arrays.items() if name not in names}
    head = 0.1 * jax.random.normal(jax.random.key(seed), (config.hidden_size, _WIDTH), jnp.float32)
    # Copies: the step gives its buffers up, and the caller still holds its arrays.
    weights = {"tower": {name: jnp.array(arrays[name]) for name in names}, "head": head}
    schedule = optax.warmup_cosine_decay_schedule(0.0, 2e-3, min(50, steps // 4), steps, 1e-5)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, b2=0.98, weight_decay=0.01))
    state = optimizer.init(weights)
    reports = []
    for step in range(steps):
        images, labels = tower_batch(seed, step)
        weights, state, loss, _ = _step(weights, state, rest, images, labels, template, config, optimizer)
        if (step + 1) % 100 == 0 or step + 1 == steps:
            _, right = _evaluate(weights, rest, *tower_batch(seed, 0, held_out=True), template, config)
            found = {name: round(float(value), 3) for name, value in zip(_CLASSES, right, strict=True)}
            reports.append({"tower_step": step + 1, "loss": round(float(loss), 4), "heldout_right": found})
            print(reports[-1], flush=True)
    return rest | weights["tower"], reports
