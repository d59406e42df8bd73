"""Putting a finished folder in the place of an old one, so that one of the two is always whole."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from moe28t_jax.weights.checkpoint import CONFIG_FILE, INDEX_FILE
from moe28t_jax.weights.errors import CheckpointError

ORBAX_FILE = "orbax.json"
ORBAX_ITEMS = ("layers", "globals", "vision")
# Files that belong to other weight formats are not carried along.
_OTHER_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".msgpack", ".h5", ".partial")

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2


def is_weight_file(path: Path) -> bool:
    """Whether a file or folder of a checkpoint is one that saving writes (and not, say, a tokenizer)."""
    if path.name in (CONFIG_FILE, INDEX_FILE, ORBAX_FILE):
        return True
    if path.name in ORBAX_ITEMS and (path.parent / ORBAX_FILE).is_file():
        return True
    return bool(re.fullmatch(r"model(-.*)?\.safetensors(\.crc32\.json)?", path.name))


def copy_extras(source: Path, target: Path) -> None:
    """Copy the files of a checkpoint folder that are no weights (tokenizer, licence)."""
    for file in source.iterdir():
        if file.is_file() and not is_weight_file(file) and not file.name.endswith(_OTHER_WEIGHTS):
            shutil.copy2(file, target / file.name)


def beside(folder: Path, suffix: str) -> Path:
    """Path of the work folder next to a target."""
    return folder.with_name(f".{folder.name}.{suffix}")


def check_target(folder: Path) -> None:
    """Raises CheckpointError when `folder` exists and is not a checkpoint, which is never replaced.

    An old checkpoint that a killed `publish` had moved aside, and put nothing in the place of, is moved back.
    """
    aside = beside(folder, "replaced")
    if not folder.exists() and aside.is_dir():
        # Another process of the same save may do it first.
        with contextlib.suppress(FileNotFoundError):
            os.rename(aside, folder)
    if folder.is_dir():
        if any(folder.iterdir()) and not (folder / CONFIG_FILE).is_file():
            raise CheckpointError(
                f"{str(folder)!r} exists, is not empty and has no {CONFIG_FILE}, so it is no checkpoint "
                "to replace; choose another folder."
            )
    elif folder.exists():
        raise CheckpointError(f"{str(folder)!r} is a file; choose a folder for the checkpoint.")
    if not folder.parent.is_dir():
        raise CheckpointError(f"The folder {str(folder.parent)!r} does not exist; create it first.")


@contextlib.contextmanager
def work_folder(path: Path, keep: bool) -> Iterator[Path]:
    """An exclusively locked work folder; what an interrupted run left in it is kept only when asked for.

    Raises CheckpointError when another process is writing there.
    """
    path.mkdir(exist_ok=True)
    handle = os.open(path, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise CheckpointError(
                f"Another process is writing to {str(path)!r}; wait for it to end."
            ) from error
        if not keep:
            clear(path)
        try:
            yield path
        except BaseException:
            if not keep:
                shutil.rmtree(path, ignore_errors=True)
            raise
    finally:
        os.close(handle)


def clear(folder: Path) -> None:
    """Remove everything inside a folder."""
    for child in folder.iterdir():
        if child.is_dir() and not child.is_symlink():
            shutil.rmtree(child)
        else:
            child.unlink()


def write_file(path: Path, content: bytes) -> None:
    """Write a small file to the disk."""
    with open(path, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def publish(work: Path, folder: Path) -> None:
    """Make `work` the content of `folder` in one step; files of the old folder that are not weights move
    along.

    Between any two system calls `folder` holds either the old checkpoint or the new one. Where the file system cannot
    exchange two folders there is one moment without it: the old one is then beside it as `.NAME.replaced`, and the next
    save to the same place moves it back first.
    """
    if folder.is_dir():
        for old in folder.iterdir():
            new = work / old.name
            if not is_weight_file(old) and not new.exists():
                if old.is_dir():
                    shutil.copytree(old, new, symlinks=True)
                else:
                    shutil.copy2(old, new, follow_symlinks=False)
    _sync(work)
    if not folder.exists():
        os.rename(work, folder)
    elif _exchange(work, folder):
        shutil.rmtree(work)
    else:
        old = beside(folder, "replaced")
        if old.exists():
            shutil.rmtree(old)
        os.rename(folder, old)
        os.rename(work, folder)
        shutil.rmtree(old)
    _sync(folder.parent)


def _exchange(first: Path, second: Path) -> bool:
    """Swap two folders atomically; False where the system or the file system cannot."""
    try:
        rename = ctypes.CDLL(None, use_errno=True).renameat2
    except (AttributeError, OSError):
        return False
    if rename(_AT_FDCWD, os.fsencode(first), _AT_FDCWD, os.fsencode(second), _RENAME_EXCHANGE) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP):
        return False
    raise OSError(code, os.strerror(code), str(second))


def _sync(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
