"""`megatrain export`: a checkpoint's weights as a model folder for hubs and servers."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from megatrain_cli.cli.given import open_given
from megatrain_cli.cli.options import count_threads
from megatrain_cli.errors import CorruptError
from megatrain_cli.units import read_bytes, show_number

if TYPE_CHECKING:
    from megatrain_cli.checkpoint.folder import OpenCheckpoint
    from megatrain_cli.report.model_card import CardFacts

_DTYPES = {"bf16": "BF16", "fp16": "F16", "fp32": "F32"}


def parse_size(text: str) -> int:
    """Bytes, see `read_bytes`.

    Raises:
        typer.BadParameter: It is no size, or none that could hold anything.
    """
    size = read_bytes(text)
    if not size:
        raise typer.BadParameter(f"wanted a size such as 5GB or 512MiB, got `{text}`")
    return size


def export(
    checkpoint: Annotated[
        Path,
        # Here and elsewhere: what may not be read is told with the code of disks, not of usage.
        typer.Argument(metavar="RUN_OR_CKPT", help="A run folder or a checkpoint.", readable=False),
    ],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Folder to make.")],
    max_shard_size: Annotated[
        str, typer.Option("--max-shard-size", metavar="SIZE", help="Of one weight file.")
    ] = "5GB",
    dtype: Annotated[
        Literal["bf16", "fp16", "fp32"] | None,
        typer.Option(
            "--dtype",
            help="Of the weights; others than the stored one are made from the FP32 masters.",
            show_default="as stored",
        ),
    ] = None,
) -> None:
    """Write the weights as a model folder of few files.

    A model card comes with them. Every file that is read is verified first; what was written is
    read again and compared. OUT is whole, or not there.
    """
    from megatrain_cli.checkpoint.export import export as write
    from megatrain_cli.checkpoint.fsio import FileSystem
    from megatrain_cli.checkpoint.reread import check_written
    from megatrain_cli.report.console import data
    from megatrain_cli.report.model_card import model_card
    from megatrain_cli.report.plan_view import say
    from megatrain_cli.units import show_bytes

    max_file_bytes = parse_size(max_shard_size)
    fs = FileSystem()
    with open_given(checkpoint, fs) as held:
        done = write(
            held,
            out,
            fs,
            dtype=_DTYPES[dtype] if dtype else None,
            max_file_bytes=max_file_bytes,
            card=lambda kind: model_card(_card_facts(held, out.name, kind)),
            reread=check_written,
            threads=count_threads(),
        )
        count = len(done.files)
        say(
            f"exported {held.folder} to {done.folder}: {show_number(count, 'weight file')}, "
            f"{done.dtype}, {show_bytes(done.num_bytes)}",
            data(),
        )


def _card_facts(checkpoint: "OpenCheckpoint", name: str, dtype: str) -> "CardFacts":
    from megatrain_cli.report.model_card import CardFacts

    manifest = checkpoint.manifest
    return CardFacts(
        name=name,
        architecture=manifest.model.architecture,
        num_parameters=manifest.model.num_parameters,
        dtype=dtype,
        step=manifest.step,
        target_steps=manifest.target_steps,
        num_rows=manifest.data.next_row,
        config=_config(checkpoint),
        losses=_losses(checkpoint),
        checkpoint_id=manifest.id,
    )


def _config(checkpoint: "OpenCheckpoint") -> dict[str, dict[str, object]]:
    """The run's config, as the checkpoint has it; empty if it has none."""
    import yaml

    from megatrain_cli.checkpoint.names import TRAINING

    name = f"{TRAINING}/config.yaml"
    if name not in {file.file for file in checkpoint.manifest.aux}:
        return {}
    try:
        found = yaml.safe_load(checkpoint.read_aux(name))
    except yaml.YAMLError as error:
        raise CorruptError(f"{checkpoint.folder / name}: not YAML: {error}") from error
    sections = found.items() if isinstance(found, dict) else ()
    return {str(key): value for key, value in sections if isinstance(value, dict)}


def _losses(checkpoint: "OpenCheckpoint") -> list[tuple[int, float]]:
    """Losses up to the checkpoint's step from the journal of its run, if it still lies in one."""
    from megatrain_cli.checkpoint.names import CHECKPOINTS
    from megatrain_cli.report.console import talk
    from megatrain_cli.report.journal import read_journal
    from megatrain_cli.report.plan_view import say

    above = checkpoint.folder.absolute().parent
    path = above.parent / "metrics.jsonl"
    if above.name != CHECKPOINTS or not path.is_file():
        return []
    try:
        records = read_journal(path)
    except (CorruptError, OSError) as error:  # the weights are not the worse for it
        say(f"note: the model card has no losses: {error}", talk())
        return []
    return [(one.step, one.loss) for one in records if one.step <= checkpoint.manifest.step]
