"""Byte-level BPE tokenizer over a tiktoken vocabulary file, as the Kimi K3 family publishes it.

A vocabulary file holds one line ``base64(token bytes) rank`` per ordinary token. The 256 special tokens are
not in the file: they follow the ordinary ones, so a file of ``n`` lines gives ids ``0 .. n - 1`` for ordinary
text and ``n .. n + 255`` for specials (163,584 + 256 = 163,840 for Kimi K3).

Two properties are part of the format and easy to lose: text is cut into pieces before BPE (the cuts change
the merges), and no [BOS] is ever added. A model ends its turn with ``<|end_of_msg|>``, not with [EOS].
"""

import base64
import binascii
import codecs
import hashlib
import operator
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import SupportsIndex

import tiktoken

SPECIAL_COUNT = 256
SPECIAL_NAMES: Mapping[int, str] = {
    0: "[BOS]",
    1: "[EOS]",
    2: "<|end_of_msg|>",
    3: "<|open|>",
    4: "<|close|>",
    5: "<|sep|>",
    6: "[start_header_id]",
    7: "[end_header_id]",
    9: "[EOT]",
    18: "<|media_begin|>",
    19: "<|media_content|>",
    20: "<|media_end|>",
    21: "<|media_pad|>",
    65: "<osagent_mode>",
    254: "[UNK]",
    255: "[PAD]",
}
"""Names of the special tokens by their offset from the first one; every other offset is a reserved token."""

PRETOKENIZER_ALTERNATIVES = (
    r"[\p{Han}]+",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*"
    r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+"
    r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
    r"\p{N}{1,3}",
    r" ?[^\s\p{L}\p{N}]+[\r\n]*",
    r"\s*[\r\n]+",
    r"\s+(?!\S)",
    r"\s+",
)
PRETOKENIZER_PATTERN = "|".join(PRETOKENIZER_ALTERNATIVES)
"""The pre-tokenizer, in the dialect of Rust's regex engines (``&&`` intersects character classes)."""

MAX_PIECE_CHARACTERS = 400_000
MAX_RUN_CHARACTERS = 25_000

# A run is tried at its start only: tried anew from every character, a shorter one would take quadratic time.
_LONG_RUN = re.compile(rf"(?<!\s)\s{{{MAX_RUN_CHARACTERS + 1},}}|(?<!\S)\S{{{MAX_RUN_CHARACTERS + 1},}}")
_MEDIA_PAD = "<|media_pad|>"
_MEDIA_PADS = re.compile(f"((?:{re.escape(_MEDIA_PAD)})+)")


def cut_text(text: str) -> Iterator[str]:
    """Cut text into the pieces that are encoded independently of one another.

    First every 400,000 characters; then, inside each such piece, a run of more than 25,000 whitespace or more
    than 25,000 non-whitespace characters is cut after each 25,000 of its characters. Whitespace is what
    :meth:`str.isspace` says. Only these positions are cut: text before and after a long run stays joined to
    the nearest part of it. Joining the pieces gives the text back; an empty text has no pieces.
    """
    for piece_start in range(0, len(text), MAX_PIECE_CHARACTERS):
        piece = text[piece_start : piece_start + MAX_PIECE_CHARACTERS]
        start = 0
        for run in _LONG_RUN.finditer(piece):
            for cut in range(run.start() + MAX_RUN_CHARACTERS, run.end(), MAX_RUN_CHARACTERS):
                yield piece[start:cut]
                start = cut
        yield piece[start:]


def special_tokens(base_count: int) -> dict[str, int]:
    """Name to id of the 256 special tokens that follow ``base_count`` ordinary tokens, in order of id."""
    return {
        SPECIAL_NAMES.get(offset, f"<|reserved_token_{base_count + offset}|>"): base_count + offset
        for offset in range(SPECIAL_COUNT)
    }


