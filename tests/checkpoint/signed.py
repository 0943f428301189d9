"""Manifests changed by someone who knows how to hash them: only the rules are left to object."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatrain_cli.checkpoint.manifest import Manifest
from megatrain_cli.checkpoint.strict_json import canonical

Json = dict[str, Any]


def sign(value: Json) -> bytes:
    """The bytes of a manifest that says `value`, with the hash that fits."""
    body = {key: one for key, one in value.items() if key != "manifest_sha256"}
    digest = hashlib.sha256(canonical(body)).hexdigest()
    return canonical(body | {"manifest_sha256": digest})


def changed(manifest: Manifest, change: Callable[[Json], object]) -> bytes:
    """A manifest's bytes after `change` was made to its JSON, with the hash that fits."""
    value = json.loads(manifest.to_bytes())
    change(value)
    return sign(value)


def change_in(folder: Path, change: Callable[[Json], object]) -> None:
    """Change the manifest of a checkpoint, and its hash."""
    path = folder / "manifest.json"
    path.write_bytes(changed(Manifest.from_bytes(path.read_bytes()), change))
