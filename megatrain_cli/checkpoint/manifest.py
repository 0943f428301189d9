"""`manifest.json`: the record that makes a folder a checkpoint, written last.

It names every other file with its size and hash, and carries a SHA-256 over itself, so that its id
pins every byte of the checkpoint. docs/checkpoint-format.md describes it for other programs.
"""

import hashlib
from collections.abc import Iterator, Sequence
from functools import cached_property

from pydantic import JsonValue, ValidationError, model_validator

from megatrain_cli.checkpoint.facts import DataFacts, Facts, ModelFacts, Pending, SourceFile
from megatrain_cli.checkpoint.headers import INDEX_NAME
from megatrain_cli.checkpoint.names import MANIFEST
from megatrain_cli.checkpoint.places import TensorPlace, short
from megatrain_cli.checkpoint.record import Count, Identity, Record, check_unique
from megatrain_cli.checkpoint.shards import AuxFile, Part, PartName, Shard, check_shards
from megatrain_cli.checkpoint.strict_json import canonical, parse
from megatrain_cli.errors import CorruptError, IncompatibleError

__all__ = [
    "AuxFile", "Created", "DataFacts", "Facts", "Format", "Manifest", "ModelFacts",
    "Part", "PartName", "Pending", "Shard", "SourceFile", "TensorPlace",
]  # fmt: skip

FORMAT_NAME = "megatrain-checkpoint"
MAJOR, MINOR = 1, 0
KNOWN = ("grads",)
"""What a reader must understand and this one does."""

_HASH = "manifest_sha256"


class Format(Record):
    """Which rules the checkpoint follows.

    Attributes:
        major: Another one cannot be read.
        minor: A higher one only adds keys.
        required_features: A reader that does not know one of them must refuse.
        optional_features: For information.
    """

    name: str
    major: int
    minor: int
    required_features: tuple[str, ...]
    optional_features: tuple[str, ...]


class Created(Record):
    """When and by what; for people, never for a decision."""

    unix_ns: int
    megatrain: str
    host: str | None = None
    git: str | None = None


class Manifest(Facts):
    """One checkpoint: the run's facts, and all files but the manifest itself.

    Attributes:
        save_id: Tells this save from every other.
        shards: In the model's order.
        bytes_total: Of all files named.
    """

    format: Format
    save_id: Identity
    created: Created
    shards: tuple[Shard, ...]
    aux: tuple[AuxFile, ...]
    bytes_total: Count

    @classmethod
    def build(
        cls,
        facts: Facts,
        *,
        save_id: str,
        created: Created,
        shards: Sequence[Shard],
        aux: Sequence[AuxFile],
    ) -> "Manifest":
        """The manifest of files that have been written.

        Raises:
            ValueError: The parts do not make a whole checkpoint.
        """
        about = Format(
            name=FORMAT_NAME,
            major=MAJOR,
            minor=MINOR,
            required_features=("grads",) if any(shard.has_grads for shard in shards) else (),
            optional_features=(),
        )
        files = _files(shards, aux)
        return cls.model_validate(
            dict(facts)
            | {
                "format": about,
                "save_id": save_id,
                "created": created,
                "shards": tuple(shards),
                "aux": tuple(aux),
                "bytes_total": sum(file.bytes for file in files),
            }
        )

    @classmethod
    def from_bytes(cls, raw: bytes, what: str = MANIFEST) -> "Manifest":
        """Read the file's bytes.

        Args:
            raw: All of them.
            what: Names the file in errors.

        Raises:
            CorruptError: Torn, changed after it was written, or impossible.
            IncompatibleError: Whole, but of another format, or it needs what is not known here.
        """
        body, value = _verified(raw, what)
        _check_format(value, what)
        try:
            return cls.model_validate_json(body)
        except ValidationError as error:
            first = error.errors(include_input=False, include_url=False)[0]
            where = ".".join(map(str, first["loc"])) or "manifest"
            reason = short(first["msg"].removeprefix("Value error, "), 300)[1:-1]
            raise CorruptError(
                f"{what}: not a possible manifest: {short(where)[1:-1]}: {reason}"
            ) from None

    def to_bytes(self) -> bytes:
        """The file's bytes: canonical JSON, the same for equal manifests."""
        return canonical(self._body() | {_HASH: self.id.removeprefix("sha256:")})

    @cached_property
    def id(self) -> str:
        """`sha256:` and the hash over the manifest, which is the checkpoint's identity."""
        return f"sha256:{hashlib.sha256(canonical(self._body())).hexdigest()}"

    def _body(self) -> dict[str, JsonValue]:
        # Without what was not there: a file of another minor version keeps its id when read.
        return self.model_dump(exclude_unset=True)

    @property
    def parts(self) -> Iterator[Part]:
        """All parts of all shards."""
        return (part for shard in self.shards for part in shard.parts)

    @property
    def files(self) -> tuple[Part | AuxFile, ...]:
        """Every file but the manifest itself."""
        return _files(self.shards, self.aux)

    @model_validator(mode="after")
    def _whole(self) -> "Manifest":
        check_shards(self.shards, self.step, self.model.num_parameters, self.pending)
        names = [file.file for file in self.files]
        check_unique("file", names)
        for name in ("config.json", INDEX_NAME):
            if name not in names:
                raise ValueError(f"no {name} among the aux files")
        if self.bytes_total != sum(file.bytes for file in self.files):
            raise ValueError("bytes_total is not the sum of the files' sizes")
        if ("grads" in self.format.required_features) != (self.pending is not None):
            raise ValueError("the feature `grads` is required if and only if an update is pending")
        return self


def _files(shards: Sequence[Shard], aux: Sequence[AuxFile]) -> tuple[Part | AuxFile, ...]:
    return (*(part for shard in shards for part in shard.parts), *aux)


def _verified(raw: bytes, what: str) -> tuple[bytes, dict[str, JsonValue]]:
    """The canonical JSON without its hash, and its value; the hash has been compared."""
    value = parse(raw, what)
    if not isinstance(value, dict):
        raise CorruptError(f"{what}: damaged: not a mapping")
    written = value.pop(_HASH, None)
    if written is None and not _is_ours(value):
        raise IncompatibleError(f"{what}: not the manifest of a megatrain checkpoint.")
    body = canonical(value)
    found = hashlib.sha256(body).hexdigest()
    if written != found:
        raise CorruptError(
            f"{what}: changed after it was written: its SHA-256 is {found}, "
            f"the manifest says {short(written)}. Use another checkpoint."
        )
    return body, value


def _is_ours(value: dict[str, JsonValue]) -> bool:
    about = value.get("format")
    return isinstance(about, dict) and about.get("name") == FORMAT_NAME


def _check_format(value: dict[str, JsonValue], what: str) -> None:
    """Refuse what this version cannot read, before anything else is looked at."""
    about = value.get("format")
    if not isinstance(about, dict) or not _is_ours(value):
        raise IncompatibleError(f"{what}: not the manifest of a megatrain checkpoint.")
    major, needed = about.get("major"), about.get("required_features")
    if type(major) is not int or major != MAJOR:  # True is 1
        raise IncompatibleError(
            f"{what}: format {short(major)}.{short(about.get('minor'))}, and this version reads "
            f"{MAJOR}.x. Install a version of megatrain that reads format {short(major)}."
        )
    unknown = [one for one in needed if one not in KNOWN] if isinstance(needed, list) else []
    if unknown:
        raise IncompatibleError(
            f"{what}: needs {short(unknown)}, which this version does not know. "
            "Install a newer version of megatrain."
        )
