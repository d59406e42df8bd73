"""Putting a finished folder in the place of an old one, so that one of the two is always whole."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import re
import shutil
from collections.abc import Collection, Iterator
from pathlib import Path

from moe28t_jax.weights.checkpoint import CONFIG_FILE, INDEX_FILE
from moe28t_jax.weights.errors import CheckpointError

ORBAX_FILE = "orbax.json"
ORBAX_ITEMS = ("layers", "globals", "vision")
# In a work folder: what the interrupted conversion in it was made from. No published folder has it, so that an old
# checkpoint that was exchanged for a new one is never taken for unfinished work.
UNFINISHED = ".unfinished.json"
# Files that belong to other weight formats are not carried along.
_OTHER_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".msgpack", ".h5", ".partial")

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2


def is_weight_file(path: Path) -> bool:
    """Whether a file or folder of a checkpoint is one that saving writes (and not, say, a tokenizer)."""
    if path.name in (CONFIG_FILE, INDEX_FILE, ORBAX_FILE, UNFINISHED):
        return True
    if path.name in ORBAX_ITEMS and (path.parent / ORBAX_FILE).is_file():
        return True
    return bool(re.fullmatch(r"model(-.*)?\.safetensors(\.crc32\.json)?", path.name))


# What a folder says about the model in it, other than its configuration: licences, tokenizer, code, model card.
_ABOUT_THE_MODEL = re.compile(
    r"(?:^|[-_. ])(?:licen[cs]es?|copying|eula|notice|use[-_ ]policy|terms[-_ ]of[-_ ](?:use|service))(?=[-_. ]|$)|"
    r"^tokeni[sz](?:er|ation).*|^tiktoken.*|^vocab\.|^merges\.|^special_tokens_map|^added_tokens|^chat_template|"
    r"^generation_config|^(?:pre|image_|video_)?processor_config|^(?:configuration|modeling|image_processing|processing)_"
    r".*\.py$|^readme(?:\.|$)|^model[-_ ]?card|\.model$|\.jinja$"
)


def is_about_the_model(name: str) -> bool:
    """Whether a file or folder, by its name, belongs to the weights beside it: it would be wrong beside others."""
    return _ABOUT_THE_MODEL.search(name.casefold()) is not None


def copy_extras(source: Path, target: Path) -> None:
    """Copy the files of a checkpoint folder that are no weights (tokenizer, licence)."""
    for file in source.iterdir():
        if file.is_file() and not is_weight_file(file) and not file.name.endswith(_OTHER_WEIGHTS):
            shutil.copy2(file, target / file.name)


def beside(folder: Path, suffix: str) -> Path:
    """Path of a hidden file or folder next to a target."""
    return folder.with_name(f".{folder.name}.{suffix}")


def check_target(folder: Path) -> None:
    """Raises CheckpointError when `folder` exists and is not a checkpoint, which is never replaced."""
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
def work_folder(folder: Path, purpose: str, keep: bool) -> Iterator[Path]:
    """The folder beside a target (`.NAME.PURPOSE`) in which its new content is made; the target is locked meanwhile.

    What an interrupted run left in it is kept only when asked for. What a killed `publish` left is put in order first.
    Raises CheckpointError when another process is writing to the target, and as `check_target`.
    """
    with _locked(folder):
        _recover(folder)
        check_target(folder)
        path = beside(folder, purpose)
        path.mkdir(exist_ok=True)
        if not keep:
            clear(path)
        try:
            yield path
        except BaseException:
            if not keep:
                shutil.rmtree(path, ignore_errors=True)
            raise


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    # A file of its own: the work folder changes places with the target, and folders cannot be locked on NFS.
    path = beside(folder, "lock")
    handle = _lock(path, folder)
    try:
        yield
    finally:
        try:
            # While it is still held: who opened it before finds it gone and makes another.
            path.unlink(missing_ok=True)
        finally:
            os.close(handle)


def _lock(path: Path, folder: Path) -> int:
    while True:
        try:
            handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            if error.errno == errno.ENOSPC:
                raise
            raise CheckpointError(
                f"{str(folder)!r} cannot be written, for the folder that it is in takes no files ({error.strerror}); "
                "choose another one."
            ) from error
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(handle), os.stat(path)):
                    return handle
        except BlockingIOError as error:
            os.close(handle)
            raise CheckpointError(
                f"Another process is writing to {str(folder)!r}; wait for it to end."
            ) from error
        except BaseException as error:
            os.close(handle)
            if isinstance(error, OSError):
                raise CheckpointError(
                    f"{str(path)!r} cannot be locked ({error.strerror}), so that two writers would not notice each "
                    "other; save to another file system."
                ) from error
            raise
        os.close(handle)


def _recover(folder: Path) -> None:
    """Put in order what a `publish` left that was killed where two folders cannot be exchanged."""
    aside, waste = beside(folder, "replaced"), beside(folder, "removing")
    if aside.is_dir():
        # Nothing took its place, or the new one did.
        if not folder.exists():
            os.rename(aside, folder)
        else:
            _discard(aside, waste)
    if waste.is_dir():
        shutil.rmtree(waste)


def _discard(old: Path, waste: Path) -> None:
    """Remove a folder, which has lost its name before it loses its first file."""
    if waste.is_dir():
        shutil.rmtree(waste)
    os.rename(old, waste)
    shutil.rmtree(waste)


def resume(work: Path, made_from: bytes, parts: Collection[str]) -> None:
    """Keep those `parts` of a work folder that an interrupted run of the same conversion left; remove anything else.

    `made_from` tells conversions apart. It stays in the folder until `publish`.
    """
    stamp = work / UNFINISHED
    same = stamp.is_file() and stamp.read_bytes() == made_from
    if not same:
        # Before the first part goes: what is left when this is killed is trusted by nobody.
        stamp.unlink(missing_ok=True)
        sync(work)
    for child in work.iterdir():
        # Other files are copied again: a kill may have left a part of one, or it may have changed at its source.
        if not same or child.name not in (UNFINISHED, *parts):
            _remove(child)
    if not same:
        write_file(stamp, made_from)


def clear(folder: Path) -> None:
    """Remove everything inside a folder."""
    for child in folder.iterdir():
        _remove(child)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def write_file(path: Path, content: bytes) -> None:
    """Write a small file to the disk."""
    with open(path, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def publish(work: Path, folder: Path, *, same_model: bool) -> None:
    """Make `work` the content of `folder` in one step; files of the old folder that are not weights move along.

    Of another model than the old folder held (`same_model` False) its licence, tokenizer and the like do not: they say
    nothing about the new weights (`is_about_the_model`).

    Between any two system calls `folder` holds either the old checkpoint or the new one. Where the file system cannot
    exchange two folders there is one moment without it: the old one is then beside it as `.NAME.replaced`, and the next
    save to the same place moves it back first.
    """
    if folder.is_dir():
        for old in folder.iterdir():
            new = work / old.name
            stays = not is_weight_file(old) and (same_model or not is_about_the_model(old.name))
            if stays and not new.exists():
                if old.is_dir():
                    shutil.copytree(old, new, symlinks=True)
                else:
                    shutil.copy2(old, new, follow_symlinks=False)
    # From here on the name of the work folder may belong to the old checkpoint.
    (work / UNFINISHED).unlink(missing_ok=True)
    sync(work)
    if not folder.exists():
        os.rename(work, folder)
        sync(folder.parent)
    elif _exchange(work, folder):
        sync(folder.parent)
        shutil.rmtree(work)
    else:
        aside = beside(folder, "replaced")
        os.rename(folder, aside)
        os.rename(work, folder)
        sync(folder.parent)
        _discard(aside, beside(folder, "removing"))


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


def sync(folder: Path) -> None:
    """Make what happened to the names in a folder lasting."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
