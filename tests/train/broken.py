"""Ways to break or stop the program in a process of its own, by name."""

import os
import signal
import threading
import time
from functools import partial
from pathlib import Path
from typing import NoReturn

from megatrain_cli.checkpoint.commit import Commit
from megatrain_cli.checkpoint.fsio import FileSystem
from megatrain_cli.checkpoint.load import LazyLoader
from megatrain_cli.checkpoint.names import MANIFEST
from megatrain_cli.pipeline.compute import Compute, StepInputs
from megatrain_cli.pipeline.ops import Op
from megatrain_cli.store.clock import TileClock
from megatrain_cli.train import attempt, preparation, watchdog
from megatrain_cli.train.saving import Saving
from megatrain_cli.train.warm_up import warm_up
from megatrain_cli.train.watchdog import Watchdog

LIFE = 5  # steps of a run that is killed


def publish_before_all_is_written() -> None:
    """Write under the final name, and a manifest before what it lists is there."""
    begin, publish = Commit.begin, Commit.publish

    def begin_in_place(self: Commit) -> Path:
        self._renames, self.folder = False, self.final
        old = sorted(self._checkpoints.glob("step-*")) if self._checkpoints.exists() else []
        folder = begin(self)
        if old and (old[-1] / MANIFEST).exists():
            (folder / MANIFEST).write_bytes((old[-1] / MANIFEST).read_bytes())
        return folder

    def publish_in_place(self: Commit, manifest: bytes) -> Path:
        (self.folder / MANIFEST).unlink(missing_ok=True)
        return publish(self, manifest)

    _replace(Commit, begin=begin_in_place)
    _replace(Commit, publish=publish_in_place)


def five_steps_and_no_more() -> None:
    """It goes on to save, and waits to be killed: no life is longer, however late the kill."""
    after_step, count = Saving.after_step, 0

    def wait_after_the_fifth(self: Saving, step: int, loss: float, *, asked: bool = False) -> None:
        nonlocal count
        after_step(self, step, loss, asked=asked)
        count += 1
        if count == LIFE:
            _wait_for_ever()

    _replace(Saving, after_step=wait_after_the_fifth)


def nobody_reads_what_it_says() -> None:
    """Stderr is a pipe whose other end was closed."""
    reading, writing = os.pipe()
    os.dup2(writing, 2)
    os.close(reading)
    os.close(writing)


def warm_up_never_ends() -> None:
    """Say `waits now` and wait where kernels are settled: nothing is loaded yet."""

    def say_and_wait(*args: object) -> NoReturn:
        os.write(2, b"waits now\n")
        _wait_for_ever()

    _replace(preparation, warm_up=say_and_wait)


def warm_up_gets_a_wish() -> None:
    """A checkpoint is asked for where kernels are settled: nothing is loaded yet."""

    def wish(*args: object) -> object:
        os.kill(os.getpid(), signal.SIGUSR1)
        return warm_up(*args)  # type: ignore[arg-type]  # as they came

    _replace(preparation, warm_up=wish)


def loading_never_ends() -> None:
    """No tensor is ever read; say `waits now` where the first step waits for one."""
    wait = TileClock.wait_for_weights

    def say_and_wait(clock: TileClock, layer: int) -> None:
        os.write(2, b"waits now\n")
        wait(clock, layer)

    _replace(LazyLoader, _load=_wait_for_ever)
    _replace(TileClock, wait_for_weights=say_and_wait)


def no_save_ever_begins() -> None:
    """Say `waits now` where a checkpoint's first folder is made, and wait there."""
    make_folder = FileSystem.make_folder

    def make_and_wait(fs: FileSystem, path: Path) -> None:
        make_folder(fs, path)
        if path.name.startswith(".tmp-step-"):
            os.write(2, b"waits now\n")
            _wait_for_ever()

    _replace(FileSystem, make_folder=make_and_wait)


def step_3_hangs() -> None:
    """Its first layer never ends, and the watchdog has little patience then."""
    hangs = _be_impatient()
    forward, count = Compute.forward, 0

    def forward_or_hang(compute: Compute, op: Op, step: StepInputs) -> None:
        nonlocal count
        count += op.layer == 0 and op.micro_batch == 0
        if count == 3:
            hangs.set()
            _wait_for_ever()
        forward(compute, op, step)

    _replace(Compute, forward=forward_or_hang)


def second_save_hangs() -> None:
    """Its files never reach the disk, and the watchdog has little patience then."""
    hangs = _be_impatient()
    sync = FileSystem.sync

    def sync_or_hang(fs: FileSystem, fd: int) -> None:
        path = os.readlink(f"/proc/self/fd/{fd}")  # noqa: PTH115  no file's path
        if ".tmp-step-" in path and ".tmp-step-00000001" not in path:
            hangs.set()
            _wait_for_ever()
        sync(fs, fd)

    _replace(FileSystem, sync=sync_or_hang)


def _be_impatient() -> threading.Event:
    """Watchdogs for whose clocks a second begins only with the event that is returned."""
    hangs, since = threading.Event(), time.monotonic()
    _replace(watchdog, HANG_SECONDS=1.0)

    def clock() -> float:
        nonlocal since
        if not hangs.is_set():
            since = time.monotonic()
        return time.monotonic() - since

    _replace(attempt, Watchdog=partial(Watchdog, seconds=1.0, clock=clock))
    return hangs


def _replace(holder: object, **new: object) -> None:
    for name, value in new.items():
        setattr(holder, name, value)


def _wait_for_ever(*args: object) -> NoReturn:
    threading.Event().wait(600)
    raise AssertionError("nobody ended this process")
