"""A million tokens through one sparse layer on a CPU: memory, time, and a needle at the far end.

A small random model (three delta layers and one sparse layer whose indexer has 2 heads of 16 channels) reads the
prompt chunk by chunk. After every chunk its state is on disk, so a killed run goes on where it stopped:

    python benchmarks/long_context.py
    python benchmarks/long_context.py --tokens 65536 --folder short

Recorded per chunk: seconds of CPU time, the peak of resident memory, and where the selected tokens lie. At the end it
is checked that the last token selects the needle and reads it, that decoding goes on from there, and, against a short
run in a process of its own, that peak memory grew by latents and index keys only. `benchmarks/long_context_page.py`
makes a page and a picture of the result.

The needle: two channels of the residual stream are kept free, that is, no layer writes to them and no ordinary token
has them. The needle's embedding has the first and the question's the second. The index key of the first channel is a
direction that no other channel's key has, and the question's index queries point there. Everything else is random.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from functools import cache, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from moe28t_jax.config import DSAConfig, KDAConfig, MLAConfig, ModelConfig
from moe28t_jax.engine import Steps
from moe28t_jax.model import init_cache, initialize
from moe28t_jax.model.network import Inputs, project_logits, run
from moe28t_jax.model.parameters import Group, Parameters
from pallas_kernels import index_select

KINDS = ("kda", "kda", "dsa", "kda")
SPARSE = KINDS.index("dsa")
VOCABULARY, HIDDEN = 256, 64
NEEDLE, QUESTION = 1, 2
"""Token ids; ordinary tokens begin after them."""
NEEDLE_POSITION = 1000
"""Near the start, but not among the very first tokens: a query all of whose scores are 0 selects those."""
NEEDLE_CHANNEL, QUESTION_CHANNEL = 0, 1
MARK = 16.0
"""What marks the needle and the question in their channel; ordinary channels are normal."""
ROOM = 1024
"""Tokens that the cache holds beyond the prompt, for decoding."""
DECODED = 8
SLACK = 32 * 2**20
"""Bytes by which the peaks of two processes may differ for other reasons."""


def configuration(tokens: int) -> ModelConfig:
    """One sparse layer among delta layers, with room for the prompt and what is decoded after it."""
    return ModelConfig(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        attention_kinds=KINDS,
        mlp_kinds=("dense",) * len(KINDS),
        intermediate_size=128,
        kda=KDAConfig(num_heads=2, head_dim=32),
        mla=MLAConfig(
            num_heads=2,
            kv_lora_rank=32,
            qk_nope_head_dim=16,
            qk_rope_head_dim=8,
            v_head_dim=16,
            q_lora_rank=32,
        ),
        moe=None,
        dsa=DSAConfig(num_heads=2, head_dim=16, top_k=64),
        max_context=tokens + ROOM,
    )


def bytes_per_token(config: ModelConfig) -> int:
    """Latent and index key of one token in the one sparse layer, float32."""
    assert config.mla is not None and config.dsa is not None
    return 4 * (config.mla.latent_dim + config.dsa.head_dim)


def _change(group: Group, name: str, change: Any) -> None:
    value = np.array(group[name])
    change(value)
    getattr(group, name).set_value(jnp.asarray(value))


def planted_parameters(config: ModelConfig) -> Parameters:
    """Random weights with the two channels, and the one direction of index keys, that the needle needs."""
    assert config.dsa is not None
    parameters = initialize(config, jax.random.key(0))
    heads, channels = config.dsa.num_heads, config.dsa.head_dim
    # Of mean zero, so that the layer norm of the keys keeps what is at right angles to it so.
    direction_D = np.where(np.arange(channels) % 2, -1.0, 1.0).astype(np.float32) / np.float32(channels**0.5)

    def embedding(value: np.ndarray) -> None:
        value /= config.initializer_range
        value[:, [NEEDLE_CHANNEL, QUESTION_CHANNEL]] = 0
        value[NEEDLE, NEEDLE_CHANNEL] = value[QUESTION, QUESTION_CHANNEL] = MARK

    def silence(value: np.ndarray) -> None:
        value[:, [NEEDLE_CHANNEL, QUESTION_CHANNEL]] = 0

    def keys(value: np.ndarray) -> None:
        value -= np.outer(value @ direction_D, direction_D)
        value[NEEDLE_CHANNEL] = direction_D

    def query_latent(value: np.ndarray) -> None:
        value[:, 0] = 0
        value[QUESTION_CHANNEL, 0] = 1

    def queries(value: np.ndarray) -> None:
        value[0] = np.tile(direction_D, heads)

    def head_weights(value: np.ndarray) -> None:
        value[QUESTION_CHANNEL] = 1

    _change(parameters, "embedding", embedding)
    for _, layer in parameters.layers(config):
        _change(layer.attention, "o_proj", silence)
        _change(layer.mlp, "down_proj", silence)
    sparse = parameters.segments[SPARSE][0]
    _change(sparse.indexer, "k_proj", keys)
    _change(sparse.attention, "q_a_proj", query_latent)
    _change(sparse.indexer, "q_proj", queries)
    _change(sparse.indexer, "weights_proj", head_weights)
    return parameters


def prompt(tokens: int) -> np.ndarray:
    """Ordinary tokens at random, the needle near the start, the question as the last one."""
    ids_T = np.random.default_rng(0).integers(QUESTION + 1, VOCABULARY, tokens, dtype=np.int32)
    ids_T[NEEDLE_POSITION], ids_T[-1] = NEEDLE, QUESTION
    return ids_T


@partial(jax.jit, static_argnames="config", donate_argnames="cache")
def read_chunk(parameters, ids_T, cache, config):
    """Logits after the last token, the selected tokens [T, N], the cache, and its new rows."""
    start = cache.lengths_B[0]
    result = run(parameters, Inputs(ids_T[None]), cache, config, frozenset({"index_sets"}))
    kept = result.cache.segments[SPARSE][0]
    rows = [
        jax.lax.dynamic_slice_in_dim(buffer[0], start, len(ids_T))
        for buffer in (kept.latent_BSC, kept.index_key_BSD)
    ]
    logits_V = project_logits(parameters, result.hidden_BTD[:, -1])[0]
    return logits_V, result.auxiliary[SPARSE]["index_sets"][0], result.cache, jnp.concatenate(rows, axis=-1)


@cache
def compile_chunk(config: ModelConfig, chunk: int) -> Any:
    """`read_chunk` for chunks of one size, compiled ahead, so that no chunk's time holds compilation."""
    parameters = jax.eval_shape(lambda: initialize(config, jax.random.key(0)))
    state = jax.eval_shape(lambda: init_cache(config, 1, config.max_context))
    ids_T = jax.ShapeDtypeStruct((chunk,), jnp.int32)
    return read_chunk.lower(parameters, ids_T, state, config=config).compile()


