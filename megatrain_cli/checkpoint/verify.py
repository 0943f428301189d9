"""Compare a part's bytes with the manifest: its header, then its hash."""

from collections.abc import Callable

import xxhash

from megatrain_cli.checkpoint.folder import ADVICE, OpenCheckpoint
from megatrain_cli.checkpoint.headers import Header, parse_header
from megatrain_cli.checkpoint.manifest import Part
from megatrain_cli.checkpoint.places import short
from megatrain_cli.errors import CorruptError

_CHUNK = 8 << 20


def check_header(part: Part, raw: bytes, what: str) -> Header:
    """A file's header must say what the manifest says.

    Args:
        part: Which file it should be.
        raw: The file's beginning, up to `part.data_start` or more.
        what: Names the file in errors: its path.

    Returns:
        The header, whose metadata may be shown but not trusted.

    Raises:
        CorruptError: It says something else; the error tells what the file says it is.
    """
    header = parse_header(raw, part.bytes, what)
    if header.data_start == part.data_start and header.tensors == part.tensors:
        return header
    for wanted, found in zip(part.tensors, header.tensors, strict=False):
        if wanted != found:
            difference = (
                f"its header has {short(found.name)} {found.dtype} {list(found.shape)} where the "
                f"manifest has {short(wanted.name)} {wanted.dtype} {list(wanted.shape)}"
            )
            break
    else:
        difference = (
            f"its header has {len(header.tensors)} tensors from byte {header.data_start}, "
            f"the manifest {len(part.tensors)} from {part.data_start}"
        )
    raise CorruptError(f"{what}: another file, or damaged: {difference}. {_origin(header)}{ADVICE}")


def wrong_hash(part: Part, found: str, header: Header, what: str) -> CorruptError:
    """What to raise where a part's hash is not the manifest's.

    Args:
        part: Which file it should be.
        found: The xxh3-128 of the bytes that were read, in hexadecimal.
        header: Of the file.
        what: Names the file in errors: its path.
    """
    return CorruptError(
        f"{what}: damaged, or of another checkpoint: its xxh3-128 is {found}, the manifest says "
        f"{part.xxh3_128}. {_origin(header)}{ADVICE}"
    )


def check_part(
    checkpoint: OpenCheckpoint, part: Part, on_bytes: Callable[[int], None] | None = None
) -> Header:
    """Read a whole part in chunks of a few MiB and compare header and hash.

    Args:
        checkpoint: Which has it open. Several threads may check parts of one checkpoint.
        part: One of its manifest's.
        on_bytes: Called with the number of bytes after each chunk.

    Returns:
        The file's header.

    Raises:
        CorruptError: The file is not what was saved, or cannot be read.
    """
    what = f"{checkpoint.folder / part.file}"
    header = check_header(part, checkpoint.read_bytes(part.file, 0, part.data_start), what)
    digest = xxhash.xxh3_128()
    for start in range(0, part.bytes, _CHUNK):
        raw = checkpoint.read_bytes(part.file, start, min(_CHUNK, part.bytes - start))
        digest.update(raw)
        if on_bytes is not None:
            on_bytes(len(raw))
    if digest.hexdigest() != part.xxh3_128:
        raise wrong_hash(part, digest.hexdigest(), header, what)
    return header


def _origin(header: Header) -> str:
    """What a file says it is, for a person who looks for where it came from."""
    said = {
        key: short(header.metadata[name])[1:-1]
        for key in ("shard", "part", "step", "run_id")
        if (name := f"megatrain.{key}") in header.metadata
    }
    if not said:
        return ""
    return f"The file says it is {', '.join(f'{key} {value}' for key, value in said.items())}. "
