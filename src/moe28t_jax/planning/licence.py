"""Which uses a licence allows: known texts by hash, rules of each, and acceptance by hash for the rest.

The rules are a reading of the texts that saves one from overlooking a clause. The text decides, and this is no advice.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from moe28t_jax.planning.licence_text import licence_hash

Status = Literal["ok", "attribution", "agreement", "unknown"]
_STRICTNESS: dict[Status, int] = {"ok": 0, "attribution": 1, "agreement": 2, "unknown": 3}

_LARGEST_FILE = 1 << 20


class LicenceError(ValueError):
    """The licence does not allow this use, or nobody has accepted it yet."""


@dataclass(frozen=True)
class UsageProfile:
    """How the weights are used; the default is small commercial use. Money in US dollars.

    internal: neither weights nor outputs nor capabilities reach third parties. official: through the licensor's own
    products or a certified partner. commercial: for any commercial purpose. model_as_a_service: third parties control
    inputs, parameters or training data. revenue_12_months: of licensee and affiliates together, in any 12 months.
    monthly_revenue, monthly_active_users: of the product or service that uses the weights.
    """

    internal: bool = False
    official: bool = False
    commercial: bool = True
    model_as_a_service: bool = False
    revenue_12_months: float | int = 0
    monthly_revenue: float | int = 0
    monthly_active_users: int = 0

    def __post_init__(self) -> None:
        for name in ("revenue_12_months", "monthly_revenue", "monthly_active_users"):
            value = getattr(self, name)
            if not value >= 0:
                raise ValueError(f"{name} is {value}; it is a number from 0 on.")


@dataclass(frozen=True)
class LicenceResult:
    """status: `ok`; `attribution` (something must be displayed); `agreement` (one with the licensor is needed first);
    `unknown` (no known text). name: of the licence, where known. sha256: of the normalised text, what `accept` takes.
    accepted: whether that hash was accepted. reasons: sentences. path: the file that was read."""

    status: Status
    name: str | None
    sha256: str
    accepted: bool
    reasons: tuple[str, ...]
    path: str

    @property
    def allowed(self) -> bool:
        """Whether weights may be loaded: known and allowed as it is, or accepted by hash."""
        return self.accepted or self.status in ("ok", "attribution")

    def to_json(self) -> dict[str, Any]:
        return {
            "status": self.status,
            "licence": self.name,
            "sha256": self.sha256,
            "accepted": self.accepted,
            "allowed": self.allowed,
            "reasons": list(self.reasons),
            "path": self.path,
        }


@dataclass(frozen=True)
class _Rule:
    status: Status
    applies: Callable[[UsageProfile], bool]
    reason: str


@dataclass(frozen=True)
class _Licence:
    name: str
    hashes: tuple[str, ...]
    rules: tuple[_Rule, ...] = ()


def _large_product(profile: UsageProfile) -> bool:
    return profile.commercial and (
        profile.monthly_active_users > 100_000_000 or profile.monthly_revenue > 20_000_000
    )


def _display(name: str, exempt: bool) -> _Rule:
    return _Rule(
        "attribution",
        lambda use: _large_product(use) and not (exempt and (use.internal or use.official)),
        "A product with more than 100 million monthly active users or 20 million dollars of monthly revenue must show "
        f'"{name}" prominently on its user interface.',
    )


def _needs_agreement(use: UsageProfile) -> bool:
    service = use.model_as_a_service and use.commercial and use.revenue_12_months > 20_000_000
    return service and not (use.internal or use.official)


_KNOWN: tuple[_Licence, ...] = (
    _Licence(
        "Kimi K3 License",
        ("5e032aee5e5c33d79f7bc0f5949de211063dca6591e1ee1b00b7de9801c15cd3",),
        (
            _Rule(
                "agreement",
                _needs_agreement,
                "A Model as a Service business whose revenue, affiliates included, exceeds 20 million dollars in any "
                "12 months needs a separate agreement with Moonshot AI before any commercial use (section 2).",
            ),
            _display("Kimi K3", exempt=True),
        ),
    ),
    _Licence(
        "Modified MIT License (Kimi K2)",
        ("858e04f686ee2833546c947472f6d35559ca3eb521248731201254dcf56b34af",),
        (_display("Kimi K2", exempt=False),),
    ),
    _Licence(
        "Modified MIT License (Kimi K2.5)",
        ("f5e23a510c5edbafb793e2e84915bc5e7b3a2d78c9f8490c755d8096d2eb865b",),
        (_display("Kimi K2.5", exempt=False),),
    ),
    _Licence(
        "MIT License",
        (  # under its two headings and under none
            "69539425723b87be2bdbc194c23a63b78c57c7a0ea2b261b3845c396bc7bda60",
            "1673fc9bcd589fe70a9a86f9052219695248c51a4ca3aac699ce94492880d439",
            "56959050891f7b737ac4e803051170c7197f02df73d80bd9a78d968e305bf558",
        ),
    ),
    _Licence(
        "Apache License 2.0",
        (  # with its appendix and without
            "46be4098b02dc4768c48449a6772bb67ddd1405e98a63f14d65943e9c10b5a99",
            "95cef6332b35354c12f9d666ab9ff47002e6f7ef937924896882b2e0cdb7a0d6",
        ),
    ),
)


def check_text(text: str, profile: UsageProfile | None = None, path: str = "") -> LicenceResult:
    """Judge one licence text for a use."""
    profile = profile or UsageProfile()
    digest = licence_hash(text)
    accepted = digest in accepted_hashes()
    for licence in _KNOWN:
        if digest not in licence.hashes:
            continue
        found = [rule for rule in licence.rules if rule.applies(profile)]
        statuses: list[Status] = ["ok", *(rule.status for rule in found)]
        status = max(statuses, key=lambda status: _STRICTNESS[status])
        reasons = tuple(rule.reason for rule in found) or (
            "This use needs nothing beyond the licence's notices.",
        )
        return LicenceResult(status, licence.name, digest, accepted, reasons, path)
    reason = "The text is none of the known ones, or was altered; read it and accept it by its hash."
    return LicenceResult("unknown", None, digest, accepted, (reason,), path)


def find_licences(folder: Path) -> tuple[Path, ...]:
    """Files of a folder that are licences by their name (LICENSE, MODEL_LICENSE.md, LICENCE.kimi, EULA.pdf), and
    those in a folder LICENSES; sorted."""
    files = [file for file in folder.iterdir() if file.is_file() and is_licence_name(file.name)]
    for inner in folder.iterdir():
        if inner.is_dir() and inner.name.casefold() in ("licenses", "licences"):
            files += [file for file in inner.iterdir() if file.is_file()]
    return tuple(sorted(files))


_DOCUMENTS = (".pdf", ".docx", ".doc", ".rtf", ".odt")
_TEXTS = ("", ".txt", ".md", ".rst", ".html", ".htm", *_DOCUMENTS)
_LICENCE_WORD = re.compile(
    r"(?:^|[-_. ])(?:licen[cs]es?|copying|eula|terms[-_ ]of[-_ ](?:use|service)|use[-_ ]policy)(?=[-_. ]|$)"
)


def is_licence_name(name: str) -> bool:
    """Whether a file's name says that it is a licence."""
    name = name.casefold()
    stem, dot, ending = name.partition(".")
    # `license_plates.py` is a program, `LICENSE.kimi` a licence.
    if stem in ("license", "licence", "copying"):
        return True
    if _LICENCE_WORD.search(name) is None:
        return False
    last = ending.rpartition(".")[2]
    # `LICENSE-2.0` and `Gemma-1.1-Terms-of-Use` end in no kind of file.
    return (dot + last) in _TEXTS or last[:1].isdigit() or _LICENCE_WORD.search(last) is not None


