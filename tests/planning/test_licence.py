"""Licences: known texts under every profile, altered ones, acceptance by hash."""

import json
import re
import tempfile
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe28t_jax.cli import main
from moe28t_jax.planning import (
    LicenceError,
    UsageProfile,
    accept,
    check_licence,
    licence_hash,
    require_licence,
)
from moe28t_jax.planning.licence import acceptance_file, admit, check_text, find_licences, read_licences

TEXTS = Path(__file__).parent / "licences"
K3 = (TEXTS / "kimi_k3.txt").read_text("utf-8")
K2 = (TEXTS / "modified_mit_kimi_k2.txt").read_text("utf-8")
MIT = (TEXTS / "mit.txt").read_text("utf-8")
APACHE = (Path(__file__).parents[2] / "LICENSE").read_text("utf-8")
KNOWN = {
    "Kimi K3 License": K3,
    "Modified MIT License (Kimi K2)": K2,
    "Modified MIT License (Kimi K2.5)": K2.replace('"Kimi K2"', '"Kimi K2.5"'),
    "MIT License": MIT,
    "Apache License 2.0": APACHE,
}
LARGE_MAAS = UsageProfile(model_as_a_service=True, revenue_12_months=20_000_001)


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "configuration"))


@pytest.mark.parametrize("name", KNOWN)
def test_known_texts_are_recognised_and_fine_for_small_use(name: str) -> None:
    result = check_text(KNOWN[name])
    assert (result.status, result.name, result.accepted, result.allowed) == ("ok", name, False, True)
    assert re.fullmatch("[0-9a-f]{64}", result.sha256)


@pytest.mark.parametrize(
    ("profile", "status"),
    [
        (UsageProfile(), "ok"),
        (UsageProfile(model_as_a_service=True, revenue_12_months=20_000_000), "ok"),
        (LARGE_MAAS, "agreement"),
        (UsageProfile(model_as_a_service=True, revenue_12_months=3e7, commercial=False), "ok"),
        (UsageProfile(model_as_a_service=True, revenue_12_months=3e7, internal=True), "ok"),
        (UsageProfile(model_as_a_service=True, revenue_12_months=3e7, official=True), "ok"),
        (UsageProfile(revenue_12_months=1e9), "ok"),
        (UsageProfile(monthly_active_users=100_000_000), "ok"),
        (UsageProfile(monthly_active_users=100_000_001), "attribution"),
        (UsageProfile(monthly_revenue=20_000_000), "ok"),
        (UsageProfile(monthly_revenue=20_000_001), "attribution"),
        (UsageProfile(monthly_revenue=3e7, internal=True), "ok"),
        (UsageProfile(monthly_revenue=3e7, official=True), "ok"),
        (UsageProfile(monthly_revenue=3e7, commercial=False), "ok"),
        (UsageProfile(monthly_revenue=3e7, model_as_a_service=True, revenue_12_months=3e8), "agreement"),
    ],
)
def test_rules_of_the_kimi_k3_licence(profile: UsageProfile, status: str) -> None:
    result = check_text(K3, profile)
    assert result.status == status
    assert result.allowed is (status != "agreement")
    if status == "attribution":
        assert '"Kimi K3"' in result.reasons[0]
    if profile.monthly_revenue > 2e7 and status == "agreement":
        assert len(result.reasons) == 2  # both hold


@pytest.mark.parametrize("name", ["Kimi K2", "Kimi K2.5"])
def test_rules_of_the_modified_mit_licence(name: str) -> None:
    text = K2.replace('"Kimi K2"', f'"{name}"')
    large = check_text(text, UsageProfile(monthly_revenue=3e7))
    assert large.status == "attribution" and f'"{name}"' in large.reasons[0]
    # It has no exemption for internal use, and no clause about services.
    assert check_text(text, UsageProfile(monthly_revenue=3e7, internal=True)).status == "attribution"
    assert check_text(text, LARGE_MAAS).status == "ok"


@pytest.mark.parametrize("name", ["MIT License", "Apache License 2.0"])
def test_permissive_licences_ask_nothing(name: str) -> None:
    everything = UsageProfile(
        model_as_a_service=True, revenue_12_months=1e12, monthly_revenue=1e11, monthly_active_users=10**9
    )
    assert check_text(KNOWN[name], everything).status == "ok"


