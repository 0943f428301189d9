"""The manifest: equal values have equal bytes, and no byte can be changed unnoticed."""

import hashlib
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatrain_cli.checkpoint.manifest import Created, Manifest, Pending
from megatrain_cli.checkpoint.strict_json import canonical
from megatrain_cli.errors import CorruptError, IncompatibleError
from tests.checkpoint.made import make_checkpoint, random_layers
from tests.checkpoint.signed import changed, sign

GOLDEN = Path(__file__).with_name("golden_manifest_1_0.json")


@pytest.fixture(scope="module")
def manifest(tmp_path_factory: pytest.TempPathFactory) -> Manifest:
    return make_checkpoint(tmp_path_factory.mktemp("run") / "step-3", random_layers(layers=1))


json_leaves = st.none() | st.booleans() | st.integers() | st.text(st.characters(codec="utf-8"))
json_values = st.recursive(
    json_leaves,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(st.characters(codec="utf-8")), inner, max_size=3)
    ),
    max_leaves=6,
)
mappings = st.dictionaries(st.text(st.characters(codec="utf-8"), max_size=9), json_values)
floats = st.floats(allow_nan=False, allow_infinity=False).map(float.hex)


@given(
    step=st.integers(0, 2**70),
    attempt=st.integers(0, 2**70),
    parent=st.none() | st.binary(min_size=32, max_size=32).map(lambda raw: f"sha256:{raw.hex()}"),
    optimizer=mappings,
    plan=mappings,
    changes=st.lists(mappings, max_size=2).map(tuple),
    losses=st.lists(floats, max_size=3).map(tuple),
    unix_ns=st.integers(),
    data=st.data(),
)
def test_a_manifest_reads_back_equal_and_its_bytes_are_stable(
    manifest: Manifest,
    step: int,
    attempt: int,
    parent: str | None,
    optimizer: dict[str, object],
    plan: dict[str, object],
    changes: tuple[dict[str, object], ...],
    losses: tuple[str, ...],
    unix_ns: int,
    data: st.DataObject,
) -> None:
    shards = tuple(shard.model_copy(update={"layer_step": step}) for shard in manifest.shards)
    new = {
        "step": step, "attempt": attempt, "parent": parent, "optimizer": optimizer, "plan": plan,
        "changes": changes, "losses_tail": losses,
        "created": Created(unix_ns=unix_ns, megatrain="0"), "shards": shards,
        "zz_" + data.draw(st.text(st.characters(codec="utf-8"))): data.draw(json_values),
    }  # fmt: skip
    one = Manifest.model_validate(dict(manifest) | new)
    raw = one.to_bytes()
    again = Manifest.from_bytes(raw)
    assert again == one
    assert again.to_bytes() == raw
    assert again.id == one.id
    assert raw.isascii()


def test_the_id_is_the_hash_of_the_canonical_json_without_itself(manifest: Manifest) -> None:
    value = json.loads(manifest.to_bytes())
    written = value.pop("manifest_sha256")
    plain = json.dumps(value, sort_keys=True, separators=(",", ":")).encode()
    assert manifest.id == f"sha256:{written}" == f"sha256:{hashlib.sha256(plain).hexdigest()}"


def test_any_single_byte_changed_or_missing_is_refused(manifest: Manifest) -> None:
    raw = manifest.to_bytes()
    for at in range(len(raw)):
        for bits in (0x01, 0x20, 0xFF):
            flipped = bytes([*raw[:at], raw[at] ^ bits, *raw[at + 1 :]])
            with pytest.raises(CorruptError, match=r"^manifest\.json: "):
                Manifest.from_bytes(flipped)
        with pytest.raises(CorruptError):
            Manifest.from_bytes(raw[:at])


def test_an_edited_manifest_is_refused_with_both_hashes(manifest: Manifest) -> None:  # F36
    value = json.loads(manifest.to_bytes())
    value["step"] = 4
    with pytest.raises(CorruptError, match=f"SHA-256 is [0-9a-f]{{64}}.*{manifest.id[7:]}"):
        Manifest.from_bytes(canonical(value))
    del value["manifest_sha256"]
    with pytest.raises(CorruptError, match="the manifest says None"):
        Manifest.from_bytes(canonical(value))
    with pytest.raises(CorruptError, match="changed after it was written"):
        Manifest.from_bytes(json.dumps(json.loads(manifest.to_bytes()), indent=2).encode())


def test_unknown_keys_of_a_newer_minor_version_are_kept(manifest: Manifest) -> None:  # F35
    def add(value: dict[str, dict[str, object]]) -> None:
        value["format"]["minor"] = 7
        value["format"]["optional_features"] = ["later"]
        value["later"] = {"a": [1, None]}
        value["data"]["later"] = "x"
        value["shards"][0]["parts"][0]["later"] = True  # type: ignore[index]

    raw = changed(manifest, add)
    read = Manifest.from_bytes(raw)
    assert read.to_bytes() == raw
    assert read.data == manifest.data.model_copy(update={"later": "x"})


def test_a_manifest_without_an_optional_key_keeps_its_id() -> None:  # F35
    raw = GOLDEN.read_bytes()
    value = json.loads(raw)
    del value["created"]["git"]
    raw = sign(value)
    read = Manifest.from_bytes(raw)
    assert (read.created.git, read.to_bytes()) == (None, raw)
    assert read.id == f"sha256:{json.loads(raw)['manifest_sha256']}"


@pytest.mark.parametrize("major", [0, 2, "1", None, True, 1.0])
def test_another_major_version_is_refused_by_number(manifest: Manifest, major: object) -> None:
    # F33; a float has no canonical spelling, so such a file is damaged.
    value = json.loads(manifest.to_bytes())
    value["format"]["major"] = major
    if isinstance(major, float):
        with pytest.raises(TypeError):
            sign(value)
    else:
        value["shards"] = "a later version may say anything here"
        with pytest.raises(IncompatibleError, match=r"this version reads 1\.x") as caught:
            Manifest.from_bytes(sign(value))
        assert caught.value.exit_code == 4


@pytest.mark.parametrize("features", [["quantized"], ["grads", "x\x1b[2J"], [{}], [1]])
def test_an_unknown_required_feature_is_refused_by_name(  # F33
    manifest: Manifest, features: list[object]
) -> None:
    raw = changed(manifest, lambda value: value["format"].update(required_features=features))
    with pytest.raises(IncompatibleError, match="does not know") as caught:
        Manifest.from_bytes(raw)
    assert str(caught.value).isprintable()


@pytest.mark.parametrize(
    "value", [{}, {"format": 1}, {"format": {"name": "other"}}, {"manifest_version": 2}]
)
def test_another_programs_manifest_is_not_ours(value: dict[str, object]) -> None:
    for raw in (canonical(value), sign(value)):
        with pytest.raises(IncompatibleError, match="not the manifest of a megatrain checkpoint"):
            Manifest.from_bytes(raw)
    with pytest.raises(CorruptError, match="not a mapping"):
        Manifest.from_bytes(b"[]")


def test_the_first_version_is_read_for_ever() -> None:  # F34, F35
    raw = GOLDEN.read_bytes()
    read = Manifest.from_bytes(raw)
    assert read.to_bytes() == raw
    assert read.id == "sha256:756cdf814b32dcd132d129d330d9134f0baaddafaf0e1db7a02e1f47500b23c9"
    assert (read.step, read.attempt, len(read.shards)) == (3, 2, 3)
    assert read.pending == Pending(step=3, learning_rate=(1e-3).hex(), grad_scale=(0.5).hex())
    assert read.shards[2].parts[2].tensors[0].name == "grad.model.norm.weight"
