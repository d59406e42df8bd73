"""Questions, conversations and rows of the second training."""

import json

import numpy as np
import pytest

from moe28t_jax.chat import Tokenizer, parse_ids, parse_pieces
from moe28t_jax.chat.render import render
from moe28t_jax.demo_tools import Toolbox
from moe28t_jax.evals.nano_tasks import Item, make_items, summarize, wilson_interval
from moe28t_jax.training.nano import conversations as talk
from moe28t_jax.training.nano import tasks
from moe28t_jax.training.nano.converse import Settings, make_batch
from moe28t_jax.training.nano.pictures import all_scenes
from moe28t_jax.training.nano.train import VOCABULARY


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(VOCABULARY)


def questions(family: str, count: int = 150) -> list[tasks.Question]:
    random = np.random.default_rng(1)
    return [tasks.FAMILIES[family](random) for _ in range(count)]


def solve(question: tasks.Question) -> str:
    """The answer from the question's text alone, by other means than its generator."""
    words = question.text.rstrip(".?").split()
    match question.family:
        case "addition":
            first, second = question.text[4:-1].split(" and ")
            return " ".join(str(int(first.replace(" ", "")) + int(second.replace(" ", ""))))
        case "weekday":
            count = int(words[3]) * (1 if words[5] == "after" else -1)
            return tasks.DAYS[(tasks.DAYS.index(words[6]) + count) % 7]
        case "reversal":
            return " ".join(words[:0:-1])
        case "counting":
            return str(words[4:].count(words[2]))
        case "sorting":
            return " ".join(sorted(words[1:]))
        case _:
            scope = {"__builtins__": {"max": max, "sum": sum}}
            return " ".join(str(eval(question.text[len("Value of ") : -1], scope)))


@pytest.mark.parametrize("family", tasks.FAMILIES)
def test_answers_follow_from_the_text(family: str):
    for question in questions(family):
        assert question.family == family
        assert question.answer == solve(question)
        assert question.check(question.answer) and question.check(f" {question.answer}.\n")


@pytest.mark.parametrize("family", tasks.FAMILIES)
def test_checkers_reject_wrong_answers(family: str):
    for question in questions(family, 50):
        wrong = {
            None,
            "",
            question.answer + " 1",
            question.answer[:-1],
            question.answer.replace(" ", "") + "x",
        }
        wrong |= {other.answer for other in questions(family, 20)} - {question.answer}
        assert not any(question.check(answer) for answer in wrong)


@pytest.mark.parametrize("family", tasks.FAMILIES)
def test_scratchpads_grow_with_the_effort(family: str, tokenizer: Tokenizer):
    for question in questions(family, 60):
        low, high, most = (len(tokenizer.encode(question.thoughts[effort])) for effort in tasks.EFFORTS)
        assert low == 0 < high < most <= 60
        assert question.thoughts["max"].startswith(question.thoughts["high"])


def test_columns_carry():
    assert tasks._columns(47, 85) == "7+5=1 2; 4+8+1=1 3"
    assert tasks._columns(12, 30) == "2+0=0 2; 1+3+0=0 4"
    assert tasks._tally(list("banana"), "a") == "b0 a1 n1 a2 n2 a3"


@pytest.mark.parametrize("family", tasks.FAMILIES)
def test_splits_are_disjoint_and_seeded(family: str):
    random = np.random.default_rng(0)
    train = {tasks.draw_question(random, family, held_out=False).text for _ in range(400)}
    heldout = {question.text for question in tasks.heldout_questions(family, 80)}
    assert len(heldout) == 80 and not train & heldout
    assert all(tasks.is_held_out(f"{family}: {text}") for text in heldout)
    assert heldout == {question.text for question in tasks.heldout_questions(family, 80)}
    assert heldout != {question.text for question in tasks.heldout_questions(family, 80, seed=1)}


def test_training_conversations_hold_no_heldout_question(tokenizer: Tokenizer):
    items = make_items(504, ["low"])
    asked = {item.conversation.messages[0]["content"] for item in items if not item.conversation.pictures}
    scenes = {scene.caption for scene in all_scenes() if scene.held_out}
    for kind in talk.KINDS:
        random = np.random.default_rng(2)
        for _ in range(25):
            conversation, _, _ = talk.draw_conversation(random, tokenizer, kind, 512)
            for message in conversation.messages:
                content = message["content"]
                if message["role"] == "user" and isinstance(content, str) and kind != "pictures":
                    assert content not in asked
                elif isinstance(content, list):
                    assert content[0]["image"] not in scenes


@pytest.mark.parametrize("kind", talk.KINDS)
def test_conversations_read_back(kind: str, tokenizer: Tokenizer):
    random = np.random.default_rng(3)
    seen = set()
    for _ in range(20):
        conversation, ids, written = talk.draw_conversation(random, tokenizer, kind, 512)
        assert len(ids) == len(written) <= 512
        runs = [list(piece) for piece in _runs(ids, written)]
        answers = [message for message in conversation.messages if message["role"] == "assistant"]
        assert len(runs) == len(answers)
        for run, message in zip(runs, answers, strict=True):
            assert run[-1] == tokenizer.stop_id
            output = parse_ids(tokenizer, run)
            assert output.unparsed == ""
            assert (output.reasoning or "") == message["reasoning_content"]
            assert (output.content or "") == message["content"]
            assert output.tool_calls == message.get("tool_calls", [])
        seen.add(conversation.effort)
        assert tokenizer.special_ids["<|media_pad|>"] not in [
            i for i, w in zip(ids, written, strict=True) if w
        ]
        assert ids.count(tokenizer.media_pad_id) == 16 * len(conversation.pictures)
    assert seen == set(tasks.EFFORTS)


