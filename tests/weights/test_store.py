"""Stores: what is asked for again, counts of several loads, and a cache whose disk fails."""

import errno
import logging
import os
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from moe28t_jax.weights import CheckpointError, load_parameters, stream_parameters
from moe28t_jax.weights.range_cache import CachedStore
from moe28t_jax.weights.store import LocalStore, Retry


def client_error(module: str, name: str, **attributes: Any) -> Exception:
    return type(name, (Exception,), {"__module__": module, **attributes})("so it is")


@pytest.mark.parametrize(
    ("error", "attempts"),
    [
        (client_error("botocore.exceptions", "NoCredentialsError"), 1),
        (client_error("botocore.exceptions", "PartialCredentialsError"), 1),
        (client_error("google.auth.exceptions", "DefaultCredentialsError"), 1),
        (client_error("gcsfs.retry", "HttpError", code=403), 1),
        (client_error("gcsfs.retry", "HttpError", code="404"), 1),
        (client_error("aiohttp.client_exceptions", "ClientResponseError", status=401), 1),
        (
            client_error(
                "botocore.exceptions", "ClientError", response={"ResponseMetadata": {"HTTPStatusCode": 403}}
            ),
            1,
        ),
        (client_error("gcsfs.retry", "HttpError", code=503), 4),
        (client_error("botocore.exceptions", "EndpointConnectionError"), 4),
        (client_error("botocore.exceptions", "ClientError", response={}), 4),
        (ConnectionResetError("so it is"), 4),
    ],
)
def test_only_what_may_change_is_asked_for_again(error: Exception, attempts: int) -> None:
    count = 0

    def action() -> None:
        nonlocal count
        count += 1
        raise error

    with pytest.raises(CheckpointError, match=r"^x c.*so it is") as caught:
        Retry(attempts=4, sleep=lambda seconds: None).call(action, "x", lambda: None)
    assert count == attempts
    assert ("check the connection" in str(caught.value)) is (attempts > 1)


def test_a_second_load_from_a_store_counts_its_own(data: Path, tmp_path: Path) -> None:
    store = LocalStore(data / "kimi_linear_tiny")
    cached = CachedStore(LocalStore(data / "kimi_linear_tiny"), tmp_path / "cache")
    for one in (store, cached):
        first, second = (stream_parameters(one)[2] for _ in range(2))
        assert first.header_bytes == second.header_bytes > 0
        assert first.store_bytes + first.cache_bytes == second.store_bytes + second.cache_bytes
        assert first.store_bytes + first.cache_bytes == first.header_bytes + first.data_bytes
        if one is store:
            assert first.requests == second.requests > 0
        else:
            assert second.store_bytes == second.requests == 0


@pytest.mark.parametrize("call", ["pwrite", "write", "open", "pread"])
def test_a_cache_whose_disk_fails_ends_no_load(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, call: str
) -> None:
    expected, _ = load_parameters(data / "kimi_linear_tiny")
    address = data / "kimi_linear_tiny"
    if call == "pread":
        stream_parameters(LocalStore(address), stacked=False, workers=1, cache=tmp_path / "cache")
    real, calls = getattr(os, call), 0

    def failing(*arguments: Any) -> Any:
        nonlocal calls
        if call == "open" and str(tmp_path) not in str(arguments[0]):
            return real(*arguments)
        calls += 1
        if calls > 3:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(*arguments)

    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
        patch.setattr(f"moe28t_jax.weights.range_cache.os.{call}", failing)
        found, _, report = stream_parameters(
            LocalStore(address), stacked=False, workers=1, cache=tmp_path / "cache"
        )
    assert (
        caplog.text.count("cache' fails (No space left on device); what is fetched from now on is not kept")
        == 1
    )
    assert calls == 4
    assert report.store_bytes + report.cache_bytes == report.header_bytes + report.data_bytes
    wanted = dict(jax.tree_util.tree_leaves_with_path(expected))
    for path, leaf in jax.tree_util.tree_leaves_with_path(found):
        np.testing.assert_array_equal(
            np.asarray(leaf).view(np.uint8), np.asarray(wanted[path]).view(np.uint8)
        )
    # What was kept is used, once the disk has room again.
    again, _, report = stream_parameters(
        LocalStore(address), stacked=False, workers=1, cache=tmp_path / "cache"
    )
    assert report.cache_bytes > 0
    assert jax.tree.structure(again) == jax.tree.structure(expected)
