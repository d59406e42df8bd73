"""Sampling, compiled steps and token-by-token generation."""

import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moe28t_jax.engine import FinishReason, Steps, generate_ids, sample
from moe28t_jax.engine import generate as engine
from moe28t_jax.engine.sampling import nucleus as kept_tokens
from moe28t_jax.weights import load_parameters

DATA = Path(__file__).parents[1] / "golden" / "data"
PROMPT = [5, 9, 200, 31, 17, 64, 3]


@functools.cache
def steps(chunk=1024):
    parameters, config = load_parameters(DATA / "k31_tiny_mxfp4", dtype=np.dtype("float32"))
    return Steps(parameters, config, chunk)


def generate(*arguments, chunk=1024, **options):
    """(tokens, finish reason) of `generate_ids`."""
    found = list(generate_ids(steps(chunk), *arguments, **options))
    tokens, (end, reason) = [token for token, _ in found[:-1]], found[-1]
    assert end is None and all(r is None for _, r in found[:-1])
    return tokens, reason


# -- sampling ----------------------------------------------------------------------------------------------------
LOGITS = np.array([1.0, 3.0, -2.0, 2.5, 0.0, 3.0, -40.0, 1.5], np.float32)
DRAWS = 20_000


@functools.cache
def frequencies(temperature, top_p):
    """Share of every token in many independent draws from LOGITS."""
    rows = jnp.broadcast_to(jnp.asarray(LOGITS), (DRAWS, len(LOGITS)))
    tokens = jax.jit(sample)(rows, jax.random.key(7), jnp.float32(temperature), jnp.float32(top_p))
    assert tokens.shape == (DRAWS,) and tokens.dtype == jnp.int32
    return np.bincount(np.asarray(tokens), minlength=len(LOGITS)) / DRAWS


def nucleus(temperature, top_p):
    """The distribution in numpy: the most likely tokens until their sum reaches top_p, the first always."""
    p = np.exp(LOGITS.astype(np.float64) / temperature)
    p /= p.sum()
    order = np.argsort(-p, kind="stable")
    before = np.cumsum(p[order]) - p[order]
    kept = order[(before < top_p) | (np.arange(len(p)) == 0)]
    q = np.zeros_like(p)
    q[kept] = p[kept] / p[kept].sum()
    return q


@pytest.mark.parametrize("temperature", [0.5, 1.0, 4.0])
@pytest.mark.parametrize("top_p", [1.0, 0.9, 0.5, 1e-6])
def test_draws_follow_the_nucleus_distribution(temperature, top_p) -> None:
    expected = nucleus(temperature, top_p)
    found = frequencies(temperature, top_p)
    # The support is exact; a share deviates by less than 5 standard errors.
    assert not found[expected == 0].any()
    np.testing.assert_array_less(abs(found - expected), 5 * np.sqrt(expected * (1 - expected) / DRAWS) + 1e-9)
    assert (found > 0)[expected > 1e-3].all()


def test_the_nucleus_keeps_exactly_the_tokens_that_reach_top_p() -> None:
    # At temperature 1 the shares are .331 .331 .201 and less (e^3, e^3, e^2.5 of 60.7): the second token reaches
    # 0.65, and 0.67 needs a third.
    assert np.flatnonzero(frequencies(1.0, 0.65)).tolist() == [1, 5]
    assert np.flatnonzero(frequencies(1.0, 0.67)).tolist() == [1, 3, 5]


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_nucleus_is_that_of_sorted_tokens(dtype) -> None:
    """Many equal logits, both zeros, tokens that cannot be, and all sizes of nucleus."""
    rng = np.random.default_rng(0)
    rows = rng.choice([-np.inf, -3.0, -0.0, 0.0, 0.25, 1.0, 1.5], (40, 33)).astype(dtype)
    rows[20:] = rng.normal(0, 3, (20, 33))
    rows[:, 0] = 0.5
    with jax.enable_x64(dtype == np.float64):
        for top_p in (1e-6, 0.03, 0.3, 0.5, 0.77, 0.9, 0.999):
            found = np.asarray(kept_tokens(jnp.asarray(rows), jnp.asarray(top_p, dtype)))
            for row, kept in zip(rows.astype(np.float64), found, strict=True):
                p = np.exp(row - row.max())
                p /= p.sum()
                order = np.argsort(-p, kind="stable")
                before = np.cumsum(p[order]) - p[order]
                # A sum that is top_p but for rounding may fall on either side.
                sure = abs(before - top_p) > 1e-6
                np.testing.assert_array_equal(kept[order][sure], (before < top_p)[sure])


