"""A Hugging Face folder as a source of parameters, read one layer at a time.

All names, shapes and dtypes are checked against the model before the first byte is read, in both
directions: every tensor of the folder is used and every parameter is filled.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from megatrain_cli.errors import CorruptError, ModelError
from megatrain_cli.model.spec import LayerSpec, ModelSpec

# As safetensors headers spell them. FP32 holds each of these exactly.
_READABLE = ("BF16", "F16", "F32")

_SHOWN_NAMES = 8

# How a file begins that `git clone` made without LFS: three lines of text in place of the weights.
_LFS_POINTER = b"version https://git-lfs.github.com/"


@dataclass(frozen=True)
class _Stored:
    """A tensor in the folder, from its file's header."""

    path: Path
    name: str
    shape: tuple[int, ...]
    dtype: str


class SafetensorsSource:
    """The safetensors files of a Hugging Face folder.

    The files are those that transformers would take: `model.safetensors`, else those that
    `model.safetensors.index.json` lists, else all `model*.safetensors`.

    Args:
        folder: The model's folder.
        spec: What the model needs.
        base_prefix: The base model's attribute, such as `model` or `transformer`. Files may have
            been saved without it (GPT-2 on the hub has `h.0...` for `transformer.h.0...`).
        ignored: Regular expressions, searched in a tensor's name as stored, for tensors that are
            no parameters (old attention masks, rotary frequencies).
        aliases: The head's name for a tied parameter -> the embedding's. A copy stored under the
            head's name must equal the embedding.

    Raises:
        ModelError: Wrong folder for this model; lists the names.
        CorruptError: A file is damaged.
    """

    def __init__(
        self,
        folder: Path,
        spec: ModelSpec,
        *,
        base_prefix: str,
        ignored: Sequence[str] = (),
        aliases: Mapping[str, str] | None = None,
    ) -> None:
        self._folder = folder
        self._aliases = dict(aliases or {})
        self._stored: dict[str, _Stored] = {}
        shapes = {p.name: p.shape for layer in spec.layers for p in layer.params}
        names = shapes.keys() | self._aliases.keys()
        unknown, twice = [], []
        for stored in _read_headers(folder):
            name = _full_name(stored.name, names, base_prefix.rstrip("."))
            if name is None:
                # Asked only of tensors without a parameter: GPT-2's pattern for its old mask,
                # `attn.bias`, is found in `c_attn.bias` too.
                if not any(re.search(pattern, stored.name) for pattern in ignored):
                    unknown.append(stored.name)
            elif name in self._stored:
                twice.append(name)
            else:
                self._stored[name] = stored
        self._take_head_for_missing_embedding()
        problems = [
            _listed("tensors in the folder that the model does not have", unknown),
            _listed("parameters that the folder has twice", twice),
            _listed("parameters that the folder lacks", sorted(shapes.keys() - self._stored)),
            _listed("shapes that differ", self._wrong_shapes(shapes)),
            _listed("tensors of a dtype that cannot be trained", self._wrong_dtypes()),
        ]
        found = [problem for problem in problems if problem]
        if found:
            hint = self._hint_of_tie(spec, sorted(shapes.keys() - self._stored))
            raise ModelError(
                f"{folder} does not fit {spec.architecture}: " + "; ".join(found) + hint
            )

    def read(self, layer: LayerSpec) -> Iterator[tuple[str, torch.Tensor]]:
        """Each of the layer's parameters, as stored: BF16, FP16 or FP32.

        A tensor is a view of its mapped file, whose pages count as this process's memory until the
        files are closed: when the iterator ends and the tensors are gone.

        Raises:
            CorruptError: A file changed or cannot be read any more.
            ModelError: A tied copy differs from the embedding.
        """
        with _OpenFiles() as files:
            for param in layer.params:
                tensor = files.tensor(self._stored[param.name])
                for head, embedding in self._aliases.items():
                    copy = self._stored.get(head)
                    if embedding == param.name and copy is not None:
                        _check_tied(copy, files.tensor(copy), tensor, param.name)
                yield param.name, tensor

    def _take_head_for_missing_embedding(self) -> None:
        # Some files keep a tied weight under the head's name only.
        for head, embedding in self._aliases.items():
            if head in self._stored and embedding not in self._stored:
                self._stored[embedding] = self._stored.pop(head)

    def _hint_of_tie(self, spec: ModelSpec, lacking: Sequence[str]) -> str:
        """What a folder means that lacks one matrix of the head alone: the embedding's is used."""
        matrices = [p.name for p in spec.layers[-1].params if len(p.shape) > 1]
        if spec.tied or list(lacking) != matrices:
            return ""
        return (
            ". If the head uses the embedding's weights, set `tie_word_embeddings` to true in "
            "config.json"
        )

    def _wrong_shapes(self, shapes: Mapping[str, tuple[int, ...]]) -> list[str]:
        wrong = []
        for name, stored in self._stored.items():
            wanted = shapes.get(self._aliases.get(name, name))
            if wanted is not None and stored.shape != wanted:
                wrong.append(f"{name} {stored.shape}, not {wanted}")
        return wrong

    def _wrong_dtypes(self) -> list[str]:
        return [
            f"{name} ({stored.dtype})"
            for name, stored in self._stored.items()
            if stored.dtype not in _READABLE
        ]


