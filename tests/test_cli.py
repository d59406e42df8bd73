"""The `moe28t` command, in process: output, JSON, exit statuses, and one sentence for each mistake."""

import io
import json
import shutil
import signal
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest

import moe28t_jax as m
from moe28t_jax import __version__, api, cli, command
from moe28t_jax.cli import files, main
from moe28t_jax.config import shipped_folder
from moe28t_jax.training.nano import corpus
from moe28t_jax.weights import declared_values, describe, load_parameters

TRAINED = json.loads((shipped_folder("nano") / "training.json").read_text())


@pytest.fixture(autouse=True)
def wide_terminal(monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("NO_COLOR", "1")


@pytest.fixture(scope="module")
def folder(small_checkpoint):
    return str(small_checkpoint)


@pytest.fixture
def broken(small_checkpoint, tmp_path):
    """A copy of the checkpoint whose weights end too early."""
    copy = shutil.copytree(small_checkpoint, tmp_path / "broken")
    content = (copy / "model.safetensors").read_bytes()
    (copy / "model.safetensors").write_bytes(content[:-100])
    return str(copy)


def fails(capsys, arguments, *parts, status=2):
    """The command ends with the status and one sentence on standard error that holds the parts."""
    assert main(arguments) == status
    captured = capsys.readouterr()
    error = captured.err.strip()
    assert error.startswith(f"moe28t {arguments[0]}: ") and "\n" not in error, error
    assert error.endswith("."), error
    for part in parts:
        assert part in error, error
    assert "Traceback" not in captured.out + error
    return captured.out


# -- generate ----------------------------------------------------------------------------------------------------
def test_generate_prints_the_prompt_and_its_continuation(capsys, folder) -> None:
    expected = api.load(folder, dtype="float32").generate("hello", max_new_tokens=6)
    assert main(["generate", "--model", folder, "--prompt", "hello", "--max-new-tokens", "6"]) == 0
    captured = capsys.readouterr()
    assert captured.out == f"hello{expected.text}\n"
    assert f"[5 prompt tokens, {len(expected.token_ids)} new, " in captured.err
    assert captured.err.rstrip().endswith(f"{expected.finish_reason}]")


def test_generate_as_json_from_a_file(capsys, folder, tmp_path) -> None:
    prompt = tmp_path / "prompt.txt"
    prompt.write_text("naïve 🙂", encoding="utf-8")
    options = ["--max-new-tokens", "6", "--temperature", "1.5", "--seed", "3", "--top-p", "0.9", "--json"]
    assert main(["generate", "--model", folder, "--prompt-file", str(prompt), *options]) == 0
    found = json.loads(capsys.readouterr().out)
    again = api.load(folder, dtype="float32").generate(
        "naïve 🙂", max_new_tokens=6, temperature=1.5, seed=3, top_p=0.9
    )
    assert found["text"] == again.text
    assert found["finish_reason"] == again.finish_reason
    assert found["usage"] == {"prompt_tokens": 11, "completion_tokens": len(again.token_ids)}
    assert found["tokens_per_second"] > 0


def test_generate_reads_standard_input_and_can_leave_out_the_prompt(capsys, folder, monkeypatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("hello"))
    assert main(["generate", "--model", folder, "--max-new-tokens", "6", "--no-echo"]) == 0
    expected = api.load(folder, dtype="float32").generate("hello", max_new_tokens=6)
    assert capsys.readouterr().out == f"{expected.text}\n"


def test_generate_says_what_is_wrong_with_a_prompt(capsys, folder, tmp_path, monkeypatch) -> None:
    command = ["generate", "--model", folder]
    fails(capsys, [*command, "--prompt", "", "--no-echo"], "The prompt has no tokens")
    fails(
        capsys, [*command, "--prompt", "x" * 64, "--max-context", "64", "--no-echo"],
        "The prompt has 64 tokens and the context holds 64", "larger max_context",
    )  # fmt: skip
    latin = tmp_path / "latin.txt"
    latin.write_bytes("naïve".encode("latin-1"))
    fails(capsys, [*command, "--prompt-file", str(latin)], f"{str(latin)!r} is not UTF-8 text (byte 2)")
    absent = tmp_path / "absent.txt"
    fails(capsys, [*command, "--prompt-file", str(absent)], f"{str(absent)!r} cannot be read (No such file")
    fails(
        capsys,
        [*command, "--prompt-file", str(tmp_path)],
        f"{str(tmp_path)!r} cannot be read (Is a directory",
    )
    fails(capsys, [*command, "--prompt", "x", "--prompt-file", str(latin)], "exclude each other; give one")

    class Terminal(io.StringIO):
        def isatty(self):
            return True

    monkeypatch.setattr("sys.stdin", Terminal())
    fails(
        capsys,
        command,
        "There is no prompt; give --prompt TEXT, --prompt-file FILE, or text on standard input",
    )


def test_input_that_is_not_utf8_is_named(capsys, folder, monkeypatch) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"ok \xff"), encoding="utf-8"))
    fails(capsys, ["generate", "--model", folder], "standard input is not UTF-8 text (byte 3)")