def test_temperature_zero_takes_the_highest_logit_and_the_lowest_id_of_equals() -> None:
    found = frequencies(0.0, 1.0)
    assert np.flatnonzero(found).tolist() == [1]
    assert np.flatnonzero(frequencies(0.0, 0.1)).tolist() == [1]


def test_rows_are_independent() -> None:
    rows = jnp.asarray(np.eye(5, dtype=np.float32) * 50)
    tokens = jax.jit(sample)(rows, jax.random.key(0), jnp.float32(1), jnp.float32(1))
    np.testing.assert_array_equal(tokens, np.arange(5))


# -- generation --------------------------------------------------------------------------------------------------
def test_greedy_generation_repeats_and_is_the_argmax_of_forward() -> None:
    tokens, reason = generate(PROMPT, 6)
    assert reason is FinishReason.LENGTH and len(tokens) == 6
    assert generate(PROMPT, 6) == (tokens, reason)
    assert generate(PROMPT, 6, seed=3)[0] == tokens
    whole = np.zeros((1, 64), np.int32)
    whole[0, : len(PROMPT) + 6] = PROMPT + tokens
    logits, _ = steps().forward(jnp.asarray(whole), jnp.asarray([len(PROMPT) + 6]), None)
    begin = len(PROMPT) - 1
    np.testing.assert_array_equal(np.argmax(logits[0, begin : begin + 6], axis=-1), tokens)


def test_equal_seeds_give_equal_tokens() -> None:
    sampled = [generate(PROMPT, 12, temperature=1.5, seed=seed)[0] for seed in (1, 1, 2)]
    assert sampled[0] == sampled[1] != sampled[2]
    # Without a seed every call draws its own: equal outcomes of 12 tokens do not happen.
    assert generate(PROMPT, 12, temperature=3.0)[0] != generate(PROMPT, 12, temperature=3.0)[0]


def test_a_drawn_seed_is_the_one_of_the_first_device(monkeypatch) -> None:
    monkeypatch.setattr(engine, "seed_of_first_device", lambda seed, mesh: 2)
    assert generate(PROMPT, 12, temperature=1.5) == generate(PROMPT, 12, temperature=1.5, seed=2)


def test_a_stop_token_ends_generation_and_is_not_given_out() -> None:
    tokens, _ = generate(PROMPT, 6)
    stop = tokens[3]
    expected = tokens[: tokens.index(stop)]
    assert generate(PROMPT, 6, {stop, 255}) == (expected, FinishReason.STOP)
    assert generate(PROMPT, 6, {tokens[0]}) == ([], FinishReason.STOP)
    unused = next(i for i in range(256) if i not in tokens)
    assert generate(PROMPT, 6, [unused]) == (tokens, FinishReason.LENGTH)


def test_the_context_bounds_what_is_written() -> None:
    tokens, _ = generate(PROMPT, 6)
    assert generate(PROMPT, 6, max_context=len(PROMPT) + 4) == (tokens[:4], FinishReason.LENGTH)
    assert generate(PROMPT, 1, max_context=len(PROMPT) + 4) == (tokens[:1], FinishReason.LENGTH)
    with pytest.raises(
        ValueError, match="The prompt has 7 tokens and the context holds 7; shorten it or load"
    ):
        generate(PROMPT, 6, max_context=len(PROMPT))


def test_a_prompt_of_several_chunks_gives_what_one_chunk_gives() -> None:
    prompt = np.random.default_rng(0).integers(3, 256, 150).tolist()
    assert generate(prompt, 4, chunk=64) == generate(prompt, 4)


def test_prefill_of_ragged_rows_in_chunks_gives_each_rows_last_logits() -> None:
    lengths = np.array([150, 64, 0, 65])
    ids = np.random.default_rng(1).integers(3, 256, (4, 150)).astype(np.int32)
    chunked, cache = steps(64).prefill(ids, lengths, steps(64).new_cache(4, 192))
    np.testing.assert_array_equal(cache.lengths_B, lengths)
    every, _ = steps().forward(jnp.asarray(ids), jnp.asarray(lengths, jnp.int32), steps().new_cache(4, 192))
    for row in (0, 1, 3):
        np.testing.assert_allclose(chunked[row], every[row, lengths[row] - 1], rtol=0, atol=2e-4)


