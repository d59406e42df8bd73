"""Recorded models and layers with selection and sparse attention by each implementation that runs here.

The TPU kernels are interpreted: races are errors and untouched memory is NaN. `test_models.py` runs the same on the
default, and `test_dsa_oracles.py` single layers on all.
"""

import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from moe28t_jax.model import Inputs, project_logits, run
from moe28t_jax.weights import load_parameters
from pallas_kernels.index_select import api as selection
from pallas_kernels.index_select import tpu as selection_tpu
from pallas_kernels.sparse_attention import api as attention
from pallas_kernels.sparse_attention import tpu as attention_tpu
from tests.golden import fixtures
from tests.golden.fixtures import DATA, LOGITS_TOLERANCE, assert_close, read

pytestmark = [pytest.mark.golden, pytest.mark.slow]

INTERPRET = pltpu.InterpretParams(detect_races=True, uninitialized_memory="nan")
INTERPRETED = {
    selection: functools.partial(selection_tpu.select, key_round=128, interpret=INTERPRET),
    attention: functools.partial(attention_tpu.sparse_attention, interpret=INTERPRET),
}
NAMES = ["k31_tiny", "k31_tiny_mxfp4"]


@pytest.fixture(params=["reference", "tpu"])
def used(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[set[str]]:
    """One implementation as the only default of both operations; collects which of them were called."""
    called: set[str] = set()
    for module, interpreted in INTERPRETED.items():
        operation = module.__name__.split(".")[1]
        function = interpreted if request.param == "tpu" else module.IMPLEMENTATIONS["reference"]

        def call(*given: Any, function: Any = function, operation: str = operation) -> Any:
            called.add(operation)
            return function(*given)

        monkeypatch.setattr(module, "DEFAULT", (request.param,))
        monkeypatch.setattr(module, "IMPLEMENTATIONS", {request.param: call})
    yield called
    assert called == {"index_select", "sparse_attention"}


def program(config: Any) -> Any:
    @jax.jit
    def compute(parameters: Any, token_ids: Any, lengths: Any) -> Any:
        result = run(parameters, Inputs(token_ids, lengths), None, config, frozenset({"index_sets"}))
        return project_logits(parameters, result.hidden_BTD), result.auxiliary

    return compute


def check_sets(layers: Any, golden: Any, config: Any, count: int) -> None:
    sparse = [layer for layer, kind in enumerate(config.attention_kinds) if kind == "dsa"]
    assert len(sparse) == 3
    for layer in sparse:
        sets = fixtures.sorted_sets(layers[layer]["index_sets"])
        np.testing.assert_array_equal(sets[0], golden[f"index_sets_layer{layer + 1}"][:count])


@pytest.mark.parametrize("name", NAMES)
def test_prefill(name: str, used: set[str]) -> None:
    """More tokens than one block of queries, and all that the recording of a prompt has."""
    golden, _ = read(f"{name}/golden")
    parameters, config = load_parameters(DATA / name, dtype=jnp.float32)
    count = golden["logits_prefill"].shape[1]
    ids = jnp.asarray(golden["input_ids"][:, :count])
    logits, layers = program(config)(parameters, ids, jnp.asarray([count], jnp.int32))
    assert_close(logits[0], golden["logits_prefill"][0, :count], LOGITS_TOLERANCE[name], "logits")
    check_sets(layers, golden, config, count)


def test_ragged_batch(used: set[str]) -> None:
    """How the experts are packed is nothing to the operations here: of the two models one will do."""
    name = NAMES[0]
    golden, _ = read(f"{name}/golden")
    parameters, config = load_parameters(DATA / name, dtype=jnp.float32)
    lengths = golden["batch_lengths"]
    logits, layers = program(config)(
        parameters, jnp.asarray(golden["batch_input_ids"]), jnp.asarray(lengths, jnp.int32)
    )
    for row, length in enumerate(lengths.tolist()):
        assert_close(
            logits[row, :length], golden["batch_logits"][row, :length], LOGITS_TOLERANCE[name], f"row {row}"
        )
        for layer, kind in enumerate(config.attention_kinds):
            if kind == "dsa":
                sets = fixtures.sorted_sets(layers[layer]["index_sets"])[row, :length]
                expected = golden[f"batch_index_sets_layer{layer + 1}"][row, :length]
                np.testing.assert_array_equal(sets, expected)


def test_decode_from_a_cache(used: set[str]) -> None:
    """Two cached chunks and single tokens after them."""
    from moe28t_jax.model import init_cache

    name = NAMES[1]
    golden, meta = read(f"{name}/golden")
    parameters, config = load_parameters(DATA / name, dtype=jnp.float32)
    first = meta["prefill_len"]
    ids = jnp.asarray(golden["input_ids"])
    cache = init_cache(config, 1, ids.shape[1])

    @jax.jit
    def step(parameters: Any, token_ids: Any, cache: Any) -> Any:
        lengths = jnp.full((1,), token_ids.shape[1], jnp.int32)
        result = run(parameters, Inputs(token_ids, lengths), cache, config, frozenset())
        return project_logits(parameters, result.hidden_BTD), result.cache

    found = []
    for start, stop in [(0, 64), (64, first), *((t, t + 1) for t in range(first, first + 8))]:
        logits, cache = step(parameters, ids[:, start:stop], cache)
        found.append(np.asarray(logits[0]))
    expected = golden["logits_prefill"][0, : first + 8]
    assert_close(np.concatenate(found), expected, LOGITS_TOLERANCE[name], "logits")