@pytest.mark.parametrize("name", KNOWN)
def test_form_does_not_matter(name: str) -> None:
    text = KNOWN[name]
    digest = licence_hash(text)
    forms = (
        text.replace("\n", "\r\n"),
        "\n\n" + text.replace(" ", "   ") + "\n\t\n",
        text.upper(),
        text.replace("“", '"').replace("”", '"'),
        re.sub(
            r"(?m)^Copyright \(c\) .*$", "Copyright (c) 2024-2026 Some One & Sons, Inc. <a@b.example>", text
        ),
        " ".join(text.split("\n")) if not re.search(r"(?m)^ *Copyright (\(c\)|\[)", text) else text,
    )
    assert {licence_hash(form) for form in forms} == {digest}


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("20 million\nUS dollars", "2 million\nUS dollars"),
        ("exceeds 20 million", "exceeds 10 billion"),
        ("Moonshot AI\nbefore", "Somebody Else\nbefore"),
        ("do not apply", "apply"),
        ("100 million", "100 thousand"),
        ('"Kimi K3" must', '"Kimi K4" must'),
        ("WITHOUT WARRANTY", "WITH WARRANTY"),
        ("contact <license@moonshot.ai>", "contact <license@example.org>"),
        ("Copyright (c) 2026 Moonshot AI", "Copyright (c) 2026 Moonshot AI. You must pay."),
        ("Copyright (c) 2026 Moonshot AI", "Copyright holders own all outputs"),
    ],
)
def test_an_altered_text_is_unknown(old: str, new: str) -> None:
    altered = K3.replace(old, new)
    assert altered != K3
    result = check_text(altered)
    assert (result.status, result.name, result.allowed) == ("unknown", None, False)


@pytest.mark.parametrize(
    "line",
    [
        "Copyright (c) 2026 Acme. Commercial use prohibited.",
        "Copyright (c) 2026 Acme, research purposes exclusively, no commercial use",
        "Copyright (c) 2026 Acme. Fee of 5 percent of revenue due to Acme.",
        "Copyright (c) 2026 Acme. Nur zu Forschungszwecken.",
        "Copyright (c) 2026 Acme Inc. Research and teaching.",
        "Copyright (c) 2026 Acme. All rights reserved. Evaluation.",
        "Copyright (c) 2026 Acme - non-commercial",
        "Copyright (c) 2026 Acme, individuals and companies below 5 employees can use it",
        "COPYRIGHT (C) 2026 ACME, REDISTRIBUTION PROHIBITED",
        "Copyright (c) 2025 Acme, display Acme logo in apps, attribution mandatory",
        "Copyright (c) 2025 Acme, EU barred",
        "Copyright (c) 2025 Acme, teaching and research",
        "COPYRIGHT (C) 2025 ACME OF EUROPE, TEACHING AND RESEARCH",
    ],
)
def test_terms_on_the_line_of_the_holder_are_noticed(line: str) -> None:
    holder = "Copyright (c) 2025 Somebody"
    assert holder in MIT
    result = check_text(MIT.replace(holder, line))
    assert (result.status, result.name, result.allowed) == ("unknown", None, False)


@pytest.mark.parametrize(
    "line",
    [
        "Copyright (c) 2026 Acme. All rights reserved.",
        "Copyright (c) Meta Platforms, Inc. and affiliates.",
        "Copyright © 2020, 2021 J. R. Smith, Jr. & Sons Ltd., Oxford",
        "Copyright (c) 2018- The Hugging Face team. All rights reserved.",
        "Copyright (c) 2024 University of California, Berkeley <office@example.edu>",
        "copyright (c) 2025 01.ai and contributors",
        "Copyright (c) 2023 karpathy",
        "Copyright (c) 2024 Jane van der Berg, John Smith and the Example team",
    ],
)
def test_any_holder_may_give_a_licence(line: str) -> None:
    assert check_text(MIT.replace("Copyright (c) 2025 Somebody", line)).name == "MIT License"


@given(st.integers(0, len(K3) - 1), st.characters(min_codepoint=33, max_codepoint=126))
def test_any_changed_character_is_noticed(position: int, character: str) -> None:
    line = K3[: position + 1].count("\n")
    altered = K3[:position] + character + K3[position + 1 :]
    if K3.split("\n")[line].startswith("Copyright (c)") or altered.casefold() == K3.casefold():
        return  # the holder's name is not part of the text, nor is case
    same = {"“": '"', "”": '"', "—": "-"}
    if same.get(K3[position]) == character:
        return
    assert check_text(altered).status == "unknown"


def test_the_known_texts_are_told_apart() -> None:
    assert len({licence_hash(text) for text in KNOWN.values()}) == len(KNOWN)


# -- folders and acceptance ------------------------------------------------------------------------------------


