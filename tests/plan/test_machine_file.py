"""The file of a measured machine: a round trip, whole on disk, and refused in one clear line."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatrain_cli.errors import (
    ConfigError,
    CorruptError,
    DeviceError,
    IncompatibleError,
    MegatrainError,
    StorageError,
)
from megatrain_cli.plan.machine_file import (
    VERSION,
    Fingerprint,
    MachineFile,
    default_path,
    load_machine_file,
    save_machine_file,
)
from tests.plan.small import CPU, GPU, RATES, measured_file

HERE = Fingerprint("Xeon", 16, 128, "NVIDIA H200", "570.1")
FILE = measured_file(replace(GPU, rates=RATES), HERE)


@pytest.mark.parametrize(
    "file",
    [
        FILE,
        measured_file(CPU, HERE),
        measured_file(replace(CPU, rates=replace(RATES, link=None, compute=None, disk=None)), HERE),
    ],
)
def test_what_was_saved_is_read_again(file: MachineFile, tmp_path: Path) -> None:
    path = tmp_path / "new" / "machine.json"
    save_machine_file(file, path)
    assert load_machine_file(path) == file
    assert path.read_text() == file.to_json()
    assert [p.name for p in path.parent.iterdir()] == ["machine.json"]


def test_a_write_that_fails_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "machine.json"
    save_machine_file(FILE, path)

    def refuse(self: Path, target: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", refuse)
    with pytest.raises(StorageError, match="No space left"):
        save_machine_file(measured_file(CPU, HERE), path)
    assert load_machine_file(path) == FILE
    assert [p.name for p in tmp_path.iterdir()] == ["machine.json"]


def test_the_default_place_follows_the_users_config_home(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert default_path() == tmp_path / "megatrain" / "machine.json"
    assert load_machine_file() is None
    monkeypatch.delenv("XDG_CONFIG_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "me"))
    place = tmp_path / "me" / ".config" / "megatrain" / "machine.json"
    assert default_path() == place
    save_machine_file(FILE, place)
    assert load_machine_file() == FILE


def test_a_config_home_that_is_not_absolute_does_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would be another place in each folder."""
    monkeypatch.setenv("HOME", str(tmp_path))
    for home in ("", "config", "~/.config"):
        monkeypatch.setenv("XDG_CONFIG_HOME", home)
        assert default_path() == tmp_path / ".config" / "megatrain" / "machine.json"


def test_a_link_is_followed_and_stays(tmp_path: Path) -> None:
    there = tmp_path / "there" / "m.json"
    link = tmp_path / "link.json"
    link.symlink_to(there)
    for file in (FILE, measured_file(CPU, HERE)):
        save_machine_file(file, link)
        assert link.is_symlink()
        assert load_machine_file(there) == file


def test_the_file_of_the_machine_at_hand_is_written_anew_by_a_plain_probe() -> None:
    place = default_path()
    assert place is not None
    save_machine_file(replace(FILE, version=2), place)
    with pytest.raises(IncompatibleError) as caught:
        load_machine_file()
    assert str(caught.value) == (
        f"{place} has version 2, and this program reads {VERSION}. Run `megatrain probe` to "
        "write it anew."
    )


@pytest.mark.parametrize(
    ("change", "kind", "said"),
    [
        ({"version": 1}, IncompatibleError, f"has version 1, and this program reads {VERSION}"),
        ({"version": "one"}, CorruptError, "is damaged at version"),
        ({"machine": {}}, CorruptError, "is damaged at machine.host_bytes"),
        ({"machine": None}, CorruptError, "is damaged at machine"),
        ({"fingerprint": {"cpu": 3}}, CorruptError, "is damaged at fingerprint.cpu"),
        ({"note": []}, CorruptError, "is damaged at note: no key has that name"),
    ],
)
def test_a_wrong_file_is_refused_with_its_path_and_the_way_out(
    tmp_path: Path, change: dict[str, object], kind: type[MegatrainError], said: str
) -> None:
    path = tmp_path / "m.json"
    path.write_text(json.dumps({**json.loads(FILE.to_json()), **change}))
    with pytest.raises(kind) as caught:
        load_machine_file(path)
    text = str(caught.value)
    assert text.startswith(f"{path} {said}")
    assert text.endswith("Run `megatrain probe --out FILE` on that machine to write it anew.")
    assert "\n" not in text


