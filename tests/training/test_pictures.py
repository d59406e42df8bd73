"""Generated pictures show what they claim."""

import numpy as np
import pytest

from moe28t_jax.chat import Tokenizer
from moe28t_jax.chat.images import image_prompt, open_image, prepare_image
from moe28t_jax.training.nano import pictures
from moe28t_jax.training.nano.train import VOCABULARY


def blobs(mask: np.ndarray) -> list[int]:
    """Sizes of the connected areas of a mask."""
    mask, sizes = mask.copy(), []
    while mask.any():
        stack, size = [tuple(np.argwhere(mask)[0])], 0
        mask[stack[0]] = False
        while stack:
            y, x = stack.pop()
            size += 1
            for ny, nx in ((y + 1, x), (y - 1, x), (y, x + 1), (y, x - 1)):
                if 0 <= ny < mask.shape[0] and 0 <= nx < mask.shape[1] and mask[ny, nx]:
                    mask[ny, nx] = False
                    stack.append((ny, nx))
        sizes.append(size)
    return sizes


@pytest.mark.parametrize("shape", pictures.SHAPES)
@pytest.mark.parametrize("count", pictures.COUNTS)
def test_pictures_show_their_scene(shape: str, count: int):
    random = np.random.default_rng(count)
    for position, (x, y) in pictures.POSITIONS.items():
        for colour, value in pictures.COLOURS.items():
            picture = pictures.paint(pictures.Scene(shape, colour, count, position), random)
            assert picture.shape == (112, 112, 3) and picture.dtype == np.uint8
            mask = np.abs(picture.astype(int) - 255).max(axis=2) > 60
            sizes = blobs(mask)
            assert len(sizes) == count and max(sizes) < 1.1 * min(sizes)
            rows, columns = np.nonzero(mask)
            assert abs(np.median(columns) - x) < 12 and abs(np.median(rows) - y) < 12
            # Nothing is cut off at the edge.
            assert rows.min() > 0 and columns.min() > 0 and rows.max() < 111 and columns.max() < 111
            mean = picture[mask].mean(axis=0)
            distances = {name: np.abs(mean - other).sum() for name, other in pictures.COLOURS.items()}
            assert min(distances, key=distances.get) == colour
            assert np.abs(mean - value).max() < 30
            # How much of its bounding square a shape fills: triangle 1/2, circle pi/4, square 1.
            side = np.sqrt(min(sizes))
            height = rows.max() - rows.min() + 1 if position in ("top", "bottom", "centre") else None
            if height is not None:
                fill = (side / height) ** 2
                assert fill == pytest.approx(
                    {"triangle": 0.5, "circle": 0.785, "square": 1.0}[shape], abs=0.1
                )


def test_scenes_are_split_by_their_caption():
    scenes = list(pictures.all_scenes())
    assert len(scenes) == len({scene.caption for scene in scenes}) == 225
    heldout = {scene.caption for scene in scenes if scene.held_out}
    assert 25 < len(heldout) < 65
    random = np.random.default_rng(0)
    drawn = {pictures.draw_scene(random, held_out=False).caption for _ in range(2000)}
    assert drawn == {scene.caption for scene in scenes} - heldout
    assert {pictures.draw_scene(random, held_out=True).caption for _ in range(500)} == heldout


def test_questions_about_a_scene():
    scene = pictures.Scene("circle", "red", 2, "left")
    answers = {aspect: scene.question(aspect).answer for aspect in pictures.QUESTIONS}
    assert answers == {
        "shape": "circle", "colour": "red", "count": "2", "position": "left", "caption": "2 red circle left",
    }  # fmt: skip
    question = scene.question("count")
    assert question.check("2") and not question.check("3") and not question.check(None)
    assert question.thoughts == {"low": "", "high": "red circle", "max": "2 red circle left"}


def test_patches_and_prompt_are_those_of_the_image_room():
    picture = pictures.paint(pictures.Scene("square", "blue", 3, "top"), np.random.default_rng(3))
    prepared = prepare_image(open_image(picture), patch_size=14, merge=(2, 2))
    assert tuple(prepared.grid) == (1, 8, 8)
    np.testing.assert_array_equal(pictures.patches(picture), prepared.pixel_values())
    prompt = pictures.image_prompt()
    assert prompt == image_prompt((112, 112), prepared.num_tokens)
    tokenizer = Tokenizer.from_file(VOCABULARY)
    assert tokenizer.encode(prompt, allowed_special=True).count(tokenizer.media_pad_id) == 16


def test_drawing_is_seeded():
    scene = pictures.Scene("triangle", "black", 1, "centre")
    first = pictures.paint(scene, np.random.default_rng(5))
    assert np.array_equal(first, pictures.paint(scene, np.random.default_rng(5)))
    assert not np.array_equal(first, pictures.paint(scene, np.random.default_rng(6)))
