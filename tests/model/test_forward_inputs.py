"""What `forward` takes, refuses, and does with image features."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import moe28t_jax as m
from moe28t_jax.model import Inputs, init_cache, run
from moe28t_jax.weights import load_parameters

PARAMETERS, CONFIG = load_parameters(
    Path(__file__).parents[1] / "golden" / "data" / "kimi_linear_tiny", dtype=np.dtype(np.float32)
)
CONFIG = CONFIG.override({"media_pad_id": 250})
IDS = np.array([[3, 7, 250, 250, 9], [250, 1, 250, 250, 2]], np.int32)


@pytest.mark.parametrize(
    ("inputs", "parts"),
    [
        ({"token_ids": IDS[0]}, ("token_ids has shape (5,)", "[batch, tokens]")),
        ({"token_ids": IDS[:, :0]}, ("token_ids has shape (2, 0)",)),
        ({"token_ids": IDS.astype(np.float32)}, ("token_ids has dtype float32", "integers")),
        ({"token_ids": IDS, "lengths": np.array([2])}, ("lengths has shape (1,)", "(2,)")),
        ({"token_ids": IDS, "lengths": np.array([2.0, 3.0])}, ("lengths has dtype float", "integers")),
        ({"tokens": IDS}, ("['tokens']", "token_ids")),
        ({"token_ids": np.concatenate([IDS, IDS], axis=1)}, ("10 tokens per row", "holds 8")),
        ({"token_ids": IDS[:1]}, ("cache has 2 rows and token_ids 1",)),
        ({"token_ids": np.where(IDS == 9, 256, IDS)}, ("Token id 256", "vocabulary of 256 ids")),
        ({"token_ids": np.where(IDS == 9, -1, IDS)}, ("Token id -1", "vocabulary of 256 ids")),
        ({"token_ids": IDS, "image_features": np.zeros((4, 64))}, ("5 media pad tokens", "4 rows")),
        ({"token_ids": IDS, "image_features": np.zeros((5, 63))}, ("shape (5, 63)", "[patches, 64]")),
    ],
)
def test_a_bad_input_is_one_sentence(inputs, parts):
    with pytest.raises(ValueError) as caught:
        m.forward(PARAMETERS, inputs, init_cache(CONFIG, 2, 8), CONFIG)
    assert all(part in str(caught.value) for part in parts), caught.value


def test_another_layout_is_refused():
    with pytest.raises(ValueError, match="laid out differently"):
        m.forward(PARAMETERS, {"token_ids": IDS}, init_cache(CONFIG, 2, 8, stacked=True), CONFIG)


@pytest.mark.parametrize("dtype", [jnp.int32, jnp.float8_e4m3fn])
def test_a_cache_is_of_a_real_float_type(dtype):
    with pytest.raises(ValueError, match="cache cannot be of dtype"):
        init_cache(CONFIG, 2, 8, dtype)


def test_lengths_beyond_the_tokens_count_as_all_of_them():
    cache = jax.jit(m.forward, static_argnames="config")(
        PARAMETERS, Inputs(IDS, np.array([20, -5])), init_cache(CONFIG, 2, 8), config=CONFIG
    )[1]
    assert cache.lengths_B.tolist() == [5, 0]


def test_features_replace_media_pads_in_reading_order_and_padding_takes_none():
    """Each feature is the embedding of another token, so the result must be that of a text with these tokens."""
    lengths = np.array([3, 5], np.int32)
    tokens = [11, 22, 33, 44]
    text = IDS.copy()
    text[0, 2], text[1, 0], text[1, 2], text[1, 3] = tokens
    features = PARAMETERS["embedding"][jnp.asarray(tokens)]
    function = jax.jit(run, static_argnames="config")
    found = function(PARAMETERS, Inputs(IDS, lengths, features), None, config=CONFIG).hidden_BTD
    expected = function(PARAMETERS, Inputs(text, lengths), None, config=CONFIG).hidden_BTD
    np.testing.assert_array_equal(found[0, :3], expected[0, :3])
    np.testing.assert_array_equal(found[1], expected[1])


def test_features_of_another_width_are_refused():
    with pytest.raises(ValueError, match="image_features has shape \\(4, 1\\)"):
        run(PARAMETERS, Inputs(IDS, None, jnp.ones((4, 1))), None, CONFIG)


def test_a_full_row_is_refused_where_its_fullness_is_known():
    _, cache = m.forward(
        PARAMETERS, {"token_ids": IDS, "lengths": np.array([2, 5])}, init_cache(CONFIG, 2, 8), CONFIG
    )
    with pytest.raises(ValueError, match="Row 1 of the cache holds 5 tokens and 4 more are given"):
        m.forward(PARAMETERS, {"token_ids": IDS, "lengths": np.array([5, 4])}, cache, CONFIG)


def test_padding_may_hold_any_id():
    ids = np.where(IDS == 9, 9999, IDS)
    m.forward(PARAMETERS, {"token_ids": ids, "lengths": np.array([4, 5])}, init_cache(CONFIG, 2, 8), CONFIG)


def test_lengths_beyond_int32_do_not_wrap():
    whole = m.forward(PARAMETERS, {"token_ids": IDS[:1]}, init_cache(CONFIG, 1, 8), CONFIG, "last")[0]
    wide = {"token_ids": IDS[:1], "lengths": np.array([2**32 + 1])}
    np.testing.assert_array_equal(
        m.forward(PARAMETERS, wide, init_cache(CONFIG, 1, 8), CONFIG, "last")[0], whole
    )
