"""The file that `megatrain probe` writes and `plan` and `train` read: one measured machine."""

import json
import os
from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from megatrain_cli.errors import ConfigError, CorruptError, IncompatibleError, StorageError
from megatrain_cli.plan.machine import MachineSpec
from megatrain_cli.plan.rates import Count
from megatrain_cli.regular import read_file

# Of the file. One with another number is refused: what its fields mean may have changed.
VERSION = 5


@dataclass(frozen=True)
class Fingerprint:
    """What tells one machine from another, without naming it.

    Attributes:
        cores: All that the system has, allowed or not.
        ram_gib: Rounded, as kernels keep a little more or less for themselves.
        gpu: Name of the GPU in use; empty on the CPU.
        driver: Its version; empty where the system does not tell.
    """

    cpu: str
    cores: Count
    ram_gib: Count
    gpu: str
    driver: str

    def fits(self, here: "Fingerprint") -> bool:
        """Whether what was measured there holds here: a run without a GPU needs none measured."""
        host = (self.cpu, self.cores, self.ram_gib) == (here.cpu, here.cores, here.ram_gib)
        return host and (not here.gpu or (self.gpu, self.driver) == (here.gpu, here.driver))


@dataclass(frozen=True)
class NumaNode:
    """Cores and memory that are near each other; cores as the kernel lists them, `0-15,32-47`."""

    index: Count
    cores: str
    num_bytes: Count


@dataclass(frozen=True)
class MachineFacts:
    """What the system says about this process; nothing here is measured.

    Attributes:
        memory_limit_bytes: The smallest limit of all cgroups; None without one.
        memory_limit_source: `cgroup v1` or `cgroup v2`; None without a limit.
        cpu_quota: Whole cores by cgroup; None without one.
        affinity: Cores that this process may run on, as the kernel lists them.
        device_numa_node: The node that the GPU hangs on; None if the system does not tell.
        memlock_bytes: The limit on locked memory, which need not bind the driver; None: none.
        huge_pages: Mode of transparent huge pages: `always`, `madvise`, `never`; None: not there.
    """

    memory_limit_bytes: Count | None
    memory_limit_source: str | None
    cpu_quota: Count | None
    affinity: str
    numa_nodes: tuple[NumaNode, ...]
    device_numa_node: Count | None
    memlock_bytes: Count | None
    huge_pages: str | None


@dataclass(frozen=True)
class MachineFile:
    """A measured machine.

    Attributes:
        date: When, UTC, ISO 8601.
        notes: What could not be measured, or not as it should be, and why.
    """

    version: int
    date: str
    fingerprint: Fingerprint
    machine: MachineSpec
    facts: MachineFacts
    notes: tuple[str, ...] = ()

    def to_json(self) -> str:
        """The file's content."""
        return _ADAPTER.dump_json(self, indent=2).decode() + "\n"


_ADAPTER = TypeAdapter(MachineFile)


def default_path() -> Path | None:
    """Where the file of the machine at hand lies; None for a user without a home."""
    given = Path(os.environ.get("XDG_CONFIG_HOME", ""))
    try:
        # By the XDG base directory specification one that is not absolute does not count: it would
        # be another place in each folder.
        base = given if given.is_absolute() else Path.home() / ".config"
    except RuntimeError:  # nothing says where home is
        return None
    return base / "megatrain" / "machine.json"


def save_machine_file(file: MachineFile, path: Path) -> None:
    """Write the file, whole or not at all; what was there is replaced, and a link followed.

    Raises:
        StorageError: The disk refused.
    """
    place = Path(os.path.realpath(path))
    temporary = place.with_name(f".{place.name}-{os.getpid()}")
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        try:
            with temporary.open("w", encoding="utf-8") as handle:
                handle.write(file.to_json())
                handle.flush()
                os.fsync(handle.fileno())
            temporary.replace(place)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        raise StorageError(
            f"{path} cannot be written: {error.strerror or error}. Name another place with `--out`."
        ) from error


def load_machine_file(path: Path | None = None) -> MachineFile | None:
    """Read the file at `path`; without one that of the machine at hand, None if there is none.

    Raises:
        ConfigError: `path` was given and cannot be read.
        CorruptError: Damaged.
        IncompatibleError: Of another version.
    """
    place = path or default_path()
    if place is None:
        return None
    try:
        text = read_file(place)
    except OSError as error:
        if path is None and isinstance(error, FileNotFoundError):
            return None
        raise ConfigError(f"{place}: cannot be read: {error.strerror or error}") from error
    how = "`megatrain probe`" if path is None else "`megatrain probe --out FILE` on that machine"
    again = f"Run {how} to write it anew."
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CorruptError(f"{place} is not JSON ({error}). {again}") from error
    version = values.get("version") if isinstance(values, dict) else None
    if isinstance(version, int) and version != VERSION:
        raise IncompatibleError(
            f"{place} has version {version}, and this program reads {VERSION}. {again}"
        )
    try:
        file = _ADAPTER.validate_json(text, strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"])) or "the file"
        raise CorruptError(f"{place} is damaged at {where}: {first['msg']}. {again}") from error
    strange = _strange_key(values, _ADAPTER.dump_python(file, mode="json"))
    if strange is not None:
        raise CorruptError(f"{place} is damaged at {strange}: no key has that name. {again}")
    return file


def _strange_key(given: object, read: object) -> str | None:
    """The dotted place of a key that nothing was read from, such as a misspelled one."""
    pairs: list[tuple[object, object, object]]
    if isinstance(given, dict) and isinstance(read, dict):
        strange = next((key for key in given if key not in read), None)
        if strange is not None:
            return str(strange)
        pairs = [(key, value, read[key]) for key, value in given.items()]
    elif isinstance(given, list) and isinstance(read, list):
        pairs = list(zip(range(len(given)), given, read, strict=True))
    else:
        return None
    for key, value, known in pairs:
        inside = _strange_key(value, known)
        if inside is not None:
            return f"{key}.{inside}"
    return None
