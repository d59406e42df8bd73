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

PROMPT, CAPACITY = 150, 160
MODELS = ["k31_tiny", "kimi_linear_tiny"]


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


@pytest.mark.parametrize("name", MODELS)
def test_prefill_at_every_split_equals_one_shot(tiny, same_choices, name) -> None:
    model = tiny(name)
    ids = prompt_ids(1, PROMPT)
    expected, _, expected_choices = model.step(ids, [PROMPT], model.cache(1, CAPACITY))
    assert np.abs(expected).max() > 0.5
    positions = np.arange(PROMPT)
    # Row r of a batch is the prompt cut after `cuts[r]` tokens; both parts are padded to one shape, so that all
    # splits share one compiled program.
    for first in range(1, PROMPT, 50):
        cuts = np.minimum(np.arange(first, first + 50), PROMPT - 1)
        head = np.where(positions < cuts[:, None], ids, 0)
        gather = np.minimum(positions + cuts[:, None], PROMPT - 1)
        tail = np.where(positions < PROMPT - cuts[:, None], ids[0][gather], 0)
        head_logits, cache, head_choices = model.step(head, cuts, model.cache(50, CAPACITY))
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
    ids = prompt_ids(1, PROMPT)
    expected, expected_cache, expected_choices = model.step(ids, [PROMPT], model.cache(1, CAPACITY))
    logits, cache, chosen = token_by_token(model, ids, model.cache(1, CAPACITY))
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
    # One row is empty, one has a single token, one ends on a chunk boundary, one fills the batch.
    lengths = np.array([64, 0, 1, PROMPT, 97])
    more = np.array([3, 2, 5, 0, 4])
    ids, next_ids = prompt_ids(5, PROMPT, 1), prompt_ids(5, 5, 2)
    # Memory beyond the lengths holds NaN before every step, and padding holds arbitrary tokens.
    cache = poison(model.cache(5, CAPACITY), np.zeros(5, int))
    logits, cache, chosen = model.step(ids, lengths, cache)
    np.testing.assert_array_equal(cache.lengths_B, lengths)
    decoded, cache, decoded_choices = token_by_token(model, next_ids, poison(cache, lengths), more)
    np.testing.assert_array_equal(cache.lengths_B, lengths + more)

    for row in range(5):
        alone = model.cache(1, CAPACITY)
        # The prompt alone, unpadded tokens replaced by zeros: padding has no influence.
        padded = np.where(np.arange(PROMPT) < lengths[row], ids[row], 0)[None]
        expected, alone, expected_choices = model.step(padded, lengths[row : row + 1], alone)
        keep = np.s_[: lengths[row]]
        np.testing.assert_allclose(logits[row, keep], expected[0, keep], rtol=0, atol=model.tolerance)
        mine = [{n: a[row : row + 1] for n, a in layer.items()} for layer in chosen]
        same_choices(mine, expected_choices, np.s_[:, keep])

        expected, alone, expected_choices = token_by_token(
            model, next_ids[row : row + 1], alone, more[row : row + 1]
        )
        keep = np.s_[: more[row]]
        np.testing.assert_allclose(decoded[row, keep], expected[0, keep], rtol=0, atol=model.tolerance)
        mine = [{n: a[row : row + 1] for n, a in layer.items()} for layer in decoded_choices]
        same_choices(mine, expected_choices, np.s_[:, keep])


def test_an_empty_row_leaves_its_cache_bit_for_bit(tiny) -> None:
    model = tiny("k31_tiny")
    ids = prompt_ids(2, 70, 3)
    _, before, _ = model.step(ids, [70, 33], model.cache(2, CAPACITY))
    _, after, _ = model.step(ids, [0, 20], before)
    np.testing.assert_array_equal(after.lengths_B, [70, 53])
    assert any(isinstance(entry, LatentCache) for [entry] in after.segments)
    for a, b in zip(jax.tree.leaves(after.segments), jax.tree.leaves(before.segments), strict=True):
        np.testing.assert_array_equal(a[0], b[0])
        assert not np.array_equal(a[1], b[1])


def test_a_step_without_any_token_changes_nothing(tiny) -> None:
    model = tiny("k31_tiny")
    ids = prompt_ids(2, 70, 4)
    _, before, _ = model.step(ids, [70, 33], model.cache(2, CAPACITY))
    logits, after, _ = model.step(ids, [0, 0], before)
    assert logits.shape == (2, 70, 256)
    for a, b in zip(jax.tree.leaves(after), jax.tree.leaves(before), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("capacity", [PROMPT, CAPACITY], ids=["full", "with room"])
def test_a_top_k_over_all_tokens_equals_dense_attention(tiny, same_choices, capacity) -> None:
    model = tiny("k31_tiny")
    ids = prompt_ids(2, PROMPT, 5)
    lengths = [PROMPT, 81]
    config = model.config
    every = dataclasses.replace(model, config=config.override({"dsa.top_k": PROMPT}))
    kinds = ["mla" if kind == "dsa" else kind for kind in config.attention_kinds]
    dense = dataclasses.replace(model, config=config.override({"attention_kinds": kinds, "dsa": None}))
    sparse_logits, _, _ = model.step(ids, lengths, model.cache(2, capacity))
    every_logits, cache, every_choices = every.step(ids[:, :140], [140, 81], every.cache(2, capacity))
    more_logits, _, _ = every.step(ids[:, 140:], [10, 0], cache)
    dense_logits, cache, dense_choices = dense.step(ids, lengths, dense.cache(2, capacity))
    assert all(entry.index_key_BSD is None for [entry] in cache.segments if isinstance(entry, LatentCache))
    np.testing.assert_allclose(every_logits[0], dense_logits[0, :140], rtol=0, atol=model.tolerance)
    np.testing.assert_allclose(more_logits[0], dense_logits[0, 140:], rtol=0, atol=model.tolerance)
    np.testing.assert_allclose(every_logits[1, :81], dense_logits[1, :81], rtol=0, atol=model.tolerance)
    experts = [{n: a for n, a in layer.items() if n == "router_experts"} for layer in every_choices]
    dense_experts = [{n: a[:, :140] for n, a in layer.items()} for layer in dense_choices]
    for row, length in enumerate((140, 81)):
        same_choices(experts, dense_experts, np.s_[row, :length])
    # The property is not empty: eight keys per query give something else.
    assert np.abs(sparse_logits[0] - dense_logits[0]).max() > 0.1
