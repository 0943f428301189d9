"""Every key of a run's YAML file: its kind, its default and one sentence on what it does.

A config is plain, frozen data and does no I/O. What concerns more than one key stands in
`rules.py`, what this version cannot do yet in `later.py`; `load.py` applies both.
"""

from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from megatrain_cli.config.kinds import (
    Betas,
    Bytes,
    CacheDir,
    Columns,
    Count,
    CountFrom0,
    Device,
    FilePath,
    HeldOutShare,
    Name,
    Number,
    PositiveNumber,
    PositiveShare,
    Share,
    Tags,
    Template,
    Wanted,
    Workers,
)

DataFormat = Literal[
    "auto", "alpaca", "sharegpt", "messages", "prompt_completion", "text", "tokenized"
]


class Section(BaseModel):
    """Base of every section: frozen, strict, unknown keys refused, field docs in place."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, use_attribute_docstrings=True
    )


class ModelSection(Section):
    """What is trained."""

    path: FilePath
    """Hugging Face model folder: config, tokenizer and safetensors weights."""
    init: Literal["pretrained", "random"] = "pretrained"
    """`pretrained` reads the folder's weights; `random` needs `config.json` and tokenizer
    alone."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Number format of the weights and of the computation on the device."""
    attention: Literal["auto", "sdpa", "flash_attention_2", "flex_attention", "eager"] = "auto"
    """Attention kernel; `auto` is `sdpa`."""
    trust_remote_code: bool = False
    """Whether Python code in the model folder may run."""


class DataSource(Section):
    """Where training rows come from."""

    path: FilePath
    """A file, a folder with all data files below it, an entry of LLaMA-Factory's registry
    (`data/dataset_info.json#name`), or a data set of the Hugging Face hub (`owner/name`)."""
    format: DataFormat | None = None
    """Format of its rows; null takes `data.format`."""
    weight: PositiveNumber | None = None
    """How many times each of its rows is drawn in an epoch, on average; null is 1. With 0.5 an
    epoch has half of them, the next epoch the other half."""
    max_rows: Count | None = None
    """Rows to read, from the first on; null reads all."""
    columns: Columns | None = None
    """Fields that the file has under other names, as `{instruction: question, output: answer}`."""
    tags: Tags | None = None
    """Roles that the file has under other names, as `{user: human, assistant: bot}`."""
    sample_by: Literal["line", "paragraph", "document"] | None = None
    """What a row of a `.txt` file is; null is `line`. Blank lines divide paragraphs."""
    subset: Name | None = None
    """Of a data set on a hub: the configuration."""
    split: Name | None = None
    """Of a data set on a hub: the split; null is `train`."""
    revision: Name | None = None
    """Of a data set on a hub: commit, branch or tag; null is the newest."""
    streaming: bool | None = None
    """Of a data set on a hub: whether rows are read over the network and none is kept on disk;
    null is false."""


def _sources(value: object) -> object:
    """Bring the three ways to name sources to one: a tuple of `{path, ...}`."""
    if value is None:
        return None
    items = value if isinstance(value, list | tuple) else [value]
    return tuple({"path": item} if isinstance(item, str) else item for item in items)


