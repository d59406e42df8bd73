"""Corpus and vocabulary of the small trained model: the split, exact merges, kept ids."""

import gzip
import hashlib
import random
from collections import Counter
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe28t_jax.chat import Tokenizer
from moe28t_jax.training.nano import vocabulary
from moe28t_jax.training.nano.corpus import Corpus, Document, gzip_bits_per_byte, is_held_out, load_corpus
from moe28t_jax.training.nano.vocabulary import (
    count_words,
    encode_corpus,
    train_vocabulary,
    write_vocabulary,
)


def make_document(name: str, text: str) -> Document:
    return Document(name, text, hashlib.sha256(text.encode()).hexdigest())


@pytest.fixture(scope="module")
def library() -> Corpus:
    return load_corpus()


@pytest.fixture
def root(tmp_path: Path) -> Path:
    files = {
        "b.py": b"x = 1\n",
        "a/copy.py": b"x = 1\n",
        "a/mod.py": "# caf\u00e9\r\n".encode(),
        "a/latin.py": b"# caf\xe9\n",
        "empty.py": b"",
        "notes.txt": b"text\n",
        "site-packages/other.py": b"y = 2\n",
        "encodings/cp0.py": b"z = 3\n",
        "_sysconfigdata__linux_.py": b"build_time_vars = {}\n",
        "table.py": b"t = {\n" + b"    0x80: 'name',  # comment\n" * 500 + b"}\n",
        "code.py": b"def f(value):\n    return value\n" * 500,
        "pydoc_data/topics.py": b"topics = {'assert': 'The \"assert\" statement',\n 'bool': 'Booleans'}\n",
    }
    for name, data in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return tmp_path


# Corpus


def test_documents_of_a_folder(root: Path):
    corpus = load_corpus(root)
    documents = sorted(corpus.train + corpus.heldout, key=lambda document: document.name)
    assert {document.name: document.text[:22] for document in documents} == {
        "a/copy.py": "x = 1\n",
        "a/mod.py": "# caf\u00e9\r\n",
        "code.py": "def f(value):\n    retu",
        "pydoc_data/topics/assert": 'The "assert" statement',
        "pydoc_data/topics/bool": "Booleans",
    }
    hashes = sorted(hashlib.sha256(document.text.encode()).hexdigest() for document in documents)
    assert hashes == sorted(document.sha256 for document in documents)
    assert (
        corpus.data_hash == hashlib.sha256("".join(f"{digest}\n" for digest in hashes).encode()).hexdigest()
    )


def test_data_hash_follows_content_alone(root: Path):
    before = load_corpus(root).data_hash
    (root / "code.py").rename(root / "renamed.py")
    assert load_corpus(root).data_hash == before
    (root / "renamed.py").write_text("pass\n")
    assert load_corpus(root).data_hash != before


def test_an_empty_folder(tmp_path: Path):
    with pytest.raises(ValueError, match="holds no Python source"):
        load_corpus(tmp_path)


def test_split_of_the_standard_library(library: Corpus):
    train = {document.sha256 for document in library.train}
    heldout = {document.sha256 for document in library.heldout}
    assert len(train) == len(library.train)
    assert len(heldout) == len(library.heldout)
    assert not train & heldout
    assert all(is_held_out(digest) for digest in heldout)
    assert not any(is_held_out(digest) for digest in train)
    for documents in (library.train, library.heldout):
        names = [document.name for document in documents]
        assert names == sorted(names)
        assert not any(Path(name).is_absolute() or "site-packages" in name for name in names)
    # A fifth of the documents, within five standard deviations of a binomial count.
    count = len(train) + len(heldout)
    assert abs(len(heldout) - count / 5) < 5 * (count * 0.16) ** 0.5
    assert load_corpus().data_hash == library.data_hash


def test_split_is_by_the_hash():
    assert is_held_out(f"{20:064x}")
    assert not is_held_out(f"{21:064x}")


def test_gzip_bits_per_byte():
    assert gzip_bits_per_byte("a" * 8_000) == 8 * len(gzip.compress(b"a" * 8_000, 9)) / 8_000 < 0.1
    noise = "".join(random.Random(0).choices("01", k=100_000))
    assert 1.0 < gzip_bits_per_byte(noise) < 1.4
    # Bytes of UTF-8 are counted, not characters.
    assert gzip_bits_per_byte("\u4f60") == 8 * len(gzip.compress("\u4f60".encode(), 9)) / 3
    with pytest.raises(ValueError, match="empty"):
        gzip_bits_per_byte("")


# Vocabulary


def recount(words: Counter[bytes], ranks: dict[bytes, int]) -> Counter[bytes]:
    """Joined neighbours over all words, each word segmented from its single bytes."""
    pairs: Counter[bytes] = Counter()
    for word, count in words.items():
        parts = [word[i : i + 1] for i in range(len(word))]
        while True:
            candidates = [
                (ranks[left + right], i)
                for i, (left, right) in enumerate(pairwise(parts))
                if left + right in ranks
            ]
            if not candidates:
                break
            _, i = min(candidates)
            parts[i : i + 2] = [parts[i] + parts[i + 1]]
        for left, right in pairwise(parts):
            pairs[left + right] += count
    return pairs


