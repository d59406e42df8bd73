"""The `moe28t` command."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from moe28t_jax import __version__

DEFAULT_NEW_TOKENS = 200


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; a user's mistake ends in one sentence on standard error and exit status 2."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.command is None:
        parser.print_help()
        return 2
    try:
        return options.run(options)
    except (ValueError, NotImplementedError, FileNotFoundError, PermissionError, IsADirectoryError) as error:
        print(f"moe28t {options.command}: {_sentence(error)}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"moe28t {options.command}: {_sentence(error)}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"\nmoe28t {options.command}: interrupted.", file=sys.stderr)
        return 130


def _sentence(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return (
            f"{error.strerror}: {error.filename!r}." if error.filename is not None else f"{error.strerror}."
        )
    return str(error)


def _fail(text: str) -> NoReturn:
    raise ValueError(text)


# -- commands -------------------------------------------------------------------------------------------------
def _load(options: argparse.Namespace) -> Any:
    import jax
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    from moe28t_jax.api import load

    dtype = options.dtype
    if dtype == "auto":
        # A CPU has no fast bfloat16 arithmetic.
        dtype = "float32" if jax.default_backend() == "cpu" else "bfloat16"
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        return load(
            options.model,
            dtype=dtype,
            max_context=options.max_context,
            overrides=_overrides(options),
            progress=progress,
        )


def _overrides(options: argparse.Namespace) -> dict[str, Any]:
    values = {}
    for item in options.set or []:
        name, separator, text = item.partition("=")
        if not separator:
            _fail(f"--set {item!r} is not NAME=VALUE, for example --set dsa.top_k=1024.")
        try:
            values[name] = json.loads(text)
        except json.JSONDecodeError:
            values[name] = text
        except RecursionError:
            _fail(f"--set {name} is nested too deeply for any field; give a plain value.")
    return values


def _generate(options: argparse.Namespace) -> int:
    prompt = _prompt(options)
    model = _load(options)
    started, first, count, reason, text = time.perf_counter(), None, 0, "", []
    show = not options.json
    if show and not options.no_echo:
        print(prompt, end="", flush=True)
    for chunk in model.stream(
        prompt, options.max_new_tokens, options.temperature, options.top_p, options.seed
    ):
        first = first or time.perf_counter()
        count += chunk.token_id is not None
        reason = chunk.finish_reason or reason
        text.append(chunk.text)
        if show:
            print(chunk.text, end="", flush=True)
    seconds = time.perf_counter() - (first or started)
    rate = (count - 1) / seconds if count > 1 and seconds > 0 else 0.0
    prompt_tokens = len(model.tokenizer.encode(prompt))
    if options.json:
        result = {
            "text": "".join(text),
            "finish_reason": reason,
            "usage": {"prompt_tokens": prompt_tokens, "completion_tokens": count},
            "tokens_per_second": round(rate, 2),
        }
        print(json.dumps(result, ensure_ascii=False))
    else:
        print(flush=True)
        print(f"[{prompt_tokens} prompt tokens, {count} new, {rate:.1f} tokens/s, {reason}]", file=sys.stderr)
    return 0


def _prompt(options: argparse.Namespace) -> str:
    if options.prompt is not None and options.prompt_file is not None:
        _fail("--prompt and --prompt-file exclude each other; give one.")
    if options.prompt_file is not None:
        return _read_text(options.prompt_file)
    if options.prompt is not None:
        return options.prompt
    if sys.stdin is None or sys.stdin.isatty():
        _fail("There is no prompt; give --prompt TEXT, --prompt-file FILE, or text on standard input.")
    try:
        return sys.stdin.read()
    except UnicodeDecodeError as error:
        raise ValueError(
            f"The text on standard input is not UTF-8 text (byte {error.start}); convert it first."
        ) from None


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{str(path)!r} is not UTF-8 text (byte {error.start}); convert it first.") from None


def _inspect(options: argparse.Namespace) -> int:
    from moe28t_jax.inspection import describe_model

    report = describe_model(options.model, _overrides(options))
    if options.json:
        print(json.dumps(report.to_json(), ensure_ascii=False))
    else:
        report.print(tensors=options.tensors)
    return 0


def _convert(options: argparse.Namespace) -> int:
    from rich.console import Console
    from rich.progress import Progress

    from moe28t_jax.weights import convert

    started = time.perf_counter()
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        convert(options.source, options.target, to=options.to, progress=progress)
    size = sum(file.stat().st_size for file in options.target.iterdir() if file.is_file())
    if options.json:
        result = {
            "target": str(options.target),
            "bytes": size,
            "seconds": round(time.perf_counter() - started, 2),
        }
        print(json.dumps(result))
    else:
        print(f"Wrote {options.target} ({size:,} bytes).")
    return 0


def _score(options: argparse.Namespace) -> int:
    from rich.console import Console
    from rich.progress import MofNCompleteColumn, Progress, TextColumn

    from moe28t_jax.evals import score_texts

    texts = []
    for path in options.files:
        found = sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]
        texts += [(str(file), _read_text(file)) for file in found]
    if options.heldout:
        if options.model != "nano":
            _fail("--heldout scores the texts that `nano` was not trained on; use it with --model nano.")
        from moe28t_jax.training.nano.corpus import load_corpus

        texts += [(document.name, document.text) for document in load_corpus().heldout]
    if not texts:
        _fail("There is nothing to score; name files or folders (or --heldout for nano's held-out texts).")
    model = _load(options)
    console = Console(stderr=True)
    with Progress(
        TextColumn("scored tokens"), MofNCompleteColumn(), console=console, disable=not console.is_terminal
    ) as progress:
        task = progress.add_task("scoring", total=None)
        scores = score_texts(model, texts, options.batch, lambda count: progress.advance(task, count))
    _print_scores(scores, dict(texts), options)
    return 0


def _print_scores(scores: Sequence[Any], texts: dict[str, str], options: argparse.Namespace) -> None:
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
        print(json.dumps({"total": total, "files": rows}, ensure_ascii=False))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table("file", "bytes", "tokens", "bits/byte", "gzip -9")
    for row in rows:
        values = (row["bytes"], row["tokens"], row["bits_per_byte"], row["gzip_bits_per_byte"])
        table.add_row(row["name"], *(f"{value:,}" for value in values))
    table.add_section()
    values = (total["bytes"], total["tokens"], total["bits_per_byte"], total["gzip_bits_per_byte"])
    table.add_row(f"{total['files']} files", *(f"{value:,}" for value in values))
    console = Console()
    console.print(table)
    console.print(f"{total['files_below_gzip']} of {total['files']} files take fewer bits than gzip -9.")


# -- options --------------------------------------------------------------------------------------------------
def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a positive whole number")
    return value


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="moe28t", description="Run, inspect, convert and score models of the moe28t family."
    )
    parser.add_argument("--version", action="version", version=f"moe28t {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")

    shared = argparse.ArgumentParser(add_help=False)
    shared.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    of_model = argparse.ArgumentParser(add_help=False)
    of_model.add_argument("--model", default="nano", help="checkpoint folder, or nano (default)")
    of_model.add_argument(
        "--set", action="append", metavar="NAME=VALUE", help="override a configuration field"
    )
    loaded = argparse.ArgumentParser(add_help=False)
    loaded.add_argument(
        "--dtype", default="auto", choices=("auto", "bfloat16", "float32"),
        help="activations and dense weights; auto is float32 on CPU and bfloat16 elsewhere",
    )  # fmt: skip
    loaded.add_argument(
        "--max-context", type=_positive, help="longest sequence; default the model's own limit"
    )

    generate = commands.add_parser("generate", parents=[shared, of_model, loaded], help="continue a text")
    generate.add_argument("--prompt", help="the text; default standard input")
    generate.add_argument("--prompt-file", type=Path, help="read the text from a file")
    generate.add_argument("--max-new-tokens", type=_positive, default=DEFAULT_NEW_TOKENS)
    generate.add_argument("--temperature", type=float, default=0.0, help="0 (default) is greedy")
    generate.add_argument("--top-p", type=float, default=1.0)
    generate.add_argument("--seed", type=int, help="makes sampling repeatable")
    generate.add_argument("--no-echo", action="store_true", help="print only the continuation")
    generate.set_defaults(run=_generate)

    inspect = commands.add_parser(
        "inspect",
        parents=[shared],
        help="show configuration, counts, bytes and layers of a checkpoint or preset",
    )
    inspect.add_argument(
        "model", nargs="?", default="nano", help="checkpoint folder, config.json, or preset name"
    )
    inspect.add_argument(
        "--set", action="append", metavar="NAME=VALUE", help="override a configuration field"
    )
    inspect.add_argument("--tensors", action="store_true", help="also list every stored tensor of a folder")
    inspect.set_defaults(run=_inspect)

    convert = commands.add_parser(
        "convert", parents=[shared], help="round a checkpoint's experts to MXFP4, or unpack them"
    )
    convert.add_argument("source", type=Path)
    convert.add_argument("target", type=Path)
    convert.add_argument("--to", choices=("mxfp4", "bfloat16"), default="mxfp4")
    convert.set_defaults(run=_convert)

    score = commands.add_parser(
        "score", parents=[shared, of_model, loaded], help="bits per byte of text files"
    )
    score.add_argument("files", type=Path, nargs="*", help="files or folders")
    score.add_argument("--heldout", action="store_true", help="also nano's held-out texts")
    score.add_argument("--batch", type=_positive, default=4)
    score.set_defaults(run=_score)
    return parser


if __name__ == "__main__":
    sys.exit(main())