def decode_licence(content: bytes, where: str) -> str:
    """A licence file as text. Of a document that is none (PDF, Word) what stands there for its hash, which is unknown
    and may be accepted. Raises ValueError for another file that is not UTF-8."""
    if where.casefold().endswith(_DOCUMENTS):
        return content.decode("utf-8", "surrogateescape")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{where!r} is not UTF-8 text (byte {error.start}); convert it first.") from None


def read_licences(folder: Path) -> dict[str, str]:
    """The licence texts of a folder, by path. Raises ValueError for one that is no text."""
    return {str(file): _read(file) for file in find_licences(folder)}


def admit(
    source: str, texts: Mapping[str, str], accepted: str | None = None, profile: UsageProfile | None = None
) -> LicenceResult | None:
    """What loading asks: the strictest judgement of the licences that lie beside weights, by path; None for none.

    `accepted` is the hash of a text that the caller accepts for this one time. Weights without a licence file are
    loaded: nobody has stated terms that could be overlooked, as with a folder that one has written oneself
    (`require_licence`, for what serves others, refuses them). Raises LicenceError for a text that is unknown or altered
    and not accepted, or needs an agreement; ValueError when `accepted` is the hash of none of the texts.
    """
    results = [check_text(text, profile, path) for path, text in texts.items()]
    given = None if accepted is None else accepted.strip().lower()
    if given is not None and given not in [result.sha256 for result in results]:
        found = " or ".join(result.sha256 for result in results)
        raise ValueError(
            f"{accepted!r} is not the hash of a licence of {source!r}; "
            + (
                f"that is {found}."
                if found
                else "it holds no licence file, so that nothing need be accepted."
            )
        )
    results = [replace(result, accepted=result.accepted or result.sha256 == given) for result in results]
    for result in results:
        if not result.allowed:
            raise LicenceError(
                f"The weights of {source!r} are under a licence that is not known to allow this use "
                f"({result.name or 'unknown licence'}, {result.path}): {' '.join(result.reasons)} Read it; to load the "
                f"weights, pass accept_licence={result.sha256!r} (on the command line --accept-licence "
                f"{result.sha256})."
            )
    return max(results, key=lambda result: _STRICTNESS[result.status], default=None)


