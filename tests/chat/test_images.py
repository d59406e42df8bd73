"""Opening, resizing and cutting images, and what is refused."""

import base64
import io
import os
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from moe28t_jax.chat import images
from moe28t_jax.chat.images import image_data_url, image_prompt, open_image, prepare_image


def noise(height: int, width: int, channels: int = 3) -> np.ndarray:
    return np.random.default_rng(height * 1000 + width).integers(0, 256, (height, width, channels), np.uint8)


def encoded(image: Image.Image, format: str = "PNG", **options: object) -> bytes:
    stream = io.BytesIO()
    image.save(stream, format, **options)
    return stream.getvalue()


def assembled(prepared: images.PreparedImage) -> np.ndarray:
    """The padded picture [H, W, 3] that the patches were cut from, patch by patch."""
    _, rows, columns = prepared.grid
    size = prepared.patches_u8.shape[2]
    picture = np.zeros((rows * size, columns * size, 3), np.uint8)
    for index, patch in enumerate(prepared.patches_u8):
        y, x = divmod(index, columns)
        picture[y * size : (y + 1) * size, x * size : (x + 1) * size] = patch.transpose(1, 2, 0)
    return picture


@given(st.integers(1, 90), st.integers(1, 90), st.sampled_from([2, 7, 14]), st.sampled_from([(2, 2), (1, 3)]))
def test_small_images_are_padded_and_never_scaled(
    height: int, width: int, patch: int, merge: tuple[int, int]
) -> None:
    pixels = noise(height, width)
    prepared = prepare_image(open_image(pixels), patch, merge)
    picture = assembled(prepared)
    assert picture.shape[0] % (patch * merge[0]) == 0 and picture.shape[0] - height < patch * merge[0]
    assert picture.shape[1] % (patch * merge[1]) == 0 and picture.shape[1] - width < patch * merge[1]
    np.testing.assert_array_equal(picture[:height, :width], pixels)
    assert picture.sum(dtype=np.int64) == pixels.sum(dtype=np.int64)  # black everywhere else
    assert prepared.size == (width, height)
    assert prepared.num_tokens * merge[0] * merge[1] == len(prepared.patches_u8)


@pytest.mark.parametrize(
    ("size", "grid"),
    [
        ((1, 1), (1, 2, 2)),
        ((1861, 7041), (1, 502, 134)),  # padding comes after the limit
        ((8000, 100), (1, 8, 512)),
        ((20, 30000), (1, 512, 2)),
        ((4000, 4000), (1, 258, 258)),
    ],
)
def test_limits(size: tuple[int, int], grid: tuple[int, int, int]) -> None:
    prepared = prepare_image(Image.new("RGB", size))
    assert prepared.grid == grid and prepared.size == size


