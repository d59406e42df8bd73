"""How well `nano` answers: held-out questions, tool calls and pictures at each effort, greedily decoded.

`python -m moe28t_jax.evals.nano_tasks --model FOLDER --output results.json [--plot picture.png]`. Every question is
one no training conversation holds; accuracies come with Wilson's 95% intervals. Calls are executed with
`moe28t_jax.demo_tools` and their results read before the answer.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from moe28t_jax.chat import Tokenizer, encode, parse_ids
from moe28t_jax.chat.parse import ParsedOutput
from moe28t_jax.chat.render import CLOSE
from moe28t_jax.demo_tools import Toolbox, specifications
from moe28t_jax.engine.steps import Steps, round_up
from moe28t_jax.model.vision import encode_prepared
from moe28t_jax.training.nano.conversations import (
    TOOL_FAMILIES,
    Conversation,
    draw_tool_task,
    picture_turns,
)
from moe28t_jax.training.nano.pictures import QUESTIONS, all_scenes, paint, patches
from moe28t_jax.training.nano.tasks import EFFORTS, FAMILIES, Question, heldout_questions
from moe28t_jax.weights import load_parameters

BATCH = 64
MAX_NEW_TOKENS = 128
_CAPACITY = 512
_CHUNK = 64


def wilson_interval(right: int, count: int) -> tuple[float, float]:
    """Wilson's 95% interval of a proportion; (0, 1) where nothing was counted."""
    if count == 0:
        return 0.0, 1.0
    z = 1.959963984540054
    share = right / count
    centre = (share + z * z / (2 * count)) / (1 + z * z / count)
    half = z / (1 + z * z / count) * math.sqrt(share * (1 - share) / count + z * z / (4 * count * count))
    return max(0.0, centre - half), min(1.0, centre + half)


@dataclass
class Item:
    """One question put at one effort: the conversation so far, how its answer is checked, and what came out."""

    family: str
    effort: str
    conversation: Conversation
    question: Question | None = None
    call: dict[str, Any] | None = None
    toolbox: Toolbox | None = None
    answer: str | None = None
    reasoning_tokens: int = 0
    finished: bool = False
    calls: list[dict[str, Any]] = field(default_factory=list)
    content: str | None = None

    @property
    def right(self) -> bool:
        """Whether the last answer is right; of a question that needs a tool, also that the call was."""
        if self.question is not None:
            return self.finished and self.question.check(self.content)
        return self.finished and self.called_right and (self.content or "").strip() == self.answer

    @property
    def called_right(self) -> bool:
        """Whether the one call is the expected one, its arguments with their types."""
        return len(self.calls) == 1 and json.dumps(self.calls[0], sort_keys=True) == json.dumps(
            self.call, sort_keys=True
        )


