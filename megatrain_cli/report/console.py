"""What a person sees of a run while it goes on, on stderr.

In a terminal one progress bar stays at the bottom. Anywhere else (a file, a pipe, a job's log)
each step is one plain line, without escapes, carriage returns or wrapping, so that `grep` works.
"""

import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import IO, Self, cast

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    ProgressColumn,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)

from megatrain_cli.report.listener import Listener
from megatrain_cli.report.plan_view import PlanView, say, show_plan
from megatrain_cli.report.preview_view import Spans, show_first
from megatrain_cli.report.records import EvalRecord, StepRecord
from megatrain_cli.units import show_bytes, show_count, show_number


class CursorStays(Console):
    """Hides no cursor: however a process is ended while a bar is shown, the terminal has it."""

    def show_cursor(self, show: bool = True) -> bool:
        """Change nothing."""
        del show
        return False


def talk() -> Console:
    """The console for all that is said to a person: stderr."""
    file = cast("IO[str]", Listener())  # as much of a stream as is needed here
    return CursorStays(file=file, stderr=True, highlight=False, markup=False, emoji=False)


def data() -> Console:
    """The console for what was asked for: stdout."""
    return Console(highlight=False, markup=False, emoji=False)


# Seconds between two lines about the data, where no bar can be drawn.
_QUIET_SECONDS = 10.0
# Characters.
_MOST_OF_A_ROW = 600
# Columns of a terminal: below, the numbers would be cut.
_WIDTH_WITH_BAR, _WIDTH_WITH_TIME = 100, 80


class RunConsole:
    """Tells a person how a run goes. Close it (or leave its `with`) to give the terminal back."""

    def __init__(
        self, console: Console | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Talk to `console`; without one, to stderr."""
        self._console = console or talk()
        self._clock = clock
        self._preparing: Progress | None = None
        self._last_line: float | None = None
        self._progress: Progress | None = None
        self._task: TaskID | None = None

    def note(self, text: str) -> None:
        """Say one thing that the user should know."""
        say(text, self._console)

    def first_row(self, spans: Spans) -> None:
        """Show one row, with what is trained on set off."""
        show_first(spans, self._console, _MOST_OF_A_ROW)

    def preparing(self, num_rows: int, share: float) -> None:
        """Show how far the data has been tokenised.

        Args:
            num_rows: Rows so far.
            share: Of all bytes; 1 ends it.
        """
        if not self._can_draw:
            now = self._clock()
            self._last_line = now if self._last_line is None else self._last_line
            if now - self._last_line >= _QUIET_SECONDS:
                self._last_line = now
                say(
                    f"prepared {show_number(num_rows, 'row')}, {share:.0%} of the data",
                    self._console,
                )
            return
        if self._preparing is None:
            self._preparing = Progress(
                TextColumn("prepared {task.fields[rows]} rows", markup=False),
                BarColumn(),
                TextColumn("{task.percentage:.0f} %", markup=False),
                TimeRemainingColumn(),
                console=self._console,
                refresh_per_second=4,
                transient=True,
            )
            self._preparing.add_task("", total=1.0, rows=num_rows)
            self._preparing.start()
        self._preparing.update(self._preparing.task_ids[0], completed=share, rows=num_rows)
        if share >= 1:
            self._preparing.stop()
            self._preparing = None

    @property
    def _can_draw(self) -> bool:
        """Where the cursor cannot move, rich draws nothing until all has ended."""
        return self._console.is_terminal and not self._console.is_dumb_terminal

    def plan(self, plan: PlanView) -> None:
        """Show the plan of the run."""
        show_plan(plan, self._console)

    def step(self, record: StepRecord, total_steps: int) -> None:
        """Show a step that has ended."""
        numbers = show_step(record)
        if not self._can_draw:
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

    def evaluated(self, record: EvalRecord) -> None:
        """Show an evaluation that has ended."""
        say(show_evaluation(record), self._console)

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
        if self._preparing is not None:
            self._preparing.stop()
            self._preparing = None
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
        f"  grad_norm {record.grad_norm:.4g}  targets/s {record.tokens_per_second:.0f}"
    )


def show_evaluation(record: EvalRecord) -> str:
    """An evaluation on one line."""
    return (
        f"eval step {record.step}  loss {record.eval_loss:.4f}  ppl {record.eval_perplexity:.4g}"
        f"  ({show_number(record.eval_tokens, 'token', show_count)}, {record.eval_seconds:.1f} s)"
    )


def _progress(console: Console) -> Progress:
    """A bar as far as there is room: the numbers matter most, then the time, then the bar."""
    step = "step {task.completed:.0f}/{task.total:.0f}  {task.fields[numbers]}"
    columns: list[ProgressColumn] = [TextColumn(step, markup=False)]
    if console.width >= _WIDTH_WITH_BAR:
        columns.append(BarColumn())
    if console.width >= _WIDTH_WITH_TIME:
        columns.append(TimeRemainingColumn())
    return Progress(*columns, console=console, refresh_per_second=4)
