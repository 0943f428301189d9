"""Chat templates by name, and the use of another template than the tokenizer's own.

Written for this program from the formats that each family documents. A system text that a family
has no place for stands before the first question, as its own tools do it.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from megatrain_cli.data.template_file import read_template
from megatrain_cli.data.written import start_of
from megatrain_cli.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

NO_TEMPLATE = "none"
"""The name by which a tokenizer's own template is put aside: prompts stay plain text."""

# Roles with a mark each; the answer's mark is the prompt.
_CHATML = """\
{%- for message in messages -%}
{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}
"""
_LLAMA3 = """\
{%- for message in messages -%}
{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
{{- message['content'] | trim + '<|eot_id|>' }}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif -%}
"""
_PIPES = """\
{%- for message in messages -%}
{{ '<|' + message['role'] + '|>\\n' + message['content'] + END + '\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|assistant|>\\n' }}{%- endif -%}
"""
# Those without a system turn: its text goes before the first question.
_WITHOUT_SYSTEM = """\
{%- set seen = namespace(lead='') -%}
{%- for message in messages -%}
{%- if message['role'] == 'system' -%}
{%- if not loop.first -%}
{{ raise_exception('A system turn can only be the first.') }}
{%- endif -%}
{%- set seen.lead = message['content'] + '\\n\\n' -%}
{%- elif message['role'] == 'user' -%}
USER
{%- set seen.lead = '' -%}
{%- elif message['role'] == 'assistant' -%}
ASSISTANT
{%- else -%}
{{ raise_exception('There is no place for the role ' + message['role'] + '.') }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ PROMPT }}{%- endif -%}
"""


def _without_system(user: str, assistant: str, prompt: str) -> str:
    filled = _WITHOUT_SYSTEM.replace("USER", user).replace("ASSISTANT", assistant)
    filled = filled.replace("ASKED", "seen.lead + message['content']")
    return filled.replace("PROMPT", prompt)


@dataclass(frozen=True)
class KnownTemplate:
    """A template and the marks that the tokenizer must have as tokens of their own.

    The start token, where a tokenizer writes one by itself, is put before it.
    """

    text: str
    marks: tuple[str, ...] = ()


KNOWN = {
    "chatml": KnownTemplate(_CHATML, ("<|im_start|>", "<|im_end|>")),
    "llama3": KnownTemplate(
        _LLAMA3, ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
    ),
    "gemma": KnownTemplate(
        _without_system(
            "{{ '<start_of_turn>user\\n' + (ASKED) | trim + '<end_of_turn>\\n' }}",
            "{{ '<start_of_turn>model\\n' + message['content'] | trim + '<end_of_turn>\\n' }}",
            "'<start_of_turn>model\\n'",
        ),
        ("<start_of_turn>", "<end_of_turn>"),
    ),
    "mistral": KnownTemplate(
        _without_system(
            "{{ '[INST] ' + ASKED + ' [/INST]' }}",
            "{{ ' ' + message['content'] + eos_token }}",
            "''",
        ),
        ("[INST]", "[/INST]"),
    ),
    "phi3": KnownTemplate(_PIPES.replace("END", "'<|end|>'"), ("<|user|>", "<|end|>")),
    "zephyr": KnownTemplate(_PIPES.replace("END", "eos_token")),
    "alpaca": KnownTemplate(
        _without_system(
            "{{ '### Instruction:\\n' + ASKED + '\\n\\n' }}",
            "{{ '### Response:\\n' + message['content'] + eos_token + '\\n\\n' }}",
            "'### Response:\\n'",
        )
    ),
}  # fmt: skip
"""Name -> template."""


def use_template(tokenizer: "PreTrainedTokenizerBase", template: str | None) -> None:
    """Give a tokenizer another chat template.

    Args:
        tokenizer: Is changed; saved anew, it is saved with the template.
        template: A name of `KNOWN`, `none`, the path of a Jinja file, or None for its own.

    Raises:
        DataError: The file cannot be read, or the tokenizer lacks a mark of the template.
    """
    if template is None:
        return
    if template == NO_TEMPLATE:
        tokenizer.chat_template = None
    elif template in KNOWN:
        tokenizer.chat_template = _fitted(template, tokenizer)
    else:
        tokenizer.chat_template = read_template(Path(template))


def _fitted(name: str, tokenizer: "PreTrainedTokenizerBase") -> str:
    known = KNOWN[name]
    missing = [mark for mark in known.marks if len(_ids(tokenizer, mark)) != 1]
    if missing or tokenizer.eos_token is None:
        lacks = f"no token {missing[0]}" if missing else "no eos_token"
        raise DataError(
            f"data.template: `{name}` does not fit this model: its tokenizer has {lacks}. "
            "`alpaca` needs no mark but an eos_token; or name a file of your own."
        )
    starts = start_of(tokenizer) == (tokenizer.bos_token_id,)
    return ("{{- bos_token -}}" if starts else "") + known.text


def _ids(tokenizer: "PreTrainedTokenizerBase", text: str) -> list[int]:
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids
