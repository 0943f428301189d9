"""A resumed run goes on with the chat template that it was begun with, wherever its file is now."""

from contextlib import ExitStack
from pathlib import Path

import pytest

from megatrain_cli.checkpoint.fsio import FileSystem
from megatrain_cli.config.load import dump_config
from megatrain_cli.errors import CorruptError, IncompatibleError
from megatrain_cli.train.folder import RunFolder
from megatrain_cli.train.resume import SAVED_CONFIG, ResumeRequest, Resumption, open_resume
from tests.checkpoint.made import make_checkpoint
from tests.train.saved import saved_config

OLD, NEW = "{{ 'as it was' }}", "{{ 'another' }}"


def make_run(run: Path, template: str, text: str | None = OLD) -> Path:
    """A run of 20 steps with one checkpoint; the checkpoint."""
    config = saved_config(run, {"data": {"template": template}})
    aux = {SAVED_CONFIG: dump_config(config).encode()}
    if text is not None:
        aux["chat_template.jinja"] = text.encode()
    with RunFolder(run) as folder:
        run_id = folder.run_id
    made = run / "checkpoints" / "step-00000003"
    make_checkpoint(made, step=3, run_id=run_id, aux=aux)
    return made


def resume(stack: ExitStack, run: Path, *overrides: str, allow: bool = False) -> Resumption:
    allowed = ("data.template",) if allow else ()
    request = ResumeRequest(run, overrides, allowed)
    return open_resume(request, FileSystem(), stack)


def template_of(found: Resumption) -> str | None:
    return found.config.loaded.config.data.template


@pytest.fixture
def own(tmp_path: Path) -> Path:
    path = tmp_path / "own.jinja"
    path.write_text(OLD)
    return path


def test_the_text_in_the_checkpoint_counts_and_the_place_stays_recorded(
    tmp_path: Path, own: Path
) -> None:
    made = make_run(tmp_path / "run", str(own))
    with ExitStack() as stack:
        found = resume(stack, tmp_path / "run")
        assert template_of(found) == str(made / "chat_template.jinja")
        assert found.config.recorded.data.template == str(own)
        assert (found.notes, found.lineage) == ((), ())


@pytest.mark.parametrize("text", [NEW, None])
def test_a_file_that_was_changed_or_is_gone_stops_nothing_and_is_said(
    text: str | None, tmp_path: Path, own: Path
) -> None:
    made = make_run(tmp_path / "run", str(own))
    own.unlink() if text is None else own.write_text(text)
    with ExitStack() as stack:
        found = resume(stack, tmp_path / "run", allow=text is None)
        assert template_of(found) == str(made / "chat_template.jinja")
        (note,) = found.notes
        assert str(own) in note
        assert ("--allow-change data.template" in note) is (text is not None)
        assert found.lineage == ()


def test_a_changed_file_is_taken_where_it_is_asked_for_and_recorded(
    tmp_path: Path, own: Path
) -> None:
    make_run(tmp_path / "run", str(own))
    own.write_text(NEW)
    with ExitStack() as stack:
        found = resume(stack, tmp_path / "run", allow=True)
        assert template_of(found) == str(own)
        (change,) = found.lineage
        assert change["key"] == "data.template"
        assert change["old"] != change["new"]
        (note,) = found.notes
        assert note.startswith(f"data.template: {own} (xxh3-128 ")


def test_another_place_with_the_same_text_is_no_change(tmp_path: Path, own: Path) -> None:
    made = make_run(tmp_path / "run", str(own))
    moved = own.rename(tmp_path / "moved.jinja")
    with ExitStack() as stack:
        found = resume(stack, tmp_path / "run", f"data.template={moved}")
        assert template_of(found) == str(made / "chat_template.jinja")
        assert found.config.recorded.data.template == str(moved)
        assert found.lineage == ()
    moved.write_text(NEW)
    for other in (str(moved), "chatml", "null"):
        with ExitStack() as stack, pytest.raises(IncompatibleError, match=r"data\.template: "):
            resume(stack, tmp_path / "run", f"data.template={other}")
        with ExitStack() as stack:
            found = resume(stack, tmp_path / "run", f"data.template={other}", allow=True)
            assert template_of(found) == (None if other == "null" else other)
            assert len(found.lineage) == 1


def test_a_template_by_name_is_the_one_that_the_run_was_begun_with(tmp_path: Path) -> None:
    """Its text may be another in a later version."""
    made = make_run(tmp_path / "run", "chatml")
    with ExitStack() as stack:
        assert template_of(resume(stack, tmp_path / "run")) == str(made / "chat_template.jinja")
    make_run(tmp_path / "plain", "none", None)
    with ExitStack() as stack:
        assert template_of(resume(stack, tmp_path / "plain")) == "none"


def test_a_checkpoint_without_its_copy_is_not_gone_on_from(tmp_path: Path, own: Path) -> None:
    make_run(tmp_path / "run", str(own), None)
    with ExitStack() as stack, pytest.raises(CorruptError, match=r"chat_template\.jinja: missing"):
        resume(stack, tmp_path / "run")
