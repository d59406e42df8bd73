"""The first training of `nano`, on text: `python -m moe28t_jax.training.nano.train --output FOLDER`.

Text: the Python installation's own sources and help topics, split by content hash. Routed experts are trained
through MXFP4 rounding from the first step (straight-through gradients), so that the shipped, packed weights are
the trained ones. Stage 1 reads short sequences, in which the sparse layers see every token and their indexer
learns from the full attention; stage 2 reads long ones with the real top-k. A run that is stopped continues
from its last saved step when the same command is given again.
"""

from __future__ import annotations

import argparse
import json
import math
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
from moe28t_jax.training.nano.corpus import Corpus, load_corpus
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
from moe28t_jax.training.nano.vocabulary import encode_corpus
from moe28t_jax.weights import quantize_experts, save_parameters

VOCABULARY = Path(__file__).parents[2] / "nano" / "tiktoken.model"


@dataclass(frozen=True)
class Stage:
    """A stretch of training at one sequence length; `dense` lets the sparse layers read every token."""

    share: float
    length: int
    batch: int
    dense: bool


@dataclass(frozen=True)
class Settings:
    """Everything a run depends on; written beside the result."""

    steps: int = 900
    seed: int = 0
    muon_learning_rate: float = 4e-3
    adam_learning_rate: float = 2e-3
    weight_decay: float = 0.05
    warmup: int = 30
    final_rate: float = 0.02
    stages: tuple[Stage, ...] = (Stage(0.35, 128, 16, True), Stage(0.65, 512, 4, False))

    def stage(self, step: int) -> Stage:
        end = 0.0
        for stage in self.stages:
            end += stage.share
            if step < round(end * self.steps):
                return stage
        return self.stages[-1]


def loss_function(
    trainable: Flat, biases: Flat, tokens_BT: jax.Array, template: Parameters, config: ModelConfig
) -> tuple[jax.Array, dict[str, Any]]:
    """Next-token cross entropy plus the indexers' own loss (which reaches nothing but the indexers)."""
    parameters = assemble(template, trainable | biases, quantized=True)
    result = run(parameters, Inputs(tokens_BT[:, :-1]), None, config, frozenset({"router", "indexer_loss"}))
    logits_BTV = project_logits(parameters, result.hidden_BTD)
    entropy = jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits_BTV, tokens_BT[:, 1:]))
    indexer = [jnp.mean(layer["indexer_loss"]) for layer in result.auxiliary if "indexer_loss" in layer]
    routers = [layer for layer in result.auxiliary if "router_scores" in layer]
    index_loss = sum(indexer) / max(len(indexer), 1)
    return entropy + index_loss, {"entropy": entropy, "indexer": index_loss, "routers": routers}


@partial(jax.jit, static_argnames=("config", "optimizer", "smooth"), donate_argnums=(0, 1, 2))
def train_step(trainable, biases, optimizer_state, tokens_BT, template, config, optimizer, smooth):
    (_, auxiliary), gradients = jax.value_and_grad(loss_function, has_aux=True)(
        trainable, biases, tokens_BT, template, config
    )
    with jax.numpy_dtype_promotion("standard"):  # optax relies on implicit promotion
        updates, optimizer_state = optimizer.update(stack(gradients), optimizer_state, stack(trainable))
    trainable = optax.apply_updates(trainable, unstack(updates, trainable))
    new_biases, violation = balance_routers(biases, auxiliary["routers"], config, smooth)
    metrics = {
        "entropy": auxiliary["entropy"],
        "indexer": auxiliary["indexer"],
        "violation": violation,
        "gradient": optax.tree.norm(gradients),
    }
    return trainable, new_biases, optimizer_state, metrics


class Batches:
    """Seeded sequences: the token stream cut at a random offset, its pieces shuffled anew every pass."""

    def __init__(self, tokens: np.ndarray, seed: int):
        self.tokens, self.seed = tokens, seed

    def at(self, step: int, stage: Stage) -> np.ndarray:
        """Batch of a step: depends on seed, step and stage only, so a resumed run sees the same data."""
        pieces = (len(self.tokens) - stage.length - 1) // stage.length
        taken = step * stage.batch
        rows = []
        for index in range(taken, taken + stage.batch):
            epoch, place = divmod(index, pieces)
            random = np.random.default_rng((self.seed, epoch, stage.length))
            offset = int(random.integers(stage.length))
            start = int(random.permutation(pieces)[place]) * stage.length + offset
            rows.append(self.tokens[start : start + stage.length + 1])
        return np.stack(rows).astype(np.int32)


def _record(settings: Settings, corpus: Corpus, tokenizer: Tokenizer, output: Path) -> Path:
    content = {
        "command": f"python -m moe28t_jax.training.nano.train --steps {settings.steps} --seed {settings.seed}",
        "settings": asdict(settings),
        "data_hash": corpus.data_hash,
        "train_documents": len(corpus.train),
        "heldout_documents": len(corpus.heldout),
        "vocabulary_sha256": tokenizer.fingerprint,
        **versions(),
    }
    return write_record(content, output)


