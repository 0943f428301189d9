"""Signals before a run has anything to save and behind it, and streams that a caller closed."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from megatrain_cli import __version__

ROOT = Path(__file__).parents[2]

# A shell that runs the tests in the background has them ignore interrupts, and children too.
HEARS = """\
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)
signal.signal(signal.SIGQUIT, signal.SIG_DFL)
"""


def run(code: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a Python of its own."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    return done.returncode, done.stdout, done.stderr


def test_an_interrupt_leaves_with_130_and_no_traceback(tmp_path: Path) -> None:
    """It comes while the config is read."""
    config = tmp_path / "config.yaml"
    config.write_text("model: {path: model}\n")
    code = f"""{HEARS}
import os, sys
from megatrain_cli.__main__ import main
def interrupt(event, args):
    if event == "open" and str(args[0]).endswith("config.yaml"):
        os.kill(os.getpid(), signal.SIGINT)
sys.addaudithook(interrupt)
sys.argv = ["megatrain", "plan", {str(config)!r}]
main()
"""
    assert run(code) == (130, "", "Interrupted.\n")


def test_an_interrupt_ends_an_import_that_would_swallow_it() -> None:
    """As transformers' lazy modules do: they take any exception for a missing package."""
    code = f"""{HEARS}
import os, sys
from megatrain_cli.__main__ import main
class Swallows:
    def find_spec(self, name, path=None, target=None):
        try:
            os.kill(os.getpid(), signal.SIGINT)
        except BaseException:
            pass
sys.meta_path.insert(0, Swallows())
sys.argv = ["megatrain", "plan", "config.yaml"]
main()
"""
    assert run(code) == (130, "", "Interrupted.\n")


@pytest.mark.parametrize(
    ("number", "end"),
    [
        (signal.SIGINT, (130, "", "Interrupted.\n")),
        (signal.SIGTERM, (143, "", "Stopped by SIGTERM.\n")),
        (signal.SIGHUP, (129, "", "Stopped by SIGHUP.\n")),
        (signal.SIGQUIT, (131, "", "Stopped by SIGQUIT.\n")),
        (signal.SIGXCPU, (152, "", "Stopped by SIGXCPU.\n")),
        (signal.SIGALRM, (142, "", "Stopped by SIGALRM.\n")),
        (signal.SIGUSR1, (0, f"megatrain {__version__}\n", "")),  # waits for a run to save
        (signal.SIGUSR2, (0, f"megatrain {__version__}\n", "")),
    ],
)
def test_a_signal_is_seen_to_before_anything_slow_is_imported(
    number: signal.Signals, end: tuple[int, str, str]
) -> None:
    code = f"""{HEARS}
import os, runpy, sys
class Sends:
    def find_spec(self, name, path=None, target=None):
        if name.startswith(("typer", "megatrain_cli.cli.app")):
            os.kill(os.getpid(), {number.value})
sys.meta_path.insert(0, Sends())
sys.argv = ["megatrain", "--version"]
runpy.run_module("megatrain_cli", run_name="__main__")
"""
    assert run(code) == end


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGXCPU])
def test_a_signal_that_was_ignored_as_it_started_stays_so(number: signal.Signals) -> None:
    code = f"""
import os, signal
from megatrain_cli.cli.interrupt import settle_signals
signal.signal({number.value}, signal.SIG_IGN)
settle_signals()
os.kill(os.getpid(), {number.value})
print("goes on")
"""
    assert run(code)[:2] == (0, "goes on\n")


def test_a_signal_behind_the_last_line_changes_no_exit_code() -> None:
    """It comes while libraries are taken down, which a large one takes seconds for."""
    code = f"""{HEARS}
import atexit, os, sys
from megatrain_cli.cli.interrupt import settle_signals
settle_signals()
@atexit.register
def late():
    os.kill(os.getpid(), signal.SIGTERM)
    signal.pause()
from megatrain_cli.cli.app import main
sys.argv = ["megatrain", "plan", "none.yaml"]
main()
"""
    left, _, said = run(code)
    assert left == 1
    assert len(said.splitlines()) == 1


def test_a_signal_while_the_interpreter_is_taken_down_changes_no_exit_code() -> None:
    """Python has given signals their defaults back by then."""
    code = f"""{HEARS}
import os, sys
from megatrain_cli.__main__ import main
class Late:
    def __init__(self):
        self.kill, self.pid, self.numbers = os.kill, os.getpid(), (1, 2, 3, 14, 15, 24)
    def __del__(self):
        for number in self.numbers:
            self.kill(self.pid, number)
os.late = Late()
sys.argv = ["megatrain", "--version"]
main()
"""
    assert run(code) == (0, f"megatrain {__version__}\n", "")


@pytest.mark.parametrize("closed", [{0}, {1, 2}, {0, 1, 2}])
def test_no_file_gets_the_number_of_a_stream_that_was_closed(
    closed: set[int], tmp_path: Path
) -> None:
    """A line to stderr would be written into it, were it a checkpoint's."""
    told = tmp_path / "told"
    code = f"""
import os
from megatrain_cli.cli.interrupt import fill_standard_numbers
fill_standard_numbers()
file = open({str(told)!r}, "w")
file.write(f"{{file.fileno() > 2}} {{[os.get_inheritable(n) for n in range(3)]}}")
"""
    close = " ".join(f"{number}>&-" for number in sorted(closed))
    command = ["sh", "-c", f'exec "$0" "$@" {close}', sys.executable, "-c", code]
    subprocess.run(command, env={**os.environ, "PYTHONPATH": str(ROOT)}, check=True)
    assert told.read_text() == "True [True, True, True]"
