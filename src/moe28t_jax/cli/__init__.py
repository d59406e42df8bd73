"""The `moe28t` command: its options, and what happens to a user's mistake."""

from __future__ import annotations

import argparse
import difflib
import os
import select
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import NoReturn

from moe28t_jax import __version__
from moe28t_jax.cli.chat import EFFORTS, run_chat
from moe28t_jax.cli.checkpoints import (
    add_convert_options,
    add_fake_checkpoint_options,
    run_checksums,
    run_convert,
    run_fake_checkpoint,
)
from moe28t_jax.cli.common import device_failure, some_path
from moe28t_jax.cli.compile import add_compile_options, run_compile
from moe28t_jax.cli.demo import IMAGE_QUESTION, TOOL_QUESTION, run_demo
from moe28t_jax.cli.files import run_inspect, run_score
from moe28t_jax.cli.generate import run_generate
from moe28t_jax.cli.interrupts import heard
from moe28t_jax.cli.plan import add_licence_options, add_plan_options, run_licence, run_plan
from moe28t_jax.parallel.watch import HostError

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; a user's mistake ends in one sentence on standard error and exit status 2."""
    parser = _parser()
    words = list(sys.argv[1:] if arguments is None else arguments)
    _check_command(parser, words)
    options, unknown = parser.parse_known_args(words)
    if unknown:
        _refuse(parser, options.command, unknown)
    if options.command is None:
        parser.print_help()
        return 2
    try:
        with heard(), _kernels(getattr(options, "kernels", None)):
            status = options.run(options)
        # What is still held back fails here, where it is answered.
        sys.stdout.flush()
        return status
    except BrokenPipeError as error:
        if not _output_is_closed():
            return _failed(options, _sentence(error), 1)
        # Who read the output has ended, such as `head`: nothing is left to say, also when Python closes it.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _ended("Nobody reads its output any more.", 128 + signal.SIGPIPE)
    except (ValueError, NotImplementedError, FileNotFoundError, PermissionError, IsADirectoryError) as error:
        return _failed(options, _sentence(error), 2)
    except (OSError, FloatingPointError, HostError) as error:
        return _failed(options, _sentence(error), 1)
    except (RuntimeError, MemoryError) as error:
        sentence = device_failure(error)
        if sentence is None:
            raise
        return _failed(options, sentence, 1)
    except KeyboardInterrupt:
        print(f"\nmoe28t {options.command}: interrupted.", file=sys.stderr)
        return _ended("It was interrupted.", 130)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        option, separator, _ = message.removeprefix("argument ").partition(": expected one argument")
        if separator and option.startswith("-"):
            message += f"; one that begins with - is written {option}=VALUE"
        super().error(message)


