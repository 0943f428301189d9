"""P9, bit-exact resume: a run that was stopped and goes on is the run that never stopped.

`same_runs` compares every number of the journal, every byte of every tensor of the last
checkpoint, and what its manifest says; `test_exact_mutations` proves that the comparison sees
what it should.
"""

from pathlib import Path

import pytest

from megatrain_cli.checkpoint.facts import Facts
from megatrain_cli.checkpoint.folder import open_checkpoint
from megatrain_cli.checkpoint.fsio import FileSystem
from megatrain_cli.checkpoint.headers import INDEX_NAME
from megatrain_cli.checkpoint.load import LazyLoader
from megatrain_cli.checkpoint.save import Snapshot
from megatrain_cli.config.load import load_config
from megatrain_cli.errors import Stopped
from megatrain_cli.store.master import MasterStore
from megatrain_cli.train.assemble import prepare, update_order
from tests.checkpoint.tiles import manifest_of, payloads, saver_of
from tests.train.prepared import Prepared
from tests.train.same_runs import checkpoints, differences, differing_tensors, steps_of
from tests.train.whole_runs import Died, Runs, die, stop, with_dropout

TOTAL = 8  # of 12 rows, 2 a step: the first epoch ends with step 6


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return with_dropout(tmp_path_factory.mktemp("exact"), TOTAL)


@pytest.fixture(scope="module")
def whole(runs: Runs) -> Path:
    """A run that nothing interrupts."""
    return runs.train("whole")


def rows_of(runs: Runs, start: int) -> dict[int, tuple[int, ...]]:
    """Which rows each step took, from a place in the ledger on."""
    return dict(runs.taken[start:])


def test_a_run_from_the_start_is_equal_to_itself(runs: Runs, whole: Path) -> None:
    """B10: without it no other test here says anything of resuming."""
    at = len(runs.taken)
    again = runs.train("again")
    assert not differences(whole, again)
    assert len(steps_of(whole)) == TOTAL
    assert rows_of(runs, at) == rows_of(runs, 0)


@pytest.mark.parametrize("how", ["async", "sync"])
@pytest.mark.parametrize("step", [1, 6, 7])
def test_a_run_that_was_stopped_once_ends_as_one_that_was_not(
    how: str, step: int, runs: Runs, whole: Path
) -> None:
    """B1: after the first step, at the end of an epoch, and one step later."""
    at = len(runs.taken)
    name = f"{how}-{step}"
    sync = f"checkpoint.async_save={str(how == 'async').lower()}"
    run = runs.train(name, sync, "checkpoint.save_steps=3", after={step: stop}, ends=Stopped)
    assert [record["step"] for record in steps_of(run)] == list(range(1, step + 1))
    assert checkpoints(run)[-1].name == f"step-{step:08d}"
    said = runs.resume(run)
    assert "every byte was verified" in said
    assert "not bit-exact" not in said
    assert not differences(whole, run)
    taken = [step for step, _ in runs.taken[at:]]
    assert taken == list(range(1, TOTAL + 1))
    assert rows_of(runs, at) == rows_of(runs, 0)


def test_a_run_that_was_killed_loses_what_no_checkpoint_has_and_ends_the_same(
    runs: Runs, whole: Path
) -> None:
    """The lines of the journal that are ahead of the checkpoint are set aside."""
    sync = "checkpoint.save_steps=3", "checkpoint.async_save=false"
    run = runs.train("killed", *sync, after={5: die}, ends=Died)
    assert [path.name for path in checkpoints(run)] == ["step-00000003"]
    assert len(steps_of(run)) == 5
    runs.resume(run)
    assert not differences(whole, run)


def test_a_run_that_was_resumed_five_times_ends_the_same(runs: Runs, whole: Path) -> None:
    """B2, RES-05: it saves every step, and every other process dies instead of stopping."""
    at = len(runs.taken)
    run = runs.train("chain", "checkpoint.save_steps=1", after={1: stop}, ends=Stopped)
    runs.resume(run, after={3: die}, ends=Died)
    runs.resume(run, after={4: stop}, ends=Stopped)
    runs.resume(run, after={6: die}, ends=Died)
    runs.resume(run, after={7: stop}, ends=Stopped)
    runs.resume(run)
    assert not differences(whole, run)
    assert rows_of(runs, at) == rows_of(runs, 0)
    assert manifest_of(checkpoints(run)[-1]).attempt == 6


def test_every_checkpoint_on_the_way_is_that_of_the_whole_run(runs: Runs, tmp_path: Path) -> None:
    """B2 for each step, not for the last alone: a difference cannot heal."""
    keep = "checkpoint.save_steps=1", "checkpoint.keep_last=20", "checkpoint.async_save=false"
    one = runs.train("every", *keep)
    other = runs.train("every-2", *keep, after={2: stop}, ends=Stopped)
    for step in (4, 5):
        runs.resume(other, after={step: stop}, ends=Stopped)
    runs.resume(other)
    pairs = list(zip(checkpoints(one), checkpoints(other), strict=True))
    assert len(pairs) == TOTAL
    for left, right in pairs:
        assert differing_tensors(left, right) == ()


@pytest.mark.slow
def test_a_run_that_goes_on_in_another_process_ends_the_same(
    runs: Runs, whole: Path, server: Prepared
) -> None:
    """B1: nothing that only this process knows was needed."""
    run = runs.train("elsewhere", after={3: stop}, ends=Stopped)
    done = server.run("resume", run)
    assert done.end() == 0, done.text
    assert "not bit-exact" not in done.text
    assert not differences(whole, run)


def test_a_save_of_what_was_just_loaded_has_the_same_bytes(runs: Runs, whole: Path) -> None:
    """B15: nothing is rounded, reordered or left out on the way through memory."""
    folder = checkpoints(whole)[-1]
    before = manifest_of(folder)
    skeleton, plan = prepare(load_config(runs.config, runs.overrides))
    store = MasterStore(skeleton.layouts, plan.decisions.tile_format)
    order = update_order(plan)
    with open_checkpoint(folder, FileSystem()) as checkpoint:
        loader = LazyLoader(checkpoint, store, fs=FileSystem(), update_order=order)
        loader.start()
        loader.wait()
        aux = {file.file: checkpoint.read_aux(file.file) for file in before.aux}
        loader.close()
    del aux[INDEX_NAME]  # the saver's own
    saver = saver_of(store, runs.config.parent / "again-saved", order=order)
    facts = Facts.model_validate({name: getattr(before, name) for name in Facts.model_fields})
    saver.begin(Snapshot(facts, aux))
    (report,) = saver.wait()
    saver.close()
    store.close()
    assert payloads(report.folder) == payloads(folder)
    after = manifest_of(report.folder)
    assert [(p.file, p.tensors) for p in after.parts] == [(p.file, p.tensors) for p in before.parts]
    assert after.aux == before.aux
