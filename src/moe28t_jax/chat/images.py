"""Images as the model reads them: opening, resizing, cutting into patches, and their place in a prompt.

Nothing here runs a model. The steps, the bicubic filter and all limits are those of the public image processor of
Kimi K3; its configuration says nothing about EXIF orientation, so a photograph is read as its pixels are stored and
never rotated.
"""

from __future__ import annotations

import base64
import binascii
import io
import math
import os
import re
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from urllib.parse import unquote_to_bytes

import numpy as np
from jaxtyping import Float, UInt8
from PIL import Image, UnidentifiedImageError

PATCH_LIMIT: Final = 65_536
"""Patches of one image before padding; larger images are scaled down."""
SIDE_LIMIT: Final = 512
"""Patches along one side; larger images are scaled down."""
MAX_PIXELS: Final = 80_000_000
"""Pixels of a file; more are refused from the header, before anything is decoded."""
MAX_SIDE: Final = 65_535
"""Pixels along one side of a file."""
MAX_BYTES: Final = 100_000_000
"""Bytes of a file; more are refused before anything is read or decoded."""
FORMATS: Final = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
"""Formats that are read; others of Pillow's start programs or are rarely tested against hostile files. JPEG takes in
MPO, the JPEG photographs of cameras that hold further pictures: the first one is read."""

# Transparent images are shown on a chessboard.
_SQUARE, _WHITE, _GRAY = 8, 255, 180
_DEEP_MODES = ("I", "F", "I;16", "I;16B", "I;16L", "I;16N")


@dataclass(frozen=True, eq=False)
class PreparedImage:
    """An image cut into patches.

    patches_u8: uint8 [N, 3, P, P], patches row by row, channel first. grid: frames, rows and columns of patches;
    N is their product. size: (width, height) of the original, which the prompt names.
    """

    patches_u8: UInt8[np.ndarray, "N 3 P P"]
    grid: tuple[int, int, int]
    size: tuple[int, int]
    merge: tuple[int, int] = (2, 2)

    @property
    def num_tokens(self) -> int:
        """Media pad tokens that stand for the image in a prompt: one per merged patch."""
        return self.grid[1] * self.grid[2] // math.prod(self.merge)

    def pixel_values(self) -> Float[np.ndarray, "N C"]:
        """(x / 255 - 0.5) / 0.5 as float32 [N, 3 * P * P], what the image tower reads."""
        rows = self.patches_u8.reshape(len(self.patches_u8), -1).astype(np.float32)
        return (rows / np.float32(255) - np.float32(0.5)) / np.float32(0.5)


def open_image(source: Any, allow_paths: bool = True) -> Image.Image:
    """A decoded still image from a path, bytes of a file, a `data:` URL, a PIL image, or a uint8 array.

    Arrays are [height, width] gray, or [height, width, 3 or 4] RGB or RGBA. allow_paths False refuses paths, for
    sources that come from somebody else. Files of several frames are refused, since the model reads one and which
    one is the caller's choice; the extra pictures inside an MPO photograph are ignored.
    Raises ValueError, in one sentence, for anything that is no whole image within `MAX_BYTES`, `MAX_PIXELS` and
    `MAX_SIDE`, and for a path that is no regular file; bytes are counted before they are read or decoded, and the
    size in pixels comes from the file's header.
    """
    if isinstance(source, Image.Image):
        return _decoded(source, "The image")
    if isinstance(source, np.ndarray):
        return _from_array(source)
    if isinstance(source, bytes | bytearray | memoryview):
        _check_bytes(memoryview(source).nbytes, "The image")
        return _from_bytes(bytes(source), "The image")
    if isinstance(source, str):
        if source[:5].lower() == "data:":
            return _from_bytes(_data_url(source), "The image in the data URL")
        scheme = re.match(r"([A-Za-z][A-Za-z0-9+.-]*)://", source)
        if scheme is not None:
            raise ValueError(
                f"The image is the address {source[:100]!r}, and nothing is fetched over {scheme[1]}; fetch it first "
                "and pass its bytes, a data URL or a path."
            )
    if isinstance(source, str | Path):
        if not allow_paths:
            raise ValueError(
                f"The image is {str(source)[:100]!r}, and paths are not read here; pass a data URL "
                "(data:image/png;base64,...)."
            )
        return _from_bytes(_file_content(Path(source)), _file_name(Path(source)))
    raise ValueError(
        f"An image is a {type(source).__name__}; expected a path, bytes of a file, a data URL, a PIL image or a uint8 "
        "array: pass one of these."
    )


