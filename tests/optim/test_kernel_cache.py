"""Kernels work wherever they are installed: with no folder for the cache, a full disk, two starts.

Each case is a process of its own, because a kernel compiles once in the life of a process.
"""

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

USE = """
import numpy as np
from megatrain_cli.optim import kernels

bits, floats = np.zeros(70, np.uint16), np.zeros(70, np.float32)
scalars = tuple(np.ones(9, np.float32))
work = (np.array([[0, 70, 1]]), np.zeros(1, np.int64), 0)
kernels.adamw_bf16(work, bits, bits.copy(), floats, floats.copy(), scalars)
stats = kernels.adamw_bf16.stats
print(sum(stats.cache_hits.values()), sum(stats.cache_misses.values()), stats.cache_path)
"""

NO_FOLDER = """
from numba.core import caching

caching.CacheImpl._locator_classes = []
from megatrain_cli.optim import kernels

print(type(kernels.adamw_bf16._cache).__name__)
from megatrain_cli.optim.adamw import ALL_FORMATS
from megatrain_cli.optim.worker import TileUpdater

TileUpdater(2, fmt=ALL_FORMATS[1]).close()
print("updated")
"""

FULL_DISK = """
import errno
from numba.core import caching

def save(*_):
    print("refused")
    raise OSError(errno.ENOSPC, "No space left on device")

caching.IndexDataCacheFile.save = save
from megatrain_cli.optim.adamw import ALL_FORMATS
from megatrain_cli.optim.worker import TileUpdater

TileUpdater(2, fmt=ALL_FORMATS[1]).close()
print("updated")
"""


def start(script: str, cache: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(script)],
        env={"NUMBA_CACHE_DIR": str(cache), "PATH": "/nowhere"},  # no compiler to be found
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_two_processes_may_fill_an_empty_cache_at_once_and_a_third_uses_it(tmp_path: Path) -> None:
    outputs = [run.communicate() for run in [start(USE, tmp_path) for _ in range(2)]]
    for out, err in outputs:
        assert err == ""
        assert str(tmp_path) in out
    out, err = start(USE, tmp_path).communicate()
    assert (out.split()[:2], err) == (["1", "0"], "")


def test_with_no_folder_for_the_cache_kernels_compile_at_each_start(tmp_path: Path) -> None:
    assert start(NO_FOLDER, tmp_path).communicate() == ("NullCache\nupdated\n", "")


def test_a_full_disk_is_no_reason_to_stop(tmp_path: Path) -> None:
    assert start(FULL_DISK, tmp_path).communicate() == ("refused\nupdated\n", "")
