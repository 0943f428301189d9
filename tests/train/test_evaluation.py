"""What an evaluation says is what plain Hugging Face says, and training does not notice it."""

import json
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F
from transformers import AutoModelForCausalLM

from megatrain_cli.errors import ConfigError, CorruptError, Stopped
from megatrain_cli.report.journal import read_evaluations
from megatrain_cli.report.records import EvalRecord
from megatrain_cli.train.eval_rows import EvaluationRows
from megatrain_cli.train.loop import Run
from tests.train.here import train_here
from tests.train.same_runs import differences
from tests.train.whole_runs import SPLIT, Died, Runs, die, stop, with_dropout
from tests.train.workspace import Started, make_rows, make_workspace, start

LENGTH = 160  # of a packed row
EACH = "checkpoint.save_steps=1", "checkpoint.async_save=false", "checkpoint.keep_last=9"


def write_eval(folder: Path, count: int = 7) -> Path:
    """Rows of other lengths than those of training."""
    path = folder / "eval.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in make_rows(20)[-count:]))
    return path


def evaluate(run: Started) -> EvalRecord:
    rows = run.rows.evaluation
    assert rows is not None
    record = Run(run.loaded, run.engine, run.rows).evaluate(rows, 0)
    assert record is not None
    return record


def plain_loss(model: Path, rows: EvaluationRows) -> tuple[float, int]:
    """Every row alone through transformers' own forward."""
    whole = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    total, tokens = 0.0, 0
    for i in range(len(rows.documents)):
        ids, labels = map(torch.from_numpy, rows.documents.row(i))
        with torch.no_grad():
            logits = whole(input_ids=ids[None]).logits[0, :-1]
        total += F.cross_entropy(logits, labels[1:], ignore_index=-100, reduction="sum").item()
        tokens += int((labels[1:] != -100).sum())
    return total / tokens, tokens


@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize(("kind", "tied"), [("llama", True), ("mistral", False), ("gpt2", True)])
def test_its_loss_is_that_of_plain_transformers(
    kind: str, tied: bool, packing: bool, tmp_path: Path
) -> None:
    """Weighted by tokens, over rows of many lengths in several passes, the last one not full."""
    write_eval(tmp_path, 15)
    positions = "n_positions" if kind == "gpt2" else "max_position_embeddings"
    config = make_workspace(
        tmp_path,
        kind,
        tied=tied,
        model={positions: LENGTH},
        data={"eval": "eval.jsonl", "packing": packing, "max_length": LENGTH},
        train={"micro_batch_size": 1, "gradient_accumulation_steps": 2},
    )
    with start(config) as run:
        rows = run.rows.evaluation
        assert rows is not None
        assert rows.total_steps == (2 if packing else 8)
        assert packing or len(rows.lengths) % 2 == 1
        record = evaluate(run)
        loss, tokens = plain_loss(run.loaded.config.model.path, rows)
    assert record.eval_loss == pytest.approx(loss, rel=1e-6)
    assert record.eval_perplexity == pytest.approx(torch.tensor(loss).double().exp().item())
    assert record.eval_tokens == tokens


def test_a_row_that_is_longer_than_all_that_are_trained_on_has_room(tmp_path: Path) -> None:
    long = {"messages": [{"role": role, "content": "sea " * 25} for role in ("user", "assistant")]}
    (tmp_path / "eval.jsonl").write_text(json.dumps(long))
    model = {"max_position_embeddings": 300}
    config = make_workspace(tmp_path, model=model, data={"eval": "eval.jsonl", "max_length": 300})
    with start(config) as run:
        assert run.rows.evaluation is not None
        assert run.rows.longest == 256 > run.rows.documents.lengths.max() + 64
        loss, _ = plain_loss(run.loaded.config.model.path, run.rows.evaluation)
        assert evaluate(run).eval_loss == pytest.approx(loss, rel=1e-6)


def evaluations(run: Path) -> list[tuple[int, float, int]]:
    """Without what the clock decides."""
    found = read_evaluations(run / "metrics.jsonl")
    return [(record.step, record.eval_loss, record.eval_tokens) for record in found]


@pytest.fixture(scope="module")
def dropped(tmp_path_factory: pytest.TempPathFactory) -> tuple[Runs, Path]:
    """A run with dropout and evaluations after steps 0, 2, 4 and 5, never interrupted."""
    folder = tmp_path_factory.mktemp("dropped")
    runs = with_dropout(folder, steps=5)
    write_eval(folder)
    evaluated = (f"data.eval={folder / 'eval.jsonl'}", "eval.steps=2", "eval.at_start=true")
    return Runs(runs.config, (*runs.overrides, *evaluated)), runs.train("whole", *evaluated)


def test_a_run_is_evaluated_when_asked_to_and_at_its_end(dropped: tuple[Runs, Path]) -> None:
    found = evaluations(dropped[1])
    assert [step for step, _, _ in found] == [0, 2, 4, 5]
    assert len({loss for _, loss, _ in found}) == 4


def test_it_changes_no_bit_of_training(dropped: tuple[Runs, Path]) -> None:
    """Nor of what dropout draws."""
    runs, whole = dropped
    without = Runs(runs.config, SPLIT).train("without")
    assert evaluations(without) == []
    assert not differences(whole, without)


def test_it_runs_without_dropout(dropped: tuple[Runs, Path]) -> None:
    with start(dropped[0].config, dropped[0].overrides) as run:
        assert run.engine.skeleton.spec.has_dropout
        first, again = evaluate(run), evaluate(run)
        assert run.rows.evaluation is not None
        assert first.eval_loss == again.eval_loss
        assert run.engine.skeleton.layers[0].training