@partial(jax.jit, static_argnames="config")
def look(parameters, ids_T, cache, config):
    """Logits and selected tokens of the next tokens, without going on."""
    return read_chunk.__wrapped__(parameters, ids_T, cache, config)[:2]


@partial(jax.jit, donate_argnames="cache")
def put_rows(cache, rows_TC, start):
    """The cache with rows of latents and index keys written from `start` on."""
    kept = cache.segments[SPARSE][0]
    width = kept.latent_BSC.shape[-1]

    def put(buffer, part):
        return jax.lax.dynamic_update_slice_in_dim(buffer, part[None], start, axis=1)

    changed = type(kept)(
        put(kept.latent_BSC, rows_TC[:, :width]), put(kept.index_key_BSD, rows_TC[:, width:])
    )
    segments = [[changed] if index == SPARSE else layer for index, layer in enumerate(cache.segments)]
    return type(cache)(cache.lengths_B, segments)


def peak_memory() -> int:
    """Highest resident memory of this process so far, bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


class Store:
    """What is on disk of a run: the rows of all tokens, which never change, and beside them the small rest, which is
    written anew after every chunk and renamed. Rows beyond those that the rest counts are ignored."""

    def __init__(self, folder: Path, settings: dict[str, Any], row_floats: int) -> None:
        self.folder, self.settings, self.row_floats = folder, settings, row_floats
        folder.mkdir(parents=True, exist_ok=True)

    def save(self, start: int, rows_TC: np.ndarray, small: dict[str, np.ndarray]) -> None:
        """Keep the rows from token `start` on, then everything else."""
        path = self.folder / "rows.float32"
        with open(path, "r+b" if path.exists() else "w+b") as file:
            file.seek(start * self.row_floats * 4)
            file.write(np.ascontiguousarray(rows_TC).tobytes())
        part = self.folder / "state.npz.part"
        with open(part, "wb") as file:
            np.savez(file, settings=json.dumps(self.settings), **small)
        os.replace(part, self.folder / "state.npz")

    def load(self) -> dict[str, np.ndarray] | None:
        """The small rest, or None where there is none yet."""
        path = self.folder / "state.npz"
        if not path.exists():
            return None
        with np.load(path) as file:
            small = dict(file)
        found = json.loads(str(small.pop("settings")))
        if found != self.settings:
            raise ValueError(
                f"{str(self.folder)!r} holds a run with {found}, not {self.settings}; continue that one, or name "
                "another folder."
            )
        return small

    def rows(self, first: int, count: int) -> np.ndarray:
        """The rows of `count` tokens from `first` on."""
        offset = first * self.row_floats * 4
        rows = np.fromfile(self.folder / "rows.float32", np.float32, count * self.row_floats, offset=offset)
        return rows.reshape(count, self.row_floats)


class Prefill:
    """A prefill that can stop after any chunk and go on in another process."""

    def __init__(self, tokens: int, chunk: int, folder: Path) -> None:
        if tokens % chunk or chunk % 64:
            raise ValueError(
                f"{tokens} tokens in chunks of {chunk}: take a multiple of 64 as the chunk, and of the chunk as tokens."
            )
        self.tokens, self.chunk = tokens, chunk
        self.config = configuration(tokens)
        self.ids_T = prompt(tokens)
        settings = {"tokens": tokens, "chunk": chunk, "needle": NEEDLE_POSITION, "model": repr(self.config)}
        self.store = Store(folder, settings, bytes_per_token(self.config) // 4)
        small = self.store.load()
        self.parameters = planted_parameters(self.config)
        self.steps = Steps(self.parameters, self.config)
        self.records: list[tuple[float, ...]] = []
        self.done, self.sets_TN, self.logits_V = 0, None, None
        self.compiled = compile_chunk(self.config, chunk)
        self.cache = self.steps.new_cache(1, tokens + ROOM)
        if small is not None:
            self.cache = self._restored(self.cache, small)

    @property
    def temporary_bytes(self) -> int:
        """Memory of the compiled program beyond its arguments and results."""
        return self.compiled.memory_analysis().temp_size_in_bytes

    def _fixed(self, cache: Any) -> list[Any]:
        """States and windows of the delta layers."""
        return jax.tree.leaves([layer for index, layer in enumerate(cache.segments) if index != SPARSE])

    def _restored(self, cache: Any, small: dict[str, np.ndarray]) -> Any:
        """The empty cache with what is on disk; sets the rest of the run beside it."""
        self.done = int(small["done"])
        self.records = [tuple(map(float, row)) for row in small["records"]]
        self.sets_TN, self.logits_V = small["sets_TN"], small["logits_V"]
        for start in range(0, self.done, self.chunk):
            rows_TC = self.store.rows(start, self.chunk)
            cache = put_rows(cache, jnp.asarray(rows_TC), jnp.int32(start))
        kept = cache.segments[SPARSE]
        others = [layer for index, layer in enumerate(cache.segments) if index != SPARSE]
        fixed = [jnp.array(small[f"fixed_{i}"]) for i in range(len(jax.tree.leaves(others)))]
        others = jax.tree.unflatten(jax.tree.structure(others), fixed)
        others.insert(SPARSE, kept)
        return type(cache)(jnp.full((1,), self.done, jnp.int32), others)

    def advance(self) -> None:
        """Read one chunk and keep it."""
        start = self.done
        ids_T = jnp.asarray(self.ids_T[start : start + self.chunk])
        began = time.process_time()
        outputs = self.compiled(self.parameters, ids_T, self.cache)
        logits_V, sets_TN, self.cache, rows_TC = jax.block_until_ready(outputs)
        seconds = time.process_time() - began
        self.done += self.chunk
        self.logits_V, self.sets_TN = np.asarray(logits_V), np.asarray(sets_TN)
        self.records.append((seconds, float(peak_memory()), *self._where(start)))
        small = {f"fixed_{i}": np.asarray(leaf) for i, leaf in enumerate(self._fixed(self.cache))}
        small |= {"done": np.asarray(self.done), "records": np.asarray(self.records)}
        small |= {"sets_TN": self.sets_TN, "logits_V": self.logits_V}
        self.store.save(start, np.asarray(rows_TC), small)

    def _where(self, start: int) -> tuple[float, float, float]:
        """Of what a chunk selected: mean place within the visible text (0 its start, 1 the query), how many distinct
        tokens, how many queries took the needle."""
        sets_TN = self.sets_TN
        positions_T1 = start + np.arange(self.chunk)[:, None]
        taken_TN = sets_TN >= 0
        place_TN = sets_TN / np.maximum(positions_T1, 1)
        distinct = len(np.unique(sets_TN[taken_TN]))
        needles = int((sets_TN == NEEDLE_POSITION).sum())
        return float(place_TN[taken_TN].mean()), float(distinct), float(needles)


def check_needle(prefill: Prefill) -> dict[str, Any]:
    """What the question selected and read at the end, and decoding after it. Raises AssertionError where it fails."""
    sets_TN = prefill.sets_TN
    selected = np.isin(NEEDLE_POSITION, sets_TN[-1])
    assert selected, "the question did not select the needle"
    others = int((sets_TN[:-1] == NEEDLE_POSITION).sum())
    top_k = sets_TN.shape[1]
    # By chance a query has the needle among its own with probability top_k / tokens.
    assert others < len(sets_TN) // 4, (
        f"{others} queries of the last chunk took the needle without a question"
    )
    assert np.isfinite(prefill.logits_V).all(), "the logits after the prompt are not finite"

    steps, cache = prefill.steps, prefill.cache
    tokens, key = [int(np.argmax(prefill.logits_V))], jax.random.key(0)
    while len(tokens) < DECODED:
        token_B = jnp.asarray(tokens[-1:], jnp.int32)
        drawn_B, logits_BV, cache = steps.decode(token_B, jnp.ones((1,), bool), cache, key, 0.0, 1.0)
        assert np.isfinite(np.asarray(logits_BV)).all(), "decoding gave logits that are not finite"
        tokens.append(int(drawn_B[0]))

    # Asked again while decoding: the needle is selected, and what it holds reaches the logits.
    question_T = jnp.full((1,), QUESTION, jnp.int32)
    logits_V, again_TN = look(prefill.parameters, question_T, cache, prefill.config)
    assert np.isin(NEEDLE_POSITION, again_TN[0]), "a decoded question did not select the needle"
    width = cache.segments[SPARSE][0].latent_BSC.shape[-1]

    def without(cache: Any, position: int) -> tuple[Any, np.ndarray]:
        blank = prefill.store.rows(position, 1)
        blank[:, :width] = 0
        cache = put_rows(cache, jnp.asarray(blank), jnp.int32(position))
        return cache, np.asarray(look(prefill.parameters, question_T, cache, prefill.config)[0])

    unselected = int(np.setdiff1d(np.arange(again_TN.shape[1] + 1), again_TN[0])[0])
    cache, same_V = without(cache, unselected)
    assert (same_V == np.asarray(logits_V)).all(), "a token that is not selected was read"
    cache, changed_V = without(cache, NEEDLE_POSITION)
    effect = float(np.abs(changed_V - np.asarray(logits_V)).max())
    assert effect > 0, "the needle was selected and not read"
    prefill.cache = cache
    return {
        "needle_position": NEEDLE_POSITION, "needle_selected": bool(selected), "selected_per_query": top_k,
        "other_queries_of_the_last_chunk_with_the_needle": others, "decoded": tokens,
        "change_of_the_logits_without_the_needle": effect,
    }  # fmt: skip


def indexer_seconds(prefill: Prefill, lengths: list[int]) -> list[float]:
    """Seconds of the selection alone, for one chunk of queries over so many keys of the run."""
    dsa = prefill.config.dsa
    assert dsa is not None
    keys_BSD = prefill.cache.segments[SPARSE][0].index_key_BSD
    keys = jax.random.split(jax.random.key(1))
    q_BQHD = jax.random.normal(keys[0], (1, prefill.chunk, dsa.num_heads, dsa.head_dim))
    weights_BQH = jax.random.normal(keys[1], (1, prefill.chunk, dsa.num_heads))

    def select(length: int) -> None:
        positions_BQ = jnp.full((1, prefill.chunk), length - 1, jnp.int32)
        jax.block_until_ready(index_select.select(q_BQHD, keys_BSD, weights_BQH, positions_BQ, dsa.top_k))

    select(dsa.top_k)
    seconds = []
    for length in lengths:
        began = time.process_time()
        select(length)
        seconds.append(time.process_time() - began)
    return seconds


def fit(prefill: Prefill) -> dict[str, Any]:
    """Straight lines through the seconds of a chunk and of its selection alone, over the keys that a query sees."""
    seconds = np.asarray([record[0] for record in prefill.records])
    seen = prefill.chunk * (np.arange(len(seconds)) + 0.5)
    line = np.polyfit(seen, seconds, 1)
    rest = seconds - np.polyval(line, seen)
    lengths = [prefill.tokens * part // 4 for part in (1, 2, 3, 4)]
    alone = indexer_seconds(prefill, lengths)
    slope = np.polyfit(lengths, alone, 1)[0]
    pairs = prefill.chunk * 1e-9
    return {
        "seconds_of_a_chunk_without_keys": float(line[1]),
        "nanoseconds_per_query_and_key": float(line[0] / pairs),
        "explained_by_the_line": float(1 - rest.var() / seconds.var()),
        "indexer_alone": {
            "keys": lengths,
            "seconds": alone,
            "nanoseconds_per_query_and_key": float(slope / pairs),
        },
    }


def measure(tokens: int, chunk: int, folder: Path) -> dict[str, Any]:
    """Read the whole prompt, from where an earlier call stopped; everything that was found."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    prefill = Prefill(tokens, chunk, folder)
    columns = (
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(),
        TimeRemainingColumn(elapsed_when_finished=True),
    )  # fmt: skip

    def pairs(done: int) -> int:
        """Work so far: every chunk sees all chunks before it."""
        number = done // chunk
        return number * (number + 1) // 2

    with Progress(*columns) as progress:
        task = progress.add_task("chunk pairs", total=pairs(tokens), completed=pairs(prefill.done))
        while prefill.done < tokens:
            prefill.advance()
            progress.update(task, completed=pairs(prefill.done))
    records = np.asarray(prefill.records)
    result = {
        "tokens": tokens, "chunk": chunk, "seconds": float(records[:, 0].sum()),
        "peak_bytes": int(records[:, 1].max()), "temporary_bytes": prefill.temporary_bytes,
        "state_bytes_per_token": bytes_per_token(prefill.config),
        "chunks": {
            name: records[:, column].tolist()
            for column, name in enumerate(("seconds", "peak_bytes", "mean_place", "distinct", "needles"))
        },
    }  # fmt: skip
    return result | {"needle": check_needle(prefill), "fit": fit(prefill)}


