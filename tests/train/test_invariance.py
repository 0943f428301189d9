"""How a step is carried out never changes a bit of it: buffers, slabs, recompute, threads, order.

Whatever a user turns to fit a machine, the run stays the same run.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from megatrain_cli.optim import worker
from megatrain_cli.plan.plan import RunPlan
from megatrain_cli.train.loop import dropout_seed
from tests.train.workspace import make_rows, make_workspace, run_digest, start

Digest = tuple[tuple[str, ...], str]

FP32 = ("model.dtype=float32", "optimizer.master=fp32")
SPLIT = ("model.dtype=bfloat16", "optimizer.master=fp32_split")
MODES = pytest.mark.parametrize("mode", [FP32, SPLIT], ids=["fp32", "split"])
UNCLIPPED = ("optimizer.max_grad_norm=null",)


@pytest.fixture(autouse=True, scope="module")
def _small_tasks() -> Iterator[None]:
    """So that a tiny tile is work for several optimizer threads."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(worker, "CHUNK_ELEMENTS", 256)
        yield


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tied, so that the head needs a second layer's weights beside its own."""
    return make_workspace(
        tmp_path_factory.mktemp("invariance"),
        tied=True,
        train={"micro_batch_size": 2, "gradient_accumulation_steps": 2},
        optimizer={"weight_decay": 0.1},
    )


@pytest.fixture(scope="module")
def plain(config: Path) -> Callable[..., Digest]:
    """The digest of a run with nothing turned, computed once for each set of overrides."""
    known: dict[tuple[str, ...], Digest] = {}

    def digest_of(*overrides: str) -> Digest:
        if overrides not in known:
            known[overrides] = run_digest(config, overrides)
        return known[overrides]

    return digest_of


WAYS = [
    *(f"pipeline.staging_buffers={n}" for n in (1, 3, 4)),
    *(f"pipeline.grad_slabs={n}" for n in (1, 2, 3, "auto")),
    "pipeline.activations=recompute",
    "pipeline.activations=keep",
    *(f"pipeline.activations={{keep_layers: {n}}}" for n in (1, 2)),
    *(f"pipeline.activations={{keep_layers: {n}, offload: true}}" for n in (0, 1, 3)),
    *(f"optimizer.threads={n}" for n in (2, 3)),
]


@MODES
@pytest.mark.parametrize("way", WAYS)
def test_no_setting_of_the_pipeline_changes_a_bit(
    way: str, mode: tuple[str, ...], config: Path, plain: Callable[..., Digest]
) -> None:
    assert run_digest(config, [*mode, way]) == plain(*mode)


@MODES
def test_all_settings_together_change_no_bit(
    mode: tuple[str, ...], config: Path, plain: Callable[..., Digest]
) -> None:
    ways = [
        "pipeline.staging_buffers=1",
        "pipeline.grad_slabs=1",
        "pipeline.activations={keep_layers: 1, offload: true}",
        "optimizer.threads=3",
    ]
    assert run_digest(config, [*mode, *ways]) == plain(*mode)


def without_slabs(plan: RunPlan) -> RunPlan:
    """As a page-locked store on a GPU has it; no key asks for it on the CPU."""
    return replace(plan, decisions=replace(plan.decisions, num_slabs=0))


@MODES
def test_gradients_straight_into_the_tiles_change_no_bit(
    mode: tuple[str, ...], config: Path, plain: Callable[..., Digest]
) -> None:
    assert run_digest(config, mode, adjust=without_slabs) == plain(*mode)


@MODES
@pytest.mark.parametrize("slabs", [1, 12])
def test_eager_updates_equal_deferred_ones(
    slabs: int, mode: tuple[str, ...], config: Path, plain: Callable[..., Digest]
) -> None:
    eager = [*mode, *UNCLIPPED, "optimizer.update=eager", f"pipeline.grad_slabs={slabs}"]
    assert run_digest(config, eager) == plain(*mode, *UNCLIPPED)


@pytest.mark.parametrize("slots", [1, 2, 3])
@pytest.mark.parametrize("activations", ["recompute", "keep", "{keep_layers: 1, offload: true}"])
def test_nothing_reads_a_staging_buffer_that_was_given_back(
    slots: int, activations: str, config: Path, plain: Callable[..., Digest]
) -> None:
    """STR-01: a kernel that kept a view of the buffer would now read NaN."""
    ways = [f"pipeline.staging_buffers={slots}", f"pipeline.activations={activations}"]
    assert run_digest(config, [*SPLIT, *ways], poison=True) == plain(*SPLIT)


