"""Write a chat with the tokenizer's own template.

transformers runs the template, in Jinja's sandbox. A template may ask for today's date; it is
given the same one always (`_dated`), so that a row's tokens are the same on every day.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

from jinja2 import TemplateError, TemplateSyntaxError

from megatrain_cli.data.formats import Message, Row, check_text
from megatrain_cli.errors import DataError, RowError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# What a template, a program of someone else, may end with.
FAULTS = (
    TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
)

# The day that Llama's templates fall back to where no clock is at hand. trim_blocks eats the line
# break behind the macro, so nothing is added to the text.
_CLOCK = "{% macro strftime_now(format) %}{{ format" + (
    "".join(
        f" | replace('%{letter}', '{text}')"
        for letter, text in {
            "c": "Fri Jul 26 00:00:00 2024", "D": "07/26/24", "x": "07/26/24", "F": "2024-07-26",
            "T": "00:00:00", "X": "00:00:00", "R": "00:00", "r": "12:00:00 AM",
            "-d": "26", "-e": "26", "-m": "7", "-H": "0", "-I": "12", "-M": "0", "-S": "0",
            "-j": "208", "-y": "24", "-l": "12", "-k": "0",
            "d": "26", "e": "26", "m": "07", "Y": "2024", "y": "24", "C": "20", "G": "2024",
            "g": "24", "b": "Jul", "h": "Jul", "B": "July", "A": "Friday", "a": "Fri", "H": "00",
            "I": "12", "k": " 0", "l": "12", "M": "00", "S": "00", "f": "000000", "p": "AM",
            "P": "am", "j": "208", "u": "5", "w": "5", "U": "29", "V": "30", "W": "30", "Z": "",
            "z": "", "n": "\\n", "t": "\\t", "%": "%",
        }.items()
    )
    + " }}{% endmacro %}\n"
)  # fmt: skip


def render(
    tokenizer: "PreTrainedTokenizerBase",
    messages: Sequence[Message],
    tools: Sequence[dict[str, object]] = (),
    *,
    generation_prompt: bool = False,
    **flags: bool,
) -> str:
    """A chat as text.

    Args:
        tokenizer: Has a chat template.
        messages: What the template is given.
        tools: Schemas of what may be called.
        generation_prompt: Whether the text ends by asking for an answer.
        **flags: Variables of the template, such as `enable_thinking`.

    Raises:
        FAULTS: The template fails, or refuses the chat.
        DataError: It is no template.
    """
    variables: dict[str, Any] = dict(flags)  # whatever a template knows, not what mypy does
    template = template_of(tokenizer, tools)
    try:
        text = tokenizer.apply_chat_template(
            cast("list[dict[str, str]]", list(messages)),  # narrower than what templates take
            tools=list(tools) or None,
            chat_template=_dated(template),
            tokenize=False,
            add_generation_prompt=generation_prompt,
            **variables,
        )
    except TemplateSyntaxError as error:
        line = error.lineno - _dated(template).count("\n") + template.count("\n")
        raise DataError(
            f"The chat template is no Jinja template: line {line}: {error.message}"
        ) from None
    return str(text)


def render_tagged(
    tokenizer: "PreTrainedTokenizerBase", row: Row
) -> tuple[str, list[tuple[int, int]]]:
    """A chat as text, and what the template's generation tags enclose, in characters.

    Raises:
        FAULTS: The template fails, or refuses the chat.
    """
    # Imported here: transformers takes seconds, and this module is wanted without it.
    from transformers.utils.chat_template_utils import render_jinja_template  # noqa: PLC0415

    special: dict[str, Any] = tokenizer.special_tokens_map
    rendered = render_jinja_template(
        conversations=[list(row.messages)],
        tools=list(row.tools) or None,
        chat_template=_dated(template_of(tokenizer, row.tools)),
        return_assistant_tokens_mask=True,
        **special,
    )
    (text,), (spans,) = cast("tuple[list[str], list[list[tuple[int, int]]]]", rendered)
    return text, spans


def template_of(
    tokenizer: "PreTrainedTokenizerBase", tools: Sequence[dict[str, object]] = ()
) -> str:
    """The template that a chat is written with: some tokenizers have another one for tools."""
    return tokenizer.get_chat_template(None, cast("list[dict[str, str]]", list(tools)) or None)


def render_chat(row: Row, tokenizer: "PreTrainedTokenizerBase") -> str:
    """The whole chat as text.

    Raises:
        RowError: The template refuses it; names the turn and the template's reason.
    """
    try:
        text = render(tokenizer, row.messages, row.tools)
    except FAULTS as error:
        turn = _first_refused(row, tokenizer, str(error))
        raise refused(row, turn, error) from None
    # Templates write more than what was checked as text: calls, tools, names.
    return check_text(text, "chat", row.where)


def render_until(
    row: Row,
    stop: int,
    tokenizer: "PreTrainedTokenizerBase",
    *,
    generation_prompt: bool = False,
    **flags: bool,
) -> str:
    """The first turns of a chat as text, for a template that has written the whole already.

    Raises:
        RowError: The template refuses what comes before a turn that it has written.
    """
    try:
        return render(
            tokenizer,
            row.messages[:stop],
            row.tools,
            generation_prompt=generation_prompt,
            **flags,
        )
    except FAULTS as error:
        raise refused(row, stop, error) from None


def refused(row: Row, turn: int, error: Exception) -> RowError:
    """The error for a turn, counted from 1, that a template does not take."""
    role = row.messages[turn - 1]["role"]
    return RowError(row.where, f"turn {turn} ({role}): the chat template refuses it: {error}")


def _dated(template: str) -> str:
    return _CLOCK + template if "strftime_now" in template else template


def _first_refused(row: Row, tokenizer: "PreTrainedTokenizerBase", reason: str) -> int:
    """The turn, counted from 1, with which a template begins to give this reason."""
    for stop in range(1, len(row.messages)):
        try:
            render(tokenizer, row.messages[:stop], row.tools)
        except FAULTS as error:
            if str(error) == reason:
                return stop
    return len(row.messages)
