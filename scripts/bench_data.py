"""How fast data is prepared, read again and resumed into, with the peak of memory.

Writes JSONL of chats, prepares it with 1 and with more processes, prepares it again from the cache,
and asks for a row far into 10 million. Each measurement runs in a process of its own, so that its
peak of memory is its own.

    python scripts/bench_data.py --model MODEL_FOLDER --megabytes 1000 --workers 1,2
"""

import argparse
import json
import random
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

MB = 1_000_000
_WORDS = 4000
_LETTERS = "etaoinshrdlucmfwypvbgk"


def write_rows(path: Path, num_bytes: int, seed: int = 0) -> int:
    """Chats of one or two turns, of 20 to 600 words that no tokenizer knows by heart; how many."""
    draw = random.Random(seed)
    words = ["".join(draw.choices(_LETTERS, k=draw.randint(2, 9))) for _ in range(_WORDS)]
    size = count = 0
    with path.open("w", encoding="utf-8") as file:
        while size < num_bytes:
            turns = []
            for _ in range(draw.randint(1, 2)):
                turns.append({"role": "user", "content": " ".join(draw.choices(words, k=20))})
                said = " ".join(draw.choices(words, k=int(draw.lognormvariate(4.6, 0.8)) + 1))
                turns.append({"role": "assistant", "content": said})
            size += file.write(json.dumps({"messages": turns}) + "\n")
            count += 1
    return count


def measure_preparation(data: Path, model: Path, cache: Path, workers: int) -> dict[str, float]:
    """In this process: prepare, or take from the cache."""
    from megatrain_cli.data.chunks import Encoding
    from megatrain_cli.data.examples import load_tokenizer
    from megatrain_cli.data.prepare import HowToPrepare, prepare
    from megatrain_cli.data.source import SourceFile

    tokenizer = load_tokenizer(model)
    began = time.perf_counter()
    found = prepare(
        [SourceFile(data)],
        tokenizer,
        Encoding(2048, "truncate", train_on_prompt=False),
        how=HowToPrepare(workers, cache),
    )
    seconds = time.perf_counter() - began
    return {
        "seconds": seconds,
        "rows": found.summary.num_read,
        "tokens": found.summary.num_tokens,
        "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / MB,
        "worker_peak_mb": resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024 / MB,
    }


def measure_order(num_rows: int) -> dict[str, float]:
    """Seconds until a resumed run knows its next rows: shuffled, and packed."""
    import numpy as np

    from megatrain_cli.data.pack import pack_documents
    from megatrain_cli.data.sampler import RowStream, packing_order

    began = time.perf_counter()
    RowStream(num_rows, 1, shuffle=True).rows(num_rows - 1, num_rows + 31)
    plain = time.perf_counter() - began
    drawn = np.random.default_rng(0).lognormal(5.5, 0.9, num_rows)
    lengths = np.clip(drawn.astype(np.int64), 1, 2048)
    pack_documents(lengths[:10], [packing_order(10, 1)], 2048)  # compiled, as at any second start
    began = time.perf_counter()
    packs = pack_documents(lengths, [packing_order(num_rows, 1)], 2048)
    RowStream(len(packs), 1, shuffle=True).rows(len(packs) - 1, len(packs) + 31)
    return {
        "plain_seconds": plain,
        "packed_seconds": time.perf_counter() - began,
        "packing_efficiency": packs.efficiency,
        "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / MB,
    }


def in_own_process(*args: object) -> dict[str, float]:
    """One measurement, by this script in another process."""
    done = subprocess.run(
        [sys.executable, __file__, *map(str, args)], check=True, capture_output=True, text=True
    )
    result: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return result


def main() -> None:
    """Measure, or be one measurement."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, help="a folder with a tokenizer")
    parser.add_argument("--megabytes", type=int, default=1000)
    parser.add_argument("--workers", default="1,2")
    parser.add_argument("--rows", type=int, default=10_000_000, help="of the order")
    parser.add_argument("--one", nargs=4, metavar=("DATA", "MODEL", "CACHE", "WORKERS"))
    parser.add_argument("--order", action="store_true")
    given = parser.parse_args()
    if given.one:
        data, model, cache, workers = given.one
        result = measure_preparation(Path(data), Path(model), Path(cache), int(workers))
        print(json.dumps(result))
        return
    if given.order:
        print(json.dumps(measure_order(given.rows)))
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        count = write_rows(folder / "rows.jsonl", given.megabytes * MB)
        size = (folder / "rows.jsonl").stat().st_size / MB
        print(f"{count} rows, {size:.0f} MB")
        cache = folder
        for workers in given.workers.split(","):
            cache = folder / f"cache-{workers}"
            found = in_own_process("--one", folder / "rows.jsonl", given.model, cache, workers)
            seconds = found["seconds"]
            print(
                f"{workers} processes: {seconds:.1f} s, {count / seconds:.0f} rows/s, "
                f"{size / seconds:.2f} MB/s, {found['tokens'] / seconds:.0f} tokens/s, peak "
                f"{found['peak_mb']:.0f} MB, of a worker {found['worker_peak_mb']:.0f} MB"
            )
        found = in_own_process("--one", folder / "rows.jsonl", given.model, cache, 1)
        print(f"from the cache: {found['seconds']:.2f} s, peak {found['peak_mb']:.0f} MB")
    found = in_own_process("--order", "--rows", given.rows)
    print(
        f"row {given.rows - 1} of {given.rows}: {found['plain_seconds'] * 1000:.2f} ms; with packs "
        f"made anew: {found['packed_seconds']:.1f} s ({found['packing_efficiency']:.2%} full, peak "
        f"{found['peak_mb']:.0f} MB)"
    )


if __name__ == "__main__":
    main()
