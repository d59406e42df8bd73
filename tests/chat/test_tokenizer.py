"""Tokenizer: the format's rules on a small vocabulary and the shipped one; published ids where possible."""

import base64
import os
import pickle
from pathlib import Path

import numpy as np
import pytest
import regex
from hypothesis import given, settings
from hypothesis import strategies as st

import moe28t_jax.chat.tokenizer as tokenizer_module
from moe28t_jax.chat import StreamDecoder, Tokenizer
from moe28t_jax.chat.tokenizer import (
    MAX_PIECE_CHARACTERS,
    MAX_RUN_CHARACTERS,
    PRETOKENIZER_PATTERN,
    cut_text,
    read_vocabulary,
    special_tokens,
)

SINGLE_BYTES = [bytes([value]) for value in range(256)]
MERGES = [b"th", b"the", b" the", b"aa", b"aaaa", b"\xe4\xbd", b"\xe4\xbd\xa0", b"<|"]
NANO_VOCABULARY = Path(tokenizer_module.__file__).parents[1] / "nano" / "tiktoken.model"


def make_tokenizer(merges: list[bytes]) -> Tokenizer:
    return Tokenizer({token: rank for rank, token in enumerate([*SINGLE_BYTES, *merges])})


def write_lines(path: Path, lines: list[bytes]) -> Path:
    path.write_bytes(b"".join(line + b"\n" for line in lines))
    return path


def vocabulary_lines(tokens: list[bytes]) -> list[bytes]:
    return [base64.b64encode(token) + b" %d" % rank for rank, token in enumerate(tokens)]


SMALL = make_tokenizer(MERGES)
NANO = Tokenizer.from_file(NANO_VOCABULARY)
BOTH = pytest.mark.parametrize("tokenizer", [SMALL, NANO], ids=["small", "nano"])


# Special tokens


def test_special_ids_of_the_published_size():
    specials = special_tokens(163_584)
    assert len(specials) == 256
    assert sorted(specials.values()) == list(range(163_584, 163_840))
    named = {
        name: token_id for name, token_id in specials.items() if not name.startswith("<|reserved_token_")
    }
    assert named == {
        "[BOS]": 163584,
        "[EOS]": 163585,
        "<|end_of_msg|>": 163586,
        "<|open|>": 163587,
        "<|close|>": 163588,
        "<|sep|>": 163589,
        "[start_header_id]": 163590,
        "[end_header_id]": 163591,
        "[EOT]": 163593,
        "<|media_begin|>": 163602,
        "<|media_content|>": 163603,
        "<|media_end|>": 163604,
        "<|media_pad|>": 163605,
        "<osagent_mode>": 163649,
        "[UNK]": 163838,
        "[PAD]": 163839,
    }
    assert specials["<|reserved_token_163592|>"] == 163592
    assert specials["<|reserved_token_163837|>"] == 163837


def test_named_ids():
    base = 256 + len(MERGES)
    assert SMALL.vocab_size == base + 256
    assert (SMALL.bos_id, SMALL.eos_id, SMALL.stop_id) == (base, base + 1, base + 2)
    assert (SMALL.media_pad_id, SMALL.pad_id) == (base + 21, base + 255)
    assert SMALL.special_ids["<|end_of_msg|>"] == SMALL.stop_id
    assert [SMALL.is_special(token_id) for token_id in (base - 1, base)] == [False, True]


@BOTH
def test_every_special_name_is_its_id_only_where_allowed(tokenizer: Tokenizer):
    for name, token_id in tokenizer.special_ids.items():
        assert tokenizer.encode(name, allowed_special=True) == [token_id]
        assert max(tokenizer.encode(name)) < tokenizer.base_count
        assert tokenizer.decode([token_id]) == name
        assert tokenizer.token_bytes(token_id) == name.encode()


@BOTH
def test_markers_in_text_stay_text(tokenizer: Tokenizer):
    text = "literal <|open|> and <|end_of_msg|> and [BOS] here"
    plain = tokenizer.encode(text)
    assert max(plain) < tokenizer.base_count
    assert tokenizer.decode(plain) == text
    marked = tokenizer.encode(text, allowed_special=True)
    specials = tokenizer.special_ids
    assert [i for i in marked if i >= tokenizer.base_count] == [
        specials["<|open|>"],
        specials["<|end_of_msg|>"],
        specials["[BOS]"],
    ]
    assert tokenizer.decode(marked) == text
    assert tokenizer.decode(marked, skip_special=True) == "literal  and  and  here"


