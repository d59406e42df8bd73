"""Questions that a program can make, think through and check: what the second training teaches.

Numbers are written digit by digit with spaces between, letters likewise, so that each digit and each letter is
a token of its own; every step of a scratchpad can be read off from the step before it. A scratchpad exists in
three lengths: none for the effort `low`, the steps alone for `high`, the steps and a check for `max`.

A question is held out when the hash of its family and text says so: the splits are disjoint by construction.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from moe28t_jax.chat.effort import EFFORTS

HELDOUT_MODULUS = 5
DAYS = ("Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun")
LETTERS = "abcdefghijklmnopqrstuvwxyz"


@dataclass(frozen=True)
class Question:
    """One question: what is asked, the scratchpad of each effort, and the one right answer."""

    family: str
    text: str
    thoughts: dict[str, str]
    answer: str

    @property
    def held_out(self) -> bool:
        """Whether this question belongs to the held-out split."""
        return is_held_out(f"{self.family}: {self.text}")

    def check(self, content: str | None) -> bool:
        """Whether a response gives the answer: the same words, up to white space and a full stop."""
        return content is not None and content.strip().removesuffix(".").split() == self.answer.split()


def is_held_out(key: str) -> bool:
    """Whether the SHA-256 of the text, as an integer, is divisible by 5."""
    return int(hashlib.sha256(key.encode()).hexdigest(), 16) % HELDOUT_MODULUS == 0


def spaced(value: object) -> str:
    """The characters of a number or word with spaces between: 132 -> `1 3 2`."""
    return " ".join(str(value))


def _thoughts(short: str, check: str) -> dict[str, str]:
    return {"low": "", "high": short, "max": f"{short}; {check}"}


def _integer(random: np.random.Generator, low: int, high: int) -> int:
    """A whole number from low to high, both included."""
    return int(random.integers(low, high + 1))


# -- arithmetic
def _columns(a: int, b: int) -> str:
    """Addition of two numbers of two digits column by column, each sum with its carry before its digit."""
    ones = a % 10 + b % 10
    carry = ones // 10
    tens = a // 10 + b // 10 + carry
    return f"{a % 10}+{b % 10}={spaced(f'{ones:02}')}; {a // 10}+{b // 10}+{carry}={spaced(f'{tens:02}')}"


def addition(random: np.random.Generator) -> Question:
    """Two numbers of two digits; the check adds them the other way round."""
    a, b = _integer(random, 10, 99), _integer(random, 10, 99)
    thoughts = _thoughts(_columns(a, b), f"check {_columns(b, a)}")
    return Question("addition", f"Add {spaced(a)} and {spaced(b)}.", thoughts, spaced(a + b))


# -- dates
def weekday(random: np.random.Generator) -> Question:
    """The day so many days after or before another: whole weeks off, then day by day; the check counts the
    weeks."""
    count, start = _integer(random, 1, 30), _integer(random, 0, 6)
    forward = bool(random.integers(2))
    rest = count % 7
    sign = 1 if forward else -1
    walk = " ".join(f"{DAYS[(start + sign * step) % 7]}{step}" for step in range(rest + 1))
    weeks = " ".join(str(value) for value in range(count, -1, -7))
    text = f"What day is {count} days {'after' if forward else 'before'} {DAYS[start]}?"
    answer = DAYS[(start + sign * count) % 7]
    return Question(
        "weekday", text, _thoughts(f"{count}-{count - rest}={rest}; {walk}", f"check {weeks}"), answer
    )


# -- strings
def reversal(random: np.random.Generator) -> Question:
    """Letters backwards: numbered, then (`max`) numbered backwards."""
    letters = [LETTERS[i] for i in random.integers(26, size=_integer(random, 3, 6))]
    numbered = [f"{letter}{place}" for place, letter in enumerate(letters, start=1)]
    thoughts = _thoughts(f" {' '.join(numbered)}", " ".join(reversed(numbered)))
    return Question("reversal", f"Reverse {' '.join(letters)}.", thoughts, " ".join(reversed(letters)))


def _tally(letters: list[str], target: str) -> str:
    count = 0
    walk = []
    for letter in letters:
        count += letter == target
        walk.append(f"{letter}{count}")
    return " ".join(walk)


def counting(random: np.random.Generator) -> Question:
    """How often a letter occurs: a running count, checked (`max`) from the end."""
    alphabet = [LETTERS[i] for i in random.choice(26, size=3, replace=False)]
    letters = [alphabet[i] for i in random.integers(3, size=_integer(random, 4, 8))]
    target = alphabet[0]
    thoughts = _thoughts(f" {_tally(letters, target)}", f"check {_tally(letters[::-1], target)}")
    text = f"How many {target} in {' '.join(letters)}?"
    return Question("counting", text, thoughts, str(letters.count(target)))


# -- lists
def sorting(random: np.random.Generator) -> Question:
    """Different digits in ascending order: inserted one by one, neighbours compared as the check."""
    digits = random.permutation(10)[: _integer(random, 3, 5)].tolist()
    stages = [spaced("".join(map(str, sorted(digits[:count])))) for count in range(1, len(digits) + 1)]
    compared = " ".join(f"{a}<{b}" for a, b in pairwise(sorted(digits)))
    thoughts = _thoughts("; ".join(stages), compared)
    return Question("sorting", f"Sort {' '.join(map(str, digits))}.", thoughts, stages[-1])


# -- code
def code(random: np.random.Generator) -> Question:
    """The value of a small Python expression: an index, a sum, a maximum."""
    match _integer(random, 0, 2):
        case 0:
            items = random.integers(10, size=4).tolist()
            place = _integer(random, 0, 3)
            numbered = [f"{index}:{item}" for index, item in enumerate(items)]
            thoughts = _thoughts(" ".join(numbered), numbered[place])
            expression, value = f"{items}[{place}]", items[place]
        case 1:
            a = _integer(random, 0, 9)
            b = _integer(random, 0, 9 - a)
            c = _integer(random, 0, 9)
            steps = f"{a}+{b}=0 {a + b}; {a + b}+{c}={spaced(f'{a + b + c:02}')}"
            swapped = f"{b}+{a}=0 {a + b}; {c}+{a + b}={spaced(f'{a + b + c:02}')}"
            thoughts = _thoughts(steps, f"check {swapped}")
            expression, value = f"sum([{a}, {b}, {c}])", a + b + c
        case _:
            items = random.integers(10, size=4).tolist()
            running = [max(items[: count + 1]) for count in range(4)]
            compared = " ".join(f"{item}<={running[-1]}" for item in items)
            thoughts = _thoughts(" ".join(map(str, running)), compared)
            expression, value = f"max({items})", running[-1]
    return Question("code", f"Value of {expression}?", thoughts, spaced(value))


FAMILIES: dict[str, Callable[[np.random.Generator], Question]] = {
    "addition": addition,
    "weekday": weekday,
    "reversal": reversal,
    "counting": counting,
    "sorting": sorting,
    "code": code,
}
"""Every family of questions: a seeded generator of one question."""


def draw_question(random: np.random.Generator, family: str, held_out: bool) -> Question:
    """A random question of a family from one of the two splits."""
    while True:
        question = FAMILIES[family](random)
        if question.held_out == held_out:
            return question


def heldout_questions(family: str, count: int, seed: int = 0) -> list[Question]:
    """Up to `count` different held-out questions of a family (small families have fewer), seeded."""
    random = np.random.default_rng((seed, sum(family.encode())))
    found: dict[str, Question] = {}
    for _ in range(60 * count):
        if len(found) == count:
            break
        question = draw_question(random, family, held_out=True)
        found.setdefault(question.text, question)
    return list(found.values())


__all__ = ["EFFORTS", "FAMILIES", "Question", "draw_question", "heldout_questions", "is_held_out", "spaced"]