class DataSection(Section):
    """What it learns from."""

    train: Annotated[
        tuple[DataSource, ...],
        BeforeValidator(_sources),
        Field(min_length=1),
        Wanted("a path, a list of paths, or a list of {path, format}"),
    ]
    """Sources of training rows: a path, a list of paths, or a list of `{path, ...}`."""
    eval: Annotated[
        Annotated[tuple[DataSource, ...], Field(min_length=1)] | None,
        BeforeValidator(_sources),
        Wanted("a path, a list of paths, a list of {path, format}, or null"),
    ] = None
    """Sources of rows to evaluate on, as in `data.train`."""
    eval_share: HeldOutShare | None = None
    """Share of the training rows that is held out: evaluated on, and never trained on."""
    format: DataFormat = "auto"
    """Format of the rows; `auto` tells from the columns of a source's first row."""
    template: Template | None = None
    """Chat template: the path of a .jinja file or a name; null takes the tokenizer's own."""
    on_bad_row: Literal["error", "skip"] = "error"
    """What a row does that cannot be used: stop the run, or be counted and left out."""
    max_bad_share: Share = 0.05
    """Share of a source's rows that `on_bad_row: skip` may leave out; more is an error."""
    max_length: Count = 1024
    """Longest sequence, in tokens."""
    packing: bool = False
    """Whether several documents share a row; none attends to another."""
    overlong: Literal["truncate", "drop", "error"] = "truncate"
    """What happens to a row that is longer than `max_length`."""
    train_on_prompt: bool = False
    """Whether prompts are learned too, not answers alone."""
    shuffle: bool = True
    """Whether rows come in a new random order each epoch."""
    workers: Workers | Literal["auto"] = "auto"
    """Processes that tokenise; `auto` is every usable core for more than 32 MiB of files, and
    otherwise 1: this process."""
    cache_dir: CacheDir = "auto"
    """Folder where tokenised rows are kept for the next start; `auto` keeps those of more than
    32 MiB of files in the user's cache folder; null keeps none."""

    @property
    def is_evaluated(self) -> bool:
        """Whether there are rows to evaluate on."""
        return self.eval is not None or self.eval_share is not None


class TrainSection(Section):
    """How long, in what portions, and where the results go."""

    output_dir: FilePath
    """The run folder: metrics, the config as it was resolved, and checkpoints."""
    max_steps: CountFrom0 | None = None
    """Optimizer steps to make; exactly one of `max_steps` and `num_epochs`. 0 only writes the
    weights again."""
    num_epochs: PositiveNumber | None = None
    """Passes over the data to make; a part of a pass may be asked for."""
    micro_batch_size: Count = 4
    """Rows that pass through a layer at once; on a GPU small micro-batches may pass together."""
    gradient_accumulation_steps: Count = 1
    """Micro-batches in one optimizer step."""
    seed: CountFrom0 = 42
    """Decides the order of rows, random weights and random rounding."""
    deterministic: bool = False
    """Whether two runs must agree to the last bit on one machine."""


class OptimizerSection(Section):
    """How parameters change: AdamW on the CPU."""

    learning_rate: Number = 2e-5
    """Highest learning rate; the schedule scales it."""
    betas: Betas = (0.9, 0.999)
    """Decay of the first and second moment."""
    eps: PositiveNumber = 1e-8
    """Added to the denominator."""
    weight_decay: Number = 0.0
    """Decoupled decay; parameters with one dimension (norms, biases) are not decayed."""
    max_grad_norm: PositiveNumber | None = 1.0
    """Global gradient norm to clip to; null does not clip."""
    master: Literal["fp32_split", "bf16", "bf16_stochastic", "fp32"] = "fp32_split"
    """How the exact weights are kept; `fp32_split` is FP32-exact at 14 bytes a parameter."""
    update: Literal["auto", "deferred", "eager"] = "auto"
    """When layers are updated: `deferred` after backward, `eager` during it (no clipping)."""
    threads: Workers | Literal["auto"] = "auto"
    """CPU threads of the optimizer; `auto` is every usable core. Beside a GPU it is one less, and
    five less where there are 16 cores or more and the store is not page-locked."""


class ScheduleSection(Section):
    """The learning rate as a function of the step."""

    type: Literal["constant", "linear", "cosine"] = "cosine"
    """How the learning rate falls after warm-up."""
    warmup_steps: CountFrom0 = 0
    """Steps over which the learning rate rises; the first has rate 0, as in transformers."""
    warmup_ratio: Share | None = None
    """The same as a share of all steps, rounded up; at most one of the two."""
    min_lr_ratio: Share | None = None
    """Where the fall ends, as a share of `optimizer.learning_rate`; null is 0.1 for `cosine`, and 0
    for `linear`, as in transformers."""

    @property
    def floor(self) -> float:
        """`min_lr_ratio`, or the schedule's own default."""
        if self.min_lr_ratio is not None:
            return self.min_lr_ratio
        return 0.1 if self.type == "cosine" else 0.0


class KeepLayers(Section):
    """Activations of some layers are kept on the device; the others' are computed again."""

    keep_layers: CountFrom0
    """How many of the last layers keep their activations."""
    offload: bool = False
    """Whether layer inputs wait in host RAM instead of on the device."""


