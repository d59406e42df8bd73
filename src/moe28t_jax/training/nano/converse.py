"""The second training: `python -m moe28t_jax.training.nano.converse --start FOLDER --output FOLDER`.

Continues the text model of `moe28t_jax.training.nano.train` with conversations in XTML: questions with scratchpads
as long as the effort asks, tool calls, generated pictures, and text as before, so that it is not forgotten. The
image tower first learns by itself to tell the pictures' attributes apart. A run that is stopped continues from
its last saved step when the same command is given again.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import time
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from moe28t_jax.chat.tokenizer import Tokenizer
from moe28t_jax.config import ModelConfig
from moe28t_jax.model.network import Inputs, project_logits, run
from moe28t_jax.model.parameters import Parameters, initialize
from moe28t_jax.model.vision import encode_images
from moe28t_jax.training.nano.conversations import KINDS, MAX_PICTURES, draw_conversation, picture_patches
from moe28t_jax.training.nano.corpus import load_corpus
from moe28t_jax.training.nano.optimization import (
    Flat,
    assemble,
    balance_routers,
    flatten,
    is_bias,
    make_optimizer,
    stack,
    unstack,
    versions,
    write_record,
)
from moe28t_jax.training.nano.tower import train_tower
from moe28t_jax.training.nano.train import VOCABULARY, Batches, Stage
from moe28t_jax.training.nano.vocabulary import encode_corpus
from moe28t_jax.weights import load_parameters, quantize_experts, save_parameters
from pallas_kernels.mxfp4_matmul import MXFP4Tensor

MINIATURE: dict[str, Any] = {
    "hidden_size": 96,
    "intermediate_size": 192,
    "attention_kinds": ("kda", "kda", "kda", "dsa"),
    "mlp_kinds": ("dense", "moe", "moe", "moe"),
    "kda.num_heads": 3,
    "mla.num_heads": 3,
    "residual_block_size": 2,
}
"""What a miniature differs in from `nano`: four layers of width 96, trained from random weights."""
LOG = "conversation_log.jsonl"


@dataclass(frozen=True)
class Settings:
    """Everything a run depends on; written beside the result. `rows` are a step's rows by kind; the weights are of
    the loss of library text, and of the elements around what the assistant says."""

    steps: int = 560
    seed: int = 0
    effort_text: bool = True
    length: int = 512
    rows: tuple[str, ...] = ("questions", "questions", "questions", "tools", "pictures", "text")
    text_weight: float = 0.5
    structure_weight: float = 1.0
    tower_steps: int = 300
    muon_learning_rate: float = 3e-3
    adam_learning_rate: float = 1.5e-3
    weight_decay: float = 0.05
    warmup: int = 20
    final_rate: float = 0.02


Batch = dict[str, np.ndarray]


def make_batch(
    settings: Settings, step: int, tokenizer: Tokenizer, text: Batches | None, held_out: bool = False
) -> Batch:
    """The rows of a step: `tokens` [B, T + 1], `weights` [B, T] of each next token's loss, `lengths` [B], and the
    `patches` of the pictures. Depends on the settings and the step alone."""
    count = settings.length
    tokens = np.full((len(settings.rows), count + 1), tokenizer.pad_id, np.int32)
    weights = np.zeros((len(settings.rows), count), np.float32)
    lengths = np.zeros((len(settings.rows),), np.int32)
    pictures: list[np.ndarray] = []
    texts = settings.rows.count("text")
    places = iter(text.at(step, Stage(1.0, count, texts, False)) if text is not None and texts else ())
    for row, kind in enumerate(settings.rows):
        if kind == "text":
            tokens[row], weights[row], lengths[row] = next(places), settings.text_weight, count
            continue
        random = np.random.default_rng((settings.seed, step, row, held_out))
        conversation, ids, weight = draw_conversation(
            random, tokenizer, kind, count + 1, settings.effort_text, held_out, settings.structure_weight
        )
        tokens[row, : len(ids)] = ids
        weights[row, : len(ids) - 1] = weight[1:]
        lengths[row] = len(ids) - 1
        pictures += conversation.pictures
    places_for_pictures = max(1, settings.rows.count("pictures")) * MAX_PICTURES
    patches = picture_patches(pictures, places_for_pictures)
    return {"tokens": tokens, "weights": weights, "lengths": lengths, "patches": patches}


def loss_function(
    trainable: Flat, biases: Flat, batch: dict[str, jax.Array], template: Parameters, config: ModelConfig
) -> tuple[jax.Array, dict[str, Any]]:
    """Weighted next-token cross entropy plus the indexers' own loss."""
    parameters = assemble(template, trainable | biases, quantized=True)
    grids_I3 = jnp.broadcast_to(jnp.asarray([1, 8, 8], jnp.int32), (batch["patches"].shape[0], 3))
    features_IMD = encode_images(parameters, batch["patches"], grids_I3, config)
    features_ND = features_IMD.reshape(-1, features_IMD.shape[-1])
    inputs = Inputs(batch["tokens"][:, :-1], batch["lengths"], features_ND)
    result = run(parameters, inputs, None, config, frozenset({"router", "indexer_loss"}))
    logits_BTV = project_logits(parameters, result.hidden_BTD)
    targets_BT, weights_BT = batch["tokens"][:, 1:], batch["weights"]
    nats_BT = optax.softmax_cross_entropy_with_integer_labels(logits_BTV, targets_BT)
    entropy = jnp.sum(nats_BT * weights_BT) / jnp.sum(weights_BT)
    per_row_B = jnp.sum(nats_BT * weights_BT, axis=1) / jnp.maximum(jnp.sum(weights_BT, axis=1), 1e-6)
    right_BT = (jnp.argmax(logits_BTV, axis=-1) == targets_BT) & (weights_BT > 0)
    place_BT = jnp.broadcast_to(jnp.arange(targets_BT.shape[1], dtype=jnp.int32), targets_BT.shape)
    real_BT = place_BT < batch["lengths"][:, None]
    indexer = [
        jnp.sum(jnp.where(real_BT, layer["indexer_loss"], 0.0)) / jnp.sum(real_BT.astype(entropy.dtype))
        for layer in result.auxiliary
        if "indexer_loss" in layer
    ]
    # Padding takes part in no balancing: a real token of its row stands in for it.
    source_BT1 = (place_BT % jnp.maximum(batch["lengths"], 1)[:, None])[:, :, None]
    routers = [
        {name: jnp.take_along_axis(layer[name], source_BT1, axis=1) for name in layer if "router" in name}
        for layer in result.auxiliary
        if "router_scores" in layer
    ]
    index_loss = sum(indexer) / max(len(indexer), 1)
    found = {"entropy": entropy, "indexer": index_loss, "routers": routers, "rows": per_row_B}
    written_B = jnp.sum((weights_BT > 0).astype(entropy.dtype), axis=1)
    found["right"] = jnp.sum(right_BT.astype(entropy.dtype), axis=1) / jnp.maximum(written_B, 1)
    return entropy + index_loss, found