def test_large_images_are_scaled_by_pillows_bicubic_filter() -> None:
    pixels = noise(96, 200)
    prepared = prepare_image(open_image(pixels), patch_limit=40)
    scale = (40 / (96 // 14 * (200 // 14))) ** 0.5
    size = int(200 * scale), int(96 * scale)
    expected = np.asarray(Image.fromarray(pixels).resize(size, Image.Resampling.BICUBIC))
    np.testing.assert_array_equal(assembled(prepared)[: size[1], : size[0]], expected)


def test_pixel_values() -> None:
    prepared = prepare_image(open_image(noise(28, 28)))
    values = prepared.pixel_values()
    assert values.dtype == np.float32 and values.shape == (4, 588)
    expected = (prepared.patches_u8.reshape(4, 588) / 255 - 0.5) / 0.5
    np.testing.assert_allclose(values, expected, atol=2e-7)


def test_transparency_shows_a_chessboard() -> None:
    pixels = np.zeros((28, 28, 4), np.uint8)
    pixels[:, :, 0] = 200
    pixels[:, 14:, 3] = 255
    pixels[20:, :, 3] = 100
    picture = assembled(prepare_image(open_image(pixels)))
    for y in range(28):
        for x in range(28):
            board = 180 if (x // 8 + y // 8) % 2 else 255
            alpha = int(pixels[y, x, 3])
            expected = [(c * alpha + board * (255 - alpha)) // 255 for c in (200, 0, 0)]
            assert picture[y, x].tolist() == expected


def test_the_chessboard_comes_after_scaling() -> None:
    image = Image.new("RGBA", (280, 280))
    picture = assembled(prepare_image(image, patch_limit=16))
    assert picture[0, 0, 0] == 255 and picture[0, 8, 0] == 180 and set(np.unique(picture)) == {180, 255}


def test_hidden_colours_leave_no_fringe() -> None:
    pixels = np.zeros((112, 112, 4), np.uint8)
    pixels[:, :56] = (0, 255, 0, 0)  # invisible green
    pixels[:, 56:] = (255, 0, 0, 255)
    picture = assembled(prepare_image(open_image(pixels), patch_limit=16)).astype(int)
    assert (picture[:, :, 1] - picture[:, :, 2]).max() <= 2


@pytest.mark.parametrize("mode", ["1", "L", "P", "RGB", "CMYK", "YCbCr", "HSV", "LA", "PA", "RGBA"])
def test_every_mode_of_eight_bits(mode: str) -> None:
    image = Image.fromarray(noise(20, 30)).convert("L" if mode in ("LA", "PA") else "RGB").convert(mode)
    prepared = prepare_image(open_image(image))
    assert prepared.grid == (1, 2, 4)
    expected = np.asarray(image.convert("RGB"))
    np.testing.assert_array_equal(assembled(prepared)[:20, :30], expected)


def test_palette_transparency_is_seen() -> None:
    image = Image.new("P", (28, 28), 0)
    image.putpalette([10, 20, 30] * 256)
    picture = assembled(prepare_image(open_image(encoded(image, transparency=0))))
    assert set(np.unique(picture)) == {180, 255}


def test_photographs_are_not_rotated() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    prepared = prepare_image(open_image(encoded(Image.new("RGB", (60, 30)), "JPEG", exif=exif)))
    assert prepared.size == (60, 30)


def test_all_sources_give_the_same_image(tmp_path: Path) -> None:
    pixels = noise(40, 50)
    content = encoded(Image.fromarray(pixels))
    path = tmp_path / "a picture"
    path.write_bytes(content)
    text = base64.b64encode(content).decode()
    sources = [
        path, str(path), content, bytearray(content), Image.open(path), pixels, pixels[:, ::-1][:, ::-1],
        f"data:image/png;base64,{text}", f"DATA:;BASE64,{text[:40]}\n{text[40:]}",
    ]  # fmt: skip
    for source in sources:
        np.testing.assert_array_equal(np.asarray(open_image(source)), pixels)
    gray = pixels[:, :, 0]
    np.testing.assert_array_equal(np.asarray(open_image(gray)), gray)
    np.testing.assert_array_equal(np.asarray(open_image(gray[:, :, None])), gray)


def test_the_first_picture_of_a_photograph_with_several_is_read() -> None:
    first, second = Image.fromarray(noise(16, 16)), Image.new("RGB", (8, 8))
    content = encoded(first, "MPO", save_all=True, append_images=[second], quality=95)
    opened = Image.open(io.BytesIO(content))
    assert opened.format == "MPO" and opened.n_frames == 2
    assert open_image(content).size == (16, 16)


def bomb(width: int, height: int) -> bytes:
    """A PNG file that claims this size and holds no pixels."""
    header = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    data = b"IDAT" + zlib.compress(b"")
    chunks = b"".join(
        struct.pack(">I", len(c) - 4) + c + struct.pack(">I", zlib.crc32(c)) for c in (header, data)
    )
    return b"\x89PNG\r\n\x1a\n" + chunks


ANIMATED = encoded(
    Image.new("RGB", (8, 8)), "GIF", save_all=True, append_images=[Image.new("RGB", (8, 8), "red")]
)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (b"", "is empty"),
        (b"hello, I am a text", "is no image that can be read"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "is no image that can be read"),
        (encoded(Image.fromarray(noise(64, 64)))[:2000], "truncated or damaged"),
        (encoded(Image.fromarray(noise(64, 64)), "JPEG")[:2000], "truncated or damaged"),
        (bomb(9000, 9000), "9000 x 9000 pixels; at most 80,000,000"),
        (bomb(12_000, 10_000), "more than 80,000,000 pixels"),
        (bomb(60_000, 60_000), "more than 80,000,000 pixels"),
        (bomb(70_000, 2), "70000 x 2 pixels"),
        (ANIMATED, "has more than one frame and one is read"),
        (Image.new("I;16", (5, 5)), "more than 8 bits"),
        (Image.new("F", (5, 5)), "more than 8 bits"),
        (np.zeros((0, 5, 3), np.uint8), "5 x 0 pixels; expected at least one"),
        (np.zeros((5, 5, 3), np.float32), "dtype float32; expected uint8"),
        (np.zeros((3, 5, 5), np.uint8), r"shape \(3, 5, 5\)"),
        (np.zeros(5, np.uint8), r"shape \(5,\)"),
        (np.zeros((70_000, 1), np.uint8), "1 x 70000 pixels"),
        ("data:image/png;base64,@@@", "no valid base64"),
        ("data:image/png;base64", "has no comma"),
        ("data:image/png;base64,", "is empty"),
        ("https://example.org/a.png", "nothing is fetched over https; fetch it first"),
        ("file:///etc/hostname", "nothing is fetched over file"),
        ("/no/such/picture.png", "cannot be read .*No such file"),
        ("a\0b", "cannot be read"),
        (7, "An image is a int"),
        (None, "An image is a NoneType"),
    ],
)  # fmt: skip
def test_refusals(source: object, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        open_image(source)
    assert len(str(caught.value)) < 500


def test_bombs_are_not_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(self: Image.Image) -> None:
        raise AssertionError("decoded")

    monkeypatch.setattr(Image.Image, "load", load)
    with pytest.raises(ValueError, match="at most 80,000,000"):
        open_image(bomb(9000, 9000))


def test_paths_can_be_switched_off(tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    path.write_bytes(encoded(Image.new("RGB", (5, 5))))
    for source in (path, str(path)):
        with pytest.raises(ValueError, match="paths are not read here"):
            open_image(source, allow_paths=False)
    content = base64.b64encode(path.read_bytes()).decode()
    assert open_image(f"data:image/png;base64,{content}", allow_paths=False).size == (5, 5)


def test_only_regular_files_are_read(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for path in (pipe, tmp_path, "/dev/zero"):
        with pytest.raises(ValueError, match="is a folder, a device or a pipe; expected a regular file"):
            open_image(path)


def test_files_beyond_the_limit_are_refused_unread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = encoded(Image.new("RGB", (5, 5)))
    path, sparse = tmp_path / "a.png", tmp_path / "sparse.png"
    path.write_bytes(content)
    with sparse.open("wb") as file:
        file.truncate(images.MAX_BYTES + 1)
    with pytest.raises(ValueError, match=r"sparse\.png' has more than 100,000,000 bytes; make it smaller"):
        open_image(sparse)
    url = image_data_url(path)
    monkeypatch.setattr(images, "MAX_BYTES", len(content))
    assert [open_image(source).size for source in (path, content, url)] == [(5, 5)] * 3

    def never(*_: object, **__: object) -> None:
        raise AssertionError("read or decoded")

    monkeypatch.setattr(images, "MAX_BYTES", len(content) - 1)
    monkeypatch.setattr(Image, "open", never)
    for source in (path, content, bytearray(content), memoryview(content), url):
        with pytest.raises(ValueError, match=r"has more than \d+ bytes; make it smaller"):
            open_image(source)
    monkeypatch.setattr(base64, "b64decode", never)
    monkeypatch.setattr(images, "unquote_to_bytes", never)
    for header in ("image/png;base64", "image/png"):
        with pytest.raises(ValueError, match="The image in the data URL has more than"):
            open_image(f"data:{header},{'A' * 2000}")


def test_a_file_that_hides_its_size_is_read_to_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    path = Path("/proc/self/status")
    if not path.is_file() or path.stat().st_size:
        pytest.skip("there is no file without a size here")
    monkeypatch.setattr(images, "MAX_BYTES", 100)
    with pytest.raises(ValueError, match="has more than 100 bytes"):
        open_image(path)


@pytest.mark.parametrize(
    ("format", "kind"), [("PNG", "image/png"), ("JPEG", "image/jpeg"), ("BMP", "image/bmp")]
)
def test_a_file_as_a_data_url(tmp_path: Path, format: str, kind: str) -> None:
    path = tmp_path / "picture"
    path.write_bytes(encoded(Image.fromarray(noise(8, 9)), format))
    url = image_data_url(path)
    assert url == f"data:{kind};base64,{base64.b64encode(path.read_bytes()).decode()}"
    np.testing.assert_array_equal(np.asarray(open_image(url)), np.asarray(open_image(path)))
    path.write_text("no picture")
    with pytest.raises(ValueError, match="is no image that can be read"):
        image_data_url(path)


def test_prompt() -> None:
    prompt = image_prompt((75, 52), 3)
    pads = "<|media_pad|><|media_pad|><|media_pad|>"
    assert prompt == f"<|media_begin|>image 75x52<|media_content|>{pads}<|media_end|>"


def test_text_pictures_are_no_format_since_their_comments_take_quadratic_time():
    with pytest.raises(ValueError, match="is no image that can be read"):
        open_image(b"P3\n10 10\n255\n" + b"#\n" * 500_000)
