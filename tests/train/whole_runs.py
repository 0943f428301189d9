"""Whole runs in this process: trained, stopped or killed where a test wants, and resumed."""

import io
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from rich.console import Console

from megatrain_cli.config.load import load_config
from megatrain_cli.report.console import RunConsole
from megatrain_cli.report.records import StepRecord
from megatrain_cli.train.layout import StepRows
from megatrain_cli.train.prefetch import Prefetch
from megatrain_cli.train.resume import ResumeRequest
from megatrain_cli.train.rows import TrainingRows
from megatrain_cli.train.session import resume, train
from tests.train.workspace import make_workspace, one_thread

Actions = Mapping[int, Callable[[], object]]
"""What happens once a step's line is in the journal, before its checkpoint begins."""


class Died(BaseException):
    """The process is gone, as far as the run can tell: nothing is saved any more."""


def die() -> None:
    raise Died


def stop() -> None:
    """The step is finished and saved."""
    signal.raise_signal(signal.SIGTERM)


class Heard(RunConsole):
    """Keeps what is said, and acts after steps."""

    def __init__(self, after: Actions) -> None:
        self._file, self._after = io.StringIO(), after
        super().__init__(Console(file=self._file, width=10_000))

    def step(self, record: StepRecord, total_steps: int) -> None:
        super().step(record, total_steps)
        self._after.get(record.step, lambda: None)()

    @property
    def said(self) -> str:
        return self._file.getvalue()


SPLIT = ("model.dtype=bfloat16", "optimizer.master=fp32_split")


@dataclass
class Runs:
    """Starts runs of one workspace.

    Attributes:
        config: Of all of them.
        overrides: Of all new ones.
        taken: Which rows each step took, in the order in which this process began the steps.
    """

    config: Path
    overrides: tuple[str, ...] = ()
    taken: list[tuple[int, tuple[int, ...]]] = field(default_factory=list)

    def train(
        self,
        name: str,
        *overrides: str,
        after: Actions | None = None,
        ends: type[BaseException] | None = None,
    ) -> Path:
        """A run from its first step, which must end as `ends` says; its folder."""
        words = (*self.overrides, *overrides, f"train.output_dir={name}")
        console = Heard(after or {})
        with self._watched(ends):
            train(load_config(self.config, words), console)
        return self.config.parent / name

    def resume(
        self,
        path: Path,
        *overrides: str,
        after: Actions | None = None,
        ends: type[BaseException] | None = None,
        **request: object,
    ) -> str:
        """Go on; the run must end as `ends` says. Returns what was said."""
        asked = ResumeRequest(path, overrides, **request)  # type: ignore[arg-type]  # by name
        console = Heard(after or {})
        with self._watched(ends):
            resume(asked, console)
        return console.said

    @contextmanager
    def _watched(self, ends: type[BaseException] | None) -> Iterator[None]:
        begin = Prefetch.of_step

        def note(prefetch: Prefetch, index: int) -> StepRows:
            # Not when rows are made: those of the next step are, whether it comes or not.
            rows = prefetch._rows
            assert isinstance(rows, TrainingRows)
            self.taken.append((index + 1, tuple(rows.ids_of_step(index))))
            return begin(prefetch, index)

        with pytest.MonkeyPatch.context() as patch, one_thread():
            patch.setattr(Prefetch, "of_step", note)
            with pytest.raises(ends) if ends else nullcontext():
                yield


def with_dropout(folder: Path, steps: int, layers: int = 2, **optimizer: object) -> Runs:
    """Runs of a tied GPT-2 with dropout, 2 of 12 shuffled rows a step, and a cosine to its end."""
    config = make_workspace(
        folder,
        "gpt2",
        tied=True,
        model={"layers": layers, "attn_pdrop": 0.1, "embd_pdrop": 0.1, "resid_pdrop": 0.1},
        data={"shuffle": True},
        train={"max_steps": steps, "micro_batch_size": 1, "gradient_accumulation_steps": 2},
        optimizer=optimizer,
        schedule={"type": "cosine", "warmup_steps": 2},
    )
    return Runs(config, SPLIT)
