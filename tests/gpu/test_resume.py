"""A run that goes on computes what the run that was not stopped computes, to the last bit.

Every test runs on the CPU too, with a tiny model, but for what only a GPU has.
"""

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megatrain_cli.errors import DeviceError
from megatrain_cli.store.master import MasterStore
from megatrain_cli.store.pagelock import lock_pages
from megatrain_cli.train.preparation import Prepared, prepare_attempt
from tests.gpu.resuming import (
    Losses,
    Place,
    State,
    clear,
    flip_byte,
    losses_of,
    make_place,
    state_of,
    step_folder,
)
from tests.store.cudart import fake_driver

GPU = pytest.param("cuda", marks=pytest.mark.gpu)
# Compilers and drivers have warnings of their own; they are shown, and fail nothing here.
pytestmark = pytest.mark.filterwarnings("default")

ROOT = Path(__file__).parents[2]
STEPS = 20


@pytest.fixture(scope="module", params=["cpu", GPU])
def workspace(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Place]:
    place = make_place(tmp_path_factory.mktemp("resume"), request.param)
    yield place
    clear(place)


@pytest.fixture
def place(workspace: Place) -> Iterator[Place]:
    yield workspace
    clear(workspace)


@pytest.fixture(scope="module")
def whole(workspace: Place) -> tuple[Losses, State]:
    """What 20 steps compute that nothing stops and that save only at the end."""
    run = workspace.train("whole")
    found = losses_of(run), state_of(run, STEPS)
    clear(workspace)
    assert len(found[0]) == STEPS
    return found


def test_the_same_run_twice_is_the_same_and_saves_beside_it_change_nothing(
    whole: tuple[Losses, State], place: Place
) -> None:
    """B10: without it, no difference after a resume would say anything about the resume."""
    run = place.train("again", "checkpoint.save_steps=5")
    assert losses_of(run) == whole[0]
    assert state_of(run, STEPS) == whole[1]


@pytest.mark.parametrize("memory", ["auto", "pageable"])
def test_ten_steps_and_ten_more_are_twenty(
    memory: str, whole: tuple[Losses, State], place: Place
) -> None:
    """B11: while steps before are still being saved, in whatever memory the store lies."""
    asked = [f"store.memory={memory}", "checkpoint.save_steps=5"]
    run = place.train("halves", *asked, "train.max_steps=10")
    said = place.resume(run, steps=STEPS)
    assert "every byte was verified" in said
    assert "not bit-exact" not in said
    assert losses_of(run) == whole[0]
    assert state_of(run, STEPS) == whole[1]


def test_a_damaged_checkpoint_gives_way_to_the_one_before(
    whole: tuple[Losses, State], place: Place
) -> None:
    asked = ["checkpoint.save_steps=2", "checkpoint.keep_last=2", "checkpoint.async_save=false"]
    run = place.train("damaged", *asked, "train.max_steps=4")
    flip_byte(step_folder(run, 4) / "training" / "optim-layer-00001.safetensors")
    said = place.resume(run, steps=6)
    assert "optim-layer-00001" in said
    assert losses_of(run) == whole[0][:6]
    assert step_folder(run, 6).is_dir()


# Breaks the device, as far as there is one, in the forward of the 7th step.
FAILING = """
import sys
import torch
from megatrain_cli.cli.app import main
from megatrain_cli.pipeline.compute import Compute
from megatrain_cli.train.loop import Run

forward, update, steps = Compute.forward, Run._update, []

def noted(self, index):
    steps.append(index)
    return update(self, index)

def broken(self, op, step):
    if steps[-1] == 6 and op.layer == 2:
        if not torch.cuda.is_available():
            raise torch.AcceleratorError("CUDA error: device-side assert triggered")
        torch._assert_async(torch.zeros((), device="cuda"))  # every call fails from then on
    return forward(self, op, step)

Run._update, Compute.forward = noted, broken
sys.argv[0] = "megatrain"
main()
"""


