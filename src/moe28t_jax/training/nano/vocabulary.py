"""Vocabulary of the small trained model: a byte-level BPE in tiktoken format, trained on its corpus.

``python -m moe28t_jax.training.nano.vocabulary --output tiktoken.model`` trains and writes it.

tiktoken knows a token by its bytes and its rank, not by the pair it was merged from, and applies the lowest
rank first wherever two neighbours join to a known token. Training follows the same rule exactly: it counts a
pair by its joined bytes, so that the segmentation it counts is the one that encoding produces.
"""

import argparse
import base64
import hashlib
import heapq
import io
import os
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import regex
from jaxtyping import UInt16
from rich.console import Console
from rich.progress import track

from moe28t_jax.chat.tokenizer import PRETOKENIZER_PATTERN, Tokenizer, cut_text
from moe28t_jax.training.nano.corpus import Document, load_corpus

BASE_COUNT = 3_840


def count_words(texts: Iterable[str]) -> Counter[bytes]:
    """How often each word of the pre-tokenizer occurs in the texts, as UTF-8 bytes."""
    # V1 gives the class intersection of the Rust engine that encodes.
    pattern = regex.compile(PRETOKENIZER_PATTERN, regex.V1)
    words: Counter[str] = Counter()
    for text in texts:
        for piece in cut_text(text):
            words.update(pattern.findall(piece))
    return Counter({word.encode(): count for word, count in words.items()})


def train_vocabulary(
    words: Counter[bytes], base_count: int = BASE_COUNT, console: Console | None = None
) -> dict[bytes, int]:
    """Train byte-level BPE on word counts: token bytes to rank, the 256 single bytes first.

    Each step adds the joined pair with the highest count over all words, of equals the one whose bytes sort
    first, so the result depends on the counts alone. Progress is shown when a console is given. Raises
    ValueError when ``base_count`` is under 256 or the words run out of pairs.
    """
    if base_count < 256:
        raise ValueError(
            f"base_count is {base_count}; expected at least 256, one for each byte: pass a larger number."
        )
    ranks = {bytes([value]): value for value in range(256)}
    segmentations: list[list[bytes]] = []
    counts: list[int] = []
    pair_counts: defaultdict[bytes, int] = defaultdict(int)
    pair_words: defaultdict[bytes, set[int]] = defaultdict(set)
    for word, count in sorted(words.items()):
        segmentation = [bytes([value]) for value in word]
        for left, right in pairwise(segmentation):
            pair_counts[left + right] += count
            pair_words[left + right].add(len(segmentations))
        segmentations.append(segmentation)
        counts.append(count)
    # Entries go stale when a count changes; a stale one is recognised by its count and dropped.
    heap = [(-count, pair) for pair, count in pair_counts.items()]
    heapq.heapify(heap)
    steps = range(base_count - 256)
    for _ in steps if console is None else track(steps, "Merging pairs", console=console):
        token = _most_frequent(heap, pair_counts)
        if token is None:
            raise ValueError(
                f"The corpus has pairs for {len(ranks)} tokens only; {base_count} were asked for: "
                "give more text or ask for fewer tokens."
            )
        ranks[token] = len(ranks)
        changed: set[bytes] = set()
        for index in pair_words.pop(token):
            before = segmentations[index]
            after = _segment(before, ranks)
            segmentations[index] = after
            pairs_before = Counter(left + right for left, right in pairwise(before))
            pairs_after = Counter(left + right for left, right in pairwise(after))
            for pair in pairs_before.keys() | pairs_after.keys():
                difference = pairs_after[pair] - pairs_before[pair]
                if difference:
                    pair_counts[pair] += difference * counts[index]
                    changed.add(pair)
                    if pair not in pairs_before:
                        pair_words[pair].add(index)
                    elif pair not in pairs_after and pair != token:
                        pair_words[pair].discard(index)
        del pair_counts[token]
        changed.discard(token)
        for pair in changed:
            heapq.heappush(heap, (-pair_counts[pair], pair))
    return ranks


def _most_frequent(heap: list[tuple[int, bytes]], pair_counts: dict[bytes, int]) -> bytes | None:
    while heap:
        negative_count, pair = heapq.heappop(heap)
        if negative_count < 0 and pair_counts.get(pair) == -negative_count:
            return pair
    return None


