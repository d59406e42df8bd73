"""What several commands share: loading, reading files, counting speed."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from moe28t_jax.parallel.launch import detect_launch

if TYPE_CHECKING:
    from rich.progress import Progress


def fail(text: str) -> NoReturn:
    """End the command with this sentence."""
    raise ValueError(text)


def chunk_of(options: argparse.Namespace) -> int | None:
    """`--chunk`, which prefill alone has."""
    if options.chunk is not None and options.phase != "prefill":
        fail(
            f"--chunk {options.chunk} is the size of a prefill step, and a step of {options.phase} has none; leave it "
            "out, or add --phase prefill."
        )
    return options.chunk


def check_chunk(chunk: int | None, context: int) -> None:
    """End with a sentence where a step would read more new tokens than a row holds."""
    if chunk is not None and chunk > context:
        fail(f"--chunk {chunk} is more than the {context} tokens of --context; make it no larger.")


def some_path(text: str) -> Path:
    """An option's path; an empty one would be the current folder."""
    if not text:
        raise argparse.ArgumentTypeError("an empty text is no path; name one")
    return Path(text)


# Characters that a terminal may take for commands, by code point, as visible signs.
_CONTROLS = {code: chr(0x2400 + code) for code in range(0x20) if chr(code) not in "\n\t"}
_CONTROLS |= {0x7F: "\u2421"} | {code: "\ufffd" for code in range(0x80, 0xA0)}


def harmless(text: str, file: Any) -> str:
    """Text for `file`: on a terminal with signs in place of the control characters, which could command it."""
    return text.translate(_CONTROLS) if file.isatty() else text


def json_text(value: Any, indent: int | None = None) -> str:
    """JSON with characters as they are; a surrogate without its partner has no UTF-8 form and is escaped."""
    return json.dumps(value, ensure_ascii=False, indent=indent).encode("utf-8", "backslashreplace").decode()


def device_failure(error: BaseException) -> str | None:
    """One sentence about an error of the device, such as too little memory; None for any other error."""
    jax = sys.modules.get("jax")
    if isinstance(error, MemoryError):
        reason = "out of memory"
    elif jax is not None and isinstance(error, jax.errors.JaxRuntimeError):
        lines = str(error).strip().splitlines()
        reason = lines[0][:300].rstrip(".") if lines else type(error).__name__
    else:
        return None
    return (
        f"The device could not compute it ({reason}); where memory is short, shorten the text or the conversation, or "
        "set a smaller --max-context."
    )


def is_first() -> bool:
    """Whether this process speaks for all of its program; the others say nothing but why they end."""
    return detect_launch(os.environ).is_first


def remark(text: str) -> None:
    """A line on standard error, apart from what the command prints; the first process says it for all."""
    if is_first():
        print(text, file=sys.stderr, flush=True)