class PipelineSection(Section):
    """How layers pass through the device."""

    device: Device = "auto"
    """Where layers are computed; `auto` is the first CUDA device, or the CPU if there is none."""
    grad_slabs: Count | Literal["auto"] = 12
    """Pinned host slabs for gradients in flight; `auto` is 1.5 a micro-batch, at least 2."""
    staging_buffers: Count = 2
    """Device slots for the weights of one decoder layer each; with 1 none is fetched ahead, and
    more than there are layers are not made."""
    staging_bytes: Count | Literal["auto"] = "auto"
    """Size of one pinned staging buffer; `auto` is the largest layer."""
    target_pcie_utilization: PositiveShare = 0.8
    """Share of the link's peak that a copy should reach; `plan` names the size from which on it
    does, once `megatrain probe` has measured it."""
    activations: Annotated[
        Literal["auto", "recompute", "keep"] | KeepLayers,
        Wanted("`auto`, `recompute`, `keep` or {keep_layers: N, offload: true|false}"),
    ] = "auto"
    """What is kept of forward for backward: layer inputs alone, everything, or some of it."""
    compile: bool | Literal["auto"] = "auto"
    """Whether layer templates are compiled with `torch.compile`."""


class StoreSection(Section):
    """Where the parameters live."""

    memory: Literal["auto", "pageable", "pinned"] = "auto"
    """Host memory of the master store; `auto` page-locks it where the machine allows."""


class CheckpointSection(Section):
    """What survives."""

    save_steps: Count | None = None
    """Steps between checkpoints; null saves at the end, on a stop, and on SIGUSR1."""
    keep_last: Count = 2
    """Newest checkpoints to keep; older ones are deleted once a new one is whole."""
    keep_every_steps: Count | None = None
    """Checkpoints of steps that are multiples of this are kept besides; null keeps none besides."""
    async_save: bool = True
    """Whether training goes on while a checkpoint is written."""
    bounce_pool: Bytes | Literal["auto"] = "auto"
    """Bytes of host RAM that layers not yet written are copied to, so that their updates need not
    wait; `auto` is two decoder layers if they fit beside everything else, otherwise 0."""
    include_gradients: bool = False
    """What a stop in the middle of the updates does: false waits for the rest of them; true saves
    the gradients of layers not yet updated."""
    on_error: Literal["stop", "warn"] = "stop"
    """What follows a save that failed: `stop` ends the run after the step; `warn` goes on, and ends
    it after two failures in a row."""
    on_disk_full: Literal["stop", "skip", "prune"] = "stop"
    """What follows a full disk: as `on_error: stop`, or this save is left out, or older checkpoints
    are deleted down to the newest to make room."""
    grace_seconds: PositiveNumber = 120.0
    """Seconds from SIGTERM until the process will be killed; a save that would take longer is not
    begun."""
    paranoid: bool = False
    """Whether each layer is hashed before and after it is written, to prove that nothing moved."""


class LoggingSection(Section):
    """What is written down while it runs."""

    log_steps: Count = 1
    """Steps between two lines on the terminal; `metrics.jsonl` has every step."""
    tensorboard: bool | Literal["auto"] = "auto"
    """Whether TensorBoard files are written; `auto` is off in this version."""


class EvalSection(Section):
    """How it is judged while it runs."""

    steps: Count | None = None
    """Steps between evaluations; null evaluates at the end alone."""
    at_start: bool = False
    """Whether the model is evaluated before the first step too."""


class TrainConfig(Section):
    """All that a user asks of a run."""

    model: ModelSection
    """What is trained."""
    data: DataSection
    """What it learns from."""
    train: TrainSection
    """How long, in what portions, and where the results go."""
    optimizer: OptimizerSection = OptimizerSection()
    """How parameters change."""
    schedule: ScheduleSection = ScheduleSection()
    """The learning rate as a function of the step."""
    pipeline: PipelineSection = PipelineSection()
    """How layers pass through the device."""
    store: StoreSection = StoreSection()
    """Where the parameters live."""
    checkpoint: CheckpointSection = CheckpointSection()
    """What survives."""
    logging: LoggingSection = LoggingSection()
    """What is written down while it runs."""
    eval: EvalSection = EvalSection()
    """How it is judged while it runs."""
