"""Let a trained model write, with plain Hugging Face and nothing of megatrain.

Give the folder of a run, of a checkpoint or of any Hugging Face model: the newest model below it
is loaded, and continues each prompt greedily. Text goes to stdout, talk to stderr.
"""

import argparse
import os
import sys
from pathlib import Path

# What the demo was trained to answer, and how the language reference begins its answers.
DEMO_PROMPTS = (
    "What does the Python language reference say about 'break'?",
    "What does the Python language reference say about 'lambda'?",
)


def find_model(folder: Path) -> Path:
    """The newest folder at or below `folder` that holds a config and weights."""
    if not folder.is_dir():
        sys.exit(f"{folder}: there is no such folder")
    # What is being written or removed has a hidden name, and is no model.
    found = [
        config
        for config in folder.rglob("config.json")
        if any(config.parent.glob("model*.safetensors"))
        and not any(part.startswith(".") for part in config.relative_to(folder).parts)
    ]
    if not found:
        sys.exit(f"{folder}: no folder below it holds config.json and model*.safetensors")
    return max(found, key=lambda config: config.stat().st_mtime).parent


def main() -> None:
    """Load, and write one continuation a prompt."""
    parser = argparse.ArgumentParser(description="Let a trained model write.")
    parser.add_argument("folder", type=Path, help="a run, a checkpoint or a model folder")
    parser.add_argument("--prompt", action="append", help="may be given more than once")
    parser.add_argument("--max-new-tokens", type=int, default=60)
    parser.add_argument("--raw", action="store_true", help="continue the text: no chat template")
    asked = parser.parse_args()

    folder = find_model(asked.folder)
    print(f"model: {folder}", file=sys.stderr, flush=True)
    # Before the import, which reads it: a folder is at hand, so no hub is needed.
    os.environ["HF_HUB_OFFLINE"] = "1"
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    # FP32: many CPUs have no BF16 arithmetic, and emulate it slowly.
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.eval()
    for prompt in asked.prompt or DEMO_PROMPTS:
        text = prompt
        is_chat = tokenizer.chat_template is not None and not asked.raw
        if is_chat:
            text = tokenizer.apply_chat_template(
                [{"role": "user", "content": prompt}], tokenize=False, add_generation_prompt=True
            )
        # A chat template writes its start token itself.
        encoded = tokenizer(text, add_special_tokens=not is_chat, return_tensors="pt")
        with torch.inference_mode():
            written = model.generate(
                **encoded, max_new_tokens=asked.max_new_tokens, do_sample=False
            )
        new = written[0, encoded["input_ids"].shape[1] :]
        print(f"> {prompt}\n{tokenizer.decode(new, skip_special_tokens=True)}\n", flush=True)


if __name__ == "__main__":
    main()