@partial(jax.jit, static_argnames=("config", "optimizer"), donate_argnums=(0, 1, 2))
def train_step(trainable, biases, optimizer_state, batch, template, config, optimizer):
    (_, auxiliary), gradients = jax.value_and_grad(loss_function, has_aux=True)(
        trainable, biases, batch, template, config
    )
    with jax.numpy_dtype_promotion("standard"):  # optax relies on implicit promotion
        updates, optimizer_state = optimizer.update(stack(gradients), optimizer_state, stack(trainable))
    trainable = optax.apply_updates(trainable, unstack(updates, trainable))
    new_biases, violation = balance_routers(biases, auxiliary["routers"], config, 0.1)
    metrics = {name: auxiliary[name] for name in ("entropy", "indexer", "rows", "right")}
    metrics |= {"violation": violation, "gradient": optax.tree.norm(gradients)}
    return trainable, new_biases, optimizer_state, metrics


@partial(jax.jit, static_argnames=("config",))
def _validate(trainable, biases, batch, template, config):
    _, auxiliary = loss_function(trainable, biases, batch, template, config)
    return {name: auxiliary[name] for name in ("entropy", "rows", "right")}


def _by_kind(settings: Settings, rows_B: Any) -> dict[str, float]:
    """Means over the rows of each kind."""
    values: dict[str, list[float]] = {}
    for kind, value in zip(settings.rows, np.asarray(rows_B).tolist(), strict=True):
        values.setdefault(kind, []).append(value)
    return {kind: round(sum(found) / len(found), 4) for kind, found in values.items()}


