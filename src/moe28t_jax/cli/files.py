"""`moe28t inspect` and `score`: what is read from folders and files."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from moe28t_jax.cli.common import fail, load_model, overrides, progress_display, read_text, remark


def run_inspect(options: argparse.Namespace) -> int:
    """Run `moe28t inspect`."""
    from moe28t_jax.inspection import describe_model

    report = describe_model(options.model, overrides(options))
    if options.json:
        print(json.dumps(report.to_json(), ensure_ascii=False))
    else:
        report.print(tensors=options.tensors)
    return 0


def run_score(options: argparse.Namespace) -> int:
    """Run `moe28t score`."""
    from rich.progress import MofNCompleteColumn, TextColumn

    from moe28t_jax.evals import score_texts

    texts, skipped = _texts(options.files)
    if options.heldout:
        if options.model != "nano":
            fail("--heldout scores the texts that `nano` was not trained on; use it with --model nano.")
        texts += _heldout()
    if not texts and skipped:
        fail(f"No file is text: {len(skipped)} were skipped, the first {skipped[0]!r}; name text files.")
    if not texts:
        fail("There is nothing to score; name files or folders (or --heldout for nano's held-out texts).")
    model = load_model(options)
    texts = _short_enough(texts, model, skipped) or texts[:1]
    with progress_display(TextColumn("scored tokens"), MofNCompleteColumn()) as progress:
        task = progress.add_task("scoring", total=None)
        scores = score_texts(model, texts, options.batch, lambda count: progress.advance(task, count))
    _print_scores(scores, dict(texts), skipped, options)
    return 0


def _heldout() -> list[tuple[str, str]]:
    """Nano's held-out texts, by name; a remark where this Python's library is not the one that nano was trained on."""
    from moe28t_jax.config import shipped_folder
    from moe28t_jax.training.nano.corpus import load_corpus

    trained = json.loads((shipped_folder("nano") / "training.json").read_text(encoding="utf-8"))
    corpus = load_corpus()
    if corpus.data_hash != trained["data_hash"]:
        remark(
            f"moe28t score: this Python's library is not that of Python {trained['python']}, on which nano was "
            f"trained (data {corpus.data_hash[:16]}, not {trained['data_hash'][:16]}): other texts are held out, some "
            "of them near to those it has seen, and figures do not compare with the documented ones."
        )
    return [(document.name, document.text) for document in corpus.heldout]


def _texts(paths: Sequence[Path]) -> tuple[list[tuple[str, str]], list[str]]:
    """Texts by name; and the files found inside folders that hold none, which are noted and left out."""
    texts: list[tuple[str, str]] = []
    skipped: list[str] = []
    for path in paths:
        if not path.is_dir():
            texts.append((str(path), read_text(path)))
            continue
        for file in sorted(p for p in path.rglob("*") if p.is_file()):
            try:
                text = read_text(file)
            except ValueError as error:
                # The sentence for a file that was named, without its advice.
                reason = str(error).removeprefix(f"{str(file)!r} ").partition(";")[0].rstrip(".")
                remark(f"moe28t score: skipped {str(file)!r}: it {reason}.")
                skipped.append(str(file))
                continue
            if text:
                texts.append((str(file), text))
            else:
                remark(f"moe28t score: skipped {str(file)!r}: it is empty.")
                skipped.append(str(file))
    return texts, skipped


def _short_enough(texts: list[tuple[str, str]], model: Any, skipped: list[str]) -> list[tuple[str, str]]:
    """Without those that the context does not hold, which are noted, where others stay."""
    if model.tokenizer is None or len(texts) == 1:
        return texts  # an error says what is wrong
    kept = []
    for name, text in texts:
        count = len(model.tokenizer.encode(text))
        if count <= model.max_context:
            kept.append((name, text))
        else:
            remark(f"moe28t score: skipped {name!r}: its {count} tokens are more than the context holds.")
            skipped.append(name)
    return kept


def _print_scores(
    scores: Sequence[Any], texts: dict[str, str], skipped: list[str], options: argparse.Namespace
) -> None:
    import gzip

    rows = []
    for score in scores:
        packed = 8 * len(gzip.compress(texts[score.name].encode(), 9, mtime=0)) / score.num_bytes
        rows.append(
            {
                "name": score.name,
                "bytes": score.num_bytes,
                "tokens": score.num_tokens,
                "bits_per_byte": round(score.bits_per_byte, 4),
                "gzip_bits_per_byte": round(packed, 4),
            }
        )
    total_bytes = sum(row["bytes"] for row in rows)
    total = {
        "files": len(rows),
        "bytes": total_bytes,
        "tokens": sum(row["tokens"] for row in rows),
        "bits_per_byte": round(sum(score.bits for score in scores) / total_bytes, 4),
        "gzip_bits_per_byte": round(
            sum(row["gzip_bits_per_byte"] * row["bytes"] for row in rows) / total_bytes, 4
        ),
        "files_below_gzip": sum(row["bits_per_byte"] < row["gzip_bits_per_byte"] for row in rows),
    }
    if options.json:
        print(json.dumps({"total": total, "files": rows, "skipped": skipped}, ensure_ascii=False))
        return
    from rich.console import Console
    from rich.table import Column, Table

    heads = ("file", "bytes", "tokens", "bits/byte", "gzip -9")
    table = Table(*(Column(head, overflow="fold") for head in heads))
    for row in rows:
        values = (row["bytes"], row["tokens"], row["bits_per_byte"], row["gzip_bits_per_byte"])
        table.add_row(row["name"], *(f"{value:,}" for value in values))
    table.add_section()
    values = (total["bytes"], total["tokens"], total["bits_per_byte"], total["gzip_bits_per_byte"])
    table.add_row(f"{total['files']} files", *(f"{value:,}" for value in values))
    console = Console()
    console.print(table)
    console.print(f"{total['files_below_gzip']} of {total['files']} files take fewer bits than gzip -9.")