def check_licence(
    source: str | Path, profile: UsageProfile | None = None, texts: Mapping[str, str] | None = None
) -> LicenceResult:
    """Judge the licence of a checkpoint folder, or a licence file; or `texts` by path, where `source` is an address.

    Of several files in a folder the strictest result counts. A folder without one is `unknown`; the hash to accept is
    then that of its config.json. Raises FileNotFoundError where there is nothing to judge.
    """
    results = _check_all(source, profile, texts)
    return max(results, key=lambda result: (not result.allowed, _STRICTNESS[result.status]))


def require_licence(source: str | Path, profile: UsageProfile | None = None) -> LicenceResult:
    """What a loader calls: the result, or LicenceError with what to do where the weights may not be loaded yet."""
    result = check_licence(source, profile)
    if result.allowed:
        return result
    name = result.name or "unknown licence"
    raise LicenceError(
        f"The weights of {str(source)!r} are under an agreement that is not known to allow this use ({name}): "
        f"{' '.join(result.reasons)} To go on, accept it with: moe28t licence {str(source)!r} --accept {result.sha256}"
    )


def _check_all(
    source: str | Path, profile: UsageProfile | None, texts: Mapping[str, str] | None = None
) -> list[LicenceResult]:
    if texts is not None:
        if not texts:
            raise FileNotFoundError(
                f"{str(source)!r} holds no licence file; find out what its weights are under. They load without one."
            )
        return [check_text(text, profile, path) for path, text in texts.items()]
    source = Path(source)
    if source.is_dir():
        files = find_licences(source)
        if files:
            return [check_text(_read(file), profile, str(file)) for file in files]
        config = source / "config.json"
        if not config.is_file():
            raise FileNotFoundError(
                f"The folder {str(source)!r} holds neither a licence nor a config.json; name a checkpoint folder or a "
                "licence file."
            )
        digest = hashlib.sha256(config.read_bytes()).hexdigest()
        reason = (
            "The folder holds no licence file; find out what its weights are under, then accept the hash of its "
            "config.json. (Loading does not ask for it, as with a folder that one has written oneself.)"
        )
        return [LicenceResult("unknown", None, digest, digest in accepted_hashes(), (reason,), str(config))]
    if not source.exists():
        raise FileNotFoundError(
            f"There is no file or folder {str(source)!r}; name a checkpoint or a licence file."
        )
    return [check_text(_read(source), profile, str(source))]


def _read(path: Path) -> str:
    if not path.is_file() or path.stat().st_size > _LARGEST_FILE:
        raise ValueError(
            f"{str(path)!r} is no licence text: it is not a plain file of at most {_LARGEST_FILE} bytes."
        )
    return decode_licence(path.read_bytes(), str(path))


# -- acceptance ------------------------------------------------------------------------------------------------


def acceptance_file() -> Path:
    """Where accepted hashes are kept: `moe28t/accepted_licences.json` below XDG_CONFIG_HOME or ~/.config."""
    base = os.environ.get("XDG_CONFIG_HOME")
    return (Path(base) if base else Path.home() / ".config") / "moe28t" / "accepted_licences.json"


def accepted_hashes() -> frozenset[str]:
    """Hashes that the user has accepted. Raises ValueError where the file is damaged."""
    path = acceptance_file()
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(document, dict) or not all(isinstance(name, str) for name in document.values()):
            raise ValueError("it is no object of texts")
    except FileNotFoundError:
        return frozenset()
    except ValueError as error:
        raise ValueError(
            f"The list of accepted licences {str(path)!r} is damaged ({error}); correct it or remove the file."
        ) from None
    return frozenset(document)


def accept(source: str | Path, sha256: str, texts: Mapping[str, str] | None = None) -> LicenceResult:
    """Remember that the user accepts a licence. `sha256` must be the whole hash of what `source` holds now, so that
    nothing else is accepted by mistake; raises ValueError otherwise. `texts` are those of `check_licence`."""
    results = _check_all(source, None, texts)
    chosen = next((result for result in results if result.sha256 == sha256.strip().lower()), None)
    if chosen is None:
        raise ValueError(
            f"{sha256!r} is not the hash of the licence of {str(source)!r}; that is "
            f"{' or '.join(result.sha256 for result in results)}."
        )
    path = acceptance_file()
    path.parent.mkdir(parents=True, exist_ok=True)
    with _locked(path.parent):
        document = json.loads(path.read_text(encoding="utf-8")) if accepted_hashes() else {}
        document[chosen.sha256] = chosen.name or Path(chosen.path).name
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name)
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                json.dump(document, file, indent=1, ensure_ascii=True)
            os.replace(temporary, path)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise
    return check_licence(source, texts=texts)


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Wait for others who change the list; it is read and replaced."""
    handle = os.open(folder / "accepted_licences.lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)
