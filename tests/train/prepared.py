"""A process that has imported everything and forks runs: the command line without its seconds.

Forking is safe here: the process that forks has one thread, and refuses to fork with more.
"""

import gc
import json
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path

from tests.train.command import ROOT
from tests.train.workspace import make_workspace

_ENDED = "ended with "
_PATIENCE = 600  # seconds; no run that is right is silent for so long


class Child:
    """One `megatrain ARGS` in a process of its own.

    Attributes:
        lines: All that it said so far, on stderr and stdout.
    """

    def __init__(self, output: int) -> None:
        self.lines: list[str] = []
        self._code: int | None = None
        self._said: queue.SimpleQueue[str] = queue.SimpleQueue()
        threading.Thread(target=self._listen, args=(output,), daemon=True).start()
        self.pid = int(self._said.get(timeout=_PATIENCE))

    def wait_for(self, text: str, times: int = 1) -> str:
        """Read on until a text was said so many times; the line of the last."""
        line = ""
        for _ in range(times):
            while text not in (line := self._next(_PATIENCE)):
                assert self._code is None, "\n".join(["it ended:", *self.lines])
        return line

    def send(self, *numbers: int) -> None:
        for number in numbers:
            os.kill(self.pid, number)

    def kill_after(self, text: str, count: int, seconds: float) -> bool:
        """Kill it some time after a text was said so many times; False if it ended before.

        No time has passed where the text is said once more.
        """
        try:
            self.wait_for(text, count)
            until = time.monotonic() + seconds
            while (left := until - time.monotonic()) > 0 and self._code is None:
                if text in self._next(left):
                    break
        except queue.Empty:
            pass
        if self._code is None:
            self.send(signal.SIGKILL)
        return self.end() == -signal.SIGKILL

    def end(self) -> int:
        """Wait for the end; what `subprocess.Popen.returncode` would be."""
        while self._code is None:
            self._next(_PATIENCE)
        return self._code

    @property
    def text(self) -> str:
        return "\n".join(self.lines)

    def _next(self, seconds: float) -> str:
        line = self._said.get(timeout=seconds)
        if line.startswith(_ENDED):
            self._code = int(line.removeprefix(_ENDED))
        else:
            self.lines.append(line)
        return line

    def _listen(self, output: int) -> None:
        with open(output, encoding="utf-8", errors="replace") as stream:
            for line in stream:
                self._said.put(line.rstrip("\n"))
        self._said.put(f"{_ENDED}255")  # where nobody lived to say it


class Prepared:
    """Starts runs, any number at a time."""

    def __init__(self, commands: socket.socket) -> None:
        self._commands = commands

    def start(self, *args: str | Path, broken: Sequence[str] = ()) -> Child:
        """Start `megatrain ARGS`.

        Args:
            args: Of the command line.
            broken: `module:function` of what is called first, to break the program.
        """
        reading, writing = os.pipe()
        asked = json.dumps([[*map(str, args)], [*broken]]).encode()
        socket.send_fds(self._commands, [asked], [writing])
        os.close(writing)
        return Child(reading)

    def run(self, *args: str | Path, broken: Sequence[str] = ()) -> Child:
        """Run it to its end."""
        child = self.start(*args, broken=broken)
        child.end()
        return child


@contextmanager
def prepared(folder: Path) -> Iterator[Prepared]:
    """The process, until the block ends; runs that have not ended go on.

    Args:
        folder: Empty, for what it has to read.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    code = "import sys; from tests.train.prepared import serve; serve(*sys.argv[1:])"
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(theirs.fileno()), str(make_workspace(folder))],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        pass_fds=[theirs.fileno()],
    )
    theirs.close()
    with process, ours:
        yield Prepared(ours)
        ours.close()  # ends the process, which is waited for next


def serve(number: str, config: str) -> None:
    """Fork what is asked for, until nobody can ask any more."""
    _load_all(Path(config))
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the waiting processes
    with socket.socket(fileno=int(number)) as commands:
        while True:
            asked, fds, _, _ = socket.recv_fds(commands, 1 << 16, 1)
            if not asked:
                return
            assert len([*Path("/proc/self/task").iterdir()]) == 1, "a fork would lose threads"
            args, broken = json.loads(asked)
            if os.fork() == 0:
                break
            os.close(fds[0])
    # The waiting process: its own child is the run.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    pid = os.fork()
    if pid == 0:
        _become(args, broken, fds[0])
        return
    status = os.waitpid(pid, 0)[1]
    os.write(fds[0], f"\n{_ENDED}{os.waitstatus_to_exitcode(status)}\n".encode())


def _load_all(config: Path) -> None:
    """Have all loaded that is loaded on first use, as far as that starts no thread."""
    import numba.experimental
    import numba.typed  # noqa: F401

    import megatrain_cli.cli.app
    import megatrain_cli.train.dry_run
    import megatrain_cli.train.session  # noqa: F401
    from megatrain_cli.config.load import load_config
    from megatrain_cli.optim.worker import _compile_for
    from megatrain_cli.train.assemble import prepare
    from megatrain_cli.train.rows import load_rows

    loaded = load_config(config)
    decisions = prepare(loaded)[1].decisions
    load_rows(loaded.config, decisions)
    _compile_for(decisions.tile_format)  # without the threads of a `TileUpdater`
    gc.freeze()  # a collection in a child would copy all of this


def _become(args: list[str], broken: list[str], output: int) -> None:
    # Tests that run in a shell's background ignore interrupts, those of `nohup` hangups, and their
    # children too.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    os.write(output, f"{os.getpid()}\n".encode())
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    for place in broken:
        module, _, function = place.partition(":")
        getattr(import_module(module), function)()
    sys.argv = ["megatrain", *args]
    from megatrain_cli.__main__ import main

    try:
        main()
    except SystemExit as error:
        # Taking down an interpreter this large costs seconds; `test_run.py` has ends that do.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(int(error.code or 0))
