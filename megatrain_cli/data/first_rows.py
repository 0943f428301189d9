"""A look at the first rows of chat data: is anything learnt of them, and not everything?

The loss curve of a run that learns from prompts, or from nothing, looks as good as any other. The
rule, for chats without `data.train_on_prompt`:

- if in each of the first rows every token is learnt, the run is refused: no prompt was found in
  any of them;
- if none of the first rows has anything to learn, the run is refused, whatever comes behind them.
  Rows that `data.overlong: drop` leaves out do not count: that was asked for.

Rows of tokens bring their own labels, so for them the first case is only said.
"""

from dataclasses import dataclass, field

from megatrain_cli.data.formats import Row
from megatrain_cli.data.template import IGNORED, Encoded, SkipReason
from megatrain_cli.errors import DataError

FIRST_ROWS = 100
"""How many rows are looked at; all, where there are fewer."""


@dataclass
class FirstRows:
    """Give it each row as it is read; it stops a run whose first rows are not as they should be.

    Attributes:
        train_on_prompt: Whether everything is meant to be learnt.
        notes: What a person should know.
    """

    train_on_prompt: bool
    notes: list[str] = field(default_factory=list)
    _seen: int = 0
    _whole: int = 0
    _nothing: int = 0
    _tokens: int = 0
    _where: str = ""
    _done: bool = False

    def add(self, row: Row, encoded: Encoded) -> None:
        """Take the next row.

        Raises:
            DataError: It is the last of the first rows, and they are refused.
        """
        if self._done or row.text is not None or self.train_on_prompt:
            return
        parts = [encoded, *encoded.rest]
        if all(part.skipped is SkipReason.TOO_LONG for part in parts):
            return
        self._seen += 1
        self._where = self._where or row.where
        used = [part for part in parts if part.skipped is None]
        self._nothing += not used
        self._tokens += row.input_ids is not None
        # Nothing predicts the first token, so it may be learnt or not; but a prompt is a prompt.
        first = 0 if row.format == "prompt_completion" else 1
        self._whole += bool(used) and all(IGNORED not in part.labels[first:] for part in used)
        if self._seen == FIRST_ROWS:
            self.finish()

    def finish(self) -> None:
        """There are no more rows.

        Raises:
            DataError: They are refused.
        """
        if self._done or not self._seen:
            return
        self._done = True
        each, none = "the one row that counts", "the one row that counts has nothing to learn"
        if self._seen > 1:
            each = f"each of the first {self._seen} rows"
            none = f"none of the first {self._seen} rows has anything to learn"
        if self._nothing == self._seen:
            raise DataError(
                f"{self._where}: {none}. Look at data.format, at the roles in the file and at "
                "data.max_length."
            )
        if self._whole == self._seen:
            fault = f"in {each} every token is learnt"
            if self._tokens < self._seen:
                raise DataError(
                    f"{self._where}: {fault}, so no prompt was found. If that is meant, set "
                    "`data.train_on_prompt: true`."
                )
            self.notes.append(
                f"{self._where}: {fault}: they have no labels, or labels that leave nothing out"
            )


@dataclass
class FirstRowsOfSources:
    """The same for a run of several sources, each of which is looked at by itself."""

    train_on_prompt: bool
    _looks: dict[int, FirstRows] = field(default_factory=dict)

    def add(self, row: Row, encoded: Encoded) -> None:
        """Take the next row.

        Raises:
            DataError: The first rows of its source are refused.
        """
        look = self._looks.setdefault(row.source, FirstRows(self.train_on_prompt))
        look.add(row, encoded)

    def finish(self) -> list[str]:
        """There are no more rows.

        Returns:
            What a person should know.

        Raises:
            DataError: The first rows of a source are refused.
        """
        for look in self._looks.values():
            look.finish()
        return [note for look in self._looks.values() for note in look.notes]
