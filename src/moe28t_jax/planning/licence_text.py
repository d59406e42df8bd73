"""What two copies of one licence text have in common: its normal form, and the hash of that."""

from __future__ import annotations

import hashlib
import re
import unicodedata

# A line that names a holder and says nothing else; the same licence is given by many. Whatever is not understood as
# such stays a part of the text, which then is none of the known ones.
_COPYRIGHT = re.compile(
    r"copyright (?=\(c\)|©|\d{4}|\[yyyy\])(?:\(c\)|©)?\s*(?:[\d,\- ]|\[yyyy\])*(?P<holder>[\w .,&'<>@\[\]-]{0,80})",
    re.IGNORECASE,
)
_RESERVED = re.compile(r"[.,]? all rights reserved\.?$")
# A full stop within a name: of a short form, or within a word.
_STOP = re.compile(
    r"\b(?:inc|ltd|co|corp|llc|plc|pty|bros)\.(?=,| and | & | <)|\b(?:dept|univ|st|dr|jr|sr|\w)\.(?=[ ,])|\.(?=\w)|\.$"
)
# Words, by how they begin, that belong to terms and hardly to a name.
_TERMS = re.compile(
    r"\b(?:(?:must|shall|may|can|cannot|will|would|should|not?|non|none|never|nor|only|solely|exclusively?|merely|just|"
    r"if|unless|except|until|when|where|whoever|which|that|this|these|those|any|all|each|every|other|otherwise|"
    r"to|with|without|under|subject|use|used|uses|using|users?|paid|due|owed|own|owns|owned|void|free|pending)\b|"
    r"usage|commerc|noncommerc|profit|nonprofit|purpos|licen[cs]|fee|pay|royalt|revenue|percent|per cent|charg|cost|"
    r"pric|prohibit|forb|permi|allow|restrict|require|need|obtain|consent|approv|authori[sz]|agree|contract|condition|"
    r"term|clause|notice|written|prior|revo[ck]|expir|evaluat|educat|academic|personal|private|internal|individual|"
    r"sell|sale|sold|resale|resell|distribut|redistribut|cop(?:y|ies)\b|modif|deriv|train|output|deploy|host|"
    r"display|logo\b|attribut|mandator|credit|show|visib|barred|bann|citizen|countr|"
    r"militar|weapon|embargo|reserv|exclud|includ|provid|grant|accept|violat|liab|warrant|contact)"
)
# Words of a holder's name that are written small.
_SMALL_WORD = re.compile(
    r"and|the|of|for|at|its|et|al|de|da|del|di|du|la|le|van|von|der|den|y|e|und|team|contributors|authors|affiliates|"
    r"others|developers|maintainers|community|project|foundation"
)
_MOST_CAPITAL_WORDS, _MOST_WORDS = 4, 12
_PUNCTUATION = str.maketrans("“”„‘’–—‑", '"""\'\'---')


def normalize(text: str) -> str:
    """The text without what carries no meaning: case, line breaks, spacing, forms of quotes and dashes, and lines that
    only name a copyright holder."""
    text = unicodedata.normalize("NFKC", text).translate(_PUNCTUATION)
    lines = (" ".join(line.split()) for line in text.splitlines())
    return " ".join(line.casefold() for line in lines if line and not _names_holder(line))


def _names_holder(line: str) -> bool:
    """Whether a line only says who holds the copyright."""
    match = _COPYRIGHT.fullmatch(line)
    if match is None:
        return False
    holder = match["holder"]
    lower = _RESERVED.sub("", holder.casefold())
    if lower == "[name of copyright owner]":
        return True
    # What stands behind the end of a sentence is no name.
    return "." not in _STOP.sub("", lower) and not _TERMS.search(lower) and _is_written_as_name(holder)


def _is_written_as_name(holder: str) -> bool:
    """Whether few words stand there, in capitals where names have them; a word by itself may be anybody's."""
    lower = _RESERVED.sub("", holder.casefold())
    words = [word for word in re.split(r"[\s,&<>\[\]]+", holder[: len(lower)]) if word]
    if holder.isupper():
        return len(words) <= _MOST_CAPITAL_WORDS
    small = [word for word in words if word[0].islower() and "@" not in word]
    return len(words) <= _MOST_WORDS and (
        len(words) == 1 or all(_SMALL_WORD.fullmatch(word.casefold().strip(".")) for word in small)
    )


def licence_hash(text: str) -> str:
    """SHA-256 of the normalised text, in hexadecimal."""
    return hashlib.sha256(normalize(text).encode("utf-8", "surrogatepass")).hexdigest()