def test_placeholder_of_an_image_is_no_token():
    assert max(NANO.encode("<|kimi_image_placeholder|>", allowed_special=True)) < NANO.base_count


# Encoding


def test_ids_of_the_small_vocabulary():
    names = {token: 256 + index for index, token in enumerate(MERGES)}
    assert SMALL.encode("the the") == [names[b"the"], names[b" the"]]
    assert SMALL.encode("aaaaaaa") == [names[b"aaaa"], names[b"aa"], ord("a")]
    assert SMALL.encode("\u4f60") == [names[b"\xe4\xbd\xa0"]]
    assert SMALL.encode("") == []
    # No [BOS], and a merge never crosses the word boundary between "x" and " the".
    assert SMALL.encode("x the") == [ord("x"), names[b" the"]]


@pytest.mark.parametrize(
    "words",
    [
        ["\u4f60\u597d", "\uff0c", "\u4e16\u754c", "\uff01", "Kimi"],  # Han, punctuation, Han
        ["\u30ab\u30ca", "\u6f22\u5b57"],  # letters without case stop before Han: the class intersection
        ["abc", "\u6f22", "def"],
        ["I've", " HELLOworld", " Don'T", " we'LL", "get", "HTTP", "ing"],
        ["e\u0301x"],  # a combining mark is part of its word
        ["123", "45", "x", "678", "9"],
        ["a", "  ", " b"],
        ["x", "\n\n", "  ", " y"],
        ["foo", "();\r\n\n", "bar", " ==", " baz", ".qux"],
        ["a", " \t\n", "\t", "\tif"],
        ["a", "   "],
        ["\u2163", "X"],  # a letter-like number is a number
    ],
    ids=ascii,
)
def test_pretokenizer_words(words: list[str]):
    # With every prefix of each word and of the whole text as a token, only a word boundary can stop a merge.
    data = [word.encode() for word in words]
    chains = [[word[:size] for size in range(2, len(word) + 1)] for word in data]
    whole = b"".join(data)
    chains.append([whole[:size] for size in range(2, len(whole) + 1)])
    merges = list(dict.fromkeys(token for chain in chains for token in chain))
    tokenizer = make_tokenizer(merges)
    assert [tokenizer.token_bytes(i).decode() for i in tokenizer.encode("".join(words))] == words


@BOTH
@settings(max_examples=300)
@given(text=st.text(max_size=200))
def test_decode_inverts_encode(tokenizer: Tokenizer, text: str):
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode_bytes(ids) == text.encode()
    assert tokenizer.decode(tokenizer.encode(text, allowed_special=True)) == text


@settings(max_examples=100)
@given(
    pieces=st.lists(
        st.tuples(st.sampled_from(["the", "", " x", "<|open|>", "a<|sep|>b", "\u4f60"]), st.booleans())
    )
)
def test_pieces_are_encoded_one_by_one(pieces: list[tuple[str, bool]]):
    assert SMALL.encode_pieces(pieces) == [i for text, special in pieces for i in SMALL.encode(text, special)]


def test_pieces_do_not_merge_and_user_markers_stay_text():
    assert SMALL.encode_pieces([("t", False), ("he", False)]) == [ord("t"), ord("h"), ord("e")]
    ids = SMALL.encode_pieces([("<|open|>", True), ("<|open|>", False)])
    assert ids[0] == SMALL.special_ids["<|open|>"]
    assert max(ids[1:]) < SMALL.base_count
    assert SMALL.decode(ids) == "<|open|><|open|>"


def test_surrogates():
    assert SMALL.decode(SMALL.encode("a\ud83d\ude00b")) == "a\U0001f600b"
    assert SMALL.decode(SMALL.encode("a\ud83db")) == "a\ufffdb"
    assert SMALL.decode(SMALL.encode("a\ud83db", allowed_special=True)) == "a\ufffdb"


def test_pickle_and_fingerprint():
    copy = pickle.loads(pickle.dumps(NANO))
    assert copy.encode("def f(x):") == NANO.encode("def f(x):")
    assert copy.fingerprint == NANO.fingerprint != SMALL.fingerprint


# Cuts