@pytest.mark.slow
@MODES
def test_any_split_of_a_step_into_micro_batches_is_the_same_step(
    mode: tuple[str, ...], config: Path
) -> None:
    """LOOP-01. To the last bit, as a CPU takes rows one by one in any case."""
    splits = [
        [f"train.micro_batch_size={b}", f"train.gradient_accumulation_steps={12 // b}"]
        for b in (1, 2, 3, 12)
    ]
    assert len({run_digest(config, [*mode, *split]) for split in splits}) == 1


@pytest.mark.parametrize("kind", ["llama", "mistral", "gpt2"])
@pytest.mark.parametrize("rows_at_once", [2, 3, 12])
def test_rectangles_of_padded_rows_give_the_gradients_of_single_rows(
    kind: str, rows_at_once: int, tmp_path: Path
) -> None:
    """As on a GPU: rows side by side, padded on the right, without a mask."""
    single = {"micro_batch_size": 1, "gradient_accumulation_steps": 12, "max_steps": 1}
    config = make_workspace(tmp_path, kind, train=single, optimizer={"learning_rate": 0.0})
    with start(config) as run:
        (one,) = run.steps()
        wanted = run.by_name(lambda tile: tile.gradient)

    def in_rectangles(plan: RunPlan) -> RunPlan:
        decisions = replace(
            plan.decisions, micro_batch_size=rows_at_once, num_micro_batches=12 // rows_at_once
        )
        return replace(plan, decisions=decisions)

    with start(config, adjust=in_rectangles) as run:
        rows = run.rows.of_step(0)
        assert rows.num_rows == 12
        assert {mb.input_ids.shape for mb in rows.micro_batches} == {(rows_at_once, 64)}
        (record,) = run.steps()
        found = run.by_name(lambda tile: tile.gradient)
    assert record.tokens == one.tokens
    assert record.loss == pytest.approx(one.loss, rel=1e-6)
    assert record.grad_norm == pytest.approx(one.grad_norm, rel=1e-6)
    for name, gradient in wanted.items():
        worst = ((found[name] - gradient).abs().max() / gradient.abs().max()).item()
        # The gradient of a bias is one sum over all 768 positions: its order shows the most.
        assert worst <= 2e-6, f"{name} differs by {worst:.2e}"


@pytest.mark.parametrize("compiled", [False, True])
def test_micro_batches_that_pass_together_take_the_same_rows_to_the_last_part_of_an_epoch(
    compiled: bool, tmp_path: Path
) -> None:
    """Steps of 8 of 11 rows, twice over: the last has 6, and padding where there are no more."""
    train = {"micro_batch_size": 2, "gradient_accumulation_steps": 4}
    config = make_workspace(
        tmp_path, "gpt2", rows=11, data={"shuffle": True}, train={**train, "max_steps": None}
    )
    seen = {}
    for rows_at_once in (1, 2, 8):

        def divided(plan: RunPlan, rows: int = rows_at_once) -> RunPlan:
            decisions = replace(
                plan.decisions,
                micro_batch_size=rows,
                num_micro_batches=8 // rows,
                compiled=compiled,
            )
            return replace(plan, decisions=decisions)

        with start(config, ["train.num_epochs=2"], adjust=divided) as run:
            steps = [run.rows.of_step(i) for i in range(run.rows.total_steps)]
            shapes = {mb.input_ids.shape for step in steps for mb in step.micro_batches}
            assert {count for count, _ in shapes} == {rows_at_once}
            assert not compiled or shapes == {(rows_at_once, run.engine.plan.decisions.max_length)}
            learnt = [
                [tuple(row[row != -100]) for mb in step.micro_batches for row in mb.labels]
                for step in steps
            ]
            seen[rows_at_once] = learnt, [(r.loss, r.tokens, r.rows, r.epoch) for r in run.steps()]
    learnt, records = seen.pop(1)
    assert [rows for _, _, rows, _ in records] == [8, 8, 6]
    for other_learnt, other_records in seen.values():
        assert other_learnt == learnt
        for found, wanted in zip(other_records, records, strict=True):
            assert found == pytest.approx(wanted, rel=1e-6)


