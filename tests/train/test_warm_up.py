"""Micro-batches that pass together are rehearsed, the most first, until some fit."""

import io
import re
import weakref
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from rich.console import Console

from megatrain_cli.config.load import load_config
from megatrain_cli.errors import PlanError
from megatrain_cli.model.skeleton import Skeleton
from megatrain_cli.plan.decide import Decisions
from megatrain_cli.plan.measured import Measured
from megatrain_cli.report.console import RunConsole
from megatrain_cli.train import warm_up as module
from megatrain_cli.train.assemble import prepare
from tests.plan.small import GPU
from tests.train.workspace import make_workspace

FIRST_THAT_FITS = 2


@pytest.mark.parametrize("finds_out", ["runs out", "measures too much"])
def test_fewer_micro_batches_are_rehearsed_after_the_memory_of_more_was_let_go(
    finds_out: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train = {"micro_batch_size": 2, "gradient_accumulation_steps": 8}
    loaded = load_config(make_workspace(tmp_path, train=train, pipeline={"device": "auto"}), [])
    skeleton, plan = prepare(loaded, GPU)
    assert plan.decisions.joined == 8
    tried: list[int] = []
    held: list[weakref.ref[torch.Tensor]] = []

    def rehearse(
        skeleton: Skeleton, functions: object, decisions: Decisions, device: object
    ) -> Measured:
        assert all(ref() is None for ref in held), "what the last rehearsal held is still there"
        assert emptied == ["device", "page-locked"] * len(tried)
        hidden = torch.zeros(1)
        held.append(weakref.ref(hidden))
        tried.append(decisions.joined)
        fits = decisions.joined <= FIRST_THAT_FITS
        if finds_out == "runs out" and not fits:
            raise torch.OutOfMemoryError
        graph = {layer.kind: 1 if fits else 1 << 60 for layer in skeleton.spec.decoder_layers}
        return Measured(graph, graph, 1, decisions.micro_batch_size * decisions.max_length)

    monkeypatch.setattr(module, "rehearse", rehearse)
    monkeypatch.setattr(module, "_settle_attention", lambda *_: "sdpa")
    emptied: list[str] = []
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append("device"))
    empty_host_cache = partial(emptied.append, "page-locked")
    monkeypatch.setattr(torch.accelerator, "empty_host_cache", empty_host_cache, raising=False)
    monkeypatch.setattr(Skeleton, "move_buffers", lambda *_: None)
    console = RunConsole(Console(file=io.StringIO()))
    found, _ = module.warm_up(loaded.config, skeleton, plan, 64, console)
    assert tried == [8, 4, 2]
    assert found.decisions.joined == FIRST_THAT_FITS
    assert emptied == ["device", "page-locked"] * 3
    assert found.known.measured is not None
    assert not found.shortfalls


def test_what_does_not_fit_a_gpu_is_not_tried_on_it(tmp_path: Path) -> None:
    loaded = load_config(make_workspace(tmp_path, pipeline={"device": "auto"}), [])
    skeleton, plan = prepare(loaded, replace(GPU, device_bytes=1))
    console = RunConsole(Console(file=io.StringIO()))
    with pytest.raises(PlanError, match="on NVIDIA H200 and 1 B is free"):
        module.warm_up(loaded.config, skeleton, plan, 64, console)


@pytest.mark.gpu
def test_page_locked_memory_that_nobody_holds_is_given_back() -> None:
    before, size = _shared_bytes(), 256 << 20
    tensor = torch.ones(size, dtype=torch.uint8, pin_memory=True)
    del tensor
    assert _shared_bytes() - before >= size, "torch holds on to it by itself"
    module._release_caches()
    assert _shared_bytes() - before < size // 4


def _shared_bytes() -> int:
    """Page-locked memory of the driver's is shared memory to the system."""
    found = re.search(r"RssShmem:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024
