"""What a run writes does not become what it reads."""

from pathlib import Path

import pytest

from megatrain_cli.config.load import check_paths
from megatrain_cli.errors import ConfigError
from tests.config.conftest import Load


@pytest.mark.parametrize("key", ["train.output_dir", "data.cache_dir"])
@pytest.mark.parametrize("rows", ["data.train", "data.eval"])
def test_nothing_is_written_where_all_files_are_read_as_rows(
    rows: str, key: str, load: Load, tmp_path: Path
) -> None:
    """A run would find its own journal among its data, and the next one the cached rows."""
    (tmp_path / "model").mkdir()
    (tmp_path / "train.jsonl").write_text("")
    (tmp_path / "set").mkdir()
    (tmp_path / "link").symlink_to("set")
    for place in ("set", "set/below/it", "link/run"):
        with pytest.raises(ConfigError) as caught:
            check_paths(load("", f"{rows}=[set]", f"{key}={place}"))
        [problem] = caught.value.problems
        said = f"lies in {tmp_path}/set of `{rows}`, where every file is read as rows; name a"
        assert said in problem
        assert problem.startswith(f"override `{key}={place}`: {key}: ")
    for place in ("set/.cache/it", "settings", "run"):
        check_paths(load("", f"{rows}=[set]", f"{key}={place}"))
