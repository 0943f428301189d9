"""Machines that a user does not sit at, by name; each number says where it comes from.

A file of `profiles/` is one GPU beside one kind of host. Its numbers end with `measured` (on such a
machine), `datasheet` or `assumed`. Units: GiB; for rates 10^9 bytes or parameters a second, and
10^12 operations a second. A link's points are [MiB of a copy, to the device, to the host, each way
while both are in use]; other points are [threads, rate]. Issuing a layer is milliseconds [forward,
backward]; beside the optimizer are [copies to page-locked memory, how many times as long issuing
takes, forward and backward], and beside copies the last two. `ram_gib` names a machine for each
amount of RAM that a run may take.
"""

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Annotated, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from megatrain_cli.config.names import did_you_mean
from megatrain_cli.errors import ConfigError
from megatrain_cli.plan.machine import MachineSpec
from megatrain_cli.plan.rates import (
    Beside,
    ComputeRates,
    DiskRates,
    IssueCost,
    IssueTimes,
    LinkRate,
    MachineRates,
    ThreadRate,
)
from megatrain_cli.units import GIB, MIB

_FOLDER = Path(__file__).with_name("profiles")

Kind = Literal["measured", "datasheet", "assumed"]
_KINDS: tuple[Kind, ...] = ("measured", "datasheet", "assumed")
_Positive = Annotated[float, Field(gt=0)]
_Number = tuple[_Positive, Kind]
_Points = Annotated[list[list[_Positive] | Kind], Field(min_length=2)]


class Profile(BaseModel):
    """One file, as it is written."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    gpu: str
    gpu_gib: _Number
    cores: _Number
    ram_gib: dict[str, _Number]
    link: _Points
    copy_in_ram: Annotated[_Points, Field(alias="copy")]
    read: _Points
    adam: _Points
    matmul: _Number
    layer: _Number
    compiled_layer: _Number
    issue: tuple[_Positive, _Positive, Kind]
    beside_optimizer: tuple[_Positive, _Positive, _Positive, Kind]
    beside_copies: tuple[_Positive, _Positive, Kind]
    disk: tuple[_Positive, _Positive, Kind]

    def machine(self, name: str) -> MachineSpec:
        """The machine of one amount of RAM."""
        copy = _by_threads(self.copy_in_ram)
        # Compiled or not, which differs by less than hosts do.
        issue = IssueCost(self.issue[0] / 1e3, self.issue[1] / 1e3)
        rates = MachineRates(
            link=tuple(
                LinkRate(round(size * MIB), into * 1e9, out * 1e9, both * 1e9)
                for size, into, out, both in _numbers(self.link)
            ),
            copy=copy,
            copy_to_pinned=copy,
            read=_by_threads(self.read),
            adam=_by_threads(self.adam),
            lockable_bytes=None,
            lockable_refused=False,
            compute=ComputeRates(
                self.matmul[0] * 1e12,
                self.layer[0] * 1e12,
                self.compiled_layer[0] * 1e12,
                issue,
                issue,
            ),
            disk=DiskRates(self.disk[0] * 1e9, self.disk[1] * 1e9, direct=True),
            beside=Beside(
                self.beside_optimizer[0] * 1e9,
                IssueTimes(*self.beside_optimizer[1:3]),
                IssueTimes(*self.beside_copies[:2]),
            ),
        )
        return MachineSpec(
            host_bytes=round(self.ram_gib[name][0] * GIB),
            host_source=f"profile {name}",
            num_cores=round(self.cores[0]),
            device="cuda:0",
            device_name=self.gpu,
            device_bytes=round(self.gpu_gib[0] * GIB),
            rates=rates,
            origin=f"profile {name}: {self._kinds(name)}",
        )

    def _kinds(self, name: str) -> str:
        """Which numbers are of which kind, the surest first."""
        marks = {
            "RAM": self.ram_gib[name],
            "GPU memory": self.gpu_gib,
            "cores": self.cores,
            "link": self.link,
            "copies in RAM": self.copy_in_ram,
            "reads of RAM": self.read,
            "Adam": self.adam,
            "products": self.matmul,
            "layers": self.layer,
            "compiled layers": self.compiled_layer,
            "issuing": self.issue,
            "beside the optimizer": self.beside_optimizer,
            "beside copies": self.beside_copies,
            "disk": self.disk,
        }
        parts = []
        for kind in _KINDS:
            found = [label for label, mark in marks.items() if mark[-1] == kind]
            if found:
                parts.append(f"{kind}: {', '.join(found)}")
        return "; ".join(parts)


@cache
def known_profiles() -> dict[str, Profile]:
    """All profiles, by the names of their machines."""
    found: dict[str, Profile] = {}
    adapter = TypeAdapter(Profile)
    for path in sorted(_FOLDER.glob("*.yaml")):
        profile = adapter.validate_python(yaml.safe_load(path.read_text(encoding="utf-8")))
        found |= dict.fromkeys(profile.ram_gib, profile)
    return found


def find_profile(name: str) -> MachineSpec:
    """The machine of a profile, by its name in any case.

    Raises:
        ConfigError: There is none of that name.
    """
    wanted, profiles = name.lower(), known_profiles()
    if wanted not in profiles:
        hint = did_you_mean(wanted, profiles)
        raise ConfigError(
            f"`{name}` is neither a machine file nor a known machine. {hint}"
            f"Known are {', '.join(profiles)}; `megatrain probe --out FILE` measures any other."
        )
    return profiles[wanted].machine(wanted)


def _numbers(points: Sequence[list[float] | Kind]) -> list[list[float]]:
    return [point for point in points if isinstance(point, list)]


def _by_threads(points: Sequence[list[float] | Kind]) -> tuple[ThreadRate, ...]:
    return tuple(ThreadRate(round(threads), rate * 1e9) for threads, rate in _numbers(points))
