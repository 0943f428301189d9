"""What a person sees of a run while it goes on, on stderr.

In a terminal one progress bar stays at the bottom. Anywhere else (a file, a pipe, a job's log)
each step is one plain line, without escapes, carriage returns or wrapping, so that `grep` works.
"""

from pathlib import Path
from types import TracebackType
from typing import IO, Self, cast

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from megatrain_cli.report.listener import Listener
from megatrain_cli.report.plan_view import PlanView, say, show_plan
from megatrain_cli.report.records import StepRecord
from megatrain_cli.units import show_bytes


def talk() -> Console:
    """The console for all that is said to a person: stderr."""
    file = cast("IO[str]", Listener())  # as much of a stream as is needed here
    return Console(file=file, stderr=True, highlight=False, markup=False, emoji=False)


def data() -> Console:
    """The console for what was asked for: stdout."""
    return Console(highlight=False, markup=False, emoji=False)


class RunConsole:
    """Tells a person how a run goes. Close it (or leave its `with`) to give the terminal back."""

    def __init__(self, console: Console | None = None) -> None:
        """Talk to `console`; without one, to stderr."""
        self._console = console or talk()
        self._progress: Progress | None = None
        self._task: TaskID | None = None

    def note(self, text: str) -> None:
        """Say one thing that the user should know."""
        say(text, self._console)

    def plan(self, plan: PlanView) -> None:
        """Show the plan of the run."""
        show_plan(plan, self._console)

    def step(self, record: StepRecord, total_steps: int) -> None:
        """Show a step that has ended."""
        numbers = show_step(record)
        # Where the cursor cannot move, rich draws nothing until the run has ended.
        if not self._console.is_terminal or self._console.is_dumb_terminal:
            say(f"step {record.step}/{total_steps}  {numbers}", self._console)
            return
        if self._progress is None:
            self._progress = _progress(self._console)
            # One step has run: counting from it keeps a resumed run's time to go right.
            self._task = self._progress.add_task(
                "", total=total_steps, completed=record.step - 1, numbers=numbers
            )
            self._progress.start()
        if self._task is not None:
            self._progress.update(self._task, completed=record.step, numbers=numbers)

    def saved(self, path: Path, num_bytes: int, seconds: float, waited: float) -> None:
        """Say that a checkpoint is on disk, whole.

        Args:
            path: Its folder.
            num_bytes: Of all its files.
            seconds: That it took.
            waited: Of these, how long updates were kept waiting.
        """
        rate = show_bytes(round(num_bytes / max(seconds, 1e-9)))
        say(
            f"saved {path} ({show_bytes(num_bytes)} in {seconds:.1f} s, {rate}/s; training waited "
            f"{waited:.1f} s)",
            self._console,
        )

    def close(self) -> None:
        """Stop drawing; a second call does nothing."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = None

    def __enter__(self) -> Self:
        """Return itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close."""
        self.close()


def show_step(record: StepRecord) -> str:
    """The numbers of a step on one line."""
    return (
        f"loss {record.loss:.4f}  lr {record.learning_rate:.3g}"
        f"  grad_norm {record.grad_norm:.4g}  tok/s {record.tokens_per_second:.0f}"
    )


def _progress(console: Console) -> Progress:
    return Progress(
        TextColumn("step {task.completed:.0f}/{task.total:.0f}", markup=False),
        BarColumn(),
        TextColumn("{task.fields[numbers]}", markup=False),
        TimeRemainingColumn(),
        console=console,
        refresh_per_second=4,
    )
