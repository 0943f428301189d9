"""Saving what can be saved when a run has failed: the state is in host RAM, whatever the GPU does.

No call of this module asks the device for anything.
"""

import faulthandler
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass

from megatrain_cli.checkpoint.save import Saver
from megatrain_cli.errors import HangError, MegatrainError, MixedStateError, NumericsError
from megatrain_cli.report.console import RunConsole
from megatrain_cli.store.clock import TileClock
from megatrain_cli.train import watchdog
from megatrain_cli.train.saving import Saving
from megatrain_cli.train.step import StepUpdate


@dataclass
class Rescue:
    """The last whole state of a run.

    Attributes:
        clock: Of the store.
        saving: Writes it.
        landed: Gives the last step whose gradients have all landed; None before the first.
    """

    clock: TileClock
    saving: Saving
    landed: Callable[[], StepUpdate | None]

    def save(self) -> str:
        """Save the last complete step, or the one whose update was under way; say what was done.

        No update may be under way any more. Whatever cannot be saved is said, and not raised: the
        failure that led here is what matters.
        """
        if not self.clock.loaded:
            return "Nothing had changed since the checkpoint that the run resumed from."
        steps, left = self.clock.steps, self._left()
        step = max(steps)
        if left is not None:
            self.saving.saver.abandon()  # it may wait for an update that will never come
        self.clock.settle()
        try:
            if not self.saving.finish(step, left):
                left = None  # no layer has had it, and the step before it is saved
        except MixedStateError as error:
            return f"The state in memory was not saved: {error}"
        except NumericsError as error:
            if step == 0:  # to go on from a checkpoint with another rate would be no advice
                return "Nothing was learnt before it, and nothing was saved."
            return f"The state after step {step} could not be saved: {error}"
        except MegatrainError as error:
            return f"The state after step {step} could not be saved: {error}"
        if left is not None:
            return f"Step {left.step} was saved in the middle of its update; `resume` finishes it."
        return f"The state after step {step} is saved."

    def _left(self) -> StepUpdate | None:
        """The step whose update some layers still need, if all that it needs is in the tiles."""
        steps, landed = set(self.clock.steps), self.landed()
        if landed is None or self.clock.torn or landed.step - 1 not in steps:
            return None
        return landed if steps <= {landed.step - 1, landed.step} else None


def leave_hung(clock: TileClock, rescue: Rescue | None, console: RunConsole) -> None:
    """End a process whose main thread will never come back: show all stacks, save what can be.

    Runs on the watchdog's thread and does not return. A save that hangs too is given up.
    """
    faulthandler.dump_traceback(all_threads=True)
    seconds = watchdog.HANG_SECONDS
    error = HangError(f"Nothing has ended for {seconds:.0f} s: a copy, a thread or a disk hangs.")
    if rescue is None:
        console.note(str(error))
        os._exit(error.exit_code)
    saver = rescue.saving.saver
    console.note(f"{error} {_under_way(saver)}Saving what can be saved.")
    clock.refuse_updates(error)
    said: list[str] = []
    thread = threading.Thread(target=lambda: said.append(rescue.save()), daemon=True)
    thread.start()
    written = -1
    while thread.is_alive() and saver.num_chunks != written:  # a large one may take long
        written = saver.num_chunks
        thread.join(seconds)
    console.note(" ".join(said) or f"The disk does not answer: given up after {seconds:.0f} s.")
    os._exit(error.exit_code)


def _under_way(saver: Saver) -> str:
    step = saver.saving_step
    return "" if step is None else f"The checkpoint of step {step} was being written. "
