"""Rules over several keys, keys without effect, and what this version refuses by name."""

from pathlib import Path

import pytest

from megatrain_cli.config.load import dump_config
from tests.config.conftest import Load, Problems

START = "model: {path: m}\ndata: {train: t}\n"


def test_exactly_one_length_of_run_is_asked_for(load: Load, problems: Problems) -> None:
    assert problems("train: {output_dir: r}\n", start=START) == [
        (
            "config.yaml:3: train.max_steps: missing; set exactly one of `train.max_steps` and"
            " `train.num_epochs`"
        )
    ]
    both = "train:\n  output_dir: r\n  max_steps: 1\n  num_epochs: 1\n"
    assert problems(both, start=START) == [
        (
            "config.yaml:6: train.num_epochs: set together with `train.max_steps`; set exactly one"
            " of them and the other to null"
        )
    ]
    train = load("train: {output_dir: r, num_epochs: 0.5}\n", start=START).config.train
    assert (train.max_steps, train.num_epochs) == (None, 0.5)


def test_an_override_can_swap_the_length_of_the_run(load: Load) -> None:
    train = load("", "train.max_steps=null", "train.num_epochs=2").config.train
    assert (train.max_steps, train.num_epochs) == (None, 2)


def test_warm_up_is_in_steps_or_in_shares(load: Load, problems: Problems) -> None:
    [problem] = problems("schedule:\n  warmup_steps: 2\n  warmup_ratio: 0.1\n")
    assert problem.startswith("config.yaml:6: schedule.warmup_ratio: set together")
    assert load("schedule: {warmup_steps: 0, warmup_ratio: 0.1}\n").config.schedule.warmup_ratio


@pytest.mark.parametrize("master", ["fp32_split", "bf16", "bf16_stochastic"])
def test_masters_that_rebuild_from_bf16_need_bf16_weights(
    load: Load, problems: Problems, master: str
) -> None:
    [problem] = problems(f"optimizer: {{master: {master}}}\n", "model.dtype=float32")
    assert "Set one of `optimizer.master: fp32` and `model.dtype: bfloat16`" in problem
    assert problem.startswith("config.yaml:4: optimizer.master: ")
    assert load(f"optimizer: {{master: {master}}}\n").config.optimizer.master == master


def test_a_float32_model_with_the_default_master_is_told_at_its_own_line(
    problems: Problems,
) -> None:
    [problem] = problems("", "model.dtype=float32")
    assert problem.startswith(
        "override `model.dtype=float32`: model.dtype: `optimizer.master: fp32_"
    )


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_fp32_masters_go_with_any_weights(load: Load, dtype: str) -> None:
    assert load("", f"model.dtype={dtype}", "optimizer.master=fp32").config.model.dtype == dtype


def test_eager_updates_cannot_clip(load: Load, problems: Problems) -> None:
    [problem] = problems("optimizer:\n  update: eager\n")
    assert problem.startswith("config.yaml:5: optimizer.update: `eager` updates a layer before")
    config = load("optimizer: {update: eager, max_grad_norm: null}\n").config
    assert config.optimizer.update == "eager"


def test_eager_updates_leave_no_gradients_to_save(load: Load, problems: Problems) -> None:
    eager = "optimizer: {update: eager, max_grad_norm: null}\n"
    [problem] = problems(eager, "checkpoint.include_gradients=true")
    assert "checkpoint.include_gradients: with `optimizer.update: eager` no gradient" in problem
    assert load("checkpoint: {include_gradients: true}\n").config.checkpoint.include_gradients


def test_a_rule_is_not_applied_to_a_value_that_is_wrong_already(problems: Problems) -> None:
    [problem] = problems("train: {output_dir: r, max_steps: ten}\n", start=START)
    assert "wanted a whole number" in problem
    [problem] = problems("optimizer: {update: eager, max_grad_norm: -1}\n")
    assert "wanted a number from 1e-30 to 1e30" in problem


