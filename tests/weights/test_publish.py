"""Wherever a conversion is killed, its target is whole, and running it again gives what it would have given."""

import errno
import fcntl
import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from moe28t_jax.config import ModelConfig
from moe28t_jax.weights import (
    CheckpointError,
    convert,
    convert_to_orbax,
    export_orbax,
    fake_checkpoint,
    load_parameters,
    publish,
    save_parameters,
)
from moe28t_jax.weights.publish import UNFINISHED, resume, work_folder

Snapshot = Callable[[Path], dict[str, bytes]]


class Killed(BaseException):
    """No handler of the program catches it."""


class Killer:
    """The call number `at` that changes the file system does not take place, nor does any later one."""

    NAMES = ("rename", "replace", "unlink", "rmdir", "mkdir", "fsync")

    def __init__(self, patch: pytest.MonkeyPatch, at: int, exchange: bool) -> None:
        self.at, self.count = at, 0
        for name in self.NAMES:
            patch.setattr(os, name, self.killing(getattr(os, name)))
        swap = publish._exchange if exchange else lambda *_: False
        patch.setattr(publish, "_exchange", self.killing(swap))

    def killing(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*arguments: Any, **options: Any) -> Any:
            self.count += 1
            if self.count >= self.at:
                raise Killed
            return function(*arguments, **options)

        return wrapper


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints `a` and `b` of the same names and shapes, in shards, and what they are converted to."""
    root = tmp_path_factory.mktemp("sources")
    config = ModelConfig.from_hf(Path(__file__).parents[1] / "golden" / "data" / "k31_tiny_mxfp4")
    for seed, name in enumerate("ab"):
        fake_checkpoint(
            root / name, config, layers=2, experts=4, seed=seed, vision=False, max_shard_bytes=200_000
        )
        (root / name / "LICENSE").write_text(f"terms of {name}")
        convert_to_orbax(root / name, root / f"{name}-orbax")
    return root


class Replacing:
    """The target of converting `before`, over which `after` is converted."""

    def __init__(
        self, action: Callable[[Path, Path], None], before: Path, after: Path, root: Path, snapshot: Snapshot
    ) -> None:
        self.action, self.after, self.root, self.snapshot = action, after, root, snapshot
        action(before, root / "before")
        (root / "before" / "notes.md").write_text("keep me")
        action(after, root / "after")
        self.old = snapshot(root / "before")
        self.new = snapshot(root / "after") | {"notes.md": b"keep me"}
        assert self.old.keys() == self.new.keys() and self.old != self.new

    def killed(self, at: int, exchange: bool, from_publish: bool = False) -> bool:
        """Convert, killed at one call, and again. False where there is no such call."""
        work = folder(self.root / "work")
        target = work / "x"
        shutil.copytree(self.root / "before", target)
        with pytest.MonkeyPatch.context() as patch:
            if from_publish:
                for module in ("convert", "orbax_convert"):
                    killing = self._killing_publish(patch, at, exchange)
                    # By name it would be the function `convert`.
                    patch.setattr(sys.modules[f"moe28t_jax.weights.{module}"], "publish", killing)
            else:
                Killer(patch, at, exchange)
            try:
                self.action(self.after, target)
            except Killed:
                killed = True
            else:
                killed = False
        if target.exists():
            assert self.snapshot(target) in (self.old, self.new)
        else:
            assert not exchange and self.snapshot(work / ".x.replaced") == self.old
        if killed:
            self.action(self.after, target)
        assert self.snapshot(target) == self.new
        assert [file.name for file in work.iterdir()] == ["x"]
        shutil.rmtree(work)
        return killed

    def _killing_publish(self, patch: pytest.MonkeyPatch, at: int, exchange: bool) -> Callable[..., None]:
        real = publish.publish

        def publishing(work: Path, folder: Path, *, same_model: bool) -> None:
            Killer(patch, at, exchange)
            real(work, folder, same_model=same_model)

        return publishing


@pytest.mark.parametrize(
    ("exchange", "from_publish"),
    [(True, True), *(pytest.param(one, False, marks=pytest.mark.slow) for one in (True, False))],
)
def test_a_conversion_killed_at_every_point(
    sources: Path, tmp_path: Path, snapshot: Snapshot, exchange: bool, from_publish: bool
) -> None:
    replacing = Replacing(convert, sources / "a", sources / "b", tmp_path, snapshot)
    at = 1
    while replacing.killed(at, exchange, from_publish):
        at += 1
    # Exchange, and each file of the old checkpoint; before it the work folder, its stamp and shards.
    assert at > (8 if from_publish else 20)


def folder(path: Path) -> Path:
    path.mkdir()
    return path


@pytest.mark.parametrize("exchange", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "at", [5, *(pytest.param(at, marks=pytest.mark.slow) for at in (1, 2, 3, 4, 6, 7, 8, 9, 20))]
)
@pytest.mark.parametrize("action", [convert_to_orbax, export_orbax])
def test_orbax_killed_while_it_is_put_in_place(
    sources: Path, tmp_path: Path, snapshot: Snapshot, action: Any, at: int, exchange: bool
) -> None:
    """At 5 the old one is about to lose its first file."""
    suffix = "-orbax" if action is export_orbax else ""
    take = without_times(snapshot) if action is convert_to_orbax else snapshot
    replacing = Replacing(action, sources / f"a{suffix}", sources / f"b{suffix}", tmp_path, take)
    # An export has fewer files than an Orbax folder: it has ended by then, whole.
    assert replacing.killed(at, exchange, from_publish=True) or (action is export_orbax and at == 20)


def without_times(snapshot: Snapshot) -> Snapshot:
    """What of an Orbax folder depends on the weights alone: the data lie in files with random names."""
    from moe28t_jax.weights import load_orbax

    def take(path: Path) -> dict[str, bytes]:
        import jax
        import numpy as np

        parameters, _ = load_orbax(path)
        leaves = jax.tree_util.tree_leaves_with_path(parameters)
        found = {jax.tree_util.keystr(place): np.asarray(leaf).tobytes() for place, leaf in leaves}
        return found | {file.name: file.read_bytes() for file in path.iterdir() if file.is_file()}

    return take


@pytest.mark.parametrize("other", ["convert", "convert_to_orbax", "export_orbax", "fake", "same"])
def test_what_is_said_about_one_model_does_not_stay_beside_another(
    sources: Path, tmp_path: Path, other: str
) -> None:
    """Only saving the parameters that were loaded keeps licence and tokenizer of the checkpoint that it replaces."""
    target = tmp_path / "x"
    shutil.copytree(sources / "a", target)
    about = ("LICENSE", "MODEL_LICENSE.pdf", "tiktoken.model", "tokenizer_config.json", "README.md")
    for name in (*about, "notes.md", "LICENSES/EULA.txt", "runs/loss.csv"):
        (target / name).parent.mkdir(exist_ok=True)
        (target / name).write_text("of a")
    if other == "fake":
        config = ModelConfig.from_hf(target)
        fake_checkpoint(target, config, layers=2, experts=4, seed=3, vision=False)
    elif other == "same":
        save_parameters(target, *load_parameters(target))
    else:
        actions = {"convert": convert, "convert_to_orbax": convert_to_orbax, "export_orbax": export_orbax}
        actions[other](sources / ("b-orbax" if other == "export_orbax" else "b"), target)
    # What says nothing about the model is the user's and stays in any case.
    assert (target / "notes.md").read_text() == (target / "runs" / "loss.csv").read_text() == "of a"
    kept = {name for name in (*about, "LICENSES") if (target / name).exists()}
    if other == "same":
        assert kept == {*about, "LICENSES"} and (target / "LICENSE").read_text() == "of a"
    elif other == "fake":
        assert kept == set()
    else:
        assert kept == {"LICENSE"} and (target / "LICENSE").read_text() == "terms of b"


def test_other_files_of_an_interrupted_run_are_made_again(tmp_path: Path) -> None:
    work = folder(tmp_path / "work")
    resume(work, b"one", ["model.safetensors", "layers"])
    for name in (
        "model.safetensors",
        "model.safetensors.partial",
        "tiktoken.model",
        "layers/0/x",
        "drafts/y",
    ):
        (work / name).parent.mkdir(parents=True, exist_ok=True)
        (work / name).write_text("half")
    resume(work, b"one", ["model.safetensors", "layers"])
    assert sorted(file.name for file in work.rglob("*") if file.is_file()) == sorted(
        [UNFINISHED, "model.safetensors", "x"]
    )
    resume(work, b"two", ["model.safetensors", "layers"])
    assert [file.name for file in work.iterdir()] == [UNFINISHED]
    assert (work / UNFINISHED).read_bytes() == b"two"


def test_the_source_s_configuration_is_part_of_what_is_converted(sources: Path, tmp_path: Path) -> None:
    from moe28t_jax.weights import Checkpoint
    from moe28t_jax.weights.convert import source_stamp

    copy = tmp_path / "a"
    shutil.copytree(sources / "a", copy)
    before = source_stamp(Checkpoint(copy), "mxfp4")
    assert source_stamp(Checkpoint(copy), "mxfp4") == before != source_stamp(Checkpoint(copy), "bfloat16")
    content = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(content, indent=7))
    assert source_stamp(Checkpoint(copy), "mxfp4") != before


# -- the lock --------------------------------------------------------------------------------------------------


def test_a_target_is_locked_until_its_old_content_is_gone(
    sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also by other kinds of writers, and after work folder and target have changed places."""
    convert(sources / "a", tmp_path / "x")
    remove = shutil.rmtree
    refused = []

    def removing(path: Any, *arguments: Any, **options: Any) -> None:
        monkeypatch.setattr(publish.shutil, "rmtree", remove)
        with pytest.raises(CheckpointError, match=r"Another process is writing to '.*x'") as caught:
            convert_to_orbax(sources / "b", tmp_path / "x")
        refused.append(caught.value)
        remove(path, *arguments, **options)

    monkeypatch.setattr(publish.shutil, "rmtree", removing)
    convert(sources / "b", tmp_path / "x")
    assert len(refused) == 1
    assert [file.name for file in tmp_path.iterdir()] == ["x"]