class Answerer:
    """Greedy answers of one model to many conversations at a time."""

    def __init__(self, folder: Path, progress: Callable[[int, int], None] | None = None) -> None:
        self.progress = progress
        self.parameters, self.config = load_parameters(folder, dtype=np.dtype(np.float32))
        self.tokenizer = Tokenizer.from_file(folder / "tiktoken.model")
        # Short chunks: prompts of every length share one compiled program.
        self.steps = Steps(self.parameters, self.config, chunk=_CHUNK)

    def generate(
        self, prompts: Sequence[Sequence[int]], pictures: Sequence[Sequence[np.ndarray]]
    ) -> list[list[int]]:
        """Continuations of up to `BATCH` prompts, to the end of the message or `MAX_NEW_TOKENS`."""
        longest = round_up(max(map(len, prompts)))
        tokens = np.zeros((BATCH, longest), np.int32)
        lengths = np.ones((BATCH,), np.int32)
        for row, prompt in enumerate(prompts):
            tokens[row, : len(prompt)], lengths[row] = prompt, len(prompt)
        cache = self.steps.new_cache(BATCH, _CAPACITY)
        images = [(patches(picture), (1, 8, 8)) for shown in pictures for picture in shown]
        features = {}
        if images:
            features = {"image_features": encode_prepared(self.parameters, images, self.config)}
        logits_BV, cache = self.steps.prefill(tokens, lengths, cache, **features)
        next_B = jnp.argmax(logits_BV, axis=-1).astype(jnp.int32)
        active = np.arange(BATCH) < len(prompts)
        results: list[list[int]] = [[] for _ in prompts]
        key = jax.random.key(0)
        for _ in range(MAX_NEW_TOKENS):
            for row, token in enumerate(np.asarray(next_B).tolist()):
                if active[row]:
                    results[row].append(token)
                    active[row] = token != self.tokenizer.stop_id
            if not active.any():
                break
            next_B, _, cache = self.steps.decode(next_B, active, cache, key, 0.0, 1.0)
        return results

    def answer(self, items: Sequence[Item]) -> None:
        """Put every item, run the calls it makes, and put those again with the results."""
        waiting = self._round(list(items))
        self._round(waiting)

    def _round(self, items: list[Item]) -> list[Item]:
        prompts = [
            encode(self.tokenizer, item.conversation.pieces(add_generation_prompt=True)) for item in items
        ]

        # Alike in effort and length, so that a batch ends together; pictures apart, for they take another program.
        def kind(index: int) -> tuple[bool, str]:
            return bool(items[index].conversation.pictures), items[index].effort

        groups: list[list[int]] = []
        for index in sorted(range(len(items)), key=lambda i: (kind(i), len(prompts[i]))):
            if not groups or len(groups[-1]) == BATCH or kind(groups[-1][0]) != kind(index):
                groups.append([])
            groups[-1].append(index)
        again = []
        for number, group in enumerate(groups, start=1):
            found = self.generate(
                [prompts[i] for i in group], [items[i].conversation.pictures for i in group]
            )
            for index, ids in zip(group, found, strict=True):
                if self._read(items[index], ids):
                    again.append(items[index])
            if self.progress is not None:
                self.progress(number, len(groups))
        return again

    def _read(self, item: Item, ids: list[int]) -> bool:
        """Take one output into the item; whether it called a tool for the first time."""
        close = self.tokenizer.special_ids[CLOSE]
        output: ParsedOutput = parse_ids(self.tokenizer, ids)
        item.reasoning_tokens += ids.index(close) if close in ids else len(ids)
        item.finished = ids[-1] == self.tokenizer.stop_id
        item.content = output.content
        if not output.tool_calls or item.calls or item.toolbox is None:
            return False
        item.calls = output.tool_calls
        message: dict[str, Any] = {"role": "assistant", "content": output.content or ""}
        message |= {"reasoning_content": output.reasoning or "", "tool_calls": output.tool_calls}
        results = [
            {"role": "tool", "content": item.toolbox.execute(call["name"], call["arguments"])}
            for call in output.tool_calls
        ]
        item.conversation.messages = [*item.conversation.messages, message, *results]
        return True