def folder(path: Path, **files: str) -> Path:
    path.mkdir()
    (path / "config.json").write_text("{}", encoding="utf-8")
    for name, text in files.items():
        (path / name).write_text(text, encoding="utf-8")
    return path


def test_a_folder_is_judged_by_its_strictest_file(tmp_path: Path) -> None:
    assert check_licence(folder(tmp_path / "one", LICENSE=K3)).name == "Kimi K3 License"
    both = folder(tmp_path / "two", LICENSE=MIT)
    (both / "LICENSE-MODEL.txt").write_text(K3, encoding="utf-8")
    (both / "license_plates.py").write_text("no licence", encoding="utf-8")
    (both / "LICENSE.kimi").write_text(K2, encoding="utf-8")
    assert [file.name for file in find_licences(both)] == ["LICENSE", "LICENSE-MODEL.txt", "LICENSE.kimi"]
    assert check_licence(both).status == "ok"
    assert check_licence(both, UsageProfile(monthly_revenue=3e7)).status == "attribution"
    assert check_licence(both, LARGE_MAAS).status == "agreement"
    (both / "COPYING").write_text("Do as you are told.", encoding="utf-8")
    assert check_licence(both).status == "unknown"


NAMES = (
    "MODEL_LICENSE", "MODEL_LICENSE.txt", "Kimi-K3-LICENSE", "LICENSE AGREEMENT.txt", "EULA.txt", "LICENSE_KIMI.html",
    "USE_POLICY.md", "Terms of Use.md", "third-party.licenses.txt", "LICENSE-MODEL.pdf", "Llama-3.1-LICENSE",
    "LICENSE-2.0", "Gemma-1.1-Terms-of-Use", "LICENSE_v1.2",
)  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_terms_are_found_by_their_names(name: str, tmp_path: Path) -> None:
    path = folder(tmp_path / "model")
    # Not UTF-8 where it is a document, which cannot be read: its hash is still one to accept.
    (path / name).write_bytes(b"%PDF \xff\xfe" if name.endswith("pdf") else b"Ask first.")
    result = check_licence(path)
    assert (result.status, result.path) == ("unknown", str(path / name))
    with pytest.raises(LicenceError, match=re.escape(name)):
        admit("model", read_licences(path))
    admit("model", read_licences(path), accepted=result.sha256)


@pytest.mark.parametrize(
    "name",
    ["license_plates.py", "licensed.json", "long_terms.json", "determs.txt", "policy.md", "search_terms.txt"],
)
def test_other_files_are_no_licences(name: str, tmp_path: Path) -> None:
    path = folder(tmp_path / "model")
    (path / name).touch()
    assert find_licences(path) == ()


def test_unknown_weights_are_loaded_only_after_acceptance(tmp_path: Path) -> None:
    path = folder(tmp_path / "model", LICENSE="Ask first.")
    with pytest.raises(
        LicenceError, match=r"not known to allow this use \(unknown licence\).*--accept [0-9a-f]{64}"
    ):
        require_licence(path)
    digest = licence_hash("Ask first.")
    with pytest.raises(ValueError, match="is not the hash of the licence"):
        accept(path, digest[:-1])
    with pytest.raises(LicenceError):
        require_licence(path)
    assert accept(path, f" {digest.upper()}\n").allowed
    result = require_licence(path)
    assert result.accepted and result.status == "unknown"
    # The hash, not the place: the same text elsewhere is accepted, another text here is not.
    assert require_licence(folder(tmp_path / "other", LICENSE="Ask  first.\n")).accepted
    (path / "LICENSE").write_text("Ask twice.", encoding="utf-8")
    with pytest.raises(LicenceError):
        require_licence(path)


def test_accepting_one_keeps_the_others(tmp_path: Path) -> None:
    for number in range(3):
        path = folder(tmp_path / str(number), LICENSE=f"Terms {number}")
        accept(path, licence_hash(f"Terms {number}"))
    assert len(json.loads(acceptance_file().read_text("utf-8"))) == 3
    assert all(require_licence(tmp_path / str(number)).accepted for number in range(3))
    assert {entry.suffix for entry in acceptance_file().parent.iterdir()} == {".json", ".lock"}


def test_two_who_accept_at_once_wait_for_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = [folder(tmp_path / name, LICENSE=f"Terms {name}") for name in ("one", "two")]
    make = tempfile.mkstemp
    other = threading.Thread(target=accept, args=(paths[1], licence_hash("Terms two")))

    def between(**options: Any) -> Any:
        # The first has read the list and not replaced it yet.
        if other.ident is None:
            other.start()
            other.join(0.2)
        return make(**options)

    monkeypatch.setattr(tempfile, "mkstemp", between)
    accept(paths[0], licence_hash("Terms one"))
    other.join()
    assert len(json.loads(acceptance_file().read_text("utf-8"))) == 2