@pytest.mark.parametrize(
    "override", ["optimizer.eps=1e-46", "optimizer.learning_rate=1e39", "train.num_epochs=1.7e308"]
)
def test_a_number_that_fp32_would_change_to_0_or_infinity_is_refused(
    problems: Problems, override: str
) -> None:
    [problem] = problems("", override)
    assert "wanted a number from" in problem


def test_rules_are_reported_beside_wrong_values(problems: Problems) -> None:
    found = problems("optimizer: {eps: 0, update: eager}\n", "pipeline.staging_bytes=1000000")
    keys = [problem.split(": ")[1] for problem in found]
    assert keys == ["optimizer.eps", "optimizer.update", "pipeline.staging_bytes"]


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["eval.steps=3"], "eval.steps: there are no rows to evaluate on"),
        (["eval.at_start=true"], "eval.at_start: there are no rows to evaluate on"),
        (["data.eval=a.jsonl", "data.eval_share=0.1"], "data.eval_share: set together with"),
        (["data.eval=[{path: a.jsonl, weight: 2}]"], "data.eval: `weight` of "),
        (["data.eval=[{path: a.jsonl, split: test}]"], "data.eval: `split` of "),
        (["data.eval=[{path: a.jsonl, formt: text}]"], "data.eval[0].formt: unknown key"),
        (["data.eval=[]"], "data.eval: wanted a path, a list of paths"),
        (["data.eval_share=1"], "data.eval_share: wanted a number above 0 and below 1"),
    ],
)
def test_an_evaluation_of_nothing_or_of_two_things_is_refused(
    problems: Problems, overrides: list[str], said: str
) -> None:
    [problem] = problems("", *overrides)
    assert said in problem


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("model.attention=flash_attention_2", "model.attention"),
        ("model.attention=flex_attention", "model.attention"),
        ("model.trust_remote_code=true", "model.trust_remote_code"),
        ("pipeline.staging_bytes=1000000", "pipeline.staging_bytes"),
        ("logging.tensorboard=true", "logging.tensorboard"),
    ],
)
def test_what_is_not_in_this_version_is_refused_by_name(
    problems: Problems, override: str, key: str
) -> None:
    [problem] = problems("", override)
    assert problem.startswith(f"override `{override}`: {key}: ")
    assert "is not in this version" in problem


@pytest.mark.parametrize(
    "override",
    [
        "data.packing=true",
        "data.eval=null",
        "eval.steps=null",
        "data.eval=eval.jsonl",
        "data.eval=[a.jsonl, {path: b.jsonl, format: text, max_rows: 3}]",
        "data.eval_share=0.01",
        "model.attention=eager",
        "pipeline.staging_bytes=auto",
        "checkpoint.save_steps=10",
        "checkpoint.bounce_pool=0",
        "logging.tensorboard=false",
        "data.train=[{path: a, format: text, weight: 2}]",
    ],
)
def test_the_values_that_mean_without_it_are_accepted(load: Load, override: str) -> None:
    assert load("", override).notes == ()