def _runs(ids, written):
    run = []
    for token, mine in zip(ids, written, strict=True):
        if mine:
            run.append(token)
        elif run:
            yield run
            run = []
    if run:
        yield run


def test_what_the_assistant_writes_starts_where_a_prompt_ends(tokenizer: Tokenizer):
    conversation = talk.Conversation("high", talk.question_turns(questions("addition", 1)[0], "high"))
    ids, written = talk.encode_conversation(tokenizer, conversation)
    prompt = talk.Conversation("high", conversation.messages[:1]).pieces(add_generation_prompt=True)
    encoded = tokenizer.encode_pieces(prompt)
    assert ids[: len(encoded)] == encoded
    assert written == [False] * len(encoded) + [True] * (len(ids) - len(encoded))


def test_a_user_cannot_write_for_the_assistant():
    text = "".join(piece for piece, _ in talk._PROMPT)
    pieces = render([{"role": "user", "content": text}], add_generation_prompt=False)
    assert not any(talk.written_by_assistant(pieces))


def test_tool_tasks_run(tokenizer: Tokenizer):
    random = np.random.default_rng(4)
    for family in talk.TOOL_FAMILIES:
        for held_out in (False, True):
            task = talk.draw_tool_task(random, family, held_out)
            assert task.held_out == held_out
            assert task.call["name"] in task.declared
            assert task.toolbox().execute(task.call["name"], task.call["arguments"]) == task.answer
            turns = talk.tool_turns(task, "max")
            prompt = talk.Conversation("max", turns[:1], talk.specifications(task.declared))
            assert len(tokenizer.encode_pieces(prompt.pieces(add_generation_prompt=True))) < 340
            output = parse_pieces(render(turns[1:2], add_generation_prompt=False))
            assert output.tool_calls == [task.call]


def test_without_effort_text_no_effort_is_named(tokenizer: Tokenizer):
    random = np.random.default_rng(5)
    lengths = set()
    for _ in range(12):
        conversation, ids, _ = talk.draw_conversation(random, tokenizer, "questions", 512, effort_text=False)
        assert "thinking_effort" not in tokenizer.decode(ids)
        lengths.add(min(len(message.get("reasoning_content", "x")) for message in conversation.messages))
    assert len(lengths) > 1


def test_rows_are_seeded_and_weigh_what_is_written(tokenizer: Tokenizer):
    settings = Settings(rows=("questions", "tools", "pictures"), length=512)
    first, again = make_batch(settings, 7, tokenizer, None), make_batch(settings, 7, tokenizer, None)
    assert all(np.array_equal(first[name], again[name]) for name in first)
    assert not np.array_equal(first["tokens"], make_batch(settings, 8, tokenizer, None)["tokens"])
    assert first["tokens"].shape == (3, 513) and first["patches"].shape == (4, 64, 588)
    places = np.arange(512)
    for tokens, weights, length in zip(first["tokens"], first["weights"], first["lengths"], strict=True):
        assert weights[places >= length].sum() == 0 < weights.sum()
        assert (tokens[length + 1 :] == tokenizer.pad_id).all()
        # Every message that the assistant writes ends in the loss.
        ends = (tokens[1:] == tokenizer.stop_id) & (weights > 0)
        assert ends.any()
    with pytest.raises(ValueError, match="No conversation of tools fits 64 tokens"):
        talk.draw_conversation(np.random.default_rng(0), tokenizer, "tools", 64)


@pytest.mark.parametrize(
    ("right", "count", "low", "high"),
    [(0, 10, 0.0, 0.2775), (5, 10, 0.2366, 0.7634), (10, 10, 0.7225, 1.0), (450, 500, 0.8707, 0.9233)],
)
def test_wilson_interval(right: int, count: int, low: float, high: float):
    found = wilson_interval(right, count)
    assert found == pytest.approx((low, high), abs=2e-4)
    assert wilson_interval(0, 0) == (0.0, 1.0)


def test_summary_counts_answers_and_calls():
    question = tasks.Question("addition", "Add 1 1 and 2 2.", {"low": ""}, "3 3")
    nothing = talk.Conversation("low")
    call = {"name": "set", "arguments": {"key": "a", "value": 1}}
    items = [
        Item("addition", "low", nothing, question, reasoning_tokens=4, finished=True, content="3 3"),
        Item("addition", "low", nothing, question, finished=True, content="3 4"),
        Item("addition", "low", nothing, question, finished=False, content="3 3"),
        Item("tool: write key", "low", nothing, None, call, Toolbox(), "ok", 0, True, [call], "ok"),
        Item("tool: write key", "low", nothing, None, call, Toolbox(), "ok", 0, True,
             [{"name": "set", "arguments": {"key": "a", "value": True}}], "ok"),
        Item("no tool needed", "low", nothing, question, None, Toolbox(), None, 0, True, [call], "3 3"),
    ]  # fmt: skip
    found = summarize(items)
    assert found["addition"]["low"]["right"] == found["all questions"]["low"]["right"] == 1
    assert found["addition"]["low"]["reasoning_tokens"] == round(4 / 3, 2)
    assert found["all tools"]["low"]["right_calls"] == found["tool: write key"]["low"]["right"] == 1
    assert found["no tool needed"]["low"]["needless_calls"] == 1
    assert json.dumps(found)
