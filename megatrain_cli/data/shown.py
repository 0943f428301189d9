"""Training rows as a person or another program looks at them: what is learnt, and whence it came.

Rows are shown in the order of the files, whatever order they are trained in. A pack is shown as it
is trained, at the place of the first of its documents.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from megatrain_cli.data.batch import join
from megatrain_cli.data.examples import cut_spans
from megatrain_cli.data.held_out import Documents, held_out_lines
from megatrain_cli.data.load import LoadedData
from megatrain_cli.data.pack import Packs
from megatrain_cli.data.template import IGNORED
from megatrain_cli.units import show_number

Spans = list[tuple[str, bool]]

# Sources that a person is told of.
_SHOWN = 20


@dataclass(frozen=True)
class ShownDocument:
    """One document of a row.

    Attributes:
        source: The file, or the data set of a hub.
        line: The line or row of the file.
        start: Where it begins in its row; its positions count from 0 there.
        input_ids: `(length,)` int64.
        labels: `(length,)` int64, not shifted; -100 where nothing is learnt.
        spans: Its text, cut where training begins and ends: `(text, is trained on)`.
    """

    source: str
    line: int
    start: int
    input_ids: NDArray[np.int64]
    labels: NDArray[np.int64]
    spans: Spans

    @property
    def num_tokens(self) -> int:
        """Its length."""
        return len(self.input_ids)

    @property
    def num_targets(self) -> int:
        """Tokens that are predicted and compared: nothing predicts the first."""
        return int(np.count_nonzero(self.labels[1:] != IGNORED))


@dataclass(frozen=True)
class ShownRow:
    """One training row.

    Attributes:
        documents: In their order; one, unless rows are packs.
        capacity: Tokens that a pack has room for; None where a row is one document.
    """

    documents: tuple[ShownDocument, ...]
    capacity: int | None = None

    @property
    def num_tokens(self) -> int:
        """Of all its documents."""
        return sum(document.num_tokens for document in self.documents)

    @property
    def num_targets(self) -> int:
        """Of all its documents."""
        return sum(document.num_targets for document in self.documents)

    def to_json(self) -> dict[str, object]:
        """For another program; `source` and `line` are lists where the row is a pack."""
        ids, labels = join([(one.input_ids, one.labels) for one in self.documents])
        trained = [text for one in self.documents for text, is_trained in one.spans if is_trained]
        values: dict[str, object] = {
            "source": [one.source for one in self.documents],
            "line": [one.line for one in self.documents],
            "input_ids": ids.tolist(),
            "labels": labels.tolist(),
            "trained_text": trained,
        }
        if self.capacity is None:
            [document] = self.documents
            return values | {"source": document.source, "line": document.line}
        documents = [
            {
                "source": one.source,
                "line": one.line,
                "start": one.start,
                "tokens": one.num_tokens,
                "targets": one.num_targets,
            }
            for one in self.documents
        ]
        return values | {"documents": documents}


def show_rows(
    data: LoadedData, documents: Documents, packs: Packs | None, count: int
) -> Iterator[ShownRow]:
    """The first rows that are trained on, at most `count`, in the order of the files."""
    if packs is None:
        for i in range(min(count, len(documents))):
            yield ShownRow((_document(data, documents.id_of(i), 0),))
        return
    first = np.minimum.reduceat(packs.documents, packs.offsets[:-1])
    for row in np.argsort(first, kind="stable")[:count].tolist():
        parts: list[ShownDocument] = []
        start = 0
        for i in packs.row(row):
            parts.append(_document(data, documents.id_of(i), start))
            start += parts[-1].num_tokens
        yield ShownRow(tuple(parts), packs.capacity)


def _document(data: LoadedData, i: int, start: int) -> ShownDocument:
    input_ids, labels = data.prepared.examples.row(i)
    if start:
        # Nothing predicts the first token of a document. In a pack, whoever shifts the labels
        # would have the last token of the document before predict it.
        labels[0] = IGNORED
    source, line = data.place(i)
    spans = cut_spans(input_ids, labels, data.tokenizer)
    return ShownDocument(source, line, start, input_ids, labels, spans)


def count_rows(data: LoadedData, documents: Documents, packs: Packs | None) -> dict[str, object]:
    """What became of all rows, by source and reason, and how long those that are trained on are."""
    summary = data.prepared.summary
    used = zip(data.sources, summary.used_by_source, strict=True)
    lengths = documents.lengths if packs is None else packs.lengths
    tokens, targets = summary.num_tokens, summary.num_targets
    if documents.ids is not None:
        tokens, targets = documents.count_tokens()
    counts = summary.to_json() | {
        "num_rows": len(lengths),
        "num_held_out": len(data.prepared.examples) - len(documents),
        "num_trained_tokens": tokens,
        "num_trained_targets": targets,
        "sources": [
            {"source": source.name, "format": summary.formats.get(source.name), "used": count}
            for source, count in used
        ],
        "row_lengths": measure_lengths(lengths),
    }
    if packs is not None:
        counts["packing"] = {
            "documents": len(packs.documents),
            "capacity": packs.capacity,
            "efficiency": packs.efficiency,
        }
    return counts


def measure_lengths(lengths: NDArray[np.int64]) -> dict[str, float]:
    """Of rows, in tokens; a quantile is the smallest length that so many rows are up to."""
    low, median, high, top = np.quantile(lengths, [0, 0.5, 0.95, 1], method="inverted_cdf").tolist()
    return {"min": low, "median": median, "mean": float(lengths.mean()), "p95": high, "max": top}


def count_lines(data: LoadedData, documents: Documents, packs: Packs | None) -> list[str]:
    """The same for a person, a line a fact."""
    summary = data.prepared.summary
    lines = summary.lines()
    if len(data.sources) > 1:
        used = zip(data.sources, summary.used_by_source, strict=True)
        lines += [
            f"{source.name}: {show_number(count, 'row')} used"
            for source, count in islice(used, _SHOWN)
        ]
        if len(data.sources) > _SHOWN:
            lines.append(
                f"and {show_number(len(data.sources) - _SHOWN, 'more source')}; --json has them all"
            )
    lines += held_out_lines(documents)
    if packs is not None:
        lines.append(packs.line())
    lengths = documents.lengths if packs is None else packs.lengths
    m = measure_lengths(lengths)
    lines.append(
        f"tokens of a row: shortest {m['min']}, median {m['median']}, mean {m['mean']:.1f}, "
        f"95 % up to {m['p95']}, longest {m['max']}"
    )
    return lines
