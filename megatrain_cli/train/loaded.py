"""What is said of a checkpoint once all of it is there."""

from megatrain_cli.checkpoint.load import LoadReport
from megatrain_cli.units import show_bytes, show_number


def notes_on_loaded(report: LoadReport, *, force: bool) -> list[str]:
    """How fast it came, and what `--force` was needed for.

    Args:
        report: Of the load.
        force: Whether weights that are not finite were taken.
    """
    rate = show_bytes(round(report.num_bytes / max(report.seconds, 1e-9)))
    size = show_bytes(report.num_bytes)
    notes = [f"loaded {size} in {report.seconds:.1f} s, {rate}/s; every byte was verified"]
    if force and report.not_finite:
        notes.append(
            "--force: values that are not finite are in weights of "
            f"{show_number(len(report.not_finite), 'layer')}, as in {report.not_finite[0]}"
        )
    elif force:
        notes.append("--force: has no effect: all weights are finite")
    return notes
