"""What `describe_model` reports of presets, folders and configuration files."""

import json
import shutil

import pytest

from moe28t_jax.config import ModelConfig
from moe28t_jax.inspection import describe_model


def test_a_preset_is_described_by_its_counts() -> None:
    report = describe_model("moe28t")
    found = report.to_json()
    assert json.loads(json.dumps(found)) == json.loads(json.dumps(found))
    assert found["name"] == "moe28t"
    assert found["parameters"]["total"] == 2_780_110_363_392
    assert found["parameters"]["active"] == 104_368_141_056
    assert sum(found["parameters"]["by_group"].values()) == found["parameters"]["total"]
    assert len(found["layers"]) == found["config"]["attention_kinds"].__len__() == 93
    assert (found["tensors"], report.file_bytes) == ([], 0)
    assert describe_model("kimi-k3").to_json()["stored_tensors"] == 497_220
    assert describe_model("kimi-k3").to_json()["stored_bytes"] == 1_560_860_324_864


def test_a_folder_is_described_with_its_tensors(small_checkpoint) -> None:
    report = describe_model(str(small_checkpoint))
    found = json.loads(json.dumps(report.to_json()))
    assert report.config == ModelConfig.from_hf(small_checkpoint)
    assert len(found["tensors"]) == found["stored_tensors"]
    assert report.file_bytes == found["stored_bytes"] == sum(t["bytes"] for t in found["tensors"])
    assert {t["shard"] for t in found["tensors"]} == {"model.safetensors"}
    by_name = {t["name"]: t for t in found["tensors"]}
    [head] = [t for name, t in by_name.items() if name.endswith("lm_head.weight")]
    assert (head["dtype"], head["shape"], head["bytes"]) == ("BF16", [512, 64], 2 * 512 * 64)


def test_a_configuration_file_needs_no_weights(small_checkpoint, tmp_path) -> None:
    shutil.copy(small_checkpoint / "config.json", tmp_path / "config.json")
    for source in (tmp_path, tmp_path / "config.json"):
        report = describe_model(str(source), {"dsa.top_k": 5})
        assert report.config.dsa.top_k == 5 and report.tensors == ()


def test_the_printed_tables_name_the_facts(small_checkpoint, capsys, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    report = describe_model(str(small_checkpoint))
    report.print()
    text = capsys.readouterr().out
    for part in (
        "2 (1 kda, 1 dsa)",
        "attention over blocks of 3 layers",
        "8, 2 per token",
        "top 8, 4 index heads",
    ):
        assert part in text
    assert f"{report.count.total:,}" in text and "lm_head.weight" not in text
    report.print(tensors=True)
    assert "lm_head.weight" in capsys.readouterr().out
    describe_model("kimi-linear-48b-a3b").print()
    text = capsys.readouterr().out
    assert "plain" in text and "20 kda, 7 mla" in text and "index heads" not in text


def test_an_orbax_folder_is_told_apart(small_checkpoint, tmp_path, capsys, monkeypatch) -> None:
    shutil.copy(small_checkpoint / "config.json", tmp_path)
    (tmp_path / "orbax.json").write_text("{}")
    report = describe_model(str(tmp_path))
    size = sum(file.stat().st_size for file in tmp_path.iterdir())
    assert report.to_json()["orbax_bytes"] == size and not report.tensors
    monkeypatch.setenv("COLUMNS", "160")
    report.print(tensors=True)
    text = capsys.readouterr().out
    assert (
        "bytes of this Orbax folder" in text and f"{size:,}" in text and "stored bytes, in the public" in text
    )
    assert "holds Orbax items, one per layer" in text


def test_no_digit_is_cut_in_a_narrow_terminal(capsys, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    report = describe_model("moe28t")
    report.print()
    text = capsys.readouterr().out
    assert "…" not in text and "2,780,110,363,392"[:8] in text


def test_what_cannot_be_described_is_refused(tmp_path) -> None:
    with pytest.raises(
        ValueError, match=r"'abcent' is neither a folder nor a file, and no preset; the presets are"
    ):
        describe_model("abcent")
    with pytest.raises(ValueError, match=r"The configuration has no field 'nope'"):
        describe_model("nano", {"nope": 1})
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config\.json"):
        describe_model(str(tmp_path))
