"""Retention: what may never be removed is not, whatever lies in the folder."""

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatrain_cli.checkpoint.keep import which_to_prune, which_to_remove
from megatrain_cli.checkpoint.manifest import Manifest
from megatrain_cli.checkpoint.resolve import Candidate
from tests.checkpoint.made import make_checkpoint, random_layers


@pytest.fixture(scope="module")
def manifest(tmp_path_factory: pytest.TempPathFactory) -> Manifest:
    return make_checkpoint(tmp_path_factory.mktemp("x") / "c", random_layers(layers=0))


def make(
    manifest: Manifest,
    step: int,
    attempt: int = 1,
    run_id: str = "mine",
    problem: str | None = None,
) -> Candidate:
    about = manifest.model_copy(update={"run_id": run_id, "attempt": attempt})
    return Candidate(Path(f"step-{step:08d}"), step, about, problem)


drawn = st.lists(
    st.tuples(
        st.integers(0, 40),
        st.integers(1, 3),
        st.sampled_from(["mine", "mine", "other"]),
        st.sampled_from([None, None, "broken"]),
        st.booleans(),
        st.booleans(),
        st.booleans(),
    ),
    unique_by=lambda one: one[0],
    max_size=12,
)


@given(drawn, st.integers(1, 4), st.none() | st.integers(1, 7), st.data())
def test_nothing_that_must_stay_is_removed_and_all_else_is(
    manifest: Manifest,
    drawn: list[tuple[int, int, str, str | None, bool, bool, bool]],
    keep_last: int,
    keep_every: int | None,
    data: st.DataObject,
) -> None:
    found = []
    for step, attempt, run_id, problem, kept, hinted, readable in drawn:
        one = replace(make(manifest, step, attempt, run_id, problem), kept=kept, hinted=hinted)
        found.append(one if readable or problem is None else replace(one, manifest=None))
    folders = [one.folder for one in found]
    protected = data.draw(st.lists(st.sampled_from(folders), max_size=2)) if folders else []
    removed = which_to_remove(
        found,
        run_id="mine",
        keep_last=keep_last,
        keep_every=keep_every,
        protected=[Path("/elsewhere") / folder for folder in protected],
    )
    whole = [
        one
        for one in found
        if one.problem is None and one.manifest is not None and one.manifest.run_id == "mine"
    ]
    newer = {one.step: sum(other.order > one.order for other in whole) for one in whole}
    for one in found:
        stays = (
            one not in whole
            or newer[one.step] < keep_last
            or (keep_every is not None and one.step % keep_every == 0)
            or one.kept
            or one.hinted
            or one.folder in protected
        )
        assert (one in removed) != stays
    if whole:
        assert max(whole, key=lambda one: one.order) not in removed
    assert removed == sorted(removed, key=lambda one: one.order)


@pytest.mark.parametrize("keep_last", [0, -1])
def test_nothing_is_decided_for_keeping_none(manifest: Manifest, keep_last: int) -> None:  # F49
    with pytest.raises(AssertionError, match="never removed"):
        which_to_remove([make(manifest, 1)], run_id="mine", keep_last=keep_last)


def test_steps_8_to_11_beside_another_runs_step_5000(manifest: Manifest) -> None:
    found = [make(manifest, step) for step in (9, 11, 8, 10)]
    found.append(make(manifest, 5000, run_id="other"))
    removed = which_to_remove(found, run_id="mine", keep_last=2)
    assert [one.step for one in removed] == [8, 9]


def test_a_stale_higher_step_of_an_earlier_attempt_goes_first(manifest: Manifest) -> None:
    found = [make(manifest, 5000, attempt=1), make(manifest, 1200, attempt=2)]
    assert which_to_remove(found, run_id="mine", keep_last=1) == found[:1]


def test_a_broken_newest_does_not_push_out_the_last_good_one(manifest: Manifest) -> None:
    found = [make(manifest, 12, problem="truncated"), make(manifest, 11)]
    assert which_to_remove(found, run_id="mine", keep_last=1) == []


@pytest.mark.parametrize("reason", ["KEEP", "hint", "protected", "multiple"])
def test_each_reason_to_stay_is_enough(manifest: Manifest, reason: str) -> None:
    old = replace(make(manifest, 6), kept=reason == "KEEP", hinted=reason == "hint")
    found = [old, make(manifest, 7), make(manifest, 8)]
    removed = which_to_remove(
        found,
        run_id="mine",
        keep_last=1,
        keep_every=3 if reason == "multiple" else None,
        protected=[Path("/run/checkpoints/step-00000006")] if reason == "protected" else [],
    )
    assert [one.step for one in removed] == [7]
    assert len(which_to_remove([make(manifest, 6), *found[1:]], run_id="mine", keep_last=1)) == 2


def test_a_full_disk_costs_all_whole_ones_but_the_newest_and_those_that_are_marked(
    manifest: Manifest,
) -> None:
    found = [make(manifest, step) for step in (9, 7, 6, 5)]
    found[2] = replace(found[2], kept=True)
    broken = make(manifest, 8, problem="broken")
    assert which_to_prune([broken, *found]) == [found[1], found[3]]
    marked = [replace(found[0], kept=True), *found[1:]]
    assert which_to_prune(marked) == [found[1], found[3]]  # the newest is that, marked or not
    assert which_to_prune(found[:1]) == which_to_prune([]) == []