def cut_one_character_at_a_time(text: str) -> list[str]:
    pieces = []
    for start in range(0, len(text), MAX_PIECE_CHARACTERS):
        current, run, was_space = "", 0, None
        for character in text[start : start + MAX_PIECE_CHARACTERS]:
            is_space = character.isspace()
            run = run + 1 if is_space == was_space else 1
            was_space = is_space
            if run > MAX_RUN_CHARACTERS:
                pieces.append(current)
                current, run = "", 1
            current += character
        pieces.append(current)
    return pieces


RUN = MAX_RUN_CHARACTERS


@pytest.mark.parametrize(
    "runs",
    [
        [("a", RUN)],
        [("a", RUN + 1)],
        [(" ", 2 * RUN), ("a", 1)],
        [("a", 2 * RUN + 1), (" ", 3), ("\u4f60", RUN + 7), ("\n", RUN + 1), ("b", 5)],
        [("ab ", 10), ("\x1c\x85\u3000", RUN), ("\u200b", RUN + 1)],
        [("word ", 80_000), ("a", RUN + 2)],
        [("x ", 190_000), ("a", RUN + 10_000), (" ", 1)],
        [("a", MAX_PIECE_CHARACTERS + 1)],
    ],
    ids=str,
)
def test_cuts(runs: list[tuple[str, int]]):
    text = "".join(part * count for part, count in runs)
    pieces = list(cut_text(text))
    assert pieces == cut_one_character_at_a_time(text)
    assert "".join(pieces) == text


@settings(max_examples=8)
@given(
    runs=st.lists(
        st.tuples(
            st.sampled_from(["a", " ", "\n", "a ", "\u4f60"]),
            st.sampled_from([1, 2, RUN - 1, RUN, RUN + 1, 50_001]),
        ),
        max_size=4,
    )
)
def test_cuts_of_any_runs(runs: list[tuple[str, int]]):
    text = "".join(part * count for part, count in runs)
    assert list(cut_text(text)) == cut_one_character_at_a_time(text)