def image_data_url(path: str | Path) -> str:
    """A picture's file as a base64 `data:` URL, which stays the same picture whatever becomes of the file.

    Raises ValueError as `open_image` does.
    """
    content = _file_content(Path(path))
    format = _from_bytes(content, _file_name(Path(path))).format
    kind = Image.MIME.get(format or "", "application/octet-stream")
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"


def _file_name(path: Path) -> str:
    return f"The image {str(path)[:200]!r}"


def _check_bytes(count: int, what: str) -> None:
    if count > MAX_BYTES:
        raise ValueError(f"{what} has more than {MAX_BYTES:,} bytes; make it smaller.")


def _file_content(path: Path) -> bytes:
    what = _file_name(path)
    try:
        # Opening a pipe would otherwise wait for somebody who writes into it.
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
        try:
            status = os.fstat(descriptor)
            regular, content = stat.S_ISREG(status.st_mode), b""
            if regular and status.st_size <= MAX_BYTES:
                with open(descriptor, "rb", closefd=False) as file:
                    # One byte beyond the limit tells a file that grows, or shows no size, from one that fits.
                    content = file.read(MAX_BYTES + 1)
        finally:
            os.close(descriptor)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ValueError(f"{what} cannot be read ({reason}); correct its path.") from error
    if not regular:
        raise ValueError(
            f"{what} is a folder, a device or a pipe; expected a regular file: correct its path."
        )
    _check_bytes(max(status.st_size, len(content)), what)
    return content


def _data_url(url: str) -> bytes:
    # Four characters of base64 are three bytes; what is written with percent signs is counted once more, decoded.
    if len(url) > MAX_BYTES // 3 * 4 + 1000:
        raise ValueError(f"The image in the data URL has more than {MAX_BYTES:,} bytes; make it smaller.")
    header, comma, content = url[5:].partition(",")
    if not comma:
        raise ValueError(
            f"The data URL {url[:60]!r} has no comma; expected data:image/png;base64,... with the file after the comma."
        )
    raw = unquote_to_bytes(content)
    if not header.lower().endswith(";base64"):
        return raw
    try:
        return base64.b64decode(b"".join(raw.split()), validate=True)
    except binascii.Error as error:
        raise ValueError(
            f"The data URL {url[:60]!r} is no valid base64 ({error}); encode the file's bytes again."
        ) from error


def _from_bytes(content: bytes, what: str) -> Image.Image:
    _check_bytes(len(content), what)
    if not content:
        raise ValueError(f"{what} is empty; pass the bytes of an image file.")
    try:
        image = Image.open(io.BytesIO(content), formats=FORMATS)
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise ValueError(f"{what} has more than {MAX_PIXELS:,} pixels; make it smaller.") from error
    except UnidentifiedImageError as error:
        raise ValueError(
            f"{what} is no image that can be read; expected one of {', '.join(FORMATS)}: convert it to PNG."
        ) from error
    # A damaged header can make the reader of a format fail in any way.
    except Exception as error:
        raise ValueError(f"{what} is damaged ({error}); export it again.") from error
    return _decoded(image, what)


def _check_size(size: tuple[int, int], what: str) -> None:
    width, height = size
    if width < 1 or height < 1:
        raise ValueError(f"{what} is {width} x {height} pixels; expected at least one: pass another image.")
    if width * height > MAX_PIXELS or max(size) > MAX_SIDE:
        raise ValueError(
            f"{what} is {width} x {height} pixels; at most {MAX_PIXELS:,} pixels and {MAX_SIDE:,} on a side are read: "
            "make it smaller."
        )


def _decoded(image: Image.Image, what: str) -> Image.Image:
    _check_size(image.size, what)
    try:
        several = image.format != "MPO" and _has_second_frame(image)
        if not several:
            image.load()
    # Pillow's decoders raise many types for damaged data.
    except Exception as error:
        raise ValueError(f"{what} is truncated or damaged ({error}); export it again.") from error
    if several:
        raise ValueError(
            f"{what} has more than one frame and one is read; choose one, e.g. PIL's image.seek(0) and image.copy()."
        )
    if image.mode in _DEEP_MODES:
        raise ValueError(
            f"{what} has the pixel mode {image.mode}, more than 8 bits per channel; scale it to 8 bits."
        )
    return image