def _commands(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    [action] = [one for one in parser._actions if isinstance(one, argparse._SubParsersAction)]
    return action.choices


def _check_command(parser: argparse.ArgumentParser, words: Sequence[str]) -> None:
    """End with the command that was probably meant, where the first word is none."""
    commands = _commands(parser)
    command = next((word for word in words if word in commands), None)
    if words and words[0].startswith("--") and command is not None:
        option = words[0].partition("=")[0]
        if option in commands[command]._option_string_actions:
            commands[command].error(f"{option} goes behind the command: moe28t {command} {option}")
    if words and not words[0].startswith("-") and words[0] not in commands:
        if words[0] == "serve":
            parser.error(
                "there is no command 'serve' yet: the HTTP service is planned; chat and generate are there."
            )
        near = difflib.get_close_matches(words[0], commands, 1)
        meant = f"did you mean {near[0]}?" if near else f"it has: {', '.join(commands)}."
        parser.error(f"there is no command {words[0]!r}; {meant}")


def _refuse(parser: argparse.ArgumentParser, command: str | None, unknown: Sequence[str]) -> None:
    """End with the usage of the command itself and, for an option, the one that was probably meant."""
    asked = parser if command is None else _commands(parser)[command]
    option = unknown[0].partition("=")[0]
    if option in asked._option_string_actions:
        asked.error(f"{option} goes behind the command: {asked.prog} {option}")
    near = (
        difflib.get_close_matches(option, asked._option_string_actions, 1, 0.75)
        if option.startswith("-")
        else []
    )
    meant = f"; did you mean {near[0]}?" if near else f"; {asked.prog} --help lists what it takes."
    asked.error(f"it does not know {unknown[0]!r}{meant}")


def _kernels(name: str | None) -> AbstractContextManager[None]:
    if name is None:
        return nullcontext()
    from pallas_kernels import prefer

    return prefer(name)


def _failed(options: argparse.Namespace, sentence: str, status: int) -> int:
    print(f"moe28t {options.command}: {sentence}", file=sys.stderr)
    return _ended(sentence, status)


def _output_is_closed() -> bool:
    try:
        print(end="", flush=True)
        os.write(sys.stdout.fileno(), b"")
        readers = select.poll()
        readers.register(sys.stdout.fileno(), select.POLLERR)
        return bool(readers.poll(0))
    except BrokenPipeError:
        return True


def _ended(sentence: str, status: int) -> int:
    """The status; where this process has been connected with others, they are told the reason and it ends here."""
    startup = sys.modules.get("moe28t_jax.parallel.startup")
    return status if startup is None else startup.fail_together(sentence, status)


def _sentence(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return (
            f"{error.strerror}: {error.filename!r}." if error.filename is not None else f"{error.strerror}."
        )
    return str(error)


def _positive(text: str) -> int:
    digits = text.strip()
    if not digits.isdecimal() or not digits.strip("0"):
        raise argparse.ArgumentTypeError(f"{text} is not a positive whole number")
    # Longer than any dimension of an array.
    if len(digits) > 10 or int(digits) >= 2**31:
        raise argparse.ArgumentTypeError(f"{text[:20]}{'...' * (len(text) > 20)} is more than {2**31 - 1}")
    return int(digits)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="moe28t",
        description="Run, inspect, plan, convert and score models of the moe28t family.",
        epilog="moe28t COMMAND --help explains a command and shows examples.",
    )
    parser.add_argument("--version", action="version", version=f"moe28t {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", title="commands")

    json_option = _Parser(add_help=False)
    json_option.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    settings = _Parser(add_help=False)
    settings.add_argument(
        "--set", action="append", metavar="NAME=VALUE",
        help="override a configuration field, for example dsa.top_k=1024; may be repeated",
    )  # fmt: skip
    loaded = _Parser(add_help=False)
    loaded.add_argument(
        "--model", default="nano", help="checkpoint folder, s3:// or gs:// address, or nano (default)"
    )
    loaded.add_argument(
        "--cache", type=Path, metavar="FOLDER",
        help="keep here what an address sends, so that an interrupted load goes on; delete it afterwards",
    )  # fmt: skip
    loaded.add_argument(
        "--accept-licence", metavar="SHA256", help="load weights whose licence is not known and has this hash"
    )
    loaded.add_argument(
        "--dtype", default="auto", choices=("auto", "bfloat16", "float32"),
        help="activations and dense weights; auto (default) is float32 on CPU and bfloat16 elsewhere",
    )  # fmt: skip
    loaded.add_argument(
        "--max-context", type=_positive, metavar="TOKENS",
        help="longest sequence; default the model's own limit",
    )  # fmt: skip
    loaded.add_argument(
        "--mesh", metavar="FILE",
        help="mesh file, by path or by name, whose devices share the model; default one device",
    )  # fmt: skip
    loaded.add_argument(
        "--kernels", choices=("tpu", "gpu"),
        help="try these kernels first, which are compiled and tested for their chips but have not run on one",
    )  # fmt: skip
    loaded.add_argument(
        "--programs", type=some_path, metavar="FOLDER",
        help="keep compiled programs there and use those that are there, as moe28t compile --save kept them",
    )  # fmt: skip
    sampled = _Parser(add_help=False)
    sampled.add_argument(
        "--max-new-tokens", type=_positive, metavar="TOKENS",
        help="end after so many; default 256 for a text and 4096 for an answer, reasoning included",
    )  # fmt: skip
    sampled.add_argument("--temperature", type=float, help="0 (default) is greedy")
    sampled.add_argument("--top-p", type=float, help="draw from the likeliest tokens of this mass; default 1")
    sampled.add_argument("--seed", type=int, help="makes sampling repeatable")
    talk = _Parser(add_help=False)
    talk.add_argument("--system", metavar="TEXT", help="a system message at the start of the conversation")
    talk.add_argument(
        "--effort", choices=EFFORTS, help="how much to think; default max; none answers without reasoning"
    )
    talk.add_argument("--tools", type=Path, metavar="FILE", help="JSON file with a list of tools to offer")
    talk.add_argument(
        "--demo-tools", action="store_true",
        help="offer the built-in tools (calculator, key-value store, files) and run them, at most 8 rounds",
    )  # fmt: skip

    def add(
        name: str,
        run: Callable[[argparse.Namespace], int],
        summary: str,
        examples: Sequence[str],
        *parents: _Parser,
    ) -> argparse.ArgumentParser:
        command = commands.add_parser(
            name, parents=parents, help=summary, description=f"{summary[0].upper()}{summary[1:]}.",
            epilog="\n".join(["examples:", *(f"  moe28t {name} {example}" for example in examples)]),
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )  # fmt: skip
        command.set_defaults(run=run)
        return command

    generate = add(
        "generate", run_generate, "continue a text, or answer a conversation",
        ['--prompt "import os" --temperature 0.7', '--chat "Sort 8 2 5 1." --effort high',
         '--chat "Describe it." --image a.png',
         '--chat "Read left8.txt." --demo-tools', "--messages request.json --json"],
        json_option, loaded, settings, sampled, talk,
    )  # fmt: skip
    generate.add_argument("--prompt", metavar="TEXT", help="text to continue; default standard input")
    generate.add_argument("--prompt-file", type=Path, metavar="FILE", help="read that text from a file")
    generate.add_argument(
        "--no-echo", action="store_true", help="do not print the prompt before its continuation"
    )
    generate.add_argument("--chat", metavar="TEXT", help="a user's message to answer; comes after --messages")
    generate.add_argument(
        "--messages", type=Path, metavar="FILE",
        help="JSON file with a list of messages, or with a whole request (messages, tools, reasoning_effort, ...)",
    )  # fmt: skip
    generate.add_argument(
        "--image", action="append", metavar="PATH", help="picture for the last user message; may be repeated"
    )

    add(
        "chat", run_chat, "talk with a model in the terminal (/help lists what can be typed)",
        ["", "--effort low --demo-tools", '--model path/to/checkpoint --system "Answer briefly."'],
        loaded, settings, sampled, talk,
    )  # fmt: skip

    demo = add(
        "demo", run_demo, "show a text continued, a picture described and a tool used",
        ["", '--prompt "def read_lines(path):"', "--image picture.png"], json_option, loaded, settings,
    )  # fmt: skip
    demo.add_argument(
        "--prompt", metavar="TEXT", help="text to continue", default="class Counter:\n    def __init__(self"
    )
    demo.add_argument("--image", metavar="PATH", help="picture to look at; default one that is drawn")
    demo.add_argument(
        "--image-question", metavar="TEXT", help="question about the picture", default=IMAGE_QUESTION
    )
    demo.add_argument(
        "--tool-question", metavar="TEXT", help="question that needs a tool", default=TOOL_QUESTION
    )

    inspect = add(
        "inspect", run_inspect, "show configuration, counts, bytes and layers of a checkpoint or preset",
        ["moe28t", "path/to/checkpoint --tensors", "moe28t --set dsa.top_k=1024 --json"], json_option, settings,
    )  # fmt: skip
    inspect.add_argument(
        "model",
        nargs="?",
        default="nano",
        help="checkpoint folder or address, config.json, or preset name; default nano",
    )
    inspect.add_argument("--tensors", action="store_true", help="also list every stored tensor of a folder")

    plan = add(
        "plan", run_plan, "say what fits on a deployment, how fast it can be at best and what a token costs",
        ["--chips h200:16", "--mesh tpu7x-4x4x2 --context 1048576 --batch 1", "--mesh my.toml --phase prefill --json"],
        json_option, settings,
    )  # fmt: skip
    add_plan_options(plan, _positive)

    compiled = add(
        "compile", run_compile, "compile a step for a deployment that is not there; say what it needs and moves",
        ["--mesh tpu7x-4x4x2", "--mesh v5p-4x4x8 --phase prefill --json", "--mesh my.toml --batch 1 --context 1048576"],
        json_option, settings,
    )  # fmt: skip
    add_compile_options(compiled, _positive)

    licence = add(
        "licence", run_licence, "say whether the licence of a checkpoint allows a use, and accept one by hash",
        ["path/to/checkpoint", "LICENSE --maas --revenue 3e7 --json"], json_option,
    )  # fmt: skip
    add_licence_options(licence)

    convert = add(
        "convert", run_convert, "round a checkpoint's experts to MXFP4, unpack them, or change to and from Orbax",
        ["path/to/checkpoint packed", "nano unpacked --to bfloat16", "path/to/checkpoint sharded --to orbax"],
        json_option,
    )  # fmt: skip
    add_convert_options(convert)

    fake = add(
        "fake-checkpoint", run_fake_checkpoint, "write a checkpoint with drawn weights in the public layout",
        ["--preset nano --out small", "--preset kimi-k3 --layers 2 --experts 16 --out two --json"],
        json_option, settings,
    )  # fmt: skip
    add_fake_checkpoint_options(fake, _positive)

    checksums = add(
        "checksums", run_checksums, "write the checksums of a checkpoint's tensors beside them",
        ["path/to/checkpoint"], json_option,
    )  # fmt: skip
    checksums.add_argument("folder", help="checkpoint folder")

    score = add(
        "score", run_score, "bits per byte of text files",
        ["notes.txt src/", "--heldout --json"], json_option, loaded, settings,
    )  # fmt: skip
    score.add_argument("files", type=Path, nargs="*", help="files, or folders whose text files are scored")
    score.add_argument("--heldout", action="store_true", help="also nano's held-out texts")
    score.add_argument(
        "--batch", type=_positive, default=4, metavar="ROWS", help="texts read at once; default 4"
    )
    return parser
