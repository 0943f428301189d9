"""The law of labels: what is learnt is what the assistant said, behind what a server would give.

The expected text comes from the row by rules that a person would write down, and the prompts from
transformers; nothing of it goes through the code that is tested.
"""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from megatrain_cli.data.formats import Message, Row
from megatrain_cli.data.template import IGNORED, SkipReason
from tests.data.chats import chat, encode, served, taught
from tests.data.templates import FAMILIES, SPECIAL, THINKING, TOOLS, make_tokenizer

TOKENIZERS = {
    name: make_tokenizer(template, eos) for name, (template, eos, _, _) in FAMILIES.items()
}
SAMPLE = Path(__file__).parents[2] / "models" / "SmolLM2-135M-Instruct"

# Texts that a search for marks would trip over.
contents = st.lists(
    st.one_of(
        st.sampled_from([*SPECIAL, "assistant\n", "\n", " ", "\u2028", "é", "\U0001f600", "yes"]),
        st.text(st.characters(exclude_categories=["Cs"]), max_size=5),
    ),
    max_size=5,
).map("".join)
exchanges = st.lists(st.tuples(contents, contents), min_size=1, max_size=4)


def without_mark(said: str, end: str) -> str:
    """An answer that was written with the end mark already does not get a second one."""
    while said.rstrip().endswith(end):
        said = said.rstrip().removesuffix(end)
    return said


def spelled(said: str, tokenizer: Any) -> str:
    """A real vocabulary does not have every character."""
    return str(tokenizer.decode(tokenizer(said, add_special_tokens=False)["input_ids"]))


def check(
    talk: list[tuple[str, str]],
    tokenizer: Any,
    end: str,
    *,
    lead: str = "",
    trims: bool = False,
    dated: bool = False,
) -> None:
    turns = [t for asked, said in talk for t in (("user", asked), ("assistant", said))]
    encoded = encode(chat(*turns), tokenizer)
    answers = [without_mark(said, end) for _, said in talk]
    if not any(said.strip() for _, said in talk):
        assert encoded.skipped is SkipReason.EMPTY
        return
    assert taught(encoded, tokenizer) == [
        lead + spelled(said.strip() if trims else said, tokenizer) + end for said in answers
    ]
    if dated:
        return
    clean = [t for (asked, _), said in zip(talk, answers, strict=True)
             for t in (("user", asked), ("assistant", said))]  # fmt: skip
    prompts = served(chat(*clean), tokenizer)
    for part in (encoded, *encoded.rest):
        starts = [
            i
            for i, label in enumerate(part.labels)
            if label != IGNORED and part.labels[i - 1] == IGNORED
        ]
        # Behind an answer that began with a line break the history is cut as it was learnt, not as
        # a server would cut it anew: the same text.
        assert part.input_ids[: starts[0]] in prompts
        shown = {tokenizer.decode(prompt) for prompt in prompts}
        assert {tokenizer.decode(part.input_ids[:start]) for start in starts} <= shown


@pytest.mark.parametrize("family", sorted(FAMILIES))
@given(exchanges)
@settings(max_examples=40)
@example([("yes", "yes"), ("", "a"), ("b", "")])
@example([("say <|im_end|>\n<|im_start|>assistant\nno", " a <|im_end|> b </s>\n")])
def test_exactly_the_assistant_turns_are_taught(family: str, talk: list[tuple[str, str]]) -> None:
    _, _, end, trims = FAMILIES[family]
    lead = " " if family in ("mistral", "moving") else ""
    check(talk, TOKENIZERS[family], end, lead=lead, trims=trims, dated=family == "dated")


words = st.text(st.characters(exclude_categories=["Cs", "Zs", "Cc"]), max_size=8).filter(
    lambda word: "think>" not in word
)


@given(st.lists(st.tuples(words, st.one_of(st.none(), words), words), min_size=1, max_size=4))
@settings(max_examples=60)
def test_reasoning_is_taught_with_its_answer_and_no_empty_one_is(
    talk: list[tuple[str, str | None, str]],
) -> None:
    tokenizer = make_tokenizer(THINKING)
    messages: list[Message] = []
    wanted = []
    for asked, thought, said in talk:
        answer: Message = {"role": "assistant", "content": said + "."}
        head = ""
        if thought:
            answer["reasoning_content"] = thought
            head = f"<think>\n{thought}\n</think>\n\n"
        messages += [{"role": "user", "content": asked}, answer]
        wanted.append(f"{head}{said}.<|im_end|>")
    encoded = encode(Row("f:1", "messages", tuple(messages)), tokenizer)
    assert taught(encoded, tokenizer) == wanted
    assert len(encoded.rest) == len(talk) - 1, "each answer stands behind what a server shows"


@given(st.lists(st.sampled_from(["call", "ask", "mute"]), min_size=1, max_size=6), contents)
@settings(max_examples=40)
def test_calls_are_taught_results_and_muted_turns_are_not(steps: list[str], odd: str) -> None:
    tokenizer = make_tokenizer(TOOLS)
    messages: list[Message] = [{"role": "user", "content": "u" + odd}]
    wanted = []
    for i, step in enumerate(steps):
        if step == "call":
            called = [{"function": {"name": f"f{i}", "arguments": {"x": i}}}]
            messages.append({"role": "assistant", "content": "", "tool_calls": called})
            messages.append({"role": "tool", "content": f"SECRET{i}" + odd})
            shown = f'[{{"function": {{"name": "f{i}", "arguments": {{"x": {i}}}}}}}]'
            wanted.append(f"{shown}<|im_end|>")
        else:
            messages.append({"role": "assistant", "content": f"a{i}"})
            if step == "mute":
                messages[-1]["train"] = False
            else:
                wanted.append(f"a{i}<|im_end|>")
            messages.append({"role": "user", "content": odd})
    encoded = encode(Row("f:1", "messages", tuple(messages), tools=({"name": "f"},)), tokenizer)
    if not wanted:
        assert encoded.skipped is SkipReason.NOT_TAUGHT
        return
    assert taught(encoded, tokenizer) == wanted
    assert all(f"SECRET{i}" in tokenizer.decode(encoded.input_ids)
               for i, step in enumerate(steps) if step == "call")  # fmt: skip


@pytest.mark.slow
@pytest.mark.skipif(not SAMPLE.is_dir(), reason="scripts/get_sample_model.py makes the model")
@given(exchanges)
@settings(max_examples=30, suppress_health_check=[HealthCheck.too_slow], deadline=None)
def test_the_same_with_the_tokenizer_and_template_of_a_real_model(
    talk: list[tuple[str, str]],
) -> None:
    check(talk, real_tokenizer(), "<|im_end|>")


def real_tokenizer(cache: dict[str, Any] = {}) -> Any:  # noqa: B006
    from megatrain_cli.data.examples import load_tokenizer

    if "it" not in cache:
        cache["it"] = load_tokenizer(SAMPLE)
    return cache["it"]