@pytest.mark.parametrize("after", [1, 2, 4])
def test_a_resumed_run_evaluates_at_the_same_steps_with_the_same_values(
    after: int, dropped: tuple[Runs, Path]
) -> None:
    runs, whole = dropped
    for name, action, ends in (("stopped", stop, Stopped), ("died", die, Died)):
        run = runs.train(f"{name}-{after}", *EACH, after={after: action}, ends=ends)
        if action is stop and after in (2, 4):  # a stop is heard before the evaluation
            assert after not in [step for step, _, _ in evaluations(run)]
        if action is die and after == 1:
            continue  # before the first checkpoint
        runs.resume(run)
        assert evaluations(run) == evaluations(whole)
        assert not differences(run, whole)


def test_a_stop_at_the_last_step_loses_no_evaluation(dropped: tuple[Runs, Path]) -> None:
    """A run that has ended is not resumed: it is made once all is saved."""
    runs, whole = dropped
    run = runs.train("stopped-last", after={5: stop})
    assert evaluations(run) == evaluations(whole)
    assert not differences(run, whole)


def test_evaluations_beyond_a_rewind_are_set_aside(dropped: tuple[Runs, Path]) -> None:
    runs, whole = dropped
    run = runs.train("rewound", *EACH)
    runs.resume(run / "checkpoints" / "step-00000003", rewind=True)
    assert evaluations(run) == evaluations(whole)
    [aside] = (run / "superseded").glob("metrics-*.jsonl")
    assert [record.step for record in read_evaluations(aside)] == [4, 5]


def test_a_run_that_goes_on_with_other_rows_to_evaluate_on_says_so(tmp_path: Path) -> None:
    write_eval(tmp_path)
    config = make_workspace(tmp_path, data={"eval": "eval.jsonl"}, eval={"steps": 1})
    runs = Runs(config)
    run = runs.train("run", after={1: stop}, ends=Stopped)
    assert "does not compare" not in runs.resume(run, after={2: stop}, ends=Stopped)
    [before] = read_evaluations(run / "metrics.jsonl")  # the stop came before that of step 2
    write_eval(tmp_path, 9)
    said = runs.resume(run)
    now = read_evaluations(run / "metrics.jsonl")[-1].eval_tokens
    assert now > before.eval_tokens
    tokens = f"evaluated on are {now} tokens, and {before.eval_tokens} up to step {before.step}"
    assert f"{tokens}: `eval_loss` does not compare" in said


def test_a_line_that_is_no_evaluation_is_named(dropped: tuple[Runs, Path]) -> None:
    runs, _ = dropped
    run = runs.train("damaged", after={2: stop}, ends=Stopped)
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2, "eval_loss": 1.0}\n')
    with pytest.raises(
        CorruptError,
        match=r"metrics\.jsonl:4: .*eval_perplexity is missing\. Move the file away to go on",
    ):
        runs.resume(run)
    (run / "metrics.jsonl").rename(run / "metrics.away")
    runs.resume(run)


@pytest.mark.parametrize("packing", [False, True])
def test_rows_held_out_are_never_trained_on(packing: bool, tmp_path: Path) -> None:
    config = make_workspace(
        tmp_path,
        rows=30,
        data={"eval_share": 0.2, "shuffle": True, "packing": packing},
        train={"max_steps": None, "num_epochs": 3, "micro_batch_size": 2},
    )
    with start(config) as run:
        rows = run.rows
        assert rows.evaluation is not None
        held = rows.evaluation.documents
        kept = {rows.documents.row(i)[0].tobytes() for i in range(len(rows.documents))}
        trained = {
            micro.input_ids[row][micro.documents[row] == number].tobytes()
            if micro.documents is not None
            else micro.input_ids[row].tobytes()
            for index in range(rows.total_steps)
            for micro in rows.of_step(index).micro_batches
            for row in range(len(micro.input_ids))
            for number in range(1 if micro.documents is None else micro.documents[row].max() + 1)
        }
        evaluated = {held.row(i)[0].tobytes() for i in range(len(held))}
        assert len(held) >= 6
        assert trained >= kept
        assert trained.isdisjoint(evaluated)
        assert evaluated.isdisjoint(kept)
        assert rows.order.endswith("+lowest-hashes-v1")
        assert f"{len(held)} of them are held out for evaluation" in rows.lines()


def test_a_share_that_leaves_nothing_is_refused(tmp_path: Path) -> None:
    config = make_workspace(tmp_path, rows=1, data={"eval_share": 0.5})
    said = r"data\.eval_share: 0\.5 of 1 row, .*leave none"
    with pytest.raises(ConfigError, match=said), start(config):
        pass


def test_one_that_is_given_up_says_nothing_and_training_goes_on(tmp_path: Path) -> None:
    write_eval(tmp_path)
    config = make_workspace(tmp_path, data={"eval": "eval.jsonl"}, train={"micro_batch_size": 2})
    asked = iter([False, True])
    with start(config) as run, start(config) as other:
        rows = run.rows.evaluation
        assert rows is not None
        record = Run(run.loaded, run.engine, run.rows).evaluate(rows, 0, lambda: next(asked))
        assert record is None
        assert [r.loss for r in run.steps()] == [r.loss for r in other.steps()]


def test_a_file_that_is_trained_and_evaluated_on_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = make_workspace(tmp_path, train={"max_steps": 1})
    (tmp_path / "copy.jsonl").write_bytes((tmp_path / "train.jsonl").read_bytes())
    (tmp_path / "other.jsonl").write_bytes((tmp_path / "train.jsonl").read_bytes() + b"\n")
    train_here(config, f"data.eval=[{tmp_path}/other.jsonl,{tmp_path}/copy.jsonl]")
    told = [line for line in capsys.readouterr().err.splitlines() if "of data.train too" in line]
    assert len(told) == 1
    assert "copy.jsonl is a file of data.train too" in told[0]
