"""A run that does not fit is refused before weights are read; in a cgroup, by the cgroup's name."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatrain_cli.cli.app import main
from megatrain_cli.probe import machine
from megatrain_cli.probe.cgroup import host_memory
from megatrain_cli.store import source
from tests.families import tiny_config
from tests.train.workspace import make_workspace

GIB = 1 << 30
_PROC, _GROUPS = Path("/proc"), Path("/sys/fs/cgroup")

# Some 0.4 billion parameters of 16 bytes each.
_BIG = {"hidden_size": 2048, "intermediate_size": 8192, "vocab_size": 16000}


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """Weights and rows are no such files: whoever reads them fails otherwise."""
    path = make_workspace(tmp_path)
    tiny_config("llama", tied=False, layers=5, **_BIG).save_pretrained(tmp_path / "model")
    for name in ("model/model.safetensors", "train.jsonl"):
        (tmp_path / name).write_bytes(b"not to be read")
    return path


def check(told: str, group: str) -> None:
    """The refusal names the cgroup, its limit, and the bytes that are missing."""
    told = " ".join(told.split())
    found = re.search(
        r"needs ([\d.]+) GiB of host RAM and ([\d.]+) GiB may be taken "
        rf"\({re.escape(group)}, limit 2\.00 GiB\): ([\d.]+) GiB are missing",
        told,
    )
    assert found is not None, told
    needed, available, missing = map(float, found.groups())
    assert 0 < available <= 2 < needed
    assert missing == pytest.approx(needed - available, abs=0.06)  # as far as is printed
    assert "not to be read" not in told


@pytest.mark.parametrize(
    ("group", "files"),
    [
        (
            "cgroup v2 /jobs/mine",
            {
                "proc/self/cgroup": "0::/jobs/mine\n",
                "cgroup/jobs/memory.max": f"{64 * GIB}\n",
                "cgroup/jobs/memory.current": "0\n",
                "cgroup/jobs/mine/memory.max": f"{2 * GIB}\n",
                "cgroup/jobs/mine/memory.current": f"{GIB // 4}\n",
            },
        ),
        (
            "cgroup v1 /jobs/mine",
            {
                "proc/self/cgroup": "4:memory:/jobs/mine\n",
                "cgroup/memory/jobs/mine/memory.limit_in_bytes": f"{2 * GIB}\n",
                "cgroup/memory/jobs/mine/memory.usage_in_bytes": f"{GIB // 4}\n",
            },
        ),
    ],
    ids=["v2", "v1"],
)
def test_in_a_cgroup_that_is_too_small_a_run_is_refused_before_weights_are_read(
    config: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    group: str,
    files: dict[str, str],
) -> None:
    for name, text in files.items():
        path = tmp_path / "system" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    root, proc = tmp_path / "system" / "cgroup", tmp_path / "system" / "proc"
    monkeypatch.setattr(machine, "host_memory", lambda: host_memory(root, proc))

    def opened(path: object, **options: object) -> None:
        raise AssertionError(f"{path} was opened")

    monkeypatch.setattr(source, "safe_open", opened)
    monkeypatch.setattr(sys, "argv", ["megatrain", "train", str(config)])
    capsys.readouterr()
    with pytest.raises(SystemExit) as left:
        main()
    assert left.value.code == 1
    check(capsys.readouterr().err, group)


@pytest.fixture
def small_group() -> Iterator[Path]:
    """A cgroup of 2 GiB below this process's own: what bounds this process bounds it too."""
    places = {}
    for text in (_PROC / "self" / "cgroup").read_text().splitlines():
        _, controllers, path = text.split(":", 2)
        if controllers == "memory":
            places[_GROUPS / "memory" / path.lstrip("/")] = "memory.limit_in_bytes"
        elif not controllers:
            places[_GROUPS / path.lstrip("/")] = "memory.max"
    reasons = []
    for above, limit in places.items():
        made = above / f"megatrain-test-{os.getpid()}"
        try:
            made.mkdir()
        except OSError as error:
            reasons.append(f"{above}: {error.strerror}")
            continue
        try:
            if not (made / limit).exists():
                reasons.append(f"{above}: memory is not delegated")
                continue
            (made / limit).write_text(str(2 * GIB))
            yield made
        except PermissionError as error:
            reasons.append(f"{made}: {error.strerror}")
            continue
        finally:
            made.rmdir()
        return
    pytest.skip(f"no cgroup can be made here: {'; '.join(reasons) or 'there are none'}")


# Python's own opening of files is noticed; what the file holds lets all other ways fail.
_WATCHED = """
import sys
def notice(event, args):
    if event == "open" and str(args[0]).endswith(".safetensors"):
        sys.stderr.write(f"not to be read: {args[0]}\\n")
sys.addaudithook(notice)
from megatrain_cli.cli.app import main
main()
"""


@pytest.mark.slow
def test_in_a_real_cgroup_of_2_gib_the_refusal_names_it(config: Path, small_group: Path) -> None:
    join = f'echo $$ > "{small_group}/cgroup.procs" && exec "$@"'
    run = subprocess.run(
        ["sh", "-c", join, "sh", sys.executable, "-c", _WATCHED, "train", str(config)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
    )
    v1 = (small_group / "memory.limit_in_bytes").exists()
    above = _GROUPS / "memory" if v1 else _GROUPS
    assert run.returncode == 1, run.stderr
    check(run.stderr, f"cgroup v{1 if v1 else 2} /{small_group.relative_to(above)}")