def test_generate_says_what_is_wrong_with_a_checkpoint(capsys, folder, broken, tmp_path) -> None:
    prompt = ["--prompt", "x"]
    absent = str(tmp_path / "absent")
    fails(capsys, ["generate", "--model", absent, *prompt, "--no-echo"], absent)
    fails(capsys, ["generate", "--model", broken, *prompt, "--no-echo"], "model.safetensors")
    fails(capsys, ["generate", "--model", "gs://b/x", *prompt], "needs gcsfs")
    bare = shutil.copytree(folder, tmp_path / "bare")
    (bare / "tiktoken.model").unlink()
    fails(capsys, ["generate", "--model", str(bare), *prompt, "--no-echo"], "has no tiktoken.model")
    fails(
        capsys,
        ["generate", "--model", folder, *prompt, "--max-context", "4096"],
        "max_context is 4096",
        "1 to 1024",
    )


@pytest.mark.parametrize(("item", "parts"), [
    ("top_k", ("--set 'top_k' is not NAME=VALUE", "for example --set dsa.top_k=1024")),
    ("nope=1", ("The configuration has no field 'nope'", "it has: ")),
    ("dsa.topk=1", ("The configuration has no field 'dsa.topk'",)),
    ("dsa.top_k=0", ("top_k",)),
    ("vocab_size=300", ("pad_id",)),
    ('dsa.top_k="x"', ("top_k",)),
    ("hidden_size=wide", ("hidden_size",)),
    ("dsa=5", ("dsa", "section")),
    ("dsa.top_k=" + "[" * 5000, ("dsa.top_k", "nested too deeply")),
])  # fmt: skip
def test_a_bad_override_is_named(capsys, folder, item, parts) -> None:
    fails(capsys, ["generate", "--model", folder, "--prompt", "x", "--no-echo", "--set", item], *parts)


def test_a_bad_sampling_value_is_named(capsys, folder) -> None:
    command = ["generate", "--model", folder, "--prompt", "x", "--no-echo"]
    fails(capsys, [*command, "--temperature", "-1"], "temperature is -1.0; it must be 0 (greedy)")
    fails(capsys, [*command, "--top-p", "2"], "top_p is 2.0; it must be above 0 and at most 1")


def test_an_interrupt_ends_with_status_130(capsys, folder, monkeypatch) -> None:
    def interrupted(*_):
        yield ord("a"), None
        raise KeyboardInterrupt

    monkeypatch.setattr(api, "generate_ids", interrupted)
    assert main(["generate", "--model", folder, "--prompt", "hello"]) == 130
    captured = capsys.readouterr()
    assert captured.out == "helloa" and captured.err.endswith("\nmoe28t generate: interrupted.\n")


