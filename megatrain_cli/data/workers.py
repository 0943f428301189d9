"""Tokenising in several processes, with the result of one: chunks come back in their order.

Processes are started anew (`spawn`): a copy of this one would share its threads' locks, those of
the tokenizer and of torch among them, held for ever. They get rows, not files, so that every kind
of source is read in one place, and by one process; reading is far faster than tokenising.
"""

import os
import signal
import sys
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context, parent_process, resource_tracker
from typing import TYPE_CHECKING

from megatrain_cli.data.chunks import Chunk, EncodedChunk, Encoding, Look, encode_chunk
from megatrain_cli.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Chunks of a process that are read ahead: enough that none waits, and few enough to be small.
_AHEAD = 4

# Of a worker process.
_tools: list[tuple["PreTrainedTokenizerBase", Encoding]] = []


def encode_chunks(
    chunks: Iterable[Chunk],
    tokenizer: "PreTrainedTokenizerBase",
    encoding: Encoding,
    num_workers: int,
    look: Look | None = None,
) -> Iterator[EncodedChunk]:
    """Tokenise chunks, in order.

    Args:
        chunks: What they raise is raised here, behind all that was read before.
        tokenizer: Copied into each process.
        encoding: What else decides.
        num_workers: Processes; with 1 it is done in this one.
        look: Sees the first chunk of each source, which is tokenised in this process.

    Raises:
        DataError: Of reading, or of `look`; or a process was killed.
    """
    if num_workers == 1:
        for chunk in chunks:
            yield encode_chunk(chunk, tokenizer, encoding, look if chunk.first else None)
        return
    _start_tracker()
    pool = ProcessPoolExecutor(
        num_workers,
        mp_context=get_context("spawn"),
        initializer=_start,
        initargs=(tokenizer, encoding),
    )
    waiting: deque[Future[EncodedChunk] | EncodedChunk] = deque()
    failure: DataError | None = None
    try:
        for item in _until_failure(chunks):
            if isinstance(item, DataError):
                failure = item
            elif item.first:
                waiting.append(encode_chunk(item, tokenizer, encoding, look))
            else:
                waiting.append(pool.submit(_encode, item))
            while len(waiting) > _AHEAD * num_workers:
                yield _result(waiting.popleft())
        while waiting:
            yield _result(waiting.popleft())
    except BrokenProcessPool as error:
        raise DataError(
            "A process that tokenised rows was killed; the machine may be short of memory. Set "
            "`data.workers: 1`, or a smaller number."
        ) from error
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
    if failure is not None:
        raise failure


def _start_tracker() -> None:
    """Start the process that removes semaphores of one that was killed; it is to say nothing.

    Python's would warn of them on stderr, behind the last line of a run that a signal has ended.
    """
    sys.warnoptions.append("ignore:resource_tracker:UserWarning")
    try:
        resource_tracker.ensure_running()
    finally:
        sys.warnoptions.pop()


def _until_failure(chunks: Iterable[Chunk]) -> Iterator[Chunk | DataError]:
    """The chunks, and the error that ended them as the last item."""
    try:
        yield from chunks
    except DataError as error:
        yield error


def _result(found: Future[EncodedChunk] | EncodedChunk) -> EncodedChunk:
    return found if isinstance(found, EncodedChunk) else found.result()


def _start(tokenizer: "PreTrainedTokenizerBase", encoding: Encoding) -> None:
    """In a new process: a Ctrl-C is for the one that began it, and cores are shared out already."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _tools.append((tokenizer, encoding))


def _end_with_parent() -> None:
    """Else it would wait for rows for ever: it holds both ends of the pipe that it gets them from.

    A process that was killed, or that left at once, tells its pool nothing.
    """
    parent = parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _encode(chunk: Chunk) -> EncodedChunk:
    return encode_chunk(chunk, *_tools[0])
