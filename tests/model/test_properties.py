"""What must not change the result: how a prompt is cut, what shares its batch, what lies in unused memory.

Every property holds in float32 up to rounding and in float64 at 1e-9, where a wrong formula cannot hide, with
equal experts and equal index sets.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moe28t_jax.model.cache import LatentCache

# Few shapes, each a compiled program: one prompt alone, and batches of ROWS.
PROMPT, CAPACITY, ROWS = 150, 160, 10
MODELS = ["k31_tiny", pytest.param("kimi_linear_tiny", marks=pytest.mark.slow)]
# Both types prove the same; the wider one, where no mistake hides behind rounding, in every run.
FLOAT32_SLOWLY = pytest.mark.parametrize(
    "dtype", [pytest.param("float32", marks=pytest.mark.slow), "float64"], indirect=True
)


def prompt_ids(batch, count, seed=0, vocab=256):
    return np.random.default_rng(seed).integers(3, vocab, (batch, count))


def poison(cache, lengths):
    """The cache with NaN in every latent row and index key beyond the lengths."""

    def fill(buffer):
        unused = jnp.arange(buffer.shape[-2])[None, :, None] >= jnp.asarray(lengths)[:, None, None]
        return jnp.where(unused, jnp.asarray(jnp.nan, buffer.dtype), buffer)

    def layer(entry):
        if not isinstance(entry, LatentCache):
            return entry
        keys = entry.index_key_BSD
        return LatentCache(fill(entry.latent_BSC), None if keys is None else fill(keys))

    segments = [[layer(entry) for entry in segment] for segment in cache.segments]
    return dataclasses.replace(cache, segments=segments)


def token_by_token(model, ids, cache, lengths=None):
    """Logits [B, T, V] and choices of decoding the ids one by one."""
    logits, chosen = [], []
    for index in range(ids.shape[1]):
        here = np.ones(len(ids)) if lengths is None else index < np.asarray(lengths)
        step_logits, cache, step_choices = model.step(ids[:, index : index + 1], here.astype(int), cache)
        logits.append(step_logits)
        chosen.append(step_choices)
    joined = [
        {name: np.concatenate([step[layer][name] for step in chosen], axis=1) for name in chosen[0][layer]}
        for layer in range(len(chosen[0]))
    ]
    return np.concatenate(logits, axis=1), cache, joined


@FLOAT32_SLOWLY
@pytest.mark.parametrize("name", MODELS)
def test_prefill_at_every_split_equals_one_shot(tiny, same_choices, name) -> None:
    model = tiny(name)
    ids = prompt_ids(1, PROMPT)
    expected, _, expected_choices = model.step(ids, [PROMPT], model.cache(1, CAPACITY))
    assert np.abs(expected).max() > 0.5
    positions = np.arange(PROMPT)
    # Row r of a batch is the prompt cut after `cuts[r]` tokens; both parts are padded to one shape, so that all
    # splits share one compiled program.
    for first in range(1, PROMPT, ROWS):
        cuts = np.minimum(np.arange(first, first + ROWS), PROMPT - 1)
        head = np.where(positions < cuts[:, None], ids, 0)
        gather = np.minimum(positions + cuts[:, None], PROMPT - 1)
        tail = np.where(positions < PROMPT - cuts[:, None], ids[0][gather], 0)
        head_logits, cache, head_choices = model.step(head, cuts, model.cache(ROWS, CAPACITY))
        tail_logits, cache, tail_choices = model.step(tail, PROMPT - cuts, cache)
        np.testing.assert_array_equal(cache.lengths_B, PROMPT)
        for row, cut in enumerate(cuts):
            both = np.concatenate([head_logits[row, :cut], tail_logits[row, : PROMPT - cut]])
            np.testing.assert_allclose(both, expected[0], rtol=0, atol=model.tolerance, err_msg=f"cut {cut}")
            joined = [
                {n: np.concatenate([a[n][row, :cut], b[n][row, : PROMPT - cut]])[None] for n in a}
                for a, b in zip(head_choices, tail_choices, strict=True)
            ]
            same_choices(joined, expected_choices)


@pytest.mark.parametrize("name", MODELS)
def test_token_by_token_equals_one_shot(tiny, same_choices, name) -> None:
    model = tiny(name)
    ids = prompt_ids(ROWS, PROMPT, 1)
    lengths = np.full(ROWS, PROMPT)
    expected, expected_cache, expected_choices = model.step(ids, lengths, model.cache(ROWS, CAPACITY))
    logits, cache, chosen = token_by_token(model, ids, model.cache(ROWS, CAPACITY))
    np.testing.assert_allclose(logits, expected, rtol=0, atol=model.tolerance)
    same_choices(chosen, expected_choices)
    for a, b in zip(jax.tree.leaves(cache), jax.tree.leaves(expected_cache), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=model.tolerance)


def test_without_a_cache_the_prompt_is_the_whole_context(tiny, same_choices) -> None:
    model = tiny("k31_tiny")
    ids = prompt_ids(1, PROMPT)
    expected, _, expected_choices = model.step(ids, [PROMPT], model.cache(1, CAPACITY))
    logits, cache, chosen = model.step(ids, [PROMPT], None)
    assert cache is None
    np.testing.assert_allclose(logits, expected, rtol=0, atol=model.tolerance)
    same_choices(chosen, expected_choices)


@pytest.mark.parametrize("name", MODELS)
def test_a_batch_of_different_lengths_equals_each_alone(tiny, same_choices, name) -> None:
    model = tiny(name)
    # One row is empty, one has a single token, one ends on a chunk boundary, two fill the memory's batch.
    lengths = np.array([64, 0, 1, PROMPT - 5, 97, 65, 63, 128, 2, PROMPT])
    more = np.array([3, 2, 5, 5, 4, 0, 1, 5, 5, 0])
    total = lengths + more
    ids = prompt_ids(ROWS, PROMPT, 2)
    # Unused memory holds NaN before every step, and padding holds arbitrary tokens.
    cache = poison(model.cache(ROWS, CAPACITY), np.zeros(ROWS, int))
    logits, cache, chosen = model.step(ids, lengths, cache)
    np.testing.assert_array_equal(cache.lengths_B, lengths)
    next_ids = np.take_along_axis(ids, np.minimum(lengths[:, None] + np.arange(5), PROMPT - 1), axis=1)
    decoded, cache, decoded_choices = token_by_token(model, next_ids, poison(cache, lengths), more)
    np.testing.assert_array_equal(cache.lengths_B, total)

    for row, (length, count) in enumerate(zip(lengths, total, strict=True)):
        # The whole row alone, padded with zeros.
        alone = np.where(np.arange(PROMPT) < count, ids[row], 0)[None]
        expected, _, expected_choices = model.step(alone, total[row : row + 1], model.cache(1, CAPACITY))
        found = np.concatenate([logits[row, :length], decoded[row, : more[row]]])
        np.testing.assert_allclose(found, expected[0, :count], rtol=0, atol=model.tolerance)
        joined = [
            {n: np.concatenate([a[n][row, :length], b[n][row, : more[row]]])[None] for n in a}
            for a, b in zip(chosen, decoded_choices, strict=True)
        ]
        shortened = [{n: a[:, :count] for n, a in layer.items()} for layer in expected_choices]
        same_choices(joined, shortened)


def test_an_empty_row_leaves_its_cache_bit_for_bit(tiny) -> None:
    model = tiny("k31_tiny")
    ids, lengths = prompt_ids(ROWS, PROMPT, 3), np.full(ROWS, 70)
    _, before, _ = model.step(ids, lengths, model.cache(ROWS, CAPACITY))
    _, after, _ = model.step(ids, [0, 20] * 5, before)
    np.testing.assert_array_equal(after.lengths_B, [70, 90] * 5)
    for a, b in zip(jax.tree.leaves(after.segments), jax.tree.leaves(before.segments), strict=True):
        np.testing.assert_array_equal(a[::2], b[::2])
        assert not np.array_equal(a[1], b[1])
    # A step in which no row has a token changes nothing at all.
    logits, unchanged, _ = model.step(ids, np.zeros(ROWS), after)
    assert logits.shape == (ROWS, PROMPT, 256)
    for a, b in zip(jax.tree.leaves(unchanged), jax.tree.leaves(after), strict=True):
        np.testing.assert_array_equal(a, b)


@FLOAT32_SLOWLY
@pytest.mark.parametrize("capacity", [CAPACITY, pytest.param(PROMPT, marks=pytest.mark.slow)])
def test_a_top_k_over_all_tokens_equals_dense_attention(tiny, same_choices, capacity) -> None:
    """With room for more keys the sparse path selects every visible one; without, attention is dense anyway."""
    model = tiny("k31_tiny")
    ids, config = prompt_ids(1, PROMPT, 5), model.config
    every = dataclasses.replace(model, config=config.override({"dsa.top_k": PROMPT}))
    kinds = ["mla" if kind == "dsa" else kind for kind in config.attention_kinds]
    dense = dataclasses.replace(model, config=config.override({"attention_kinds": kinds, "dsa": None}))
    sparse_logits, _, _ = model.step(ids, [PROMPT], model.cache(1, capacity))
    head_logits, cache, head_choices = every.step(ids, [81], every.cache(1, capacity))
    tail = np.concatenate([ids[:, 81:], np.zeros((1, 81), int)], axis=1)
    tail_logits, _, tail_choices = every.step(tail, [PROMPT - 81], cache)
    dense_logits, cache, dense_choices = dense.step(ids, [PROMPT], dense.cache(1, capacity))
    latent = [entry for [entry] in cache.segments if isinstance(entry, LatentCache)]
    assert len(latent) == 3 and all(entry.index_key_BSD is None for entry in latent)
    found = np.concatenate([head_logits[0, :81], tail_logits[0, : PROMPT - 81]])
    np.testing.assert_allclose(found, dense_logits[0], rtol=0, atol=model.tolerance)
    experts = [
        {
            n: np.concatenate([a[n][:, :81], b[n][:, : PROMPT - 81]], axis=1)
            for n in a
            if n == "router_experts"
        }
        for a, b in zip(head_choices, tail_choices, strict=True)
    ]
    same_choices(experts, dense_choices)
    # The property is not empty: eight keys per query give something else.
    assert np.abs(sparse_logits - dense_logits).max() > 0.1