@settings(max_examples=60)
@given(
    words=st.dictionaries(st.text("abc", min_size=1, max_size=9), st.integers(1, 9), min_size=1, max_size=12),
    merges=st.integers(1, 12),
)
def test_each_merge_is_the_most_frequent_pair(words: dict[str, int], merges: int):
    counts = Counter({word.encode(): count for word, count in words.items()})
    expected = {bytes([value]): value for value in range(256)}
    for _ in range(merges):
        pairs = recount(counts, expected)
        if not pairs:
            with pytest.raises(ValueError, match=f"for {len(expected)} tokens only"):
                train_vocabulary(counts, 256 + merges)
            return
        best = min(pairs, key=lambda pair: (-pairs[pair], pair))
        expected[best] = len(expected)
    assert train_vocabulary(counts, 256 + merges) == expected


def test_training_counts_what_encoding_produces():
    text = Path(vocabulary.__file__).read_text(encoding="utf-8")
    words = count_words([text])
    assert sum(len(word) * count for word, count in words.items()) == len(text.encode())
    ranks = train_vocabulary(words, 500)
    tokenizer = Tokenizer(ranks)
    for word in words:
        parts = [word[i : i + 1] for i in range(len(word))]
        assert vocabulary._segment(parts, ranks) == [
            tokenizer.token_bytes(token_id) for token_id in tokenizer.encode(word.decode())
        ]


def test_words_are_those_of_the_tokenizer():
    # Every word is a token of its own, so the two regular expression engines must agree on every boundary.
    text = (
        "def caf\u00e9(x):\n\treturn x == 12345  # \u4f60\u597d\u30ab\u30ca, DON'T  \r\n\n"
        "  I'll e\u0301 \U0001f600\n   "
    )
    words = count_words([text])
    prefixes = {word[:size] for word in words for size in range(2, len(word) + 1)}
    joined = sorted(prefixes, key=lambda token: (len(token), token))
    tokenizer = Tokenizer(
        {token: rank for rank, token in enumerate([*(bytes([b]) for b in range(256)), *joined])}
    )
    encoded = Counter(tokenizer.token_bytes(token_id) for token_id in tokenizer.encode(text))
    assert encoded == words


def test_too_few_tokens_asked_for():
    with pytest.raises(ValueError, match="base_count is 255"):
        train_vocabulary(Counter({b"ab": 1}), 255)


def test_command(root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    output = tmp_path / "out" / "tiktoken.model"
    vocabulary.main(["--root", str(root), "--output", str(output), "--tokens", "262"])
    assert Tokenizer.from_file(output).base_count == 262
    printed = capsys.readouterr().out
    assert load_corpus(root).data_hash in printed
    assert "262 ordinary tokens, 518 in all" in printed
    assert [path.name for path in output.parent.iterdir()] == ["tiktoken.model"]
    with pytest.raises(SystemExit):
        vocabulary.main(["--root", str(root / "a" / "none"), "--output", str(output)])
    assert "holds no Python source" in capsys.readouterr().err


def test_written_vocabulary_reads_back(tmp_path: Path):
    ranks = train_vocabulary(Counter({b"abab": 2, b"\xff\x00": 1}), 258)
    write_vocabulary(ranks, tmp_path / "v.model")
    assert Tokenizer.from_file(tmp_path / "v.model").fingerprint == Tokenizer(ranks).fingerprint


# Ids of a corpus

DOCUMENTS = [make_document("a", "aab [BOS]"), make_document("b", "\u4f60 b")]
TOKENIZER = Tokenizer({**{bytes([value]): value for value in range(256)}, b"aa": 256})


def test_encoded_corpus():
    tokens = encode_corpus(TOKENIZER, DOCUMENTS)
    assert tokens.dtype == np.uint16
    bos = TOKENIZER.bos_id
    assert tokens.tolist() == [bos, 256, *b"b [BOS]", bos, *"\u4f60 b".encode()]
    assert encode_corpus(TOKENIZER, []).tolist() == []


def test_kept_ids(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = tmp_path / "kept"
    first = encode_corpus(TOKENIZER, DOCUMENTS, folder)
    (path,) = folder.iterdir()
    with monkeypatch.context() as patch:
        patch.setattr(Tokenizer, "encode", lambda *arguments: pytest.fail("encoded again"))
        np.testing.assert_array_equal(encode_corpus(TOKENIZER, DOCUMENTS, folder), first)
    # Another order, other documents, another vocabulary: each has ids of its own.
    other = Tokenizer({**{bytes([value]): value for value in range(256)}, b"ab": 256})
    for tokenizer, documents in (
        (TOKENIZER, DOCUMENTS[::-1]),
        (TOKENIZER, DOCUMENTS[:1]),
        (other, DOCUMENTS),
    ):
        expected = encode_corpus(tokenizer, documents)
        np.testing.assert_array_equal(encode_corpus(tokenizer, documents, folder), expected)
    assert len(list(folder.iterdir())) == 4
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(ValueError, match=r"is damaged .*delete it"):
        encode_corpus(TOKENIZER, DOCUMENTS, folder)
    np.save(path, first.astype(np.int64))
    with pytest.raises(ValueError, match="expected one row of uint16"):
        encode_corpus(TOKENIZER, DOCUMENTS, folder)


def test_vocabulary_over_16_bits():
    tokens = [bytes([value]) for value in range(256)]
    tokens += [bytes([a, b]) for a in range(256) for b in range(256)]
    large = Tokenizer({token: rank for rank, token in enumerate(tokens)})
    with pytest.raises(ValueError, match=f"has {65_536 + 512} tokens"):
        encode_corpus(large, DOCUMENTS)
