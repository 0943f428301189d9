"""What several commands share: overrides of config keys, and reading a config aloud."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from megatrain_cli.config.load import LoadedConfig

# Options that Typer does not know are config keys: `--train.max_steps 5`.
TAKES_OVERRIDES = {"ignore_unknown_options": True, "allow_extra_args": False}

ConfigFile = Annotated[Path, typer.Argument(metavar="CONFIG", help="The run's YAML file.")]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="KEY=VALUE",
        help="Config keys to change, such as train.max_steps=5 or --train.max_steps 5.",
        show_default=False,
    ),
]
# Of reading files: enough for the fastest disks; more would only hold more memory.
_MOST_THREADS = 8

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]


def count_threads() -> int:
    """Threads that read a checkpoint's files: as many as this process may use, up to eight."""
    from megatrain_cli.probe.cgroup import usable_cores

    return min(_MOST_THREADS, usable_cores())


def parse_overrides(words: Sequence[str] | None) -> tuple[str, ...]:
    """Bring `key=value`, `--key value` and `--key=value` to `key=value`.

    With dashes in front, dashes inside count as underscores: `--train.max-steps 5`.

    Raises:
        typer.BadParameter: A word that is none of the three.
    """
    overrides: list[str] = []
    rest = list(words or ())
    while rest:
        word = rest.pop(0)
        if not word.startswith("-"):
            if "=" not in word:
                raise typer.BadParameter(f"wanted key=value, got `{word}`")
            overrides.append(word)
            continue
        key, equals, value = word.lstrip("-").partition("=")
        if not equals:
            if not rest or rest[0].startswith("--"):
                raise typer.BadParameter(f"there is no option `{word}`, and no value follows it")
            value = rest.pop(0)
        overrides.append(f"{key.replace('-', '_')}={value}")
    return tuple(overrides)


def read_config(path: Path, words: Sequence[str] | None) -> "LoadedConfig":
    """Load a config with overrides, check that its files are there, and say its notes."""
    from megatrain_cli.config.load import check_paths, load_config
    from megatrain_cli.config.paths import exists

    if str(path).startswith("--") or ("=" in str(path) and not exists(path)):
        raise typer.BadParameter(f"the config file comes first, before `{path}`")
    loaded = load_config(path, parse_overrides(words))
    check_paths(loaded)
    say_notes(loaded)
    return loaded


def say_notes(loaded: "LoadedConfig") -> None:
    """Say what was set and has no effect."""
    for note in loaded.notes:
        typer.echo(f"note: {note}", err=True)


def set_environment(device: str) -> None:
    """Set what torch reads when it is imported, where the user has not.

    Args:
        device: `pipeline.device` of the run.
    """
    if device != "cpu":
        # Read when torch loads OpenMP. Its threads would spin between torch's parallel regions, on
        # cores that belong to the optimizer here. Where torch computes on the CPU itself, spinning
        # makes steps shorter (docs/benchmarks.md, Demo).
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
        # What torch.compile makes is kept for the next run; torch's own default is a temporary
        # folder, which a restart of the machine empties.
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache / "megatrain" / "compiled"))
