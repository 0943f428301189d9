"""What a plan knows of the rows beside the longest one."""

from dataclasses import dataclass


@dataclass(frozen=True)
class RowFacts:
    """Of the rows that are left to a process: all of a run, or those that a resumed one takes.

    Attributes:
        step_tokens: Tokens of the step that has most, or an upper bound; nothing is filled up.
        mean_tokens: Of a step, on average; what is above holds here too.
        mapped_bytes: Of the arrays that hold the rows, those of an evaluation included. They are
            pages of files: they count as this process's memory, and leave it when RAM is short.
        eval_rows: Rows of one evaluation; 0 where there is none.
        steps: Optimizer steps of this process.
        lengths: Different lengths of rows in them, at most.
        spans: Different lengths of what attention sees at once, at most: documents of packed rows.
        targets: Different numbers of targets in a row, at most.
        eval_lengths, eval_targets: Lengths and numbers of rows that are evaluated, at most, which
            no row that is trained on has.
    """

    step_tokens: int
    mean_tokens: float
    mapped_bytes: int
    eval_rows: int
    steps: int
    lengths: int = 0
    spans: int = 0
    targets: int = 0
    eval_lengths: int = 0
    eval_targets: int = 0
