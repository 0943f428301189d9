"""The runs that `check_plan.py` holds against their plans."""

from collections.abc import Sequence
from dataclasses import dataclass

from scripts.shapes import Shape


@dataclass(frozen=True)
class Case:
    """One run.

    Attributes:
        rows: Of a step; `accumulation` micro-batches of them each.
        longest: Tokens of the longest row; others have half as many or more.
        overrides: Of the config, as `key=value`.
        resumes: The process that is measured goes on from a checkpoint.
        saves: After each step, so that a step takes what a save holds up too. On a GPU steps are
            much shorter than saves, and those that fall due meanwhile become one: no step is then
            like the other, and none is held against the plan.
    """

    name: str
    shape: Shape
    rows: int
    longest: int
    overrides: tuple[str, ...] = ()
    accumulation: int = 1
    resumes: bool = False
    saves: bool = False


_FP32 = ("model.dtype=float32", "optimizer.master=fp32")
_RECOMPUTE = "pipeline.activations=recompute"
_OFFLOAD = "pipeline.activations={keep_layers: 0, offload: true}"
_SHALLOW = Shape("30M", 768, 4, 2304, 12, 4, 8000, tied=True)
_SMALL = Shape("50M", 512, 8, 1408, 8, 4, 32000, tied=False)
_MIDDLE = Shape("150M", 768, 16, 2048, 12, 4, 32000, tied=True)
_LARGE = Shape("500M", 1280, 20, 3456, 20, 4, 32000, tied=True)

CPU_CASES: tuple[Case, ...] = (
    Case("30M, 4 layers, FP32, recomputed", _SHALLOW, 2, 256, (*_FP32, _RECOMPUTE)),
    Case("50M, FP32", _SMALL, 2, 64, _FP32),
    Case("50M, FP32, 16 rows", _SMALL, 16, 64, _FP32),
    Case("50M, FP32, length 1024", _SMALL, 1, 1024, _FP32),
    Case("50M, FP32, eager attention", _SMALL, 2, 256, (*_FP32, "model.attention=eager")),
    Case("50M, fp32_split", _SMALL, 2, 128),
    Case("50M, bf16 masters", _SMALL, 2, 128, ("optimizer.master=bf16",)),
    Case("50M, 24 slabs", _SMALL, 2, 64, (*_FP32, "pipeline.grad_slabs=24")),
    Case("50M, packed rows", _SMALL, 2, 256, (*_FP32, "data.packing=true")),
    Case("50M, evaluated", _SMALL, 2, 64, (*_FP32, "data.eval_share=0.3", "eval.steps=2")),
    Case("50M, resumed", _SMALL, 2, 64, _FP32, resumes=True),
    Case(
        "150M, FP32, recomputed, 2 x 2 rows",
        _MIDDLE,
        2,
        128,
        (*_FP32, _RECOMPUTE),
        accumulation=2,
    ),
    Case("150M, FP32, offloaded, length 512", _MIDDLE, 2, 512, (*_FP32, _OFFLOAD)),
    Case("150M, half kept", _MIDDLE, 2, 128, ("pipeline.activations={keep_layers: 8}",)),
    Case(
        "150M, eager updates",
        _MIDDLE,
        2,
        64,
        (*_FP32, "optimizer.update=eager", "optimizer.max_grad_norm=null"),
    ),
    Case("150M, saved each step", _MIDDLE, 2, 64, (*_FP32, "checkpoint.save_steps=1"), saves=True),
    Case("500M, fp32_split", _LARGE, 1, 64),
    Case("500M, FP32, resumed", _LARGE, 1, 64, _FP32, resumes=True),
)


def gpu_cases(shapes: Sequence[Shape]) -> tuple[Case, ...]:
    """Batch, length, slabs, kept layers, masters, updates, rows, save, load, for each shape."""
    eager = ("optimizer.update=eager", "optimizer.max_grad_norm=null", "pipeline.grad_slabs=8")
    judged = ("data.packing=true", "data.eval_share=0.3", "eval.steps=2")
    found: list[Case] = []
    for shape in shapes:
        n, half = shape.name, f"pipeline.activations={{keep_layers: {shape.layers // 2}}}"
        found += [
            Case(f"{n}, 8 x 1024", shape, 8, 1024),
            Case(f"{n}, 32 x 1024", shape, 32, 1024),
            Case(f"{n}, 1 x 32768", shape, 1, 32768),
            Case(f"{n}, recomputed", shape, 8, 1024, (_RECOMPUTE,)),
            Case(f"{n}, half kept", shape, 8, 1024, (half,)),
            Case(f"{n}, bf16 masters", shape, 8, 1024, ("optimizer.master=bf16",)),
            Case(f"{n}, eager updates, 8 slabs", shape, 8, 1024, eager),
            Case(f"{n}, pageable store", shape, 8, 1024, ("store.memory=pageable",)),
            Case(f"{n}, packed and evaluated", shape, 8, 1024, judged),
            Case(f"{n}, saved each step", shape, 8, 1024, ("checkpoint.save_steps=1",), saves=True),
            Case(f"{n}, resumed", shape, 8, 1024, resumes=True),
        ]
    return tuple(found)