def read_vocabulary(path: str | os.PathLike[str]) -> dict[bytes, int]:
    """Read a tiktoken vocabulary file: token bytes to rank, in order of rank.

    Raises FileNotFoundError for a missing file and ValueError for a malformed line, a repeated token or rank,
    a hole in the ranks, or a single byte without a token; the message names the file and, where there is one,
    the line.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(
            f"Tokenizer vocabulary {str(path)!r} is not a file; expected the tiktoken.model that belongs to "
            "the checkpoint: pass the path of that file."
        )
    tokens: dict[int, bytes] = {}
    line_of_token: dict[bytes, int] = {}
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        if not line:
            continue
        token, rank = _parse_line(line, f"{str(path)!r}, line {number}")
        if rank in tokens:
            raise ValueError(
                f"{str(path)!r}, line {number}: rank {rank} is already taken by the token of line "
                f"{line_of_token[tokens[rank]]}; ranks must be unique: fetch the vocabulary file again."
            )
        if token in line_of_token:
            raise ValueError(
                f"{str(path)!r}, line {number}: token {token!r} is already on line {line_of_token[token]}; "
                "tokens must be unique: fetch the vocabulary file again."
            )
        tokens[rank] = token
        line_of_token[token] = number
    if not tokens:
        raise ValueError(
            f"{str(path)!r} holds no tokens; expected lines of 'base64 rank': "
            "fetch the vocabulary file again."
        )
    for rank in range(len(tokens)):
        if rank not in tokens:
            raise ValueError(
                f"{str(path)!r}: rank {rank} is missing; its {len(tokens)} tokens must have the ranks 0 to "
                f"{len(tokens) - 1}: fetch the vocabulary file again."
            )
    for value in range(256):
        if bytes([value]) not in line_of_token:
            raise ValueError(
                f"{str(path)!r}: the single byte 0x{value:02x} has no token, so not every text could be "
                "encoded; use a vocabulary with all 256 bytes."
            )
    return {tokens[rank]: rank for rank in range(len(tokens))}


def _parse_line(line: bytes, where: str) -> tuple[bytes, int]:
    fields = line.split()
    if len(fields) != 2:
        raise ValueError(
            f"{where}: {line[:60]!r} has {len(fields)} field(s); expected 'base64 rank': "
            "check that this is a tiktoken vocabulary and fetch it again."
        )
    try:
        token = base64.b64decode(fields[0], validate=True)
    except binascii.Error as error:
        raise ValueError(
            f"{where}: {fields[0][:60]!r} is not base64 ({error}); expected 'base64 rank': "
            "check that this is a tiktoken vocabulary and fetch it again."
        ) from error
    if not token:
        raise ValueError(
            f"{where}: the token is empty; expected at least one byte: fetch the vocabulary file again."
        )
    if not fields[1].isdigit():
        raise ValueError(
            f"{where}: rank {fields[1][:60]!r} is not a whole number of 0 or more: "
            "fetch the vocabulary file again."
        )
    return token, int(fields[1])


class Tokenizer:
    """Text to token ids and back.

    Build it with :meth:`from_file`, or from a mapping of token bytes to rank (ranks ``0 .. n - 1``, all
    single bytes present) as :func:`read_vocabulary` returns. Instances do not change and may be shared
    between threads.

    ``vocab_size`` counts ordinary and special tokens; ``special_ids`` maps special names to ids; ``stop_id``
    is ``<|end_of_msg|>``, where a model ends its turn; ``fingerprint`` is the SHA-256 of the vocabulary,
    equal for equal vocabularies.
    """

    def __init__(self, ranks: Mapping[bytes, int]) -> None:
        self.base_count = len(ranks)
        self.special_ids = special_tokens(self.base_count)
        self.vocab_size = self.base_count + SPECIAL_COUNT
        self._tokens = [token for token, _ in sorted(ranks.items(), key=lambda item: item[1])]
        self._tokens.extend(name.encode() for name in self.special_ids)
        self.fingerprint = hashlib.sha256(
            b"".join(base64.b64encode(token) + b"\n" for token in self._tokens)
        ).hexdigest()
        self._encoding = tiktoken.Encoding(
            name=f"kimi-{self.base_count}",
            pat_str=PRETOKENIZER_PATTERN,
            mergeable_ranks=dict(ranks),
            special_tokens=self.special_ids,
            explicit_n_vocab=self.vocab_size,
        )

    @classmethod
    def from_file(cls, path: str | os.PathLike[str]) -> "Tokenizer":
        """Read a tiktoken vocabulary file; errors as in :func:`read_vocabulary`."""
        return cls(read_vocabulary(path))

    @property
    def bos_id(self) -> int:
        """Id of [BOS], which separates documents in training and is never added by :meth:`encode`."""
        return self.base_count

    @property
    def eos_id(self) -> int:
        """Id of [EOS]; a chat turn ends with :attr:`stop_id` instead."""
        return self.base_count + 1

    @property
    def stop_id(self) -> int:
        """Id of ``<|end_of_msg|>``, where a model ends its turn."""
        return self.base_count + 2

    @property
    def media_pad_id(self) -> int:
        """Id of ``<|media_pad|>``, one for each image feature."""
        return self.special_ids["<|media_pad|>"]

    @property
    def pad_id(self) -> int:
        """Id of [PAD]."""
        return self.special_ids["[PAD]"]

    def encode(self, text: str, allowed_special: bool = False) -> list[int]:
        """Token ids of a text; no [BOS] is added.

        With ``allowed_special`` false (the default) everything is plain text, even what looks like a special
        token; with true, the names of special tokens become their ids. As in the published encoder, a name
        that lies across a cut of :func:`cut_text` is plain text; media pads, which stand for an image by the
        thousand, are never cut. Surrogates, which UTF-8 cannot carry, are joined where they form a pair and
        become U+FFFD where they do not.
        """
        if not allowed_special:
            return [token for piece in cut_text(text) for token in self._encoding.encode_ordinary(piece)]
        ids: list[int] = []
        for index, part in enumerate(_MEDIA_PADS.split(text)):
            if index % 2:
                ids += [self.media_pad_id] * (len(part) // len(_MEDIA_PAD))
                continue
            for piece in cut_text(part):
                ids += self._encoding.encode(piece, allowed_special="all")
        return ids

    def encode_pieces(self, pieces: Iterable[tuple[str, bool]]) -> list[int]:
        """Token ids of ``(text, is_special)`` pieces, each encoded by itself and without merges across
        pieces.

        Special names are recognised only in pieces marked special: this is what keeps a marker in a user's
        text text.
        """
        return [token_id for text, is_special in pieces for token_id in self.encode(text, is_special)]

    def token_bytes(self, token_id: SupportsIndex) -> bytes:
        """Bytes of one token (of a special token: its name); ValueError for an id outside the vocabulary."""
        return self._tokens[self._checked([token_id])[0]]

    def is_special(self, token_id: SupportsIndex) -> bool:
        """Whether an id is one of the 256 special tokens; ValueError for an id outside the vocabulary."""
        return self._checked([token_id])[0] >= self.base_count

    def decode_bytes(self, ids: Iterable[SupportsIndex], skip_special: bool = False) -> bytes:
        """Joined bytes of the tokens, without the special ones if asked; errors as in :meth:`token_bytes`."""
        checked = self._checked(ids)
        if skip_special:
            checked = [token_id for token_id in checked if token_id < self.base_count]
        return b"".join(map(self._tokens.__getitem__, checked))

    def _checked(self, ids: Iterable[SupportsIndex]) -> list[int]:
        indices = list(map(operator.index, ids))
        if indices and not (min(indices) >= 0 and max(indices) < self.vocab_size):
            wrong = next(index for index in indices if not 0 <= index < self.vocab_size)
            raise ValueError(
                f"Token id {wrong} is outside this vocabulary; expected 0 to {self.vocab_size - 1}: "
                "check that the ids come from a model with the same vocabulary."
            )
        return indices

    def decode(self, ids: Iterable[SupportsIndex], skip_special: bool = False) -> str:
        """Text of token ids; bytes that are not UTF-8 become U+FFFD. Errors as in :meth:`token_bytes`."""
        return self.decode_bytes(ids, skip_special).decode("utf-8", errors="replace")

    def stream_decoder(self, skip_special: bool = False) -> "StreamDecoder":
        """A decoder that takes ids one by one; see :class:`StreamDecoder`."""
        return StreamDecoder(self, skip_special)


class StreamDecoder:
    """Decode ids one by one, holding back the bytes of a character that is not complete yet.

    What all calls of :meth:`push` and the final :meth:`flush` return, joined, is what
    :meth:`Tokenizer.decode` returns for the same ids.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special: bool = False) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: SupportsIndex) -> str:
        """Take one id and return the text that became complete, perhaps none; errors as in token_bytes."""
        return self._decoder.decode(self._tokenizer.decode_bytes([token_id], self._skip_special))

    def flush(self) -> str:
        """End the text: an unfinished character becomes U+FFFD. The decoder can then start a new text."""
        text = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return text