# -- inspect -----------------------------------------------------------------------------------------------------
def test_inspect_prints_tables_or_json(capsys, folder, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    assert main(["inspect", folder, "--tensors"]) == 0
    text = capsys.readouterr().out
    assert "2 (1 kda, 1 dsa)" in text
    # Names are never cut, however narrow the terminal.
    names = {entry.name for entry in describe(folder)}
    assert {
        line.split()[-1] for line in text.splitlines() if line.startswith(("BF16 ", "F32 ", "U8 "))
    } == names
    assert main(["inspect", "moe28t", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["parameters"]["total"] == 2_780_110_363_392
    assert main(["inspect", "nano", "--set", "dsa.top_k=32", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["config"]["dsa"]["top_k"] == 32


def test_inspect_says_what_is_wrong(capsys, broken, tmp_path) -> None:
    fails(capsys, ["inspect", "no-such"], "'no-such' is neither a folder nor a file, and no preset", "moe28t")
    fails(capsys, ["inspect", broken], "model.safetensors")
    fails(capsys, ["inspect", "nano", "--set", "dsa.top_k"], "is not NAME=VALUE")
    fails(capsys, ["inspect", str(tmp_path)], "config.json")
    (tmp_path / "config.json").write_text('{"model_type": "kimi_k3"}')
    fails(capsys, ["inspect", str(tmp_path)], "text_config")


# -- convert -----------------------------------------------------------------------------------------------------
def test_convert_unpacks_and_packs_again(capsys, folder, small_checkpoint, tmp_path) -> None:
    wide, narrow = tmp_path / "wide", tmp_path / "narrow"
    assert main(["convert", folder, str(wide), "--to", "bfloat16"]) == 0
    size = sum(file.stat().st_size for file in wide.iterdir())
    assert capsys.readouterr().out == f"Wrote {wide} ({size:,} bytes).\n"
    assert main(["convert", str(wide), str(narrow), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["target"] == str(narrow) and found["seconds"] >= 0
    assert found["bytes"] == sum(file.stat().st_size for file in narrow.iterdir()) < size
    # MXFP4 values are exact in bfloat16, so packing them again keeps every value (-0 becomes 0, another code).
    before, config = load_parameters(small_checkpoint, dtype=np.dtype(np.float32))
    after, same_config = load_parameters(narrow, dtype=np.dtype(np.float32))
    assert same_config == config
    pairs = zip(declared_values(before, config), declared_values(after, config), strict=True)
    for (item, old), (_, new) in pairs:
        if item.parameter.quantizable:
            old, new = old.dequantize(), new.dequantize()
        np.testing.assert_array_equal(np.asarray(new), np.asarray(old), err_msg=item.stored_name)
    assert (narrow / "tiktoken.model").read_bytes() == (small_checkpoint / "tiktoken.model").read_bytes()


def test_convert_replaces_a_checkpoint_only_when_told(capsys, folder, tmp_path) -> None:
    target = str(shutil.copytree(folder, tmp_path / "target"))
    before = (tmp_path / "target" / "model.safetensors").read_bytes()
    fails(
        capsys,
        ["convert", folder, target, "--to", "bfloat16"],
        f"{target!r} holds a checkpoint already",
        "--overwrite",
    )
    assert (tmp_path / "target" / "model.safetensors").read_bytes() == before
    assert main(["convert", folder, target, "--to", "bfloat16", "--overwrite"]) == 0
    assert len((tmp_path / "target" / "model.safetensors").read_bytes()) > len(before)


def test_convert_takes_the_shipped_checkpoint_by_name(capsys, monkeypatch, tmp_path) -> None:
    # Also where a folder of that name lies.
    monkeypatch.chdir(tmp_path)
    assert main(["convert", "nano", "nano", "--to", "bfloat16"]) == 0
    assert capsys.readouterr().out.startswith("Wrote ./nano (")
    assert m.ModelConfig.from_hf(tmp_path / "nano").expert_quantization is None
    fails(capsys, ["convert", "./nano", str(tmp_path / "nano")], "is the source; choose another folder")
    assert main(["licence", "nano"]) == 0
    assert "Apache" in capsys.readouterr().out


def test_convert_says_what_is_wrong_and_writes_nothing(capsys, folder, broken, tmp_path) -> None:
    target = tmp_path / "target"
    (tmp_path / "file").touch()
    fails(capsys, ["convert", str(tmp_path / "absent"), str(target)], "absent")
    fails(capsys, ["convert", "moe28t", str(target)], "is a preset without weights")
    fails(capsys, ["convert", folder, "/proc/never"], "'/proc/never' cannot be written, for the folder")
    fails(
        capsys,
        ["convert", str(tmp_path / "file"), str(target)],
        "is a file, and no .safetensors file; give the",
    )
    fails(capsys, ["generate", "--model", "", "--prompt", "x"], "The source is ''; give the path")
    fails(capsys, ["convert", broken, str(target)], "model.safetensors")
    assert not target.exists()
    fails(capsys, ["convert", folder, folder], folder)
    target.mkdir()
    (target / "notes.txt").write_text("mine")
    fails(capsys, ["convert", folder, str(target)], str(target))
    assert [file.name for file in target.iterdir()] == ["notes.txt"]


# -- score -------------------------------------------------------------------------------------------------------
def test_score_prints_a_table_or_json(capsys, folder, tmp_path) -> None:
    texts = tmp_path / "texts"
    texts.mkdir()
    (texts / "a.py").write_text("def f(x):\n    return x\n")
    (texts / "b.txt").write_text("naïve", encoding="utf-8")
    single = tmp_path / "c.txt"
    single.write_text("c" * 50)
    command = ["score", str(texts), str(single), "--model", folder]
    assert main([*command, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    total, files = found["total"], found["files"]
    assert [file["name"] for file in files] == [str(texts / "a.py"), str(texts / "b.txt"), str(single)]
    assert [file["bytes"] for file in files] == [23, 6, 50]
    assert (total["files"], total["bytes"], total["tokens"]) == (3, 79, 79)
    weighted = sum(file["bits_per_byte"] * file["bytes"] for file in files) / 79
    assert abs(total["bits_per_byte"] - weighted) < 1e-3
    # A random model is far worse than gzip on 50 equal letters.
    assert files[2]["gzip_bits_per_byte"] < files[2]["bits_per_byte"]
    below = sum(file["bits_per_byte"] < file["gzip_bits_per_byte"] for file in files)
    assert total["files_below_gzip"] == below

    assert main(command) == 0
    text = capsys.readouterr().out
    assert (
        "a.py" in text and "3 files" in text and f"{below} of 3 files take fewer bits than gzip -9." in text
    )


def test_score_leaves_out_what_is_no_text_in_a_folder(capsys, folder, tmp_path) -> None:
    (tmp_path / "a.txt").write_text("hello")
    (tmp_path / "b.bin").write_bytes(b"\xff\xfe")
    (tmp_path / "c.txt").write_bytes(b"")
    assert main(["score", str(tmp_path), "--model", folder, "--json"]) == 0
    captured = capsys.readouterr()
    found = json.loads(captured.out)
    assert [file["name"] for file in found["files"]] == [str(tmp_path / "a.txt")]
    assert found["skipped"] == [str(tmp_path / "b.bin"), str(tmp_path / "c.txt")]
    assert f"skipped {found['skipped'][0]!r}: it is not UTF-8 text (byte 0).\n" in captured.err
    assert f"skipped {found['skipped'][1]!r}: it is empty.\n" in captured.err
    (tmp_path / "a.txt").unlink()
    assert main(["score", str(tmp_path), "--model", folder]) == 2
    assert "No file is text: 2 were skipped" in capsys.readouterr().err


def test_score_leaves_out_what_the_context_does_not_hold(capsys, folder, tmp_path) -> None:
    (tmp_path / "a.txt").write_text("hello")
    (tmp_path / "b.txt").write_text("x" * 1025)
    assert main(["score", str(tmp_path), "--model", folder, "--json"]) == 0
    captured = capsys.readouterr()
    found = json.loads(captured.out)
    assert [file["name"] for file in found["files"]] == [str(tmp_path / "a.txt")]
    assert found["skipped"] == [str(tmp_path / "b.txt")]
    assert "b.txt': its 1025 tokens are more than the context holds" in captured.err


def test_score_says_what_is_wrong(capsys, folder, tmp_path) -> None:
    command = ["score", "--model", folder]
    fails(capsys, command, "There is nothing to score; name files or folders")
    fails(capsys, [*command, "--heldout"], "--heldout scores the texts that `nano` was not trained on")
    absent = str(tmp_path / "absent.txt")
    fails(capsys, [*command, absent], f"{absent!r} cannot be read (No such file or directory); name a file")
    binary, empty, long = tmp_path / "binary", tmp_path / "empty", tmp_path / "long"
    binary.write_bytes(b"\xff\xfe")
    fails(capsys, [*command, str(binary)], f"{str(binary)!r} is not UTF-8 text (byte 0); convert it first")
    empty.write_bytes(b"")
    fails(capsys, [*command, str(empty)], f"{str(empty)!r} is empty")
    long.write_text("x" * 1025)
    fails(capsys, [*command, str(long)], "has 1025 tokens and the context holds 1024", "split the text")


def test_held_out_texts_of_another_python(capsys, monkeypatch) -> None:
    documents = [corpus.Document("a.py", "x = 1", "0")]
    for data_hash in (None, "0" * 64):
        found = corpus.Corpus([], documents, data_hash or TRAINED["data_hash"])
        monkeypatch.setattr(corpus, "load_corpus", lambda found=found: found)
        assert files._heldout() == [("a.py", "x = 1")]
        error = capsys.readouterr().err
        assert ("not that of Python 3.12.1" in error) == (data_hash is not None)


# -- the command itself ------------------------------------------------------------------------------------------
def test_help_version_and_usage_errors(capsys) -> None:
    assert main([]) == 2
    assert "usage: moe28t" in capsys.readouterr().out
    with pytest.raises(SystemExit) as stopped:
        main(["--version"])
    assert stopped.value.code == 0 and capsys.readouterr().out == f"moe28t {__version__}\n"
    for arguments, part in (
        (["fly"], "there is no command 'fly'; it has: generate, chat,"),
        (["genrate"], "there is no command 'genrate'; did you mean generate?"),
        (
            ["--json", "inspect"],
            "moe28t inspect: error: --json goes behind the command: moe28t inspect --json",
        ),
        (["licence", "x", "--revenue", "-5"], "--revenue: -5 is not an amount from 0 on"),
        (["generate", "--max-new-tokens", "0"], "0 is not a positive whole number"),
        (["generate", "--max-new-tokens", "many"], "many is not a positive whole number"),
        (
            ["generate", "--prompt", "-x"],
            "expected one argument; one that begins with - is written --prompt=VALUE",
        ),
        (["licence", "x", "--revenue", "much"], "--revenue: much is not a number"),
        (["licence", "x", "--monthly-users", "1e3"], "--monthly-users: 1e3 is not a whole number"),
        (["convert", "a"], "target"),
        (["convert", "a", "b", "--to", "int8"], "'int8'"),
    ):
        with pytest.raises(SystemExit) as stopped:
            main(arguments)
        assert stopped.value.code == 2
        assert part in capsys.readouterr().err


def test_who_reads_no_further_is_not_complained_to() -> None:
    script = "import sys; from moe28t_jax.cli import main; sys.exit(main(['inspect', 'moe28t', '--json']))"
    with subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 128 + signal.SIGPIPE


def test_a_failing_disk_ends_with_status_1(capsys, folder, monkeypatch) -> None:
    def full(*_, **__):
        raise OSError(28, "No space left on device", "/some/file")

    monkeypatch.setattr("moe28t_jax.weights.convert", full)
    sentence = "The disk is full, so '/tmp/never-made' was not written; make room"
    fails(capsys, ["convert", folder, "/tmp/never-made"], sentence, status=1)


def test_a_disk_without_room_is_said_before_writing(capsys, monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1_000_000))
    needed = f"{m.ModelConfig.preset('nano').parameter_count().stored_bytes:,}"
    command = ["fake-checkpoint", "--preset", "nano", "--out", str(tmp_path / "x")]
    fails(capsys, command, f"would take {needed} bytes and the disk has 1,000,000; write it elsewhere")
    assert list(tmp_path.iterdir()) == []


def test_a_fault_of_the_program_is_not_hidden(folder, monkeypatch) -> None:
    def faulty(*_):
        raise RuntimeError("a bug")

    monkeypatch.setattr(cli, "run_inspect", faulty)
    with pytest.raises(RuntimeError, match="a bug"):
        main(["inspect", folder])


def test_closed_standard_input_is_no_prompt(capsys, folder, monkeypatch) -> None:
    monkeypatch.setattr("sys.stdin", None)
    fails(capsys, ["generate", "--model", folder], "There is no prompt")


def test_a_prompt_outside_unicode_and_a_huge_seed_are_named(capsys, folder) -> None:
    command = ["generate", "--model", folder, "--no-echo", "--prompt"]
    fails(capsys, [*command, "a\udcffb"], "is not Unicode text (character 1")
    fails(capsys, [*command, "x", "--seed", "99999999999999999999"], "seed is 99999999999999999999")


def test_kernels_of_devices_that_are_not_there(capsys, folder) -> None:
    fails(
        capsys,
        ["generate", "--model", folder, "--prompt", "x", "--kernels", "tpu"],
        "JAX finds cpu here; leave it",
    )


def test_a_preset_without_weights_says_so(capsys) -> None:
    fails(
        capsys, ["generate", "--model", "moe28t", "--prompt", "x", "--no-echo"], "is a preset without weights"
    )


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (
            ["generate", "--promt", "hi"],
            "moe28t generate: error: it does not know '--promt'; did you mean --prompt?",
        ),
        (["score", "--files", "x"], "it does not know '--files'; moe28t score --help lists what it takes."),
        (["--nonsense"], "moe28t: error: it does not know '--nonsense'"),
    ],
)
def test_a_misspelt_option_is_answered_by_its_command(capsys, arguments, sentence) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2 and sentence in capsys.readouterr().err


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells by files which devices there are")
@pytest.mark.parametrize(("names", "before", "after"), [
    (("absent*",), None, "cpu"), (("absent*", "null"), None, None), (("absent*",), "tpu", "tpu"),
])  # fmt: skip
def test_the_command_does_not_look_for_devices_that_are_not_there(
    monkeypatch: pytest.MonkeyPatch, names: tuple[str, ...], before: str | None, after: str | None
) -> None:
    monkeypatch.setattr(command, "_ACCELERATORS", names)
    environment = {} if before is None else {"JAX_PLATFORMS": before}
    monkeypatch.setattr(command.os, "environ", environment)
    command._skip_devices_that_are_not_there()
    assert environment.get("JAX_PLATFORMS") == after