def train(
    settings: Settings, output: Path, config: ModelConfig, save_every: int = 150, root: Path | None = None
) -> Path:
    """Run (or continue) training and write the checkpoint folder `output`/checkpoint.

    root: the corpus's library, by default this Python's. Beside the weights the folder holds the vocabulary,
    `training.json` (settings, data hash, versions) and `training_log.jsonl`. Raises ValueError when the folder
    holds a run with other settings or other data.
    """
    output.mkdir(parents=True, exist_ok=True)
    # Text alone: the second training adds the image tower.
    config = replace(config, vision=None)
    tokenizer = Tokenizer.from_file(VOCABULARY)
    corpus = load_corpus(root)
    record = _record(settings, corpus, tokenizer, output)
    tokens = encode_corpus(tokenizer, corpus.train, output / "tokens")
    heldout = encode_corpus(tokenizer, corpus.heldout, output / "tokens")
    batches, validation = Batches(tokens, settings.seed), Batches(heldout, settings.seed)
    print(f"{len(tokens):,} training tokens, {len(heldout):,} held out; data {corpus.data_hash[:16]}")

    template = initialize(config, jax.random.key(settings.seed), jnp.float32)
    arrays = flatten(template)
    biases = {name: value for name, value in arrays.items() if is_bias(name)}
    trainable = {name: value for name, value in arrays.items() if not is_bias(name)}
    stacked = stack(trainable)
    optimizer = make_optimizer(settings, stacked)
    optimizer_state = optimizer.init(stacked)
    structure = jax.tree.structure(optimizer_state)
    skeleton = jax.tree.map(lambda x: jnp.zeros((), x.dtype), template)

    def snapshot() -> dict[str, Any]:
        return {"trainable": trainable, "biases": biases, "optimizer": jax.tree.leaves(optimizer_state)}

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    keep = ocp.CheckpointManagerOptions(max_to_keep=2)
    started = time.time()
    with (
        ocp.CheckpointManager((output / "steps").resolve(), options=keep) as manager,
        (output / "training_log.jsonl").open("a", encoding="utf-8") as log,
        Progress(*columns) as progress,
    ):
        first = manager.latest_step() or 0
        if first:
            state = manager.restore(first, args=ocp.args.StandardRestore(snapshot()))
            trainable, biases = state["trainable"], state["biases"]
            optimizer_state = jax.tree.unflatten(structure, state["optimizer"])
            progress.console.print(f"continuing from step {first}")

        def write(values: dict[str, Any]) -> None:
            log.write(json.dumps(values) + "\n")
            log.flush()

        bar = progress.add_task("training", total=settings.steps, completed=first)
        for step in range(first, settings.steps):
            stage = settings.stage(step)
            stage_config = config.override({"dsa.top_k": stage.length}) if stage.dense else config
            tokens_BT = jnp.asarray(batches.at(step, stage))
            smooth = 1.0 if step < 30 else 0.1
            trainable, biases, optimizer_state, metrics = train_step(
                trainable, biases, optimizer_state, tokens_BT, skeleton, stage_config, optimizer, smooth
            )
            if step % 10 == 0 or step + 1 == settings.steps:
                values = {name: round(float(value), 4) for name, value in metrics.items()}
                if not math.isfinite(values["entropy"]):
                    raise FloatingPointError(
                        f"The loss is {values['entropy']} at step {step}; lower the learning rate."
                    )
                seconds = round(time.time() - started, 1)
                write(values | {"step": step, "seconds": seconds, "length": stage.length})
                description = f"loss {values['entropy']:.3f} index {values['indexer']:.3f}"
                progress.update(bar, description=description)
            progress.advance(bar)
            if (step + 1) % save_every == 0 or step + 1 == settings.steps:
                manager.save(step + 1, args=ocp.args.StandardSave(snapshot()))
                # The next step gives these buffers up.
                manager.wait_until_finished()
                sample = validation.at(0, Stage(1.0, settings.stages[-1].length, 16, False))
                loss, _ = _validate(trainable, biases, jnp.asarray(sample), skeleton, config)
                write({"step": step + 1, "heldout": round(float(loss), 4)})
    parameters = quantize_experts(assemble(template, trainable | biases, quantized=False), config)
    target = output / "checkpoint"
    files = [VOCABULARY, record, output / "training_log.jsonl"]
    save_parameters(target, parameters, config, tokenizer_files=files)
    return target


_validate = jax.jit(loss_function, static_argnames="config")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--output", type=Path, required=True, help="folder of the run; continued if it exists"
    )
    parser.add_argument("--steps", type=int, default=Settings.steps)
    parser.add_argument("--seed", type=int, default=Settings.seed)
    arguments = parser.parse_args()
    settings = Settings(steps=arguments.steps, seed=arguments.seed)
    print(train(settings, arguments.output, ModelConfig.preset("nano")))


if __name__ == "__main__":
    main()
