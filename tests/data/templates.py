"""Chat templates in the styles of well-known families, and a byte-level tokenizer to hold them."""

from typing import Any

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' "
    "+ '\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA_3 = (
    "{{ bos_token }}{% for m in messages %}{{ '<|start_header_id|>' + m['role'] + "
    "'<|end_header_id|>\n\n' + m['content'] | trim + '<|eot_id|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}"
    "{% endif %}"
)
GEMMA = (
    "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'system' %}"
    "{{ raise_exception('System role not supported') }}{% endif %}"
    "{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant') }}{% endif %}"
    "{{ '<start_of_turn>' + ('model' if m['role'] == 'assistant' else m['role']) + '\n' + "
    "m['content'] | trim + '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
MISTRAL = (
    "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'user' %}"
    "{{ '[INST] ' + m['content'] + ' [/INST]' }}{% else %}"
    "{{ ' ' + m['content'] + '</s>' }}{% endif %}{% endfor %}"
)
ZEPHYR = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>\n' + m['content'] + '</s>' + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)
# Closes the whole chat behind the last turn, unless an answer is asked for.
PHI_3 = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>\n' + m['content'] + '<|end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}"
    "{{ eos_token }}{% endif %}"
)
# The line break lies inside the tags, as in some templates that are meant for training.
TAGGED = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}"
    "{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] + '<|im_end|>' + '\n' }}"
    "{% endgeneration %}{% else %}{{ m['content'] + '<|im_end|>' + '\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# Drops what stands before </think> from every turn but the last.
FORGETFUL = (
    "{% for m in messages %}{% set said = m['content'] %}"
    "{% if not loop.last %}{% set said = said.split('</think>') | last %}{% endif %}"
    "{{ '<|im_start|>' + m['role'] + '\n' + said + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# Writes the tools into a system turn, and calls and results as JSON.
TOOLS = (
    "{% if tools %}{{ '<|im_start|>system\n' + tools | tojson + '<|im_end|>\n' }}{% endif %}"
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] }}"
    "{% if m.tool_calls %}{{ m.tool_calls | tojson }}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
NO_END = (
    "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)

# name -> template, end-of-text token, end-of-turn mark, whether the answer is trimmed
FAMILIES = {
    "chatml": (CHATML, "<|im_end|>", "<|im_end|>", False),
    "llama-3": (LLAMA_3, "<|eot_id|>", "<|eot_id|>", True),
    "gemma": (GEMMA, "<eos>", "<end_of_turn>", True),
    "mistral": (MISTRAL, "</s>", "</s>", False),
    "zephyr": (ZEPHYR, "</s>", "</s>", False),
    "phi-3": (PHI_3, "<|endoftext|>", "<|end|>", False),
    "tagged": (TAGGED, "<|im_end|>", "<|im_end|>", False),
}
# fmt: off
SPECIAL = [
    "<|im_end|>", "<|im_start|>", "<unk>", "<s>", "</s>", "<|start_header_id|>",
    "<|end_header_id|>", "<|eot_id|>", "<start_of_turn>", "<end_of_turn>", "<eos>", "[INST]",
    "[/INST]", "<|user|>", "<|assistant|>", "<|system|>", "<|end|>", "<|endoftext|>",
]
# fmt: on


def make_tokenizer(
    template: str | None = CHATML,
    eos: str | None = "<|im_end|>",
    pad: str | None = "<|im_end|>",
    merges: tuple[tuple[str, str], ...] = (),
    use_regex: bool = True,
) -> Any:
    """One token a byte, besides the special ones and what `merges` joins."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    names = [*SPECIAL, *alphabet, *("".join(pair) for pair in merges)]
    vocab = {name: i for i, name in enumerate(names)}
    inner = Tokenizer(models.BPE(vocab=vocab, merges=list(merges), unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in SPECIAL])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner, bos_token="<s>", eos_token=eos, pad_token=pad, unk_token="<unk>"
    )
    tokenizer.chat_template = template
    return tokenizer