def check_memory(result: dict[str, Any], short: dict[str, Any]) -> dict[str, Any]:
    """Compare the peaks of a long and a short run. Raises AssertionError where more than the state grew."""
    state = (result["tokens"] - short["tokens"]) * result["state_bytes_per_token"]
    grown = result["peak_bytes"] - short["peak_bytes"]
    temporaries = result["temporary_bytes"] - short["temporary_bytes"]
    assert grown <= 1.1 * state + SLACK, f"peak memory grew by {grown:,} bytes, the state by {state:,}"
    assert temporaries <= 2**20, f"temporaries of the program grew by {temporaries:,} bytes"
    return {"state_grew": state, "peak_grew": grown, "temporaries_grew": temporaries}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=1_048_576, help="default 1,048,576")
    parser.add_argument("--chunk", type=int, default=2048, help="tokens read at once; default 2048")
    parser.add_argument(
        "--folder",
        type=Path,
        default=Path("benchmarks/results/long_context"),
        help="state of the run, to go on from",
    )
    parser.add_argument("--short", type=int, default=65_536, help="run to compare memory with; 0 for none")
    options = parser.parse_args()
    short = None
    if 0 < options.short < options.tokens:
        report = options.folder / "short" / "result.json"
        if not report.exists():
            command = [
                sys.executable,
                __file__,
                "--tokens",
                str(options.short),
                "--chunk",
                str(options.chunk),
            ]
            subprocess.run([*command, "--short", "0", "--folder", str(report.parent)], check=True)
        short = json.loads(report.read_text())
    result = measure(options.tokens, options.chunk, options.folder)
    if short is not None:
        result |= {"short": short, "memory": check_memory(result, short)}
    (options.folder / "result.json").write_text(json.dumps(result))
    print(
        json.dumps(
            {name: value for name, value in result.items() if name not in ("chunks", "short")}, indent=1
        )
    )


if __name__ == "__main__":
    main()
