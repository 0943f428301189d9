"""Saving and loading take the pool and a few chunks of memory, however large a layer is."""

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

# In a process of its own: the peak of this one would hide it. Its `ru_maxrss` would too, as that
# begins with the peak of whoever started it.
PEAK = """
    import sys
    from pathlib import Path
    from megatrain_cli.checkpoint.folder import open_checkpoint
    from megatrain_cli.checkpoint.fsio import FileSystem
    from megatrain_cli.checkpoint.load import LazyLoader
    from megatrain_cli.probe.peaks import host_peak_bytes as peak
    from megatrain_cli.store.master import MasterStore
    from tests.checkpoint.tiles import SPLIT, layer, saver_of, snapshot_of

    layouts = (layer("embed", weight=(16_000, 1024)), layer("head", weight=(3, 5)))
    store = MasterStore(layouts, SPLIT)
    for tile in store.tiles:
        for flat in (tile.weights, tile.remainder, tile.exp_avg, tile.exp_avg_sq):
            flat.fill_(1)
    before = peak()
    saver = saver_of(store, Path(sys.argv[1]), order=(0, 1), pool_bytes=64 << 20)
    pool = peak() - before
    saver.begin(snapshot_of(store, 0))
    (report,) = saver.wait()
    saved = peak()
    with open_checkpoint(report.folder, FileSystem()) as checkpoint:
        loader = LazyLoader(checkpoint, store, fs=FileSystem(), update_order=(0, 1), threads=2)
        loader.start()
        loader.wait()
    print(pool, saved - before - pool, peak() - saved, report.num_bytes)
"""


@pytest.mark.slow
def test_saving_and_loading_a_large_layer_hold_no_copy_of_it(tmp_path: Path) -> None:
    run = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(PEAK), tmp_path],
        check=True,
        capture_output=True,
        text=True,
    )
    pool, saved, loaded, num_bytes = map(int, run.stdout.split())
    assert num_bytes > 190_000_000
    # All of the pool from the start, though no update came; then a chunk of 16 MiB.
    assert 60 << 20 < pool < 72 << 20
    assert saved < 48 << 20
    assert loaded < 16 << 20