def test_cuts_change_merges():
    pair = 256 + MERGES.index(b"aa")
    four = 256 + MERGES.index(b"aaaa")
    # 25,000 and 400,000 are multiples of 4: the token that would straddle the cut is two tokens instead.
    assert SMALL.encode("x" + "a" * RUN) == [ord("x"), *[four] * (RUN // 4 - 1), pair, ord("a"), ord("a")]
    filler = "x " * (MAX_PIECE_CHARACTERS // 2 - 1)
    assert SMALL.encode(filler + "yaa")[-3:] == [ord("y"), ord("a"), ord("a")]
    assert SMALL.encode(filler + "aa")[-2:] == [ord(" "), pair]


def test_a_marker_across_a_cut_is_text():
    filler = "x " * (MAX_PIECE_CHARACTERS // 2 - 2)
    inside = SMALL.encode("<|open|>" + filler, allowed_special=True)
    across = SMALL.encode(filler + "<|open|>", allowed_special=True)
    assert inside[0] == SMALL.special_ids["<|open|>"]
    assert max(across) < SMALL.base_count
    assert SMALL.decode(across) == filler + "<|open|>"


@pytest.mark.parametrize("text", [" ", "a", "\n", "\u4f60", "!", "a1", " \n", "'"], ids=ascii)
def test_long_monotonous_text(text: str):
    long = text * (130_000 // len(text))
    assert NANO.decode(NANO.encode(long)) == long


# Decoding


@BOTH
@settings(max_examples=200)
@given(data=st.data(), skip_special=st.booleans())
def test_stream_equals_decode(tokenizer: Tokenizer, data: st.DataObject, skip_special: bool):
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=40))
    decoder = tokenizer.stream_decoder(skip_special)
    parts = [decoder.push(token_id) for token_id in ids]
    assert "".join(parts) + decoder.flush() == tokenizer.decode(ids, skip_special)
    assert decoder.flush() == ""


def test_stream_holds_back_unfinished_characters():
    decoder = StreamDecoder(SMALL)
    assert [decoder.push(byte) for byte in "\U0001f600".encode()] == ["", "", "", "\U0001f600"]
    assert decoder.push(0xF0) == ""
    assert decoder.flush() == "\ufffd"
    assert decoder.push(ord("a")) == "a"


def test_decode_replaces_what_is_not_utf8():
    assert SMALL.decode([0xFF, ord("a"), 0xE4]) == "\ufffda\ufffd"
    assert SMALL.decode_bytes([0xFF, ord("a"), 0xE4]) == b"\xffa\xe4"


def test_decode_takes_numpy_integers():
    assert SMALL.decode(np.array(SMALL.encode("the the"), np.int32)) == "the the"


@pytest.mark.parametrize("token_id", [-1, SMALL.vocab_size, 10**9])
def test_ids_outside_the_vocabulary(token_id: int):
    expected = f"Token id {token_id} is outside this vocabulary; expected 0 to {SMALL.vocab_size - 1}"
    for call in (
        lambda: SMALL.token_bytes(token_id),
        lambda: SMALL.is_special(token_id),
        lambda: SMALL.decode([0, token_id]),
        lambda: SMALL.decode([token_id], skip_special=True),
        lambda: SMALL.stream_decoder().push(token_id),
    ):
        with pytest.raises(ValueError, match=expected):
            call()


# Vocabulary files


def test_file_round_trip_in_any_order_of_lines(tmp_path: Path):
    lines = vocabulary_lines([*SINGLE_BYTES, *MERGES])
    tokenizer = Tokenizer.from_file(write_lines(tmp_path / "a.model", [*reversed(lines), b""]))
    assert tokenizer.encode("the the") == SMALL.encode("the the")
    assert tokenizer.fingerprint == SMALL.fingerprint


def test_missing_file(tmp_path: Path):
    with pytest.raises(FileNotFoundError, match=r"none\.model.*is not a file"):
        Tokenizer.from_file(tmp_path / "none.model")
    with pytest.raises(FileNotFoundError, match="is not a file"):
        Tokenizer.from_file(tmp_path)


GOOD = vocabulary_lines(SINGLE_BYTES)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([*GOOD, b"dGg="], r"line 257: b'dGg=' has 1 field\(s\)"),
        ([*GOOD, b"dGg= 256 1"], r"line 257: .* has 3 field\(s\)"),
        ([*GOOD, b"dG 256"], "line 257: b'dG' is not base64"),
        ([*GOOD, b"d!Gg= 256"], "line 257: b'd!Gg=' is not base64"),
        ([*GOOD, b"==== 256"], "line 257: (the token is empty|b'====' is not base64)"),
        ([*GOOD, b"dGg= -1"], "line 257: rank b'-1' is not a whole number"),
        ([*GOOD, b"dGg= x"], "line 257: rank b'x' is not a whole number"),
        ([*GOOD, b"dGg= 3"], "line 257: rank 3 is already taken by the token of line 4"),
        ([*GOOD, b"AA== 256"], r"line 257: token b'\\x00' is already on line 1"),
        ([*GOOD, b"dGg= 257"], "rank 256 is missing"),
        (vocabulary_lines([*SINGLE_BYTES[:-1], b"th"]), "the single byte 0xff has no token"),
        ([b""], "holds no tokens"),
        ([b"\x08\x00\x12\x34"], r"line 1: .* has 1 field\(s\)"),
    ],
)
def test_damaged_files(tmp_path: Path, lines: list[bytes], message: str):
    with pytest.raises(ValueError, match=message) as caught:
        read_vocabulary(write_lines(tmp_path / "bad.model", lines))
    assert "bad.model" in str(caught.value)


def test_shipped_vocabulary():
    assert NANO.vocab_size == 4_096
    assert NANO.base_count == 3_840
    source = "    def encode(self, text: str) -> list[int]:\n        return self.ids\n"
    assert NANO.decode(NANO.encode(source)) == source
    assert len(NANO.encode(source)) < len(source) / 2
    # Every merged token is its own encoding, unless alone it is no longer one piece of the pre-tokenizer.
    pieces = regex.compile(PRETOKENIZER_PATTERN, regex.VERSION1)
    merged = {i: NANO.token_bytes(i) for i in range(256, NANO.base_count)}
    texts = {
        i: token.decode() for i, token in merged.items() if "\ufffd" not in token.decode(errors="replace")
    }
    whole = {i: text for i, text in texts.items() if [m[0] for m in pieces.finditer(text)] == [text]}
    assert len(whole) > 0.95 * len(texts)
    assert [i for i, text in whole.items() if NANO.encode(text) != [i]] == []


# The published vocabulary


@pytest.fixture(scope="module")
def published() -> Tokenizer:
    path = os.environ.get("MOE28T_TIKTOKEN_MODEL")
    if not path:
        pytest.skip(
            "set MOE28T_TIKTOKEN_MODEL to the tiktoken.model of a Kimi K3 checkpoint to run this test"
        )
    return Tokenizer.from_file(path)


def split_ids(text: str) -> list[int]:
    return [int(token_id) for token_id in text.split()]


def test_published_text(published: Tokenizer):
    assert published.vocab_size == 163_840
    fox = "The quick brown fox jumps over the lazy dog."
    assert published.encode(fox) == split_ids("1008 5072 16331 69275 60062 1312 276 29292 7751 13")
    chinese = "\u4f60\u597d\uff0c\u4e16\u754c\uff01\u6211\u662f Kimi K3\u3002"
    assert published.encode(chinese) == split_ids("33845 378 2243 856 7808 24980 72 1040 18 292")
    literal = "literal <|open|> and <|end_of_msg|> and [BOS] here"
    assert published.encode(literal) == split_ids(
        "82319 22652 4454 91 29 316 22652 517 5118 14222 91 29 316 793 33 4110 60 2397"
    )
    assert published.encode(literal, allowed_special=True) == split_ids(
        "82319 220 163587 316 220 163586 316 220 163584 2397"
    )


def opening(tag: str, **attributes: str) -> list[tuple[str, bool]]:
    pieces = [("<|open|>", True), (tag, False)]
    for key, value in attributes.items():
        pieces += [(f" {key}", False), ('="', False), (value, False), ('"', False)]
    return [*pieces, ("<|sep|>", True)]


def closing(tag: str) -> list[tuple[str, bool]]:
    return [("<|close|>", True), (tag, False), ("<|sep|>", True)]


def test_published_chat(published: Tokenizer):
    user = [
        *opening("message", role="user"),
        ("What is 2 + 2?", False),
        *closing("message"),
        ("<|end_of_msg|>", True),
        *opening("message", role="assistant"),
        *opening("think"),
    ]
    assert published.encode_pieces(user) == split_ids(
        "163587 2778 6244 878 2482 1 163589 5376 387 220 17 715 220 17 30 163588 2778 163589 163586 "
        "163587 2778 6244 878 69702 1 163589 163587 39964 163589"
    )
    before = (
        "163587 2778 6244 878 14062 1 1798 878 130400 59991 470 1 163589 63 130400 123074 470 63 28560 418 "
        "1632 2455 308 2704 306 651 9545 8491 347 2976 3411 276 4503 8491 904 9141 4661 3867 1268 1332 5713 "
        "1268 50004 5713 1268 19421 5713 316 1268 5354 16518 10048 276 2403 387 42070 472 1268 130400 "
        "123074 470 "
    )
    for effort, ids in (("max", "105281"), ("low", "28 1332")):
        text = (
            "`thinking_effort` guides on how much to think in your thinking channel (not including "
            "the response channel), supported values include `low`, `medium`, `high`, and `max`.\n"
            f"Now the system is invoked with `thinking_effort={effort}`."
        )
        message = [
            *opening("message", role="system", type="thinking-effort"),
            (text, False),
            *closing("message"),
            ("<|end_of_msg|>", True),
        ]
        assert published.encode_pieces(message) == split_ids(f"{before}{ids} 11369 163588 2778 163589 163586")


def test_published_names(published: Tokenizer):
    names = [
        "message",
        " role",
        '="',
        '"',
        "user",
        "system",
        "assistant",
        "tool",
        "think",
        "response",
        "tools",
        "call",
    ]
    names += ["argument", " tool", " index", " key", " type"]
    ids = split_ids(
        "2778 6244 878 1 2482 14062 69702 20960 39964 12092 25385 10257 47185 4453 4002 2355 1798"
    )
    assert published.encode_pieces([(name, False) for name in names]) == ids


@pytest.mark.parametrize("count", [1_924, 1_925, 16_817])
def test_pads_of_a_large_image_are_never_cut(count):
    ids = SMALL.encode(
        f"<|media_begin|>image 9x9<|media_content|>{'<|media_pad|>' * count}<|media_end|>", True
    )
    assert ids.count(SMALL.media_pad_id) == count
    assert ids[-count - 1 : -1] == [SMALL.media_pad_id] * count
    assert len(ids) - count == len(
        SMALL.encode("<|media_begin|>image 9x9<|media_content|><|media_end|>", True)
    )


def test_cutting_takes_linear_time():
    """Runs just below the limit, where a search that starts anew at every character takes minutes."""
    text = ("a" * MAX_RUN_CHARACTERS + " ") * 200
    assert "".join(cut_text(text)) == text
