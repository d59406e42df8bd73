"""Generated pictures: equal shapes of one colour, one to three of them, somewhere on white.

A picture has 112 x 112 pixels: 8 x 8 patches, 16 image tokens. A scene (shape, colour, count, position) is held
out by the hash of its caption; how it is drawn (sizes, offsets, shades, noise) is drawn anew each time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

import numpy as np
from jaxtyping import Float32, UInt8
from PIL import Image, ImageDraw

from moe28t_jax.training.nano.tasks import Question, is_held_out

SIZE = 112
PATCH = 14
SHAPES = ("circle", "square", "triangle")
COLOURS: dict[str, tuple[int, int, int]] = {
    "red": (220, 40, 40),
    "green": (40, 170, 60),
    "blue": (50, 70, 220),
    "yellow": (235, 200, 30),
    "black": (30, 30, 30),
}
COUNTS = (1, 2, 3)
POSITIONS: dict[str, tuple[int, int]] = {
    "left": (24, 56),
    "right": (88, 56),
    "top": (56, 24),
    "bottom": (56, 88),
    "centre": (56, 56),
}
QUESTIONS: dict[str, str] = {
    "shape": "What shape?",
    "colour": "What colour?",
    "count": "How many?",
    "position": "Where?",
    "caption": "Describe it.",
}


@dataclass(frozen=True)
class Scene:
    """What a picture shows."""

    shape: str
    colour: str
    count: int
    position: str

    @property
    def caption(self) -> str:
        """For instance `2 red circle left`."""
        return f"{self.count} {self.colour} {self.shape} {self.position}"

    @property
    def held_out(self) -> bool:
        """Whether this scene belongs to the held-out split."""
        return is_held_out(f"picture: {self.caption}")

    def question(self, aspect: str) -> Question:
        """A question about the picture, `aspect` a key of `QUESTIONS`; `max` thinks of the whole caption."""
        answer = self.caption if aspect == "caption" else str(getattr(self, aspect))
        thoughts = {"low": "", "high": f"{self.colour} {self.shape}", "max": self.caption}
        return Question(f"picture {aspect}", QUESTIONS[aspect], thoughts, answer)


def all_scenes() -> Iterator[Scene]:
    """Every scene there is, in fixed order."""
    for shape, colour, count, position in product(SHAPES, COLOURS, COUNTS, POSITIONS):
        yield Scene(shape, colour, count, position)


def draw_scene(random: np.random.Generator, held_out: bool) -> Scene:
    """A random scene of one of the two splits."""
    while True:
        scene = Scene(
            SHAPES[random.integers(len(SHAPES))],
            list(COLOURS)[random.integers(len(COLOURS))],
            COUNTS[random.integers(len(COUNTS))],
            list(POSITIONS)[random.integers(len(POSITIONS))],
        )
        if scene.held_out == held_out:
            return scene


def paint(scene: Scene, random: np.random.Generator) -> UInt8[np.ndarray, "112 112 3"]:
    """Draw a scene: shapes side by side at top, bottom and centre, one above the other at left and right."""
    image = Image.new("RGB", (SIZE, SIZE), (255, 255, 255))
    pen = ImageDraw.Draw(image)
    radius = int(random.integers(9, 13))
    x, y = POSITIONS[scene.position]
    x, y = x + int(random.integers(-4, 5)), y + int(random.integers(-4, 5))
    gap = 2 * radius + int(random.integers(4, 8))
    colour = tuple(int(np.clip(c + random.integers(-20, 21), 0, 255)) for c in COLOURS[scene.colour])
    for index in range(scene.count):
        offset = round((index - (scene.count - 1) / 2) * gap)
        vertical = scene.position in ("left", "right")
        cx, cy = (x, y + offset) if vertical else (x + offset, y)
        box = (cx - radius, cy - radius, cx + radius, cy + radius)
        match scene.shape:
            case "circle":
                pen.ellipse(box, fill=colour)
            case "square":
                pen.rectangle(box, fill=colour)
            case _:
                pen.polygon([(cx, box[1]), (box[2], box[3]), (box[0], box[3])], fill=colour)
    noisy = np.asarray(image, np.int16) + random.integers(-6, 7, (SIZE, SIZE, 3))
    return np.clip(noisy, 0, 255).astype(np.uint8)


def patches(picture: UInt8[np.ndarray, "H W 3"]) -> Float32[np.ndarray, "P C"]:
    """Normalised patches in reading order, channels first: what the image tower takes."""
    height, width = picture.shape[0] // PATCH, picture.shape[1] // PATCH
    grid = picture.reshape(height, PATCH, width, PATCH, 3).transpose(0, 2, 4, 1, 3)
    scaled = grid.reshape(height * width, 3 * PATCH * PATCH).astype(np.float32) / np.float32(255)
    return (scaled - np.float32(0.5)) / np.float32(0.5)


def image_prompt() -> str:
    """The prompt of one picture: its size and one placeholder per image token."""
    tokens = (SIZE // PATCH // 2) ** 2
    return f"<|media_begin|>image {SIZE}x{SIZE}<|media_content|>{'<|media_pad|>' * tokens}<|media_end|>"
