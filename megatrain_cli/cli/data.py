"""`megatrain data preview`: what a run would learn, row by row, before it is started."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from megatrain_cli.cli.options import TAKES_OVERRIDES, AsJson, ConfigFile, Overrides, read_config

if TYPE_CHECKING:
    from megatrain_cli.config.schema import TrainConfig

app = typer.Typer(
    help="Look at the data of a run.",
    rich_markup_mode=None,
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.command("preview", context_settings=TAKES_OVERRIDES)
def preview(
    config: ConfigFile,
    overrides: Overrides = None,
    count: Annotated[
        int, typer.Option("-n", "--rows", min=0, metavar="N", help="Rows to show.")
    ] = 3,
    as_json: AsJson = False,
) -> None:
    """Show rows, what is learnt of them, and what became of all.

    All data is read and tokenised, as `train` would, and kept for it; no weights are read. Rows
    come in the order of the files. With --json a line is one row, and the last line is the counts.
    """
    loaded = read_config(config, overrides)
    from megatrain_cli.data.arrange import arrange, hold_out_rows
    from megatrain_cli.data.load import load_data
    from megatrain_cli.data.shown import count_lines, count_rows, show_rows
    from megatrain_cli.report.console import RunConsole, data
    from megatrain_cli.report.plan_view import say
    from megatrain_cli.report.preview_view import legend, show_row
    from megatrain_cli.train.eval_rows import load_evaluation

    with RunConsole() as talk:
        found = load_data(loaded.config, talk.note, talk.preparing)
        evaluated: tuple[str, ...] = ()
        if loaded.config.data.eval is not None:
            _, evaluated, _ = load_evaluation(
                loaded.config.data, found.tokenizer, talk.preparing, talk.note, found.files
            )
    documents, _ = hold_out_rows(loaded.config, found)
    packs, _ = arrange(loaded.config, found, documents, _row_length(loaded.config))
    rows = show_rows(found, documents, packs, count)
    if as_json:
        for row in rows:
            typer.echo(json.dumps(row.to_json()))
        counts = count_rows(found, documents, packs)
        typer.echo(json.dumps(counts | {"evaluation": list(evaluated)}))
        return
    console = data()
    if count:
        console.print(legend(console))
    for number, row in enumerate(rows, start=1):
        say("", console)
        show_row(row, number, console)
    say("", console)
    for line in (*count_lines(found, documents, packs), *evaluated):
        say(line, console)


def _row_length(config: "TrainConfig") -> int:
    """Tokens of a row at most, as the plan decides it; asked of the model for packs alone."""
    longest = config.data.max_length
    if not config.data.packing:
        return longest
    from megatrain_cli.model.discover import read_config as read_model

    positions = getattr(read_model(Path(config.model.path)), "max_position_embeddings", None)
    return longest if positions is None else min(longest, positions)
