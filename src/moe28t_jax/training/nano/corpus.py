"""Corpus of the small trained model: text that a Python installation already carries.

The documents are the sources of the standard library, without its tests (many installations leave them out),
and the help topics of ``pydoc``. Nothing is downloaded. Which documents exist depends on the installation, so a data
hash identifies the corpus that a model was trained on.
"""

import ast
import gzip
import hashlib
import os
import re
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

TOPICS_FILE = "pydoc_data/topics.py"
HELDOUT_MODULUS = 5

# Installed packages are not the standard library. The codecs are generated, near copies of one another: they
# would put almost the same text on both sides of the split.
_SKIPPED_FOLDERS = frozenset({"site-packages", "dist-packages", "__pycache__", "encodings"})
_TEST_FOLDERS = frozenset({"test", "tests", "idle_test"})
# Generated for one build, with the paths of the machine that built it.
_SKIPPED_PREFIX = "_sysconfigdata"
_TABLE_LINE = re.compile(
    r"""\s*[-+\[({]*('[^']*'|"[^"]*"|0x[0-9a-fA-F]+|\d+|[bru]+'[^']*')[,:)\]} ].*""",
)
_TABLE_MINIMUM_CHARACTERS = 8_192


@dataclass(frozen=True)
class Document:
    """One document: name (a path below the library's root), text, and SHA-256 of the text in UTF-8."""

    name: str
    text: str
    sha256: str


@dataclass(frozen=True)
class Corpus:
    """Train and held-out documents, each in order of name, and the hash of them all.

    ``data_hash`` is the SHA-256 of the sorted content hashes, one a line.
    """

    train: list[Document]
    heldout: list[Document]
    data_hash: str


def load_corpus(root: str | os.PathLike[str] | None = None) -> Corpus:
    """Read the corpus below ``root``, by default this Python's standard library.

    Every ``.py`` file is a document, except installed packages, tests, files that are not UTF-8, empty files,
    generated codecs and other tables of data, and build records; so is every topic of ``pydoc``. Of documents
    with the same content the one whose name sorts first is kept. A document is held out when its hash, as an
    integer, is divisible by 5: the split depends on nothing but content. Raises ValueError when ``root``
    holds no document.
    """
    root = Path(root if root is not None else sysconfig.get_paths()["stdlib"])
    by_hash: dict[str, Document] = {}
    for name, text in sorted(_read_texts(root)):
        digest = hashlib.sha256(text.encode()).hexdigest()
        by_hash.setdefault(digest, Document(name=name, text=text, sha256=digest))
    if not by_hash:
        raise ValueError(
            f"{str(root)!r} holds no Python source in UTF-8; expected the root of a Python standard library: "
            "use a Python installation that carries its sources, or pass another root."
        )
    documents = list(by_hash.values())
    return Corpus(
        train=[document for document in documents if not is_held_out(document.sha256)],
        heldout=[document for document in documents if is_held_out(document.sha256)],
        data_hash=hashlib.sha256("".join(f"{digest}\n" for digest in sorted(by_hash)).encode()).hexdigest(),
    )


def is_held_out(sha256: str) -> bool:
    """Whether a document with this content hash (hexadecimal) belongs to the held-out split."""
    return int(sha256, 16) % HELDOUT_MODULUS == 0


def gzip_bits_per_byte(text: str) -> float:
    """Compressed bits per byte of UTF-8 under ``gzip -9``, a plain yardstick for a model's bits per byte.

    Raises ValueError for an empty text, which has no bytes to divide by.
    """
    data = text.encode()
    if not data:
        raise ValueError(
            "The text is empty, so bits per byte are undefined; pass a text of at least one character."
        )
    return 8 * len(gzip.compress(data, 9)) / len(data)


def _read_texts(root: Path) -> Iterator[tuple[str, str]]:
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if name not in _SKIPPED_FOLDERS | _TEST_FOLDERS]
        for file in files:
            if not file.endswith(".py") or file.startswith(_SKIPPED_PREFIX):
                continue
            path = Path(folder, file)
            name = path.relative_to(root).as_posix()
            try:
                text = path.read_bytes().decode("utf-8")
            except UnicodeDecodeError:
                # Test data in other encodings, which the library carries on purpose.
                continue
            if name == TOPICS_FILE:
                yield from _read_topics(text)
            elif text and not _is_table(text):
                yield name, text


def _read_topics(source: str) -> Iterator[tuple[str, str]]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Dict):
            for topic, text in ast.literal_eval(node).items():
                yield f"{TOPICS_FILE.removesuffix('.py')}/{topic}", text


def _is_table(text: str) -> bool:
    """Whether most of a large file's characters lie in lines that start with a literal."""
    if len(text) < _TABLE_MINIMUM_CHARACTERS:
        return False
    return 2 * sum(len(line) for line in text.splitlines() if _TABLE_LINE.fullmatch(line)) > len(text)