def _segment(parts: Sequence[bytes], ranks: dict[bytes, int]) -> list[bytes]:
    """Join neighbours, the lowest rank first and of equals the leftmost, until no two join to a token."""
    parts = list(parts)
    while True:
        joined = [
            (ranks[parts[i] + parts[i + 1]], i)
            for i in range(len(parts) - 1)
            if parts[i] + parts[i + 1] in ranks
        ]
        if not joined:
            return parts
        _, i = min(joined)
        parts[i : i + 2] = [parts[i] + parts[i + 1]]


def write_vocabulary(ranks: dict[bytes, int], path: str | os.PathLike[str]) -> None:
    """Write a tiktoken vocabulary file, beside its place first and then renamed."""
    lines = [
        base64.b64encode(token) + b" %d\n" % rank
        for token, rank in sorted(ranks.items(), key=lambda item: item[1])
    ]
    _write_atomically(Path(path), b"".join(lines))


def _write_atomically(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        beside.write_bytes(data)
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)


def encode_corpus(
    tokenizer: Tokenizer, documents: Sequence[Document], folder: str | os.PathLike[str] | None = None
) -> UInt16[np.ndarray, "tokens"]:
    """Token ids of all documents in the given order, each document preceded by [BOS].

    With a folder, the array is kept there as ``tokens-HASH.npy``, where the hash covers the vocabulary and
    the documents in order, and read from there the next time. Raises ValueError when the vocabulary does not
    fit 16 bits or a kept file is damaged.
    """
    if tokenizer.vocab_size > 2**16:
        raise ValueError(
            f"The vocabulary has {tokenizer.vocab_size} tokens; encode_corpus stores ids in 16 bits and "
            f"takes at most {2**16}: use a smaller vocabulary."
        )
    path = None
    if folder is not None:
        key = hashlib.sha256(
            "\n".join([tokenizer.fingerprint, *(d.sha256 for d in documents)]).encode()
        ).hexdigest()
        path = Path(folder) / f"tokens-{key[:32]}.npy"
        if path.exists():
            return _read_tokens(path)
    ids: list[np.ndarray] = [np.zeros(0, np.uint16)]
    for document in documents:
        ids.append(np.array([tokenizer.bos_id, *tokenizer.encode(document.text)], np.uint16))
    tokens = np.concatenate(ids)
    if path is not None:
        buffer = io.BytesIO()
        np.save(buffer, tokens)
        _write_atomically(path, buffer.getvalue())
    return tokens


def _read_tokens(path: Path) -> np.ndarray:
    try:
        tokens = np.load(path, allow_pickle=False)
    except (ValueError, EOFError, OSError) as error:
        raise ValueError(
            f"{str(path)!r} is damaged ({error}); delete it to have the corpus encoded again."
        ) from error
    if tokens.dtype != np.uint16 or tokens.ndim != 1:
        raise ValueError(
            f"{str(path)!r} holds {tokens.dtype} of shape {tokens.shape}; expected one row of uint16: "
            "delete it to have the corpus encoded again."
        )
    return tokens


def bytes_per_token(tokenizer: Tokenizer, documents: Sequence[Document]) -> float:
    """UTF-8 bytes of the documents' texts per token of them, [BOS] not counted."""
    text_bytes = sum(len(document.text.encode()) for document in documents)
    return text_bytes / sum(len(tokenizer.encode(document.text)) for document in documents)


def main(arguments: Sequence[str] | None = None) -> None:
    """Train the vocabulary on the train split and write it; ``arguments`` default to the command line's."""
    parser = argparse.ArgumentParser(
        description="Train the vocabulary of the small model on the standard library."
    )
    parser.add_argument("--output", required=True, help="the vocabulary file to write")
    parser.add_argument("--root", help="root of the Python sources (default: this Python's standard library)")
    parser.add_argument(
        "--tokens", type=int, default=BASE_COUNT, help="ordinary tokens (default: %(default)s)"
    )
    options = parser.parse_args(arguments)
    console = Console(stderr=True)
    try:
        corpus = load_corpus(options.root)
        words = count_words(track([d.text for d in corpus.train], "Counting words", console=console))
        ranks = train_vocabulary(words, options.tokens, console)
    except ValueError as error:
        parser.error(str(error))
    write_vocabulary(ranks, options.output)
    tokenizer = Tokenizer.from_file(options.output)
    print(f"data hash {corpus.data_hash}")
    print(f"{tokenizer.base_count} ordinary tokens, {tokenizer.vocab_size} in all")
    for name, documents in (("train", corpus.train), ("held out", corpus.heldout)):
        if documents:
            ratio = bytes_per_token(tokenizer, documents)
            print(f"{name}: {len(documents)} documents, {ratio:.3f} bytes per token")


if __name__ == "__main__":
    main()