@pytest.mark.slow
def test_a_device_that_has_failed_for_good_loses_no_step(
    whole: tuple[Losses, State], place: Place
) -> None:
    """F61: every call to it fails from then on, so the rescue can have made none."""
    run = place.config.parent / "failing"
    done = subprocess.run(
        [sys.executable, "-c", FAILING, "train", place.config, f"train.output_dir={run}"],
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)])},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 9, done.stderr
    assert "CUDA error: device-side assert triggered" in done.stderr
    assert "is saved" in done.stderr or "in the middle of its update" in done.stderr, done.stderr
    assert losses_of(run) == whole[0][:6]
    place.resume(run)
    assert losses_of(run) == whole[0]
    assert state_of(run, STEPS) == whole[1]


class Locks:
    """What is page-locked in the stores of a test.

    Attributes:
        calls: Layer, thread and bytes that the store had locked after it, of each call.
        refuse: Which range the driver refuses, counted from 1; 0: none.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, on_gpu: bool) -> None:
        self.calls: list[tuple[int, str, int]] = []
        self.refuse, self._asked = 0, 0
        if not on_gpu:
            self._pretend(monkeypatch)
        register = MasterStore.register_layer

        def noted(store: MasterStore, layer: int) -> None:
            register(store, layer)
            self.calls.append((layer, threading.current_thread().name, store.locked_bytes))

        def refusing(address: int, num_bytes: int) -> None:
            self._asked += 1
            if self._asked == self.refuse:
                raise DeviceError("The driver refused.")
            lock_pages(address, num_bytes)

        monkeypatch.setattr(MasterStore, "register_layer", noted)
        monkeypatch.setattr("megatrain_cli.store.arena.lock_pages", refusing)

    def take(self) -> list[tuple[int, str, int]]:
        """The calls since the last time, in the order of layers."""
        found, self.calls[:], self._asked = sorted(self.calls), [], 0
        return found

    def _pretend(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A machine whose driver can lock memory, beside a CPU that computes."""
        fake_driver(monkeypatch)

        def lockable(*args: object) -> Prepared:
            made = prepare_attempt(*args)  # type: ignore[arg-type]  # as they were given
            locked = args[0].config.store.memory != "pageable"  # type: ignore[attr-defined]
            decisions = replace(made.plan.decisions, pin_store=locked, num_slabs=0)
            return replace(made, plan=replace(made.plan, decisions=decisions))

        monkeypatch.setattr("megatrain_cli.train.attempt.prepare_attempt", lockable)
        monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)


def test_layers_are_locked_while_they_are_loaded_and_a_refusal_means_ordinary_memory(
    whole: tuple[Losses, State], place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    locks = Locks(monkeypatch, on_gpu=place.on_gpu)
    run = place.train("locked", "train.max_steps=2")
    fresh = locks.take()
    assert len(fresh) >= 4
    assert {name for _, name, _ in fresh} == {"MainThread"}
    place.resume(run, steps=3)
    loaded = locks.take()
    assert [layer for layer, _, _ in loaded] == [layer for layer, _, _ in fresh]
    assert all(name.startswith("load-") for _, name, _ in loaded)
    assert max(locked for *_, locked in loaded) == max(locked for *_, locked in fresh) > 0
    locks.refuse = 3
    said = place.resume(run, steps=4)
    assert "The driver refused." in said
    assert "Going on with ordinary memory" in said
    assert len(locks.take()) == 2
    assert losses_of(run) == whole[0][:4]


def test_a_fork_in_a_process_that_has_run_before_goes_on_with_the_same_bits(place: Place) -> None:
    """Compiled where that can be done: twice, once for each run."""
    compiled = f"pipeline.compile={str(place.on_gpu).lower()}"
    asked = [compiled, "checkpoint.save_steps=3", "checkpoint.keep_last=2", "train.max_steps=6"]
    run = place.train("compiled", *asked, "checkpoint.async_save=false")
    fork = place.config.parent / "fork"
    said = place.resume(step_folder(run, 3), fork=fork)
    assert "not bit-exact" not in said
    assert losses_of(fork, first=4) == losses_of(run)[3:]
    assert state_of(fork, 6) == state_of(run, 6)