def test_texts_that_were_fetched_are_judged_by_their_address(tmp_path: Path) -> None:
    texts = {"s3://bucket/x/LICENSE": "Ask first."}
    result = check_licence("s3://bucket/x", texts=texts)
    assert (result.status, result.path) == ("unknown", "s3://bucket/x/LICENSE")
    assert accept("s3://bucket/x", result.sha256, texts=texts).allowed
    assert check_licence("s3://bucket/x", texts=texts).accepted
    with pytest.raises(FileNotFoundError, match="'s3://bucket/x' holds no licence file"):
        check_licence("s3://bucket/x", texts={})


def test_an_agreement_can_be_accepted_by_who_has_it(tmp_path: Path) -> None:
    path = folder(tmp_path / "model", LICENSE=K3)
    assert require_licence(path).status == "ok"
    with pytest.raises(LicenceError, match="separate agreement with Moonshot AI"):
        require_licence(path, LARGE_MAAS)
    accept(path, licence_hash(K3))
    result = require_licence(path, LARGE_MAAS)
    assert (result.status, result.accepted) == ("agreement", True)


def test_every_file_of_a_folder_must_be_acceptable(tmp_path: Path) -> None:
    path = folder(tmp_path / "model", LICENSE="One.", COPYING="Two.")
    accept(path, licence_hash("One."))
    with pytest.raises(LicenceError):
        require_licence(path)
    accept(path, licence_hash("Two."))
    assert require_licence(path).allowed


def test_a_folder_without_a_licence_is_unknown_by_its_configuration(tmp_path: Path) -> None:
    path = folder(tmp_path / "model")
    result = check_licence(path)
    assert result.status == "unknown" and not result.allowed and "no licence file" in result.reasons[0]
    accept(path, result.sha256)
    assert require_licence(path).accepted
    (path / "config.json").write_text('{"a": 1}', encoding="utf-8")
    with pytest.raises(LicenceError):
        require_licence(path)


def test_what_is_no_licence_is_said(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="There is no file or folder"):
        check_licence(tmp_path / "absent")
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match=r"neither a licence nor a config\.json"):
        check_licence(tmp_path / "empty")
    (tmp_path / "LICENSE").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match="not UTF-8"):
        check_licence(tmp_path / "LICENSE")
    (tmp_path / "big").write_text("x" * (1 << 20) + "x", encoding="utf-8")
    with pytest.raises(ValueError, match="no licence text"):
        check_licence(tmp_path / "big")


@pytest.mark.parametrize("damage", ["[1]", "{", '{"a": 1}'])
def test_a_damaged_list_of_acceptances_is_named(tmp_path: Path, damage: str) -> None:
    acceptance_file().parent.mkdir(parents=True)
    acceptance_file().write_text(damage, encoding="utf-8")
    with pytest.raises(ValueError, match=r"list of accepted licences .* is damaged"):
        check_text(MIT)


@pytest.mark.parametrize("name", ["revenue_12_months", "monthly_revenue"])
@pytest.mark.parametrize("value", [-1.0, float("nan")])
def test_a_profile_has_sensible_figures(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"{name} is"):
        UsageProfile(**{name: value})


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = folder(tmp_path / "model", LICENSE=K3)
    assert main(["licence", str(path), "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["status"], result["licence"], result["allowed"]) == ("ok", "Kimi K3 License", True)
    assert main(["licence", str(path), "--maas", "--revenue", "3e7"]) == 1
    text = capsys.readouterr().out
    assert "an agreement with the licensor is needed first" in text and f"--accept {licence_hash(K3)}" in text
    assert main(["licence", str(path), "--maas", "--revenue", "3e7", "--official"]) == 0
    capsys.readouterr()
    assert main(["licence", str(path), "--maas", "--internal"]) == 2
    assert "--internal says that nothing reaches third parties, and --maas" in capsys.readouterr().err
    assert main(["licence", str(path), "--maas", "--revenue", "3e7", "--accept", licence_hash(K3)]) == 0
    assert "(accepted)" in capsys.readouterr().out
    assert main(["licence", str(path), "--accept", "0" * 64]) == 2
    assert "is not the hash of the licence" in capsys.readouterr().err
    assert main(["licence", str(tmp_path / "absent")]) == 2
    assert "There is no file or folder" in capsys.readouterr().err
