"""A run folder with checkpoints that no run made: bytes of NumPy, and a config."""

from collections.abc import Sequence
from pathlib import Path

from megatrain_cli.checkpoint.manifest import Manifest
from megatrain_cli.config.load import dump_config
from megatrain_cli.config.schema import TrainConfig
from megatrain_cli.train.folder import RunFolder
from tests.checkpoint.made import make_checkpoint
from tests.plan.small import Sections, make_config


def saved_config(run: Path, sections: Sections | None = None) -> TrainConfig:
    """A run of 20 steps of 4 rows, whose model and data are long gone."""
    train: dict[str, object] = {"output_dir": str(run), "max_steps": 20, "micro_batch_size": 4}
    asked = {name: dict(values) for name, values in (sections or {}).items()}
    return make_config(asked | {"train": train | asked.get("train", {})})


def save_step(run: Path, step: int, sections: Sections | None = None, **facts: object) -> Manifest:
    """One checkpoint of a run folder."""
    text = dump_config(saved_config(run, sections))
    return make_checkpoint(
        run / "checkpoints" / f"step-{step:08d}",
        step=step,
        aux={"training/config.yaml": text.encode()},
        **facts,  # type: ignore[arg-type] # by name, as they were given
    )


def make_run(run: Path, steps: Sequence[int], sections: Sections | None = None) -> str:
    """A run folder with an identity, a journal and checkpoints; its run id."""
    with RunFolder(run) as folder:
        lines = (f'{{"step": {step}}}\n' for step in range(1, max(steps, default=0) + 1))
        folder.metrics.write_text("".join(lines))
        run_id = folder.run_id
    for step in steps:
        save_step(run, step, sections, run_id=run_id)
    return run_id