def chat_config(miniature: bool = False) -> ModelConfig:
    """`nano` with its image tower, or the miniature."""
    config = ModelConfig.preset("nano")
    return config.override(MINIATURE) if miniature else config


def load_start(start: Path, template: Parameters, config: ModelConfig) -> tuple[Flat, bool]:
    """Float32 arrays to start from: those of the checkpoint, fresh ones where it has none; and whether it has an
    image tower."""
    loaded, _ = load_parameters(start, dtype=np.dtype(np.float32))
    arrays = flatten(template)
    leaves = jax.tree_util.tree_leaves_with_path(loaded, is_leaf=lambda x: isinstance(x, MXFP4Tensor))
    for path, leaf in leaves:
        name = jax.tree_util.keystr(path)
        if isinstance(leaf, MXFP4Tensor):
            leaf = jnp.swapaxes(leaf.dequantize(), -1, -2)
        value = jnp.asarray(leaf, jnp.float32)
        if name not in arrays or arrays[name].shape != value.shape:
            raise ValueError(
                f"{str(start)!r} has {name} of shape {value.shape}, which this configuration has not; "
                "start from a checkpoint of the first training or of a run of this one."
            )
        arrays[name] = value
    return arrays, loaded.has_vision


def train(
    settings: Settings,
    output: Path,
    config: ModelConfig,
    start: Path | None = None,
    save_every: int = 100,
    root: Path | None = None,
) -> Path:
    """Run (or continue) the second training and write the checkpoint folder `output`/checkpoint.

    start: a checkpoint folder to continue, of the first training or of a run of this one (its record and log are
    then kept, before the new ones); None for random weights. root: the corpus's library, by default this
    Python's. The folder gets the vocabulary, `training.json` (with the record of the first training),
    `training_log.jsonl` (the first training's) and `conversation_log.jsonl`. Raises ValueError when the folder
    holds a run with other settings, data or start.
    """
    output.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer.from_file(VOCABULARY)
    texts: Batches | None = None
    record: dict[str, Any] = {}
    if start is not None and (start / "training.json").exists():
        record = json.loads((start / "training.json").read_text(encoding="utf-8"))
    second: dict[str, Any] = {"settings": asdict(settings), "started_from_checkpoint": start is not None}
    if "text" in settings.rows:
        corpus = load_corpus(root)
        second["data_hash"] = corpus.data_hash
        texts = Batches(encode_corpus(tokenizer, corpus.train, output / "tokens"), settings.seed)
    second |= versions()
    if "conversations" in record:
        second["continues"] = record["conversations"]
    # Lists as JSON gives them back, for the comparison with an earlier record.
    record = json.loads(json.dumps({**record, "conversations": second}))
    record_file = write_record(record, output)

    template = initialize(config, jax.random.key(settings.seed), jnp.float32)
    arrays, has_tower = flatten(template), False
    if start is not None and (start / LOG).exists() and not (output / LOG).exists():
        shutil.copyfile(start / LOG, output / LOG)
    if start is not None:
        arrays, has_tower = load_start(start, template, config)
    skeleton = jax.tree.map(lambda x: jnp.zeros((), x.dtype), template)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    keep = ocp.CheckpointManagerOptions(max_to_keep=2)
    started = time.time()
    with (
        ocp.CheckpointManager((output / "steps").resolve(), options=keep) as manager,
        (output / LOG).open("a", encoding="utf-8") as log,
        Progress(*columns) as progress,
    ):

        def write(values: dict[str, Any]) -> None:
            log.write(json.dumps(values) + "\n")
            log.flush()

        first = manager.latest_step() or 0
        if not first and not has_tower and settings.tower_steps:
            arrays, reports = train_tower(arrays, config, skeleton, settings.tower_steps, settings.seed)
            for report in reports:
                write(report)
        biases = {name: value for name, value in arrays.items() if is_bias(name)}
        trainable = {name: value for name, value in arrays.items() if not is_bias(name)}
        stacked = stack(trainable)
        optimizer = make_optimizer(settings, stacked)
        optimizer_state = optimizer.init(stacked)
        structure = jax.tree.structure(optimizer_state)

        def snapshot() -> dict[str, Any]:
            return {"trainable": trainable, "biases": biases, "optimizer": jax.tree.leaves(optimizer_state)}

        if first:
            state = manager.restore(first, args=ocp.args.StandardRestore(snapshot()))
            trainable, biases = state["trainable"], state["biases"]
            optimizer_state = jax.tree.unflatten(structure, state["optimizer"])
            progress.console.print(f"continuing from step {first}")
        bar = progress.add_task("training", total=settings.steps, completed=first)
        for step in range(first, settings.steps):
            batch = make_batch(settings, step, tokenizer, texts)
            batch = {name: jnp.asarray(value) for name, value in batch.items()}
            trainable, biases, optimizer_state, metrics = train_step(
                trainable, biases, optimizer_state, batch, skeleton, config, optimizer
            )
            if step % 10 == 0 or step + 1 == settings.steps:
                names = ("entropy", "indexer", "violation", "gradient")
                values: dict[str, Any] = {name: round(float(metrics[name]), 4) for name in names}
                if not math.isfinite(values["entropy"]):
                    raise FloatingPointError(
                        f"The loss is {values['entropy']} at step {step}; lower the learning rate."
                    )
                values |= {"rows": _by_kind(settings, metrics["rows"])}
                values |= {"right": _by_kind(settings, metrics["right"])}
                write({"step": step, "seconds": round(time.time() - started, 1), **values})
                progress.update(bar, description=f"loss {values['entropy']:.3f}")
            progress.advance(bar)
            if (step + 1) % save_every == 0 or step + 1 == settings.steps:
                manager.save(step + 1, args=ocp.args.StandardSave(snapshot()))
                # The next step gives these buffers up.
                manager.wait_until_finished()
                sample = make_batch(settings, 0, tokenizer, texts, held_out=True)
                sample = {name: jnp.asarray(value) for name, value in sample.items()}
                found = _validate(trainable, biases, sample, skeleton, config)
                heldout = _by_kind(settings, found["rows"])
                # Text is not held out in this sample; `moe28t score --heldout` reads the text that is.
                heldout.pop("text", None)
                write({"step": step + 1, "heldout": heldout, "right": _by_kind(settings, found["right"])})
    parameters = quantize_experts(assemble(template, trainable | biases, quantized=False), config)
    target = output / "checkpoint"
    files = [VOCABULARY, record_file, output / LOG]
    if start is not None and (start / "training_log.jsonl").exists():
        shutil.copyfile(start / "training_log.jsonl", output / "training_log.jsonl")
        files.append(output / "training_log.jsonl")
    save_parameters(target, parameters, config, tokenizer_files=files)
    return target


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--start",
        type=Path,
        help="checkpoint of either training (none: random weights)",
    )
    parser.add_argument(
        "--output", type=Path, required=True, help="folder of the run; continued if it exists"
    )
    parser.add_argument("--steps", type=int, default=Settings.steps)
    parser.add_argument("--seed", type=int, default=Settings.seed)
    parser.add_argument("--no-effort-text", action="store_true", help="never name the effort: a control")
    parser.add_argument(
        "--miniature", action="store_true", help="four layers, strings alone: for comparisons"
    )
    parser.add_argument(
        "--rows",
        nargs="+",
        choices=(*KINDS, "strings", "text"),
        default=list(Settings.rows),
        metavar="KIND",
        help=f"a step's rows by kind (default: {' '.join(Settings.rows)})",
    )
    parser.add_argument("--length", type=int, default=Settings.length, help="tokens of a row")
    parser.add_argument(
        "--structure-weight",
        type=float,
        default=Settings.structure_weight,
        metavar="W",
        help="weight of the elements around what the assistant says (default 1)",
    )
    parser.add_argument(
        "--text-weight",
        type=float,
        default=Settings.text_weight,
        metavar="W",
        help=f"weight of the rows of library text (default {Settings.text_weight})",
    )
    arguments = parser.parse_args()
    settings = Settings(
        steps=arguments.steps,
        seed=arguments.seed,
        effort_text=not arguments.no_effort_text,
        rows=tuple(arguments.rows),
        length=arguments.length,
        text_weight=arguments.text_weight,
        structure_weight=arguments.structure_weight,
    )
    if arguments.miniature:
        if settings.rows != Settings.rows or settings.length != Settings.length:
            parser.error("--miniature has rows and a length of its own; leave --rows and --length out.")
        settings = replace(
            settings, rows=("strings",) * 8, length=256, tower_steps=0, muon_learning_rate=8e-3
        )
    print(train(settings, arguments.output, chat_config(arguments.miniature), arguments.start))


if __name__ == "__main__":
    main()
