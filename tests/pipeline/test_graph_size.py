"""What the head is counted to take on the CPU, held against what its loss is seen to take."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from megatrain_cli.units import MIB

# In a process of its own: the peak of this one would hide it. Vocabulary 64000, width 256.
PEAK = """
    import sys
    import torch
    from transformers import LlamaConfig
    from megatrain_cli.model.discover import make_skeleton
    from megatrain_cli.model.loss import chunked_loss, head_loss
    from megatrain_cli.pipeline.graph_size import measure_graphs
    from megatrain_cli.plan.plan import make_plan
    from megatrain_cli.probe.peaks import host_peak_bytes, host_resident_bytes
    from megatrain_cli.store.heap import settle_heap
    from tests.plan.small import CPU, make_config

    vocabulary, width, count = 64000, 256, int(sys.argv[2])
    dtype = getattr(torch, sys.argv[1])
    settle_heap()
    config = LlamaConfig(vocab_size=vocabulary, hidden_size=width, intermediate_size=256,
                         num_hidden_layers=1, num_attention_heads=4, max_position_embeddings=4096)
    skeleton = make_skeleton(config, dtype=dtype, attention="sdpa")
    asked = make_config({"model": {"dtype": sys.argv[1]}, "data": {"max_length": count},
                         "optimizer": {"master": "fp32"}})
    plan = make_plan(asked, skeleton.spec, skeleton.layouts, CPU)
    counted = measure_graphs(skeleton, plan.decisions).head_bytes

    leaf = torch.full((vocabulary, width), 1.0, dtype=dtype).requires_grad_()
    loss = head_loss(lambda own, tied, hidden: torch.nn.functional.linear(hidden, own[0]))
    sums = [torch.full((vocabulary, width), 1.0)]
    targets = torch.zeros(count, dtype=torch.int64)

    def step(n):
        hidden = torch.full((n, width), 1.0, dtype=dtype)
        chunked_loss(loss, [leaf], [], hidden, targets[:n], scale=1.0, chunk=n, sums=sums)

    step(2)  # what is used for the first time
    start = max(host_resident_bytes(), host_peak_bytes() - leaf.nbytes)
    step(count)
    print(counted, host_peak_bytes() - start)
"""


def counted_and_measured(dtype: str, positions: int) -> tuple[int, int]:
    root = Path(__file__).parents[2]
    run = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(PEAK), dtype, str(positions)],
        check=True,
        capture_output=True,
        text=True,
        cwd=root,
        env=os.environ | {"PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"},
    )
    counted, measured = map(int, run.stdout.split())
    return counted, measured


# The weight is the larger part, or logits are.
SHORT, LONG = 64, 640


@pytest.mark.parametrize("positions", [SHORT, LONG])
def test_a_chunk_takes_what_the_larger_of_its_two_moments_does(positions: int) -> None:
    counted, measured = counted_and_measured("float32", positions)
    assert abs(counted - measured) < 0.05 * measured + 6 * MIB


@pytest.mark.parametrize("positions", [SHORT, LONG])
def test_in_bf16_a_chunk_is_counted_no_smaller_than_it_is(positions: int) -> None:
    counted, measured = counted_and_measured("bfloat16", positions)
    assert counted > measured
