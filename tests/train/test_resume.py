"""What `resume` decides, on checkpoints made by hand: nothing is trained and nothing is guessed."""

from contextlib import ExitStack
from pathlib import Path

import pytest

from megatrain_cli.checkpoint.fsio import FileSystem
from megatrain_cli.config.load import dump_config, parse_config
from megatrain_cli.errors import (
    ConfigError,
    CorruptError,
    IncompatibleError,
    LockedError,
    MegatrainError,
    NoCheckpointError,
)
from megatrain_cli.train.folder import RunFolder
from megatrain_cli.train.identity import Origin
from megatrain_cli.train.outlook import find_finished
from megatrain_cli.train.position import Position
from megatrain_cli.train.resume import SAVED_CONFIG, ResumeRequest, Resumption, open_resume
from tests.checkpoint.made import make_checkpoint
from tests.plan.small import Sections
from tests.train.saved import make_run, save_step, saved_config
from tests.train.test_folder import snapshot

FS = FileSystem()
FINISHED = "finished at step 20; `--steps M` goes on to step M"
BETAS: Sections = {"optimizer": {"betas": [0.8, 0.99]}}


def step(run: Path, number: int) -> Path:
    return run / "checkpoints" / f"step-{number:08d}"


def resume(stack: ExitStack, path: Path, *overrides: str, **more: object) -> Resumption:
    request = ResumeRequest(path, overrides, **more)  # type: ignore[arg-type] # by name
    return open_resume(request, FS, stack)


def finished(request: ResumeRequest) -> str | None:
    return find_finished(request, FS, lambda text: None, {})


def refusal(kind: type[MegatrainError], path: Path, *overrides: str, **more: object) -> str:
    """What is said; the folder is as it was but for its lock, which is free again."""
    before = {k: v for k, v in snapshot(path).items() if k != "run.lock"}
    with ExitStack() as stack, pytest.raises(kind) as caught:
        resume(stack, path, *overrides, **more)
    assert {k: v for k, v in snapshot(path).items() if k != "run.lock"} == before
    if (path / "run.lock").exists():
        RunFolder.reopen(path).lock.close()
    return str(caught.value)


def test_a_run_goes_on_with_its_own_config_and_its_checkpoint_as_the_model(tmp_path: Path) -> None:
    run_id = make_run(tmp_path, [3], BETAS)
    with ExitStack() as stack:
        found = resume(stack, tmp_path)
        assert found.position == Position(3, 12)
        assert found.folder.attempt == 0
        config = found.config.loaded.config
        assert config.optimizer.betas == (0.8, 0.99)
        assert config.model.path == step(tmp_path, 3)
        assert config.train.output_dir == tmp_path
        assert found.config.recorded.model.path == Path("/model")
        assert (found.finished, found.lineage, found.notes) == (None, (), ())
        assert [g.key for g in found.config.loaded.given] == [
            "data.train[0].path",
            "model.path",
            "train.output_dir",
        ]
        assert found.go_on() == ()
        assert (found.folder.run_id, found.folder.attempt) == (run_id, 2)