def _has_second_frame(image: Image.Image) -> bool:
    """Counting all frames would walk a file that may hold tens of thousands."""
    try:
        image.seek(1)
    except EOFError:
        return False
    finally:
        image.seek(0)
    return True


def _from_array(array: np.ndarray) -> Image.Image:
    if array.dtype != np.uint8:
        raise ValueError(
            f"The image array has dtype {array.dtype}; expected uint8 with values 0 to 255: scale and convert it."
        )
    if array.ndim == 3 and array.shape[2] == 1:
        array = array[:, :, 0]
    if array.ndim != 2 and (array.ndim != 3 or array.shape[2] not in (3, 4)):
        raise ValueError(
            f"The image array has shape {array.shape}; expected [height, width] or [height, width, 3 or 4]: "
            "move its channels to the end."
        )
    _check_size((array.shape[1], array.shape[0]), "The image array")
    return Image.fromarray(np.ascontiguousarray(array))


def _is_transparent(image: Image.Image) -> bool:
    return image.mode in ("RGBA", "LA", "PA", "RGBa", "La") or "transparency" in image.info


def _on_chessboard(pixels_HWC: UInt8[np.ndarray, "H W 4"]) -> UInt8[np.ndarray, "H W 3"]:
    """Alpha blending in integers: exact, then truncated."""
    height, width, _ = pixels_HWC.shape
    squares_HW = (np.arange(height)[:, None] // _SQUARE + np.arange(width)[None, :] // _SQUARE) % 2
    board_HW1 = np.where(squares_HW == 1, _GRAY, _WHITE)[:, :, None]
    alpha_HW1 = pixels_HWC[:, :, 3:].astype(np.uint16)
    # 255 * 255 fits: four times less memory than the default integers.
    blended = (pixels_HWC[:, :, :3] * alpha_HW1 + board_HW1.astype(np.uint16) * (255 - alpha_HW1)) // 255
    return blended.astype(np.uint8)


def prepare_image(
    image: Image.Image,
    patch_size: int = 14,
    merge: tuple[int, int] = (2, 2),
    patch_limit: int = PATCH_LIMIT,
    side_limit: int = SIDE_LIMIT,
) -> PreparedImage:
    """Scale down to the limits (bicubic, never up), lay transparent images on a chessboard, pad right and bottom
    with black to whole merged patches, and cut into patches.

    patch_size: pixels. merge: rows and columns of patches that become one token. patch_limit, side_limit: patches of
    the scaled image, in all and along a side. Padding may add a row and a column beyond them.
    """
    width, height = image.size
    _check_size(image.size, "The image")
    side = side_limit * patch_size
    patches = max(1, width // patch_size) * max(1, height // patch_size)
    scale = min(1.0, math.sqrt(patch_limit / patches), side / width, side / height)
    size = (min(max(1, int(width * scale)), side), min(max(1, int(height * scale)), side))
    # With alpha Pillow filters premultiplied colours, so that invisible pixels leave no fringe.
    transparent = _is_transparent(image)
    resized = image.convert("RGBA" if transparent else "RGB").resize(size, Image.Resampling.BICUBIC)
    pixels_HWC = np.asarray(resized, np.uint8)
    if transparent:
        pixels_HWC = _on_chessboard(pixels_HWC)

    rows, columns = (
        -(-length // (patch_size * count)) * count for length, count in zip(size[::-1], merge, strict=True)
    )
    padded = np.zeros((rows * patch_size, columns * patch_size, 3), np.uint8)
    padded[: size[1], : size[0]] = pixels_HWC
    cut = padded.reshape(rows, patch_size, columns, patch_size, 3).transpose(0, 2, 4, 1, 3)
    patches_u8 = np.ascontiguousarray(cut).reshape(rows * columns, 3, patch_size, patch_size)
    return PreparedImage(patches_u8, (1, rows, columns), (width, height), merge)


def image_prompt(size: tuple[int, int], num_tokens: int) -> str:
    """The text that stands for an image in a prompt, encoded as one special piece: its original width and height,
    and one pad per feature of the image tower."""
    width, height = size
    pads = "<|media_pad|>" * num_tokens
    return f"<|media_begin|>image {width}x{height}<|media_content|>{pads}<|media_end|>"


__all__ = [
    "FORMATS", "MAX_BYTES", "MAX_PIXELS", "MAX_SIDE", "PATCH_LIMIT", "SIDE_LIMIT", "PreparedImage", "image_data_url",
    "image_prompt", "open_image", "prepare_image",
]  # fmt: skip
