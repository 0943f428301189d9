"""The table of a machine with a GPU; that of a CPU is in `tests/cli/test_probe.py`."""

from dataclasses import replace

from rich.console import Console

from megatrain_cli.plan.machine_file import Fingerprint
from megatrain_cli.plan.rates import MachineRates
from megatrain_cli.report.machine_view import show_machine
from tests.plan.small import GPU, RATES, measured_file


def rows(rates: MachineRates) -> dict[str, str]:
    fingerprint = Fingerprint("CPU", 16, 128, "NVIDIA H200", "580")
    console = Console(width=200)
    with console.capture() as printed:
        show_machine(measured_file(replace(GPU, rates=rates), fingerprint), console)
    lines = [line.partition("  ") for line in printed.get().splitlines()]
    return {label.strip(): text.strip() for label, _, text in lines}


def test_what_was_measured_of_a_gpu_is_told_in_its_units() -> None:
    told = rows(RATES)
    assert told["decoder layer"] == "500 TFLOPS, compiled 600 TFLOPS"
    assert told["issuing a layer, eager"] == "1.00 ms forward, 2.00 ms backward"
    assert told["issuing a layer, compiled"] == "0.80 ms forward, 1.60 ms backward"
    said = "copies 11 GB/s, issuing takes 2.00 x as long forward, 2.50 x backward"
    assert told["beside the optimizer"] == said


def test_what_was_not_measured_has_no_row_or_says_so() -> None:
    compute = replace(RATES.compute, compiled_layer=None, compiled_issue=None)  # type: ignore[type-var]  # there is one
    told = rows(replace(RATES, compute=compute, beside=None))
    assert told["decoder layer"] == "500 TFLOPS, compiled not measured"
    assert "issuing a layer, compiled" not in told
    assert "beside the optimizer" not in told
