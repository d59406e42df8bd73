"""`moe28t demo`: the shipped checkpoint continues a text, looks at a picture and uses a tool.

Picture and question are held out from training and among those that the checkpoint gets right; how many it does is in
docs/nano.md.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

from moe28t_jax.cli.answering import Printer, converse
from moe28t_jax.cli.common import fail, harmless, json_text, load_model

TEXT_OPTIONS = {"max_new_tokens": 120, "temperature": 0.7, "top_p": 0.9, "seed": 3}
CHAT_OPTIONS = {"max_new_tokens": 400}
IMAGE_QUESTION = "Describe it."
TOOL_QUESTION = "Read left8.txt."
DEMO_TOOLS = ("read",)
SCENE = ("triangle", "green", 3, "top")
SCENE_SEED = 0


def run_demo(options: argparse.Namespace) -> int:
    """Run the command; a model without an image tower shows what it can, and the missing part is a failure."""
    from moe28t_jax.demo_tools import DEMO_FILES, Toolbox, specifications

    picture, drawn = _picture(options.image)
    model = load_model(options)
    show = not options.json
    printer = Printer() if show else None
    found: dict[str, Any] = {}

    _heading(show, "1. A text is continued (its first token takes a while: the model is compiled)")
    if show and options.model == "nano":
        print("(nano has five million parameters: it knows the shape of Python, not its sense)", flush=True)
    if show:
        print(harmless(options.prompt, sys.stdout), end="", flush=True)
    text = []
    for chunk in model.stream(options.prompt, **TEXT_OPTIONS):
        text.append(chunk.text)
        if show:
            print(harmless(chunk.text, sys.stdout), end="", flush=True)
    if show:
        print()
    found["text"] = {"prompt": options.prompt, "text": "".join(text)}

    _heading(show, f"2. A picture is looked at ({drawn})")
    sees = model.config.vision is not None
    found["image"] = _ask(model, options.image_question, {}, printer, images=[picture]) if sees else None
    if show and not sees:
        print("Left out: this model has no image tower.")

    _heading(show, "3. A tool is used")
    tools = {"tools": specifications(DEMO_TOOLS)}
    found["tool"] = _ask(
        model, options.tool_question, tools, printer, execute=Toolbox(files=DEMO_FILES).execute
    )
    if options.json:
        print(json_text(found))
    else:
        print("\nNext: moe28t chat, moe28t --help, and docs/nano.md for what this model can and cannot do.")
    if not sees:
        fail("The picture was left out, since this model has no image tower; load a model that has one.")
    return 0


def _heading(show: bool, text: str) -> None:
    if show:
        print(f"\n== {text}", flush=True)


def _ask(
    model: Any,
    question: str,
    fields: dict[str, Any],
    printer: Printer | None,
    images: list[Any] | None = None,
    execute: Any = None,
) -> dict[str, Any]:
    content: Any = question
    if images:
        pictures = [{"type": "image", "image": image} for image in images]
        content = [*pictures, {"type": "text", "text": question}]
    messages: list[dict[str, Any]] = [{"role": "user", "content": content}]

    def ask(conversation: list[dict[str, Any]]) -> Any:
        return model.stream({**fields, "messages": conversation}, **CHAT_OPTIONS)

    if printer is not None:
        printer.line("question", question)
    last = converse(ask, messages, printer, execute)
    if last.result is None:
        raise KeyboardInterrupt
    return {"question": question, "messages": messages[1:], "text": last.result.text}


def _picture(path: str | None) -> tuple[Any, str]:
    """The picture to look at, and what to call it: a file, or a drawn scene that training has not seen."""
    if path is not None:
        from moe28t_jax.chat import open_image

        return open_image(path), path
    import numpy as np

    from moe28t_jax.training.nano.pictures import Scene, paint

    scene = Scene(*SCENE)
    return paint(scene, np.random.default_rng(SCENE_SEED)), f"drawn: {scene.caption}"
