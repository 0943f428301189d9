"""Names that users of other tools type, and the key that means the same here.

They are refused with the right name, never quietly accepted: two names for one thing would make
configs harder to compare, and some of the meanings differ in a detail.
"""

# tool -> its name -> our key. The first tool that has a name is the one that is named.
_BY_TOOL: dict[str, dict[str, str]] = {
    "Hugging Face": {
        "model_name_or_path": "model.path",
        "name_or_path": "model.path",
        "torch_dtype": "model.dtype",
        "bf16": "model.dtype",
        "fp16": "model.dtype",
        "attn_implementation": "model.attention",
        "per_device_train_batch_size": "train.micro_batch_size",
        "train_batch_size": "train.micro_batch_size",
        "num_train_epochs": "train.num_epochs",
        "full_determinism": "train.deterministic",
        "adam_epsilon": "optimizer.eps",
        "adam_beta1": "optimizer.betas",
        "adam_beta2": "optimizer.betas",
        "lr_scheduler_type": "schedule.type",
        "logging_steps": "logging.log_steps",
        "report_to": "logging.tensorboard",
        "save_total_limit": "checkpoint.keep_last",
        "eval_steps": "eval.steps",
        "eval_dataset": "data.eval",
        "eval_on_start": "eval.at_start",
        "train_dataset": "data.train",
        "torch_compile": "pipeline.compile",
        "dataset_config_name": "data.train",
    },
    "TRL": {
        "dataset_name": "data.train",
        "dataset_config": "data.train",
        "dataset_train_split": "data.train",
        "dataset_text_field": "data.train",
        "dataset_streaming": "data.train",
        "max_seq_length": "data.max_length",
    },
    "LLaMA-Factory": {
        "cutoff_len": "data.max_length",
        "template": "data.template",
        "dataset": "data.train",
        "dataset_dir": "data.train",
        "interleave_probs": "data.train",
        "max_samples": "data.train",
        "mix_strategy": "data.train",
        "flash_attn": "model.attention",
        "neat_packing": "data.packing",
        "preprocessing_num_workers": "data.workers",
        "val_size": "data.eval_share",
    },
    "ms-swift": {
        "attn_impl": "model.attention",
        "truncation_strategy": "data.overlong",
        "columns": "data.train",
        "custom_dataset_info": "data.train",
        "interleave_prob": "data.train",
        "strict": "data.on_bad_row",
        "val_dataset": "data.eval",
        "split_dataset_ratio": "data.eval_share",
    },
    "axolotl": {
        "base_model": "model.path",
        "sequence_len": "data.max_length",
        "chat_template": "data.template",
        "sample_packing": "data.packing",
        "excess_length_strategy": "data.overlong",
        "train_on_inputs": "data.train_on_prompt",
        "datasets": "data.train",
        "test_datasets": "data.eval",
        "val_set_size": "data.eval_share",
        "dataset_prepared_path": "data.cache_dir",
        "lr_scheduler": "schedule.type",
        "cosine_min_lr_ratio": "schedule.min_lr_ratio",
        "use_tensorboard": "logging.tensorboard",
    },
    "torchtune": {
        "checkpoint_dir": "model.path",
        "max_seq_len": "data.max_length",
        "batch_size": "train.micro_batch_size",
        "epochs": "train.num_epochs",
        "lr": "optimizer.learning_rate",
        "num_warmup_steps": "schedule.warmup_steps",
        "clip_grad_norm": "optimizer.max_grad_norm",
        "log_every_n_steps": "logging.log_steps",
        "keep_last_n_checkpoints": "checkpoint.keep_last",
    },
    "LitGPT": {
        "precision": "model.dtype",
        "lr_warmup_steps": "schedule.warmup_steps",
        "lr_warmup_fraction": "schedule.warmup_ratio",
        "max_norm": "optimizer.max_grad_norm",
        "log_interval": "logging.log_steps",
        "save_interval": "checkpoint.save_steps",
        "out_dir": "train.output_dir",
    },
    "MegaTrain": {
        "num_steps": "train.max_steps",
        "num_grad_slabs": "pipeline.grad_slabs",
        "beta1": "optimizer.betas",
        "beta2": "optimizer.betas",
    },
}

ALIASES: dict[str, tuple[str, str]] = {
    name: (tool, key) for tool, names in reversed(_BY_TOOL.items()) for name, key in names.items()
}
"""Another tool's name -> (that tool, our dotted key)."""