def progress_display(*columns: Any, transient: bool = False) -> Progress:
    """Bars on standard error, where that is a terminal; the first process shows them for all."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    return Progress(
        *columns, console=console, transient=transient, disable=not (console.is_terminal and is_first())
    )


def load_model(options: argparse.Namespace, check: Callable[[Any, Any], None] | None = None) -> Any:
    """The model that `--model`, `--dtype`, `--max-context` and `--set` name, with a progress bar on a terminal. `check`
    is given its configuration and its tokenizer, or None, before weights are read."""
    from moe28t_jax.parallel.startup import initialize_distributed

    # Every process of a program on several hosts runs the same command; the first one speaks for all.
    if not initialize_distributed().is_first:
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115

    if options.programs is not None:
        keep_programs(options.programs)

    import jax

    platform = jax.default_backend()
    if options.kernels is not None and platform != options.kernels:
        fail(f"--kernels {options.kernels} needs such devices, and JAX finds {platform} here; leave it out.")
    from rich.progress import BarColumn, DownloadColumn, TextColumn, TransferSpeedColumn

    from moe28t_jax.api import load
    from moe28t_jax.sources import resolve

    if check is not None:
        found = resolve(options.model)
        check(found.config(overrides(options)), found.tokenizer())
    mesh, changes = None, overrides(options)
    if options.mesh is not None:
        from moe28t_jax.parallel import config_on, load_mesh_file, make_mesh

        mesh_file = load_mesh_file(options.mesh)
        mesh = make_mesh(mesh_file)
        if mesh_file.pad_experts:
            moe = config_on(mesh_file, resolve(options.model).config(changes)).moe
            changes |= {} if moe is None else {"moe.expert_slots": moe.expert_slots}
    dtype = options.dtype
    if dtype == "auto":
        # A CPU has no fast bfloat16 arithmetic.
        dtype = "float32" if platform == "cpu" else "bfloat16"
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with progress_display(*columns, transient=True) as progress:
        return load(
            options.model,
            mesh=mesh,
            dtype=dtype,
            max_context=options.max_context,
            overrides=changes,
            progress=progress,
            accept_licence=options.accept_licence,
            cache=options.cache,
        )


def keep_programs(folder: Path) -> None:
    """Let JAX keep what it compiles in the folder, made if need be, and take from there what was kept."""
    import jax

    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        fail(f"{str(folder)!r} cannot hold compiled programs ({error.strerror}); name a folder.")
    jax.config.update("jax_compilation_cache_dir", str(folder.resolve()))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def overrides(options: argparse.Namespace) -> dict[str, Any]:
    """The fields of `--set NAME=VALUE`, values read as JSON where they are JSON."""
    values = {}
    for item in options.set or []:
        name, separator, text = item.partition("=")
        if not separator:
            fail(f"--set {item!r} is not NAME=VALUE, for example --set dsa.top_k=1024.")
        try:
            values[name] = json.loads(text)
        except json.JSONDecodeError:
            values[name] = text
        except RecursionError:
            fail(f"--set {name} is nested too deeply for any field; give a plain value.")
    return values


def read_text(path: Path) -> str:
    """A file's text; ValueError where it cannot be read or is not UTF-8."""
    try:
        return path.read_text(encoding="utf-8")
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError, PermissionError) as error:
        raise ValueError(
            f"{str(path)!r} cannot be read ({error.strerror}); name a file with the text."
        ) from None
    except UnicodeDecodeError as error:
        raise ValueError(f"{str(path)!r} is not UTF-8 text (byte {error.start}); convert it first.") from None


def read_standard_input(remedy: str) -> str:
    """The text on standard input; `remedy` is said where there is none. Of several processes the first one reads, since
    a launcher gives standard input to it alone, and all get what it read."""
    from moe28t_jax.parallel.startup import initialize_distributed

    if initialize_distributed().processes == 1:
        return _standard_input(remedy)
    from moe28t_jax.parallel.agreement import text_of_first_process

    return text_of_first_process(lambda: _standard_input(remedy))


def _standard_input(remedy: str) -> str:
    if sys.stdin is None or sys.stdin.isatty():
        fail(remedy)
    try:
        return sys.stdin.read()
    except UnicodeDecodeError as error:
        raise ValueError(
            f"The text on standard input is not UTF-8 text (byte {error.start}); convert it first."
        ) from None


def read_json(path: Path) -> Any:
    """A file's JSON value; ValueError where it is none."""
    # Some editors begin a file with a byte order mark, which JSON does not have.
    text = read_text(path).removeprefix("\ufeff")
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(
            f"{str(path)!r} is not JSON (line {error.lineno}, column {error.colno}: {error.msg}); correct it first."
        ) from None
    except RecursionError:
        raise ValueError(f"{str(path)!r} is nested too deeply; give a flatter JSON file.") from None


def read_tools(path: Path) -> list[dict[str, Any]]:
    """A file with a list of tools, or an object with the list as `tools`; checked."""
    from moe28t_jax.chat.messages import normalize_tools

    value = read_json(path)
    if isinstance(value, dict):
        value = value.get("tools")
    if not isinstance(value, list):
        fail(f'{str(path)!r} holds no list of tools; write [{{"type": "function", "function": ...}}].')
    return normalize_tools(value) or []


class Clock:
    """Decoding speed without compilation: the first two tokens compile prefill and decoding, so time counts from
    the second one on."""

    def __init__(self) -> None:
        self.tokens = 0
        self._start = self._end = 0.0

    def tick(self) -> None:
        """Note that a token came."""
        self.tokens += 1
        self._end = time.perf_counter()
        if self.tokens <= 2:
            self._start = self._end

    @property
    def rate(self) -> float | None:
        """Tokens per second; None for fewer than three tokens."""
        seconds = self._end - self._start
        return (self.tokens - 2) / seconds if self.tokens > 2 and seconds > 0 else None

    def __str__(self) -> str:
        return "" if self.rate is None else f", {self.rate:.1f} tokens/s decoding"