def test_an_inactive_row_of_a_decode_step_keeps_its_cache() -> None:
    ids = np.random.default_rng(2).integers(3, 256, (2, 9)).astype(np.int32)
    _, cache = steps().prefill(ids, np.array([9, 6]), steps().new_cache(2, 192))
    before = [np.asarray(leaf) for leaf in jax.tree.leaves(cache.segments)]
    tokens = jnp.asarray([7, 8], jnp.int32)
    _, _, cache = steps().decode(tokens, np.array([True, False]), cache, jax.random.key(0), 0.0, 1.0)
    np.testing.assert_array_equal(cache.lengths_B, [10, 6])
    for old, new in zip(before, jax.tree.leaves(cache.segments), strict=True):
        np.testing.assert_array_equal(old[1], new[1])
        assert not np.array_equal(old[0], new[0])


@pytest.mark.parametrize(("arguments", "options", "message"), [
    (([], 3), {}, r"The prompt has no tokens; give at least one character or token id\."),
    (([5, 256], 3), {}, r"Token id 256 is outside the vocabulary of 256 ids\."),
    (([-1, 5], 3), {}, r"Token id -1 is outside the vocabulary of 256 ids\."),
    (([5] * 4096, 3), {}, r"The prompt has 4096 tokens and the context holds 4096; shorten it\."),
    (([5], 0), {}, r"max_new_tokens is 0; it must be at least 1\."),
    (([5], 3), {"temperature": -0.5}, r"temperature is -0\.5; it must be 0 \(greedy\) to 1e\+06\."),
    (([5], 3), {"temperature": float("nan")}, r"temperature is nan; it must be 0"),
    (([5], 3), {"temperature": float("inf")}, r"temperature is inf; it must be 0"),
    (([5], 3), {"top_p": 0.0}, r"top_p is 0\.0; it must be above 0 and at most 1\."),
    (([5], 3), {"top_p": 1.01}, r"top_p is 1\.01; it must be above 0 and at most 1\."),
    (([5], 3), {"top_p": float("nan")}, r"top_p is nan; it must be above 0"),
])  # fmt: skip
def test_bad_requests_are_refused(arguments, options, message) -> None:
    with pytest.raises(ValueError, match=message):
        next(generate_ids(steps(), *arguments, **options))


def test_a_chunk_off_the_grid_is_refused() -> None:
    with pytest.raises(ValueError, match="The prefill chunk is 100; it must be a multiple of 64 tokens"):
        Steps(_parameters(), steps().config, 100)


def _parameters():
    return jax.tree.unflatten(steps()._structure, steps()._leaves)


def test_a_context_that_is_no_multiple_of_the_grid_is_used_to_its_end() -> None:
    parameters, config = load_parameters(DATA / "k31_tiny_mxfp4", dtype=np.dtype("float32"))
    short = Steps(parameters, config.override({"max_context": 70}))
    found = list(generate_ids(short, (PROMPT * 10)[:66], 9))
    assert found == list(generate_ids(steps(), (PROMPT * 10)[:66], 4)) and len(found) == 5
    with pytest.raises(ValueError, match="The prompt has 70 tokens and the context holds 70"):
        list(generate_ids(short, PROMPT * 10, 9))


@pytest.mark.parametrize("lengths", [[0, 0], []])
def test_prompts_without_a_token_are_refused(lengths) -> None:
    ids = np.zeros((len(lengths), 3), np.int32)
    with pytest.raises(
        ValueError, match=r"lengths of the prompts are \[.*\]; at least one row must have a token"
    ):
        steps().prefill(ids, np.asarray(lengths, np.int32), steps().new_cache(2, 64))


@pytest.mark.parametrize("name", ["k31_tiny_mxfp4", "kimi_linear_tiny"])
def test_the_default_dtype_runs_and_stays_near_float32(name) -> None:
    """Prompts of 70 and 2 tokens and a decoded one: products of bfloat16 take other paths by their shape."""
    found = {}
    for dtype in ("float32", "bfloat16"):
        parameters, config = load_parameters(DATA / name, dtype=np.dtype(jnp.dtype(dtype)))
        model = Steps(parameters, config)
        ids = np.asarray([(PROMPT * 10), PROMPT * 10], np.int32)
        logits, cache = model.prefill(ids, np.asarray([70, 2], np.int32), model.new_cache(2, 128))
        _, after, _ = model.decode(
            jnp.asarray([7, 8], jnp.int32), [True, True], cache, jax.random.key(0), 0.0, 1.0
        )
        found[dtype] = np.stack([np.asarray(x, np.float32) for x in (logits, after)])
    assert np.isfinite(found["bfloat16"]).all()
    # Rounding changes which experts and tokens are chosen, and with random weights that changes a row's logits by half
    # of their spread; rows whose choices stay show the rounding alone.
    away = np.sqrt(np.mean((found["bfloat16"] - found["float32"]) ** 2, axis=-1))
    assert away.min() < 0.1 * np.std(found["float32"]) and away.max() < np.std(found["float32"])