def test_a_rectangle_of_rows_is_no_longer_than_the_positions_of_the_model(tmp_path: Path) -> None:
    """Rounded up for the kernels, rows would look up positions that GPT-2 has not learned."""
    config = make_workspace(tmp_path, "gpt2", train={"max_steps": 1})
    longest = None
    with start(config) as run:
        longest = int(np.diff(run.rows.examples.offsets).max())
    assert longest % 64
    settings = tmp_path / "model" / "config.json"
    values = json.loads(settings.read_text())
    settings.write_text(json.dumps({**values, "n_positions": longest}))

    def in_rectangles(plan: RunPlan) -> RunPlan:
        decisions = replace(plan.decisions, micro_batch_size=4, num_micro_batches=1)
        return replace(plan, decisions=decisions)

    with start(config, ["model.init=random"], adjust=in_rectangles) as run:
        assert run.rows.of_step(0).micro_batches[0].input_ids.shape == (4, longest)
        list(run.steps())


def test_many_micro_batches_lose_no_more_than_one_rounding(tmp_path: Path) -> None:
    """NUM-02: 64 times the same row has the gradient of that row, if its sum is kept in FP32."""
    config = make_workspace(tmp_path)
    (tmp_path / "same.jsonl").write_text((json.dumps(make_rows(1)[0]) + "\n") * 64)
    one = [*SPLIT, "data.train=same.jsonl", "train.max_steps=1", "train.micro_batch_size=1"]
    gradients = []
    for accumulation in (1, 64):
        with start(config, [*one, f"train.gradient_accumulation_steps={accumulation}"]) as run:
            list(run.steps())
            gradients.append(run.by_name(lambda tile: tile.gradient))
    for name, gradient in gradients[0].items():
        worst = ((gradients[1][name] - gradient).abs().max() / gradient.abs().max()).item()
        assert worst <= 2**-9, f"{name} differs by {worst:.2e}"


@pytest.fixture(scope="module")
def with_dropout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    dropout = {"attn_pdrop": 0.1, "embd_pdrop": 0.1, "resid_pdrop": 0.1}
    return make_workspace(
        tmp_path_factory.mktemp("dropout"),
        "gpt2",
        tied=True,
        model=dropout,
        train={"micro_batch_size": 2, "gradient_accumulation_steps": 2},
    )


@MODES
def test_recompute_draws_the_dropout_masks_of_forward_again(
    mode: tuple[str, ...], with_dropout: Path
) -> None:
    """NUM-07: kept activations have the masks of forward; equal bits mean equal masks."""
    kept = run_digest(with_dropout, [*mode, "pipeline.activations=keep"])
    assert run_digest(with_dropout, [*mode, "pipeline.activations=recompute"]) == kept
    without = run_digest(with_dropout, [*mode, "train.seed=2"])
    assert without != kept, "there is dropout at all, and it depends on the seed"


def test_the_gradient_belongs_to_the_masks_of_the_loss(with_dropout: Path) -> None:
    """NUM-07, against the loss itself: finite differences at a fixed seed."""
    step = 1e-2
    with start(with_dropout, ["optimizer.learning_rate=0", "train.max_steps=1"]) as run:

        def loss_with(name: str, at: int, change: float) -> float:
            tile = next(t for t in run.engine.store.tiles if name in t.layout.by_name)
            weight = tile.view(name).view(-1)
            before = weight[at].item()
            weight[at] = before + change
            (record,) = run.steps()
            weight[at] = before
            return record.loss

        list(run.steps())
        gradients = run.by_name(lambda tile: tile.gradient)
        for name in (
            "transformer.wpe.weight",
            "transformer.h.0.attn.c_attn.weight",
            "transformer.h.1.mlp.c_fc.weight",
            "transformer.h.2.ln_1.bias",
        ):
            gradient = gradients[name].view(-1)
            at = int(gradient.abs().argmax())
            rise = loss_with(name, at, step) - loss_with(name, at, -step)
            # The third derivative is what is left out; 1 % of the slope at this step.
            assert rise / (2 * step) == pytest.approx(gradient[at].item(), rel=1e-2), name


def test_dropout_seeds_differ_for_every_argument() -> None:
    seeds = {
        dropout_seed(seed, step, layer, mb)
        for seed in range(3)
        for step in range(3)
        for layer in range(3)
        for mb in range(3)
    }
    assert len(seeds) == 81
    assert all(0 <= seed < 1 << 63 for seed in seeds)
