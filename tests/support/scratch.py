"""Whatever tests put into the temporary folder must be gone when they end."""

from __future__ import annotations

import getpass
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(scope="session", autouse=True)
def nothing_is_left_behind(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Give the session (and its child processes) a temporary folder of its own, and look into it at the end.

    Files of ``tmp_path`` lie elsewhere: pytest keeps those of the last three sessions on purpose.
    """
    tmp_path_factory.getbasetemp()  # pytest chooses its own folder before ours is in force
    before = os.environ.get("TMPDIR")
    with tempfile.TemporaryDirectory(prefix="loopkv-tests-") as folder, pytest.MonkeyPatch.context() as patch:
        # PyTorch keeps one cache of compiled code per user; it is meant to stay.
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", f"{tempfile.gettempdir()}/torchinductor_{getpass.getuser()}")
        patch.setenv("TMPDIR", folder)
        patch.setattr(tempfile, "tempdir", None)
        yield
        left = sorted(path.name for path in Path(folder).iterdir())
    assert os.environ.get("TMPDIR") == before
    assert not left, f"left in the temporary folder: {left}"