@pytest.mark.parametrize(
    ("overrides", "note"),
    [
        (
            ["checkpoint.async_save=false", "checkpoint.bounce_pool=0"],
            "checkpoint.bounce_pool: has no effect while",
        ),
        (
            ["checkpoint.save_steps=20", "checkpoint.keep_every_steps=50"],
            "checkpoint.keep_every_steps: a checkpoint is written every 20 steps, so only those",
        ),
        (
            ["checkpoint.keep_every_steps=50"],
            "checkpoint.keep_every_steps: has no effect on most runs: without `checkpoint.save_ste",
        ),
        (
            ["data.train=[{path: a.jsonl, format: alpaca}]", "data.format=messages"],
            "data.format: has no effect: every source of rows has a format of its own",
        ),
        (["schedule.type=constant", "schedule.min_lr_ratio=0"], "schedule.min_lr_ratio: has no"),
        (["optimizer.learning_rate=1e-400"], "optimizer.learning_rate: at 0 no weight changes"),
        (["schedule.warmup_ratio=1"], "schedule.warmup_ratio: the learning rate still rises"),
        (["schedule.warmup_steps=4"], "schedule.warmup_steps: the learning rate still rises"),
        (
            ["pipeline.device=cpu", "pipeline.target_pcie_utilization=0.9"],
            "pipeline.target_pcie_utilization: has no effect",
        ),
        (["pipeline.device=cpu", "store.memory=pinned"], "store.memory: has no effect"),
        (["pipeline.device=cpu", "train.deterministic=true"], "train.deterministic: has no effect"),
        (["data.packing=true", "model.attention=eager"], "model.attention: has no effect"),
        (["data.format=text", "data.train_on_prompt=true"], "data.train_on_prompt: has no effect"),
        (["optimizer.master=bf16"], "optimizer.master: changes below half a BF16 step are lost"),
        (
            ["optimizer.master=bf16_stochastic"],
            "optimizer.master: changes below a BF16 step",
        ),
    ],
)
def test_a_value_that_does_nothing_or_costs_exactness_is_announced(
    load: Load, overrides: list[str], note: str
) -> None:
    [found] = load("", *overrides).notes
    assert found.startswith(note)


def test_a_format_that_one_source_takes_needs_no_note(load: Load) -> None:
    mixed = "data.train=[{path: a.jsonl, format: alpaca}, {path: b.jsonl}]"
    assert load("", mixed, "data.format=messages").notes == ()
    alone = "data.train=[{path: a.jsonl, format: alpaca}]"
    assert load("", alone, "data.eval=b.jsonl", "data.format=messages").notes == ()


def test_milestones_that_are_saves_need_no_note(load: Load) -> None:
    assert load("checkpoint: {save_steps: 20, keep_every_steps: 100}\n").notes == ()


def test_defaults_that_do_nothing_are_not_announced(load: Load, tmp_path: Path) -> None:
    loaded = load("schedule: {type: constant}\npipeline: {device: cpu}\n")
    assert loaded.notes == ()
    # Nor where they are written out: a run's own config can be trained with again.
    again = load("", start=dump_config(loaded.config))
    assert again.config == loaded.config
    assert again.notes == ()


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("{path: a.jsonl, split: test}", "`split` of "),
        ("{path: a.jsonl, subset: en}", "`subset` of "),
        ("{path: a.jsonl, revision: v1}", "`revision` of "),
        ("{path: a.jsonl, streaming: true}", "`streaming` of "),
        ("{path: owner/name, sample_by: line}", "a data set of a hub has columns"),
        ("{path: dataset_info.json#it, format: text}", "the entry decides that"),
        ("{path: dataset_info.json#it, columns: {text: a}}", "the entry decides that"),
        ("{path: dataset_info.json#it, split: test}", "the entry decides that"),
    ],
)
def test_a_key_that_a_source_cannot_have_is_refused(
    problems: Problems, source: str, reason: str
) -> None:
    [problem] = problems("", f"data.train=[{source}]")
    assert ": data.train: " in problem
    assert reason in problem


@pytest.mark.parametrize(
    "source",
    [
        "{path: owner/name, split: 'train[:9]', subset: en, revision: v1, streaming: false}",
        "{path: dataset_info.json#it, weight: 2, max_rows: 9}",
        "{path: a.txt, sample_by: paragraph, columns: {text: a}, tags: {user: human}}",
    ],
)
def test_a_source_may_have_what_it_is_said_to_have(load: Load, source: str) -> None:
    assert load("", f"data.train=[{source}]").notes == ()


def test_a_limit_of_bad_rows_that_does_nothing_is_said(load: Load) -> None:
    [note] = load("", "data.max_bad_share=0.5").notes
    assert note.startswith("data.max_bad_share: has no effect with `data.on_bad_row: error`")
    assert load("", "data.max_bad_share=0.5", "data.on_bad_row=skip").notes == ()
