"""The device that was asked for, or a refusal; rates that were stored, if they hold here."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megatrain_cli.errors import DeviceError
from megatrain_cli.plan.machine_file import VERSION, Fingerprint, default_path, save_machine_file
from megatrain_cli.probe.facts import fingerprint
from megatrain_cli.probe.machine import probe_machine, with_rates
from tests.plan.small import CPU, RATES, make_spec, measured_file, plan_for


def test_a_machine_without_a_gpu_is_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for asked in ("auto", "cpu"):
        found = probe_machine(asked)
        assert (found.device, found.has_cuda, found.device_bytes) == ("cpu", False, 0)
        assert found.host_bytes > 0
    for asked in ("cuda", "cuda:0"):
        with pytest.raises(DeviceError, match=rf"pipeline.device is {asked} and .* 0 CUDA"):
            probe_machine(asked)
    with pytest.raises(DeviceError, match=r"--device is cuda:3 and .* 0 CUDA"):
        probe_machine("cuda:3", key="--device")


def store(fingerprint: Fingerprint) -> Path:
    path = default_path()
    assert path is not None
    save_machine_file(measured_file(replace(CPU, rates=RATES), fingerprint), path)
    return path


def test_stored_rates_are_taken_up_where_the_machine_is_the_same() -> None:
    assert with_rates(CPU) == CPU
    store(fingerprint(CPU))
    assert with_rates(CPU) == replace(CPU, rates=RATES)


def test_rates_of_another_machine_are_left_alone_and_said_so() -> None:
    path = store(replace(fingerprint(CPU), cpu="Other CPU"))
    found = with_rates(CPU)
    assert found.rates is None
    assert found.rates_note.startswith(f"not known: {path} was measured on another machine (Other")
    assert found.rates_note.endswith("ignored, run `megatrain probe`")
    assert replace(found, rates_note=CPU.rates_note) == CPU


def test_rates_of_other_cores_than_are_usable_now_hold_with_a_doubt() -> None:
    store(fingerprint(CPU))
    fewer = replace(CPU, num_cores=1)
    found = with_rates(fewer)
    assert found.rates == RATES
    assert "measured with 8 usable cores and 1 are usable now" in found.rates_doubt
    assert replace(found, rates_doubt="") == replace(fewer, rates=RATES)
    assert found.rates_doubt in plan_for(make_spec(), found).warnings


def test_a_file_of_another_version_stops_nothing() -> None:
    path = store(fingerprint(CPU))
    path.write_text(path.read_text().replace(f'"version": {VERSION}', '"version": 2'))
    found = with_rates(CPU)
    assert found.rates is None
    assert f"{path} has version 2, and this program reads {VERSION}" in found.rates_note
    assert "\n" not in found.rates_note


def test_a_folder_in_the_files_place_stops_nothing() -> None:
    path = store(fingerprint(CPU))
    path.unlink()
    path.mkdir()
    assert with_rates(CPU).rates_note == f"not known: {path}: cannot be read: Is a directory"


def test_a_damaged_file_stops_nothing() -> None:
    path = store(fingerprint(CPU))
    path.write_bytes(path.read_bytes()[:-40])
    found = with_rates(CPU)
    assert found.rates is None
    assert f"{path} is not JSON" in found.rates_note
    assert "megatrain probe" in found.rates_note