@pytest.mark.parametrize("rate", ["0.0", "-1.0", "NaN", "Infinity", "1e308", "1e-308", '"fast"'])
def test_a_rate_that_nothing_measures_is_refused(tmp_path: Path, rate: str) -> None:
    path = tmp_path / "m.json"
    text = FILE.to_json().replace("500000000000000.0", rate)
    assert rate in text
    path.write_text(text)
    with pytest.raises(CorruptError):
        load_machine_file(path)


def test_a_count_that_no_machine_has_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "m.json"
    values = json.loads(FILE.to_json())
    values["machine"]["host_bytes"] = 10**400
    path.write_text(json.dumps(values))
    with pytest.raises(CorruptError, match=r"is damaged at machine\.host_bytes"):
        load_machine_file(path)


@pytest.mark.parametrize(
    ("key", "value"),
    [("num_cores", 0), ("device", "tpu"), ("device", ""), ("device", "cuda:x")],
)
def test_a_machine_that_cannot_be_is_refused(tmp_path: Path, key: str, value: object) -> None:
    path = tmp_path / "m.json"
    values = json.loads(FILE.to_json())
    values["machine"][key] = value
    path.write_text(json.dumps(values))
    with pytest.raises(CorruptError, match=rf"is damaged at machine\.{key}"):
        load_machine_file(path)


@pytest.mark.parametrize("part", ["link", "copy", "copy_to_pinned", "read", "adam"])
def test_points_out_of_order_are_refused(tmp_path: Path, part: str) -> None:
    """What lies between two of them is looked up by their order."""
    path = tmp_path / "m.json"
    values = json.loads(FILE.to_json())
    values["machine"]["rates"][part].reverse()
    path.write_text(json.dumps(values))
    with pytest.raises(CorruptError, match=rf"is damaged at machine\.rates\.{part}: .*growing"):
        load_machine_file(path)


def test_a_misspelled_key_is_refused_with_its_place(tmp_path: Path) -> None:
    """What it stood for would be planned without, and without a word."""
    path = tmp_path / "m.json"
    for name, wrong, place in (
        ("beside", "besides", "machine.rates.besides"),
        ("compiled_issue", "compiled_issues", "machine.rates.compute.compiled_issues"),
    ):
        path.write_text(FILE.to_json().replace(f'"{name}"', f'"{wrong}"'))
        with pytest.raises(CorruptError, match=rf"is damaged at {place}: no key has that name"):
            load_machine_file(path)
    values = json.loads(FILE.to_json())
    values["machine"]["rates"]["adam"][1]["thread"] = 3
    path.write_text(json.dumps(values))
    with pytest.raises(CorruptError, match=r"at machine\.rates\.adam\.1\.thread: no key"):
        load_machine_file(path)


@given(st.binary(max_size=60))
def test_any_bytes_are_read_or_refused_by_an_error_of_ours(
    tmp_path_factory: pytest.TempPathFactory, content: bytes
) -> None:
    path = tmp_path_factory.mktemp("any") / "m.json"
    path.write_bytes(content)
    with pytest.raises(CorruptError):
        load_machine_file(path)


def test_a_file_that_was_named_must_be_there(tmp_path: Path) -> None:
    for path in (tmp_path / "none.json", tmp_path):
        with pytest.raises(ConfigError, match="cannot be read"):
            load_machine_file(path)


def test_another_machine_does_not_fit_and_a_run_on_the_cpu_needs_no_gpu() -> None:
    assert HERE.fits(HERE)
    on_cpu = replace(HERE, gpu="", driver="")
    assert HERE.fits(on_cpu)
    assert not on_cpu.fits(HERE)  # measured without the GPU that is used now
    for other in (
        replace(HERE, cpu="EPYC"),
        replace(HERE, cores=8),
        replace(HERE, ram_gib=64),
        replace(HERE, gpu="NVIDIA A100"),
        replace(HERE, driver="1"),
    ):
        assert not HERE.fits(other)


def test_a_machine_from_a_file_serves_the_device_that_is_asked_for() -> None:
    machine = replace(GPU, rates=RATES)
    assert machine.on("auto") == machine.on("cuda") == machine.on("cuda:1") == machine
    on_cpu = machine.on("cpu")
    assert (on_cpu.device, on_cpu.device_bytes, on_cpu.rates) == ("cpu", 0, RATES)
    assert CPU.on("auto") == CPU
    with pytest.raises(DeviceError, match="measured without a GPU"):
        CPU.on("cuda")
