"""What a template writes around an assistant turn, learnt from chats with made-up words.

The end mark cannot be searched for in a row: a message may contain it as text ("say
<|im_end|>"). What a template puts behind a turn is taken from probes instead, chats whose answer
is one made-up word or calls a made-up tool, and must then close each real turn too.
"""

from dataclasses import dataclass
from functools import lru_cache
from itertools import takewhile
from typing import TYPE_CHECKING

from megatrain_cli.data.formats import Message
from megatrain_cli.data.render import FAULTS, render, template_of
from megatrain_cli.data.tokenise import tokenise
from megatrain_cli.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Letters only: no template trims, splits or escapes it.
_PROBE = "megatrainprobe"

# Variables by which a server asks for an answer without reasoning.
_THINKING = ("enable_thinking", "thinking")


@dataclass(frozen=True)
class TurnMarks:
    r"""What a template writes around an assistant turn.

    Attributes:
        prompt: The generation prompt, `"<|im_start|>assistant\n"`, or as much of its end as a
            question without it does not share; "" where there is none.
        end: From the answer to the end of the end-of-turn token, `"<|im_end|>"`.
        rest: What follows that token, `"\n"`; never something to learn.
        token: The end-of-turn token itself: the end of `end`.
        call_end: What a turn that calls a tool ends with, where that is another token; else
            `end`.
        call_rest: What follows `call_end`.
        heads: What may stand before an answer that opens a chat, longest first.
        flags: Sets of variables that a server may ask for an answer with.
    """

    prompt: str
    end: str
    rest: str
    token: str
    call_end: str
    call_rest: str
    heads: tuple[str, ...]
    flags: tuple[dict[str, bool], ...]


def find_turn_marks(tokenizer: "PreTrainedTokenizerBase") -> TurnMarks:
    """Learn a template's marks from a chat of one question and one made-up word.

    Raises:
        DataError: The template cannot write such a chat, or ends a turn without a special token,
            so that nothing would teach the model to stop.
    """
    try:
        return _marks_of(tokenizer, template_of(tokenizer))
    except FAULTS as error:  # of several templates none is the ordinary one
        raise DataError(f"The tokenizer's chat template cannot be used: {error}") from None


# One template serves all rows of a run; some vocabularies flag thousands of tokens as special.
@lru_cache(maxsize=4)
def _marks_of(tokenizer: "PreTrainedTokenizerBase", template: str) -> TurnMarks:
    asked: Message = {"role": "user", "content": "x"}
    answered: Message = {"role": "assistant", "content": _PROBE}
    try:
        before = render(tokenizer, [asked])
        asking = render(tokenizer, [asked], generation_prompt=True)
        after = render(tokenizer, [asked, answered])
    except FAULTS as error:
        raise DataError(
            f"The chat template cannot write one question and its answer: {error}"
        ) from None
    # Not all of `before` need be there when an answer is asked for: some templates close the chat.
    shared = zip(before, asking, strict=False)
    prompt = asking[sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], shared)) :]
    tail = after.rpartition(_PROBE)[2]
    tokens = _special(tokenizer)
    found = [(tail.index(token), -len(token), token) for token in tokens if token in tail]
    if not found:
        raise DataError(
            "The chat template ends an assistant turn without a special token, so the model would "
            "not learn to stop. Use a tokenizer whose template writes one, or set "
            "`data.template` to one whose marks this tokenizer has."
        )
    at, _, token = min(found)
    if len(tokenise(tokenizer, [token])[0]) != 1:
        raise DataError(
            f"The tokenizer spells {token!r}, with which the chat template ends an assistant turn, "
            "as several tokens, so the model would not learn to stop. Set `split_special_tokens` "
            "in its tokenizer_config.json to false."
        )
    cut = at + len(token)
    end, rest = tail[:cut], tail[cut:]
    call_end, call_rest = _ends_of_call(tokenizer, asked, tokens, end, rest)
    flags = [{name: False} for name in _THINKING if name in template]
    heads = _heads(tokenizer, answered, prompt)
    return TurnMarks(prompt, end, rest, token, call_end, call_rest, heads, ({}, *flags))


def _ends_of_call(
    tokenizer: "PreTrainedTokenizerBase", asked: Message, tokens: set[str], end: str, rest: str
) -> tuple[str, str]:
    """What a turn that calls a tool ends with: the last special token, with blanks behind it."""
    call = {"type": "function", "function": {"name": _PROBE, "arguments": {"a": _PROBE}}}
    calling: Message = {"role": "assistant", "content": "", "tool_calls": [call]}
    try:
        text = render(tokenizer, [asked, calling])
    except FAULTS:  # it writes no calls; a row that has some is refused when it is written
        return end, rest
    bare = text.rstrip()
    last = max((token for token in tokens if bare.endswith(token)), key=len, default=None)
    if text.endswith(end + rest) or last is None or _PROBE not in text:
        return end, rest
    return last, text[len(bare) :]


def _heads(tokenizer: "PreTrainedTokenizerBase", answered: Message, prompt: str) -> tuple[str, ...]:
    """What a template writes before an answer that opens a chat: no row's text is in it."""
    try:
        head = render(tokenizer, [answered]).partition(_PROBE)[0]
    except FAULTS:  # a chat cannot open so
        return ()
    at = head.rfind(prompt) if prompt else -1
    return (head,) if at < 0 else (head, head[: at + len(prompt)])


def _special(tokenizer: "PreTrainedTokenizerBase") -> set[str]:
    """Tokens flagged as special, in the config or in the vocabulary alone."""
    added = tokenizer.added_tokens_decoder.values()
    named = {*tokenizer.all_special_tokens, *(t.content for t in added if t.special)}
    return {token for token in named if token}
