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

# A hybrid of reasoning and not: <think> is written for the last answer alone, and a server that
# wants none closes it in the prompt.
THINKING = (
    "{% set last = namespace(user=-1) %}{% for m in messages %}{% if m['role'] == 'user' %}"
    "{% set last.user = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}"
    "{% if m['role'] == 'assistant' %}{% set said = m['content'] %}"
    "{% set thought = m.reasoning_content or '' %}"
    "{% if '</think>' in said and not thought %}"
    "{% set thought = said.split('</think>')[0].split('<think>')[-1].strip('\n') %}"
    "{% set said = said.split('</think>')[-1].lstrip('\n') %}{% endif %}"
    "{% if loop.index0 > last.user %}"
    "{{ '<think>\n' + thought.strip('\n') + '\n</think>\n\n' }}{% endif %}{{ said }}"
    "{% for call in m.tool_calls or [] %}"
    "{{ '\n<tool_call>\n' + call.function | tojson + '\n</tool_call>' }}{% endfor %}"
    "{% else %}{{ m['content'] }}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    "{% if enable_thinking is defined and enable_thinking is false %}"
    "{{ '<think>\n\n</think>\n\n' }}{% endif %}{% endif %}"
)
# The prompt opens the reasoning, the template drops it from all turns but the last.
REASONER = (
    "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'user' %}"
    "{{ '<|user|>' + m['content'] }}{% elif m['role'] == 'system' %}{{ m['content'] }}"
    "{% else %}{% set said = m['content'] %}{% if not loop.last %}"
    "{% set said = said.split('</think>') | last %}{% endif %}"
    "{{ '<|assistant|>' + said + '</s>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|><think>\n' }}{% endif %}"
)
# Puts the system text into the last question, wherever that is.
MOVING = (
    "{% set asked = namespace(last=-1) %}{% for m in messages %}{% if m['role'] == 'user' %}"
    "{% set asked.last = loop.index0 %}{% endif %}{% endfor %}"
    "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'user' %}{{ '[INST] ' }}"
    "{% if loop.index0 == asked.last and messages[0]['role'] == 'system' %}"
    "{{ messages[0]['content'] + '\n\n' }}{% endif %}{{ m['content'] + '[/INST]' }}"
    "{% elif m['role'] == 'assistant' %}{{ ' ' + m['content'] | trim + '</s>' }}{% endif %}"
    "{% endfor %}"
)
# Ends a turn that calls a tool, and the last turn of a chat, each with a mark of its own.
CHANNELS = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] }}"
    "{% if m.tool_calls %}{{ m.tool_calls | tojson + '<|call|>' }}"
    "{% elif m['role'] == 'assistant' and loop.last %}{{ '<|return|>' }}"
    "{% else %}{{ '<|end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# A default system text, a date, and results as quoted JSON under a role of their own.
DATED = (
    "{% set date = strftime_now('%d %b %Y') %}{{ bos_token }}"
    "{{ '<|start_header_id|>system<|end_header_id|>\n\nToday: ' + date + '\n\n' }}"
    "{% if messages[0]['role'] == 'system' %}{{ messages[0]['content'] | trim }}"
    "{% set messages = messages[1:] %}{% endif %}{{ '<|eot_id|>' }}"
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}"
    "{% if m['role'] == 'tool' %}"
    "{{ '<|start_header_id|>ipython<|end_header_id|>\n\n' + m['content'] | tojson }}"
    "{% else %}{{ '<|start_header_id|>' + m['role'] + '<|end_header_id|>\n\n' }}"
    '{% if m.tool_calls %}{{ \'{"name": "\' + m.tool_calls[0].function.name + '
    "'\", \"parameters\": ' + m.tool_calls[0].function.arguments | tojson + '}' }}"
    "{% else %}{{ m['content'] | trim }}{% endif %}{% endif %}{{ '<|eot_id|>' }}{% endfor %}"
    "{% if add_generation_prompt %}"
    "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
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
    "dated": (DATED, "<|eot_id|>", "<|eot_id|>", True),
    "forgetful": (FORGETFUL, "<|im_end|>", "<|im_end|>", False),
    "moving": (MOVING, "</s>", "</s>", True),
}
# fmt: off
SPECIAL = [
    "<|im_end|>", "<|im_start|>", "<unk>", "<s>", "</s>", "<|start_header_id|>",
    "<|end_header_id|>", "<|eot_id|>", "<start_of_turn>", "<end_of_turn>", "<eos>", "[INST]",
    "[/INST]", "<|user|>", "<|assistant|>", "<|system|>", "<|end|>", "<|endoftext|>",
    "<|call|>", "<|return|>",
]
# fmt: on


def make_tokenizer(
    template: str | None = CHATML,
    eos: str | None = "<|im_end|>",
    pad: str | None = "<|im_end|>",
    merges: tuple[tuple[str, str], ...] = (),
    use_regex: bool = True,
    special: list[str] = SPECIAL,
) -> Any:
    """One token a byte, besides the special ones and what `merges` joins."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    names = [*special, *alphabet, *("".join(pair) for pair in merges)]
    vocab = {name: i for i, name in enumerate(names)}
    inner = Tokenizer(models.BPE(vocab=vocab, merges=list(merges), unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in special])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner, bos_token="<s>", eos_token=eos, pad_token=pad, unk_token="<unk>"
    )
    tokenizer.chat_template = template
    return tokenizer