def test_a_lock_that_its_last_holder_removed_is_not_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, lost = fcntl.flock, []

    def slow(handle: int, operation: int) -> None:
        if not lost:
            # The other process ends between opening and locking.
            lost.append(os.fstat(handle).st_ino)
            (tmp_path / ".x.lock").unlink()
        real(handle, operation)

    monkeypatch.setattr(fcntl, "flock", slow)
    with work_folder(tmp_path / "x", "saving", keep=False):
        assert lost and (tmp_path / ".x.lock").exists()
        with (
            pytest.raises(CheckpointError, match="Another process"),
            work_folder(tmp_path / "x", "converting", keep=True),
        ):
            pass


def test_a_file_system_without_locks_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(handle: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with (
        pytest.raises(CheckpointError, match=r"x\.lock' cannot be locked \(No locks available\)"),
        work_folder(tmp_path / "x", "saving", keep=False),
    ):
        pass


def test_half_of_a_discarded_checkpoint_is_never_moved_back(tmp_path: Path) -> None:
    """A kill while the old one is removed, where folders cannot be exchanged; then the user moves the new one."""
    half = folder(tmp_path / ".x.removing")
    (half / "config.json").write_text("{}")
    with work_folder(tmp_path / "x", "saving", keep=False):
        assert not half.exists() and not (tmp_path / "x").exists()
    whole = folder(tmp_path / ".x.replaced")
    (whole / "config.json").write_text("{}")
    with work_folder(tmp_path / "x", "saving", keep=False):
        assert (tmp_path / "x" / "config.json").read_text() == "{}" and not whole.exists()