class _OpenFiles:
    """Safetensors files kept open, and mapped, while one layer is read."""

    def __init__(self) -> None:
        self._files: dict[Path, safe_open] = {}

    def __enter__(self) -> "_OpenFiles":
        return self

    def __exit__(self, *_: object) -> None:
        self._files.clear()

    def tensor(self, stored: _Stored) -> torch.Tensor:
        try:
            if stored.path not in self._files:
                self._files[stored.path] = safe_open(stored.path, framework="pt")
            file = self._files[stored.path]
            # Safetensors ships a stub without a signature for this one method.
            tensor: torch.Tensor = file.get_tensor(stored.name)  # type: ignore[no-untyped-call]
        except (SafetensorError, OSError) as error:
            raise CorruptError(f"{stored.path}: {stored.name} cannot be read: {error}") from error
        return tensor


def _check_tied(copy: _Stored, head: torch.Tensor, embedding: torch.Tensor, name: str) -> None:
    same = head.dtype == embedding.dtype and torch.equal(
        head.contiguous().view(torch.uint8), embedding.contiguous().view(torch.uint8)
    )
    if not same:
        raise ModelError(
            f"{copy.path}: {copy.name} is tied to {name} but holds other values. Set "
            "`tie_word_embeddings` to false in config.json, or remove the tensor."
        )


def _full_name(stored: str, names: set[str], prefix: str) -> str | None:
    for name in (stored, f"{prefix}.{stored}", stored.removeprefix(f"{prefix}.")):
        if name in names:
            return name
    return None


def _listed(what: str, names: Sequence[str]) -> str:
    if not names:
        return ""
    more = len(names) - _SHOWN_NAMES
    rest = f" and {more} more" if more > 0 else ""
    return f"{len(names)} {what}: " + ", ".join(names[:_SHOWN_NAMES]) + rest


def _read_headers(folder: Path) -> Iterator[_Stored]:
    for path in _weight_files(folder):
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118  # not a mapping
                    part = file.get_slice(name)
                    yield _Stored(path, name, tuple(part.get_shape()), part.get_dtype())
        except (SafetensorError, OSError) as error:
            if _begins_with(path, _LFS_POINTER):
                raise CorruptError(
                    f"{path} is a Git LFS pointer, not the weights. Run `git lfs pull` in the "
                    "folder, or download the file."
                ) from error
            raise CorruptError(f"{path} is damaged or cut short: {error}") from error


def _begins_with(path: Path, start: bytes) -> bool:
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(len(start)) == start


def _weight_files(folder: Path) -> list[Path]:
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.exists():
        return [single]
    if index.exists():
        try:
            names = sorted(
                set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
            )
        except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
            raise CorruptError(f"{index} is not an index of safetensors files: {error}") from error
        outside = [name for name in names if Path(name).name != name]
        if outside:
            raise CorruptError(f"{index}: " + _listed("files that are not in the folder", outside))
        files = [folder / name for name in names]
        missing = [path.name for path in files if not path.exists()]
        if missing:
            raise ModelError(f"{folder}: " + _listed("files of the index are missing", missing))
        return files
    files = sorted(folder.glob("model*.safetensors"))
    if not files:
        if any(folder.glob("*.bin")) or any(folder.glob("*.pt")):
            raise ModelError(
                f"{folder} has its weights as pickle files only (.bin, .pt), and unpickling runs "
                "code of whoever made them. Convert it once with transformers' `save_pretrained`."
            )
        if (folder / "adapter_config.json").exists():
            raise ModelError(
                f"{folder} has an adapter (LoRA) and no weights of a model. Merge it into its base "
                "model, and name the folder of that."
            )
        others = sorted(path.name for path in folder.glob("*.safetensors"))[:_SHOWN_NAMES]
        found = f" It has {', '.join(others)}, which transformers would not read." if others else ""
        raise ModelError(
            f"{folder} has no model*.safetensors.{found} Name a folder that transformers opens, or "
            "set `model.init: random` to begin without weights."
        )
    return files