def test_a_run_that_was_moved_goes_on_where_it_is_from_any_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P18. The saved config still says where it was; a path on the command line starts here."""
    make_run(tmp_path / "run", [3])
    (tmp_path / "run").rename(tmp_path / "moved")
    monkeypatch.chdir(tmp_path)
    with ExitStack() as stack:
        found = resume(stack, Path("moved"), "data.train=new/rows.jsonl")
        config = found.config.loaded.config
        assert config.train.output_dir == tmp_path / "moved"
        assert config.model.path == step(tmp_path / "moved", 3)
        assert config.data.train[0].path == tmp_path / "new" / "rows.jsonl"
        assert found.config.recorded.train.output_dir == tmp_path / "moved"
        assert found.lineage == ()  # as far as its path tells it is the same file
    with ExitStack() as stack:
        found = resume(stack, tmp_path / "moved", "data.train=rows.jsonl", here=tmp_path / "new")
        assert found.config.loaded.config.data.train[0].path == tmp_path / "new" / "rows.jsonl"


def test_what_is_recorded_reads_back_and_is_no_change_next_time(tmp_path: Path) -> None:
    make_run(tmp_path, [3])
    with ExitStack() as stack:
        found = resume(stack, tmp_path, "train.seed=5", allow_change=("seed",))
        text = dump_config(found.config.recorded)
    assert parse_config(text, Path("x"), (), tmp_path).config == found.config.recorded
    make_checkpoint(
        step(tmp_path, 4),
        step=4,
        run_id=found.checkpoint.manifest.run_id,
        aux={SAVED_CONFIG: text.encode()},
        changes=found.lineage,
    )
    with ExitStack() as stack:  # RES-05: the same command after a kill
        again = resume(stack, tmp_path, "train.seed=5", allow_change=("seed",))
        assert again.lineage == found.lineage
        assert again.config.changes == ()


def test_a_change_of_meaning_is_refused_unless_named_and_then_recorded(tmp_path: Path) -> None:
    """F72, F73."""
    make_run(tmp_path, [3])
    asked = "optimizer.learning_rate=0.5", "train.micro_batch_size=8"
    said = refusal(IncompatibleError, tmp_path, *asked)
    assert "--allow-change optimizer.learning_rate" in said
    assert "--allow-change train.micro_batch_size" in said
    said = refusal(IncompatibleError, tmp_path, *asked, allow_change=("learning_rate",))
    assert "learning_rate" not in said
    assert "model.dtype: bfloat16 -> float32" in refusal(
        IncompatibleError, tmp_path, "model.dtype=float32", "optimizer.master=fp32"
    )
    assert "the model is in the checkpoint" in refusal(
        IncompatibleError, tmp_path, "model.path=/other"
    )
    with ExitStack() as stack:
        found = resume(stack, tmp_path, *asked, allow_change=("learning_rate,micro_batch_size",))
        first, second = found.lineage
        assert first == {
            "step": 3,
            "key": "train.micro_batch_size",
            "old": 4,
            "new": 8,
        }
        assert second["new"] == (0.5).hex()
        assert "optimizer.learning_rate: 2e-05 -> 0.5" in found.notes
        assert found.position == Position(3, 12)  # in rows, whatever a step takes from now on


def test_the_machine_may_change_freely(tmp_path: Path) -> None:
    """F71."""
    make_run(tmp_path, [3])
    asked = "pipeline.grad_slabs=3", "optimizer.threads=2", "checkpoint.keep_last=5"
    with ExitStack() as stack:
        found = resume(stack, tmp_path, *asked)
        assert found.config.loaded.config.checkpoint.keep_last == 5
        assert found.lineage == ()
        assert set(found.notes) == {
            "pipeline.grad_slabs: 12 -> 3",
            "optimizer.threads: auto -> 2",
            "checkpoint.keep_last: 2 -> 5",
        }


def test_overrides_are_checked_like_those_of_a_new_run(tmp_path: Path) -> None:
    make_run(tmp_path, [3])
    assert "Did you mean" in refusal(ConfigError, tmp_path, "optimizer.learning_rat=1")
    assert "its own folder" in refusal(ConfigError, tmp_path, f"train.output_dir={tmp_path}")
    assert "no key `nothing`" in refusal(ConfigError, tmp_path, allow_change=("nothing",))
    # `fp32_split` does not go with it, and to change both would not help.
    refused = refusal(ConfigError, tmp_path, "model.dtype=float32")
    assert "model.dtype: part of what the checkpoint is" in refused
    assert "given twice" in refusal(ConfigError, tmp_path, "train.max_steps=30", steps=40)


def test_notes_on_idle_keys_are_of_those_set_now_alone(tmp_path: Path) -> None:
    make_run(tmp_path, [3], {"pipeline": {"device": "cpu"}})
    with ExitStack() as stack:
        found = resume(stack, tmp_path, "pipeline.target_pcie_utilization=0.5")
        idle = [note for note in found.notes if "has no effect" in note]
        assert len(idle) == 1
        assert found.config.loaded.notes == tuple(idle)


def test_a_run_that_is_asked_for_no_more_than_it_has_is_not_called_finished(tmp_path: Path) -> None:
    """It was stopped on its way to 20."""
    make_run(tmp_path, [7])
    notes: list[str] = []
    said = find_finished(ResumeRequest(tmp_path, (), steps=7), FS, notes.append, {})
    assert said is not None
    assert said.startswith("at step 7 already, and no more was asked for (`train.max_steps: 7`)")
    assert not any("schedule" in note for note in notes)  # no step is left that it could change
    assert finished(ResumeRequest(tmp_path, ())) is None


@pytest.mark.parametrize("told", [True, False])
def test_a_run_at_its_last_step_says_so_and_writes_nothing(told: bool, tmp_path: Path) -> None:
    """F75."""
    run_id = make_run(tmp_path, [])
    save_step(tmp_path, 20, run_id=run_id, finished=told)
    before = snapshot(tmp_path)
    for path in (tmp_path, step(tmp_path, 20)):
        assert finished(ResumeRequest(path)) == FINISHED
    assert snapshot(tmp_path) == before
    assert finished(ResumeRequest(tmp_path, steps=25)) is None
    assert finished(ResumeRequest(tmp_path, ("train.max_steps=25",))) is None
    with ExitStack() as stack:
        assert resume(stack, tmp_path).finished == FINISHED
    with ExitStack() as stack:
        found = resume(stack, tmp_path, steps=25)
        assert found.finished is None
        assert found.config.loaded.config.train.max_steps == 25
        assert found.lineage[0] == {"step": 20, "key": "train.max_steps", "old": 20, "new": 25}
        assert any("cosine schedule now ends with the run" in note for note in found.notes)


def test_passes_over_the_data_end_when_the_checkpoint_says_so(tmp_path: Path) -> None:
    epochs: Sections = {
        "train": {"max_steps": None, "num_epochs": 2},
        "schedule": {"type": "constant"},
    }
    run_id = make_run(tmp_path, [3], epochs)
    assert finished(ResumeRequest(tmp_path)) is None
    save_step(tmp_path, 9, epochs, run_id=run_id, finished=True)
    assert finished(ResumeRequest(tmp_path)) is not None
    assert finished(ResumeRequest(tmp_path, ("train.num_epochs=3",))) is None
    with ExitStack() as stack:
        found = resume(stack, tmp_path, steps=12)
        train = found.config.loaded.config.train
        assert (train.max_steps, train.num_epochs) == (12, None)
        assert [change["key"] for change in found.lineage] == [
            "train.max_steps",
            "train.num_epochs",
        ]
        assert not any("schedule" in note for note in found.notes)


def test_an_end_that_lies_behind_is_refused(tmp_path: Path) -> None:
    make_run(tmp_path, [3])
    assert "is at step 3 already, beyond 2" in refusal(ConfigError, tmp_path, steps=2)
    said = finished(ResumeRequest(tmp_path, steps=3))
    assert said is not None


def test_an_update_under_way_is_finished_before_the_run_is(tmp_path: Path) -> None:
    run_id = make_run(tmp_path, [])
    save_step(tmp_path, 20, run_id=run_id, pending=2)
    assert finished(ResumeRequest(tmp_path)) is None
    with ExitStack() as stack:
        assert resume(stack, tmp_path).position == Position(20, 80)
    eager = "optimizer.update=eager", "optimizer.max_grad_norm=null"
    said = refusal(IncompatibleError, tmp_path, *eager, allow_change=("max_grad_norm",))
    assert "no place for them" in said


def test_a_rewind_sets_aside_what_came_later_when_it_goes_on(tmp_path: Path) -> None:
    make_run(tmp_path, [3, 4, 5])
    with ExitStack() as stack:
        found = resume(stack, step(tmp_path, 3), rewind=True)
        before = snapshot(tmp_path / "checkpoints")
        told = found.go_on()
    assert told == (
        "step-00000005 was moved to superseded/",
        "step-00000004 was moved to superseded/",
        "2 lines of metrics.jsonl were moved to superseded/",
    )
    assert before
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["step-00000003"]
    with ExitStack() as stack:  # the run is now where it was taken back to
        assert resume(stack, tmp_path).position.step == 3
    with ExitStack() as stack:  # the same command after a kill
        assert resume(stack, step(tmp_path, 3), rewind=True).go_on() == ()


def test_a_fork_leaves_its_origin_alone_and_knows_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_id = make_run(tmp_path / "run", [3, 4])
    before = snapshot(tmp_path / "run")
    monkeypatch.chdir(tmp_path)
    with ExitStack() as stack, RunFolder.reopen(tmp_path / "run"):  # even while that one runs
        found = resume(stack, step(tmp_path / "run", 3), fork=Path("fork"))
        assert found.folder.run_id != run_id
        assert found.folder.parent == Origin(run_id, found.checkpoint.manifest.id, 3)
        assert found.config.loaded.config.train.output_dir == tmp_path / "fork"
        [told] = found.go_on()
        assert told == f"a new run, forked at step 3 of run {run_id}"
    after = snapshot(tmp_path / "run")
    assert {k: v for k, v in after.items() if k != "run.lock"} == {
        k: v for k, v in before.items() if k != "run.lock"
    }
    with ExitStack() as stack:
        assert resume(stack, tmp_path / "run", fork=tmp_path / "other").position.step == 4
    with ExitStack() as stack, pytest.raises(ConfigError, match=r"^--fork: .* holds a run"):
        resume(stack, tmp_path / "run", fork=tmp_path / "run")


def test_a_run_in_use_is_not_touched(tmp_path: Path) -> None:
    """F76: here within one process; `test_reopen` has two."""
    make_run(tmp_path, [3])
    with ExitStack() as stack:
        resume(stack, tmp_path)
        before = snapshot(tmp_path)
        with ExitStack() as other, pytest.raises(LockedError, match="in use by process"):
            resume(other, tmp_path)
        assert snapshot(tmp_path) == before


@pytest.mark.parametrize("text", [None, b"\xff\xfe", b"model: [", b"x: 1"])
def test_a_checkpoint_without_a_config_to_go_on_with_is_refused(
    text: bytes | None, tmp_path: Path
) -> None:
    run_id = make_run(tmp_path, [])
    aux = {} if text is None else {SAVED_CONFIG: text}
    make_checkpoint(step(tmp_path, 3), step=3, run_id=run_id, aux=aux)
    kind = CorruptError if text in (None, b"\xff\xfe") else ConfigError
    assert "config.yaml" in refusal(kind, tmp_path)


def test_one_found_damaged_while_loading_is_passed_over_next(tmp_path: Path) -> None:
    make_run(tmp_path, [3, 4])
    refused: dict[Path, str] = {}
    with ExitStack() as stack:
        found = open_resume(ResumeRequest(tmp_path), FS, stack, refused)
        assert found.position.step == 4
        found.go_on()
        refused[found.checkpoint.folder] = "a shard that is not what was saved"
    with ExitStack() as stack:
        found = open_resume(ResumeRequest(tmp_path), FS, stack, refused)
        assert found.position.step == 3
        assert found.go_on()[0] == "step-00000004 was moved to superseded/"
        assert found.folder.attempt == 3
        assert saved_config(tmp_path).train.output_dir == tmp_path


def test_nothing_to_resume_from_is_an_error(tmp_path: Path) -> None:
    """F55."""
    make_run(tmp_path / "run", [])
    (tmp_path / "run" / "checkpoints").mkdir()
    refusal(NoCheckpointError, tmp_path / "run")