def make_items(count: int, efforts: Iterable[str], seed: int = 0) -> list[Item]:
    """Held-out items: `count` questions over the families, a fifth as many tool tasks, a tenth as many questions
    with tools declared that need none, and every aspect of every held-out scene; each at every effort.

    The effort `none` leaves the effort unsaid.
    """
    items: list[Item] = []
    per_family = -(-count // len(FAMILIES))
    plain = {family: heldout_questions(family, per_family, seed) for family in FAMILIES}
    tasks_each = max(1, count // 5 // len(TOOL_FAMILIES))
    for effort in efforts:
        named = None if effort == "none" else effort
        random = np.random.default_rng((seed, 1))
        for family, questions in plain.items():
            for question in questions:
                conversation = Conversation(named, [{"role": "user", "content": question.text}])
                items.append(Item(family, effort, conversation, question))
        for family in TOOL_FAMILIES:
            for _ in range(tasks_each):
                task = draw_tool_task(random, family, held_out=True)
                conversation = Conversation(
                    named, [{"role": "user", "content": task.text}], specifications(task.declared)
                )
                item = Item(f"tool: {family}", effort, conversation, None, task.call, task.toolbox())
                item.answer = task.answer
                items.append(item)
        for questions in plain.values():
            for question in questions[: max(1, count // 10 // len(plain))]:
                declared = draw_tool_task(random, TOOL_FAMILIES[random.integers(5)], held_out=True).declared
                message = {"role": "user", "content": question.text}
                conversation = Conversation(named, [message], specifications(declared))
                items.append(Item("no tool needed", effort, conversation, question, None, Toolbox()))
        for scene in filter(lambda scene: scene.held_out, all_scenes()):
            for aspect in QUESTIONS:
                messages = picture_turns(scene, aspect, "low", show=True)[:1]
                conversation = Conversation(named, messages, None, [paint(scene, random)])
                question = scene.question(aspect)
                items.append(Item(question.family, effort, conversation, question))
    return items


def summarize(items: Iterable[Item]) -> dict[str, dict[str, dict[str, Any]]]:
    """Per family and effort: questions, right answers, accuracy with its interval, mean reasoning tokens, and for
    tools the share of right calls, else of needless ones."""
    groups: dict[tuple[str, str], list[Item]] = defaultdict(list)
    for item in items:
        groups[item.family, item.effort].append(item)
        if item.family in FAMILIES:
            groups["all questions", item.effort].append(item)
        elif item.family.startswith("tool: "):
            groups["all tools", item.effort].append(item)
    result: dict[str, dict[str, dict[str, Any]]] = defaultdict(dict)
    for (family, effort), members in groups.items():
        right = sum(item.right for item in members)
        entry: dict[str, Any] = {"questions": len(members), "right": right}
        entry["accuracy"] = round(right / len(members), 4)
        entry["interval"] = [round(bound, 4) for bound in wilson_interval(right, len(members))]
        entry["reasoning_tokens"] = round(sum(item.reasoning_tokens for item in members) / len(members), 2)
        if family.startswith("tool: ") or family == "all tools":
            called = sum(item.called_right for item in members)
            entry["right_calls"] = called
            entry["call_accuracy"] = round(called / len(members), 4)
            entry["call_interval"] = [round(bound, 4) for bound in wilson_interval(called, len(members))]
        elif family == "no tool needed":
            entry["needless_calls"] = sum(bool(item.calls) for item in members)
        result[family][effort] = entry
    return dict(result)


def plot(results: dict[str, dict[str, dict[str, Any]]], picture: Path) -> None:
    """Accuracy against mean reasoning tokens, one line per family over its efforts."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(7, 4.5), layout="constrained")
    for family in [*FAMILIES, "all questions"]:
        points = [results[family][effort] for effort in EFFORTS if effort in results[family]]
        x = [point["reasoning_tokens"] for point in points]
        y = [point["accuracy"] for point in points]
        low = [max(0.0, point["accuracy"] - point["interval"][0]) for point in points]
        high = [max(0.0, point["interval"][1] - point["accuracy"]) for point in points]
        style: dict[str, Any] = {"color": "black", "linewidth": 2.5} if family == "all questions" else {}
        axis.errorbar(x, y, yerr=[low, high], marker="o", capsize=3, label=family, **style)
    axis.set_xlabel("mean reasoning tokens (low, high, max)")
    axis.set_ylabel("accuracy on held-out questions, 95% interval")
    axis.set_ylim(0, 1.02)
    axis.legend(fontsize=8)
    figure.savefig(picture, dpi=110)
    plt.close(figure)


def evaluate(
    folder: Path,
    count: int,
    efforts: Sequence[str],
    seed: int = 0,
    families: Sequence[str] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> tuple[dict[str, Any], list[Item]]:
    """Answer and summarise; `families` limits the items to families whose names begin so. `progress` is told how
    many batches of a round are done and how many there are."""
    answerer = Answerer(folder, progress)
    items = make_items(count, efforts, seed)
    if families is not None:
        items = [item for item in items if item.family.startswith(tuple(families))]
    if answerer.config.vision is None:
        items = [item for item in items if not item.conversation.pictures]
    answerer.answer(items)
    return {"questions": count, "seed": seed, "families": summarize(items)}, items


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, required=True, help="checkpoint folder")
    parser.add_argument("--questions", type=int, default=504)
    parser.add_argument("--efforts", default=",".join(EFFORTS), help="of low, high, max and none (unsaid)")
    parser.add_argument("--families", help="beginnings of families' names, by commas (default: all)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--plot", type=Path, help="picture of accuracy against reasoning tokens")
    options = parser.parse_args(arguments)
    efforts = options.efforts.split(",")
    unknown = [effort for effort in efforts if effort not in (*EFFORTS, "none")]
    if unknown or options.questions < 1:
        parser.error(f"efforts are low, high, max and none, questions at least 1; not {options.efforts!r}.")
    families = options.families.split(",") if options.families else None

    def progress(done: int, count: int) -> None:
        print(f"{done} of {count} batches", file=sys.stderr, flush=True)

    results, items = evaluate(options.model, options.questions, efforts, options.seed, families, progress)
    weights = (options.model / "model.safetensors").read_bytes()
    results = {"model_sha256": hashlib.sha256(weights).hexdigest(), **results}
    results["examples"] = [
        {"family": item.family, "effort": item.effort, "content": item.content, "right": item.right}
        for item in items[:: max(1, len(items) // 40)]
    ]
    options.output.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    for family, by_effort in results["families"].items():
        cells = [
            f"{effort} {entry['accuracy']:.3f} ({entry['reasoning_tokens']:.1f} tokens)"
            for effort, entry in by_effort.items()
        ]
        print(f"{family:20} n={next(iter(by_effort.values()))['questions']:4}  {'   '.join(cells)}")
    if options.plot:
        plot(results["families"], options.plot)


if __name__ == "__main__":
    main()
