"""Write a chat with the tokenizer's own template, and find what the assistant says in it.

[Note: where a turn begins and ends] A template is a program; its output has no marks. What the
model must learn of turn i is what a server would have it write: everything after the rendering
of the turns before i *with the generation prompt*, up to and including the mark that ends the
turn. Both places are found by rendering prefixes of the chat, and hold only if each is a prefix
of the whole. Templates that rewrite earlier turns (dropping `<think>` parts, moving the system
text) fail that test, and the row is refused: a guess would train on something else, silently.

The end mark cannot be searched for: a message may contain it as text ("say <|im_end|>"). What
the template puts behind a turn is taken from a probe instead, a chat whose answer is one made-up
word, and must then close each real turn too.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import takewhile
from typing import TYPE_CHECKING, cast

from jinja2 import TemplateError

from megatrain_cli.data.formats import Message, Row, check_text
from megatrain_cli.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# What a template, a program of someone else, may end with.
_FAULTS = (
    TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
)

# Letters only: no template trims, splits or escapes it.
_PROBE = "megatrainprobe"


@dataclass(frozen=True)
class TurnMarks:
    r"""What a template writes around an assistant turn.

    Attributes:
        prompt: The generation prompt, `"<|im_start|>assistant\n"`, or as much of its end as a
            question without it does not share; "" where there is none.
        end: From the answer to the end of the end-of-turn token, `"<|im_end|>"`.
        rest: What follows that token, `"\n"`; never something to learn.
    """

    prompt: str
    end: str
    rest: str


def find_turn_marks(tokenizer: "PreTrainedTokenizerBase") -> TurnMarks:
    """Learn a template's marks from a chat of one question and one made-up word.

    Raises:
        DataError: The template cannot write such a chat, or ends a turn without a special token,
            so that nothing would teach the model to stop.
    """
    return _marks_of(tokenizer, str(tokenizer.chat_template))


# One template serves all rows of a run; some vocabularies flag thousands of tokens as special.
@lru_cache(maxsize=4)
def _marks_of(tokenizer: "PreTrainedTokenizerBase", _chat_template: str) -> TurnMarks:
    asked: Message = {"role": "user", "content": "x"}
    answered: Message = {"role": "assistant", "content": _PROBE}
    try:
        before = _render(tokenizer, [asked])
        asking = _render(tokenizer, [asked], generation_prompt=True)
        after = _render(tokenizer, [asked, answered])
    except _FAULTS as error:
        raise DataError(
            f"The chat template cannot write one question and its answer: {error}"
        ) from None
    # Not all of `before` need be there when an answer is asked for: some templates close the chat.
    shared = zip(before, asking, strict=False)
    same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], shared))
    prompt = asking[same:]
    tail = after.rpartition(_PROBE)[2]
    tokens = {*tokenizer.all_special_tokens, *_added_special(tokenizer)}
    found = [(tail.index(token), -len(token), token) for token in tokens if token and token in tail]
    if not found:
        raise DataError(
            "The chat template ends an assistant turn without a special token, so the model would "
            "not learn to stop. Use a tokenizer whose template writes one."
        )
    at, _, token = min(found)
    cut = at + len(token)
    return TurnMarks(prompt, tail[:cut], tail[cut:])


def render_chat(row: Row, tokenizer: "PreTrainedTokenizerBase") -> str:
    """The whole chat as text.

    Raises:
        DataError: The template refuses it; names the turn and the template's reason.
    """
    try:
        text = _render(tokenizer, row.messages, row.tools)
    except _FAULTS as error:
        turn = _first_refused(row, tokenizer, str(error))
        raise _refused(row, turn, error) from None
    # Templates write more than what was checked as text: calls, tools, names.
    return check_text(text, "chat", row.where)


def find_turns(
    row: Row, text: str, marks: TurnMarks, tokenizer: "PreTrainedTokenizerBase"
) -> list[tuple[int, int]]:
    """Where each assistant turn begins and ends in `text`, in characters; the end mark included.

    See [Note: where a turn begins and ends].

    Raises:
        DataError: The template is not prefix-preserving for this chat.
    """
    spans = []
    for i, message in enumerate(row.messages):
        if message["role"] != "assistant":
            continue
        after = _render_until(row, i + 1, tokenizer) if i + 1 < len(row.messages) else text
        if i == 0:
            # No template writes an empty chat, so the prompt is looked up in the turn itself.
            at = after.find(marks.prompt)
            start = at + len(marks.prompt) if at >= 0 else -1
        else:
            before = _render_until(row, i, tokenizer, generation_prompt=True)
            start = len(before) if text.startswith(before) else -1
        if start < 0:
            raise _not_preserving(row, i)
        if not after.endswith(marks.end + marks.rest):
            raise DataError(
                f"{row.where}: turn {i + 1}: the chat template ends this turn in another way than "
                f"an ordinary answer ({marks.end.strip()!r}), so where it ends cannot be told."
            )
        # What follows the end mark may differ (some templates close the whole chat there).
        end = len(after) - len(marks.rest)
        if end < start or not text.startswith(after[:end]):
            raise _not_preserving(row, i)
        spans.append((start, end))
    return spans


def _render_until(
    row: Row, stop: int, tokenizer: "PreTrainedTokenizerBase", *, generation_prompt: bool = False
) -> str:
    """The first turns of a chat as text, for a template that has written the whole already."""
    try:
        return _render(
            tokenizer, row.messages[:stop], row.tools, generation_prompt=generation_prompt
        )
    except _FAULTS as error:
        raise _refused(row, stop, error) from None


def _render(
    tokenizer: "PreTrainedTokenizerBase",
    messages: Sequence[Message],
    tools: Sequence[dict[str, object]] = (),
    *,
    generation_prompt: bool = False,
) -> str:
    text = tokenizer.apply_chat_template(
        cast("list[dict[str, str]]", list(messages)),  # narrower than what templates take
        tools=list(tools) or None,
        tokenize=False,
        add_generation_prompt=generation_prompt,
    )
    return str(text)


def _added_special(tokenizer: "PreTrainedTokenizerBase") -> list[str]:
    """Tokens flagged as special in the vocabulary, which need not be named in the config."""
    added = tokenizer.added_tokens_decoder.values()
    return [token.content for token in added if token.special]


def _first_refused(row: Row, tokenizer: "PreTrainedTokenizerBase", reason: str) -> int:
    """The turn, counted from 1, with which a template begins to give this reason."""
    for stop in range(1, len(row.messages)):
        try:
            _render(tokenizer, row.messages[:stop], row.tools)
        except _FAULTS as error:
            if str(error) == reason:
                return stop
    return len(row.messages)


def _refused(row: Row, turn: int, error: Exception) -> DataError:
    role = row.messages[turn - 1]["role"]
    return DataError(f"{row.where}: turn {turn} ({role}): the chat template refuses it: {error}")


def _not_preserving(row: Row, i: int) -> DataError:
    return DataError(
        f"{row.where}: turn {i + 1}: the chat template is not prefix-preserving: it writes this "
        "turn, or those before it, in another way once the chat goes on, so what the model should "
        "learn cannot be told. Use a template with {% generation %} tags, or one answer a row."
    )
