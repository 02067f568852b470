"""All that the YAML can say, each key documented where it is declared.

Keys and defaults are those of nemo-automodel 0.6.0's EAGLE-3 recipe, so that its own YAML files are read unchanged;
only ``device``, ``capture``, ``self_check``, ``kv_pool``, ``target_process``, ``sglang_python``, ``draft_config``,
``trainer``, ``remote_token_file``, ``remote_rows`` and ``<backend>_args`` of a registered backend (all under
``recipe_args``) are this package's. Keys that no code would read are errors. Checks that need a file, a model or a
device are made by the parts that open them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, get_args

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from nemo_eagle3_sglang import backends
from nemo_eagle3_sglang.contracts import NUM_AUX_LAYERS
from nemo_eagle3_sglang.errors import ConfigError

OTHER_BACKEND_ARGS = "<backend>_args"


def _text(value: str) -> str:
    if not value.strip():
        raise ValueError("empty; write a value, or leave the key out")
    if value == "null":  # AutoModel's command line has None and none, and takes null for text
        raise ValueError("the text 'null'; write None on the command line, null without quotes in the YAML")
    return value


def _text_or_list(value: Any) -> str | list[str]:
    items = list(value) if isinstance(value, (list, tuple)) else [value]
    if not items or not all(isinstance(item, str) and item.strip() for item in items):
        raise ValueError("write a path or hub id, or a list of them")
    return [_text(item) for item in items] if isinstance(value, (list, tuple)) else _text(value)


def _pair(value: Any) -> Any:
    if not isinstance(value, (list, tuple)) or len(value) != 2:
        raise ValueError("write two numbers, e.g. [0.9, 0.95]")
    return value


def _gpus(value: Any) -> str:
    if isinstance(value, (list, tuple)):  # AutoModel evaluates "4,5" to a tuple and would export "(4, 5)"
        raise ValueError("""AutoModel takes this for a tuple; write two pairs of quotes, e.g. "'4,5'\"""")
    if isinstance(value, bool) or not isinstance(value, (int, str)):
        raise ValueError("write the index of a GPU that training does not use, e.g. 7")
    return _text(str(value))


def _aux_layers(value: list[int]) -> list[int]:
    if len(value) != NUM_AUX_LAYERS or len(set(value)) != NUM_AUX_LAYERS:
        raise ValueError(f"write exactly {NUM_AUX_LAYERS} different layer indices, e.g. [1, 15, 28]")
    return value


def _consolidated(value: Any) -> Any:
    known = {"true": "every", "every": "every", "final": "final", "false": "false"}
    name = str(value).strip().lower()
    if not isinstance(value, (bool, str)) or name not in known:
        raise ValueError("write true, false, final or every")
    return known[name]


def _adamw(value: Any) -> Any:
    name = value if isinstance(value, str) else f"{getattr(value, '__module__', '')}.{getattr(value, '__name__', '')}"
    if value is not None and name not in ("torch.optim.AdamW", "torch.optim.adamw.AdamW"):
        raise ValueError("AutoModel's EAGLE-3 recipe always builds AdamW; write torch.optim.AdamW or leave it out")
    return value


def _recipe(value: Any) -> Any:
    target = value.get("_target_") if isinstance(value, Mapping) else value
    if (isinstance(target, str) and target.strip()) or (isinstance(value, Mapping) and callable(target)):
        return value
    raise ValueError("write the class's name, e.g. TrainEagle3Recipe, or a section with `_target_`")


def _backend(value: str) -> str:
    try:
        backends.check_name(value)
    except ConfigError as error:
        raise ValueError(str(error).partition(": ")[2]) from error
    return value


def _none_is_empty(value: Any) -> Any:
    return {} if value is None else value


Text = Annotated[str, AfterValidator(_text)]
TextOrList = Annotated[str | list[str], BeforeValidator(_text_or_list)]
Count = Annotated[int, Field(ge=1)]
Index = Annotated[int, Field(ge=0)]
Seed = Annotated[int, Field(ge=0, lt=2**32)]  # what numpy's generator takes
Beta = Annotated[float, Field(ge=0, lt=1)]
Share = Annotated[float, Field(ge=0, le=1)]
PositiveShare = Annotated[float, Field(gt=0, le=1)]
PositiveFloat = Annotated[float, Field(gt=0)]
Passed = dict[str, Any] | None
Args = Annotated[dict[str, Any], BeforeValidator(_none_is_empty)]


class Section(BaseModel):
    """A closed section: an unknown key is an error, and no value is changed into another type."""

    model_config = ConfigDict(
        extra="forbid", strict=True, frozen=True, use_attribute_docstrings=True, allow_inf_nan=False
    )

    @classmethod
    def yaml_keys(cls) -> list[str]:
        """Return the keys as the YAML spells them."""
        return [field.alias or name for name, field in cls.model_fields.items()]


class DistEnv(Section):
    """``dist_env``: the training process group."""

    backend: Text = "nccl"
    """Collective backend; a single process always uses gloo."""
    timeout_minutes: PositiveFloat = 30
    """How long a collective may take before the job is given up."""


class Optimizer(Section):
    """``optimizer``: AdamW with linear warm-up and cosine decay, which AutoModel's EAGLE-3 recipe always builds."""

    lr: PositiveFloat = Field(examples=[1.0e-4])
    """Peak learning rate."""
    betas: Annotated[tuple[Beta, Beta], Field(strict=False), BeforeValidator(_pair)] = (0.9, 0.95)
    """Decay rates of the gradient's first and second moments."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """Decoupled weight decay."""
    warmup_ratio: Share = 0.05
    """Share of the optimizer steps over which the rate rises to ``lr``."""
    min_lr_ratio: Share = 0.1
    """Rate at the last step, as a share of ``lr``."""
    target: Annotated[Any, AfterValidator(_adamw)] = Field(None, alias="_target_")
    """Tolerated when it names ``torch.optim.AdamW``; it changes nothing."""


class Checkpoint(Section):
    """``checkpoint``: AutoModel's ``CheckpointingConfig`` and where to resume from."""

    enabled: bool = True
    """Whether checkpoints are written."""
    checkpoint_dir: Text | None = None
    """Where they go; left out: ``<output_dir>/checkpoints``."""
    model_save_format: Literal["safetensors", "torch_save"] = "safetensors"
    """File format of the draft's weights."""
    save_consolidated: Annotated[Literal["false", "final", "every"], BeforeValidator(_consolidated)] = "every"
    """When a folder that can be served is written: false, final, or every (= true). False by default with ``peft``."""
    restore_from: Text | None = None
    """``LATEST``, the name of a checkpoint, or its path; left out: the latest in ``checkpoint_dir`` if there is one."""
    model_cache_dir: Text | None = None
    """Hub cache; left out: Hugging Face's own."""
    model_repo_id: Text | None = None
    """Id recorded with the checkpoint; left out: the target's."""
    is_peft: bool = False
    """Whether adapters alone are saved; follows from ``peft`` when left out."""
    model_state_dict_keys: list[str] | None = None
    """Parameter names before sharding; left out: the draft's."""
    is_async: bool = False
    """Whether training goes on while a checkpoint is written."""
    wait_for_staging: bool = False
    """With ``is_async``: whether to wait until the weights are copied out of the GPU."""
    cpu_offload: bool = False
    """Whether tensors are moved to the CPU before they are saved."""
    allow_legacy_pickle_restore: bool = False
    """Whether training state may be unpickled; only for a checkpoint from a source that you trust."""
    dequantize_base_checkpoint: bool | None = None
    """Whether a quantised checkpoint is dequantised when it is loaded."""
    original_model_root_dir: Text | None = None
    """Folder of the original model's files."""
    skip_task_head_prefixes_for_base_model: list[str] | None = None
    """Parameter prefixes that are not loaded from the base model."""
    single_rank_consolidation: bool = False
    """Whether rank 0 alone consolidates."""
    staging_dir: Text | None = None
    """Folder for the temporary files of consolidation."""
    v4_compatible: bool = False
    """Whether config.json is written as transformers 4 has it."""
    diffusers_compatible: bool = False
    """Whether the index carries the name that diffusers looks for."""
    best_metric_key: Text = "default"
    """Validation metric by which the best checkpoint is chosen."""
    consolidation_timeout_minutes: Count = 30
    """How long ranks wait for consolidation."""
    max_recent_checkpoints: Count | None = None
    """Checkpoints kept besides the best and the latest; null keeps all."""


class GpuJob(Section):
    """What AutoModel's two background jobs, each a vLLM server on a GPU of its own, have in common."""

    every_steps: int = 0
    """Optimizer steps between two runs; 0 switches the job off."""
    cuda_visible_devices: Annotated[str, BeforeValidator(_gpus)] | None = None
    """GPU reserved for the job; training must not use it."""
    target_model: Text | None = None
    """Target to serve; left out: the one trained against."""
    input_data: Text | None = None
    """Prompts; left out: ``train_data_path``."""
    split: Text = "train"
    """Split of ``input_data``."""
    messages_column: Text = "messages"
    """Column that holds the chat."""
    dataset_name: Text | None = None
    """Configuration of a hub data set."""
    shuffle_seed: Seed = 42
    """Seed of the choice of prompts."""
    port: Annotated[int, Field(ge=0, le=65535)] = 0
    """Port of the server; 0 takes a free one."""
    top_p: PositiveShare = 1.0
    """Nucleus of the sampler."""
    max_model_len: Count | None = None
    """Context length of the server."""
    trust_remote_code: bool = False
    """Whether code shipped with the checkpoint may run."""

    @model_validator(mode="before")
    @classmethod
    def _null_is_default(cls, data: Any) -> Any:
        return {key: value for key, value in data.items() if value is not None} if isinstance(data, Mapping) else data


class DecodeEval(GpuJob):
    """``recipe_args.decode_eval``: measure the accept length of the draft in a real server, now and then."""

    num_speculative_tokens: Index | None = None
    """Draft length; left out or 0: ``ttt_steps``."""
    num_prompts: Count = 32
    """Prompts of one measurement."""
    concurrency: Count = 8
    """Requests in flight."""
    max_new_tokens: Count = 256
    """Longest answer."""
    temperature: Annotated[float, Field(ge=0)] = 0.0
    """Sampling temperature."""
    prompt_column: Text | None = None
    """Column with a bare prompt, in place of ``messages_column``."""
    gpu_memory_utilization: PositiveShare = 0.8
    """Share of the GPU's memory for the server."""
    timeout_s: PositiveFloat = 1800.0
    """How long one measurement may take."""


class Regen(GpuJob):
    """``recipe_args.regen``: let the target rewrite the training answers while training goes on."""

    served_model_name: Text = "target"
    """Name under which the server offers the target."""
    server_python: Text | None = None
    """Interpreter that has vLLM; left out: the trainer's."""
    shard_size: Count = 1000
    """Rows of one output file."""
    concurrency: Count = 32
    """Requests in flight."""
    max_new_tokens: Count = 1024
    """Longest answer."""
    temperature: Annotated[float, Field(ge=0)] = 1.0
    """Sampling temperature."""
    reasoning: Literal["none", "disable", "save"] = "none"
    """What is done with a reasoning trace."""
    gpu_memory_utilization: PositiveShare = 0.85
    """Share of the GPU's memory for the server."""
    timeout_s: PositiveFloat = 3600.0
    """How long one cycle may take."""


class RecipeArgs(Section):
    """``recipe_args``: target, data, draft and training loop."""

    target_model_name_or_path: Text = Field(examples=["meta-llama/Llama-3.1-8B-Instruct"])
    """Frozen target: a folder or a hub id."""
    target_model_backend: Annotated[str, AfterValidator(_backend)] = "colocated"
    """What runs the target: a backend registered by an installed distribution (``sglang``, ``hf``) or AutoModel's own
    (``colocated``, ``remote``, ``vllm``)."""
    device: Literal["auto", "cuda", "cpu"] = "auto"
    """Where target and draft run; ``auto`` is the GPU if there is one. AutoModel does not read it."""
    capture: Literal["serving", "residual"] = "serving"
    """``serving``: train on what SGLang captures when it serves the draft, or refuse. ``residual``: on the residual
    stream after each layer, whatever SGLang would capture."""
    self_check: bool = True
    """Compare, at start-up, the states trained on with what SGLang's own EAGLE-3 capture yields."""
    kv_pool: Literal["half", "auto"] = "half"
    """SGLang's KV pool. ``half``: SGLang's weights and pool take ``sglang_args.mem_fraction_static``, half of the free
    memory. ``auto``: the pool holds one micro-batch, the rest is the draft's; ``mem_fraction_static``, then 0.9, only
    bounds what SGLang may take, and ``max_total_tokens`` is refused beside it."""
    target_process: Literal["auto", "inline", "sidecar"] = "auto"
    """Where the target runs. ``inline``: in the training process. ``sidecar``: in a process of its own on the same GPU.
    ``auto``: inline in a job of one process, a sidecar where SGLang needs one (several processes, ``tp_size``)."""
    sglang_python: str | None = None
    """Python interpreter of another environment for the target's process, with this package and sglang in it."""
    sglang_args: Args = Field(default_factory=dict)
    """SGLang ServerArgs; names are checked against the installed release."""
    vllm_args: Args = Field(default_factory=dict)
    """vLLM engine arguments, passed on by AutoModel."""
    hf_args: Args = Field(default_factory=dict)
    """Options of the ``hf`` backend."""
    other_backend_args: dict[str, Args] = Field(default_factory=dict, alias=OTHER_BACKEND_ARGS)
    """Options of any other registered backend: ``toy_args`` for ``toy``. See :meth:`backend_options`."""
    trust_remote_code: bool = False
    """Whether code shipped with the target may run."""
    aux_layer_ids: Annotated[list[Index], Field(strict=False), AfterValidator(_aux_layers)] | None = None
    """Decoder layers whose outputs feed the draft: three different ids; null: ``[1, N//2-1, N-4]`` of N layers."""
    target_force_hf: bool = False
    """Colocated: whether to load Hugging Face's class even where AutoModel has its own."""
    target_attn_implementation: Text | None = None
    """Colocated: attention of the target (``sdpa`` …); null lets Hugging Face choose."""
    remote_url: Text | None = None
    """Remote: the one target server (``nemo-eagle3-sglang serve-target``)."""
    remote_urls: list[Text] | None = None
    """Remote: several equal target servers, asked in turn."""
    remote_timeout: PositiveFloat = 120
    """Remote: seconds that a request may take."""
    remote_max_retries: Index = 3
    """Remote: attempts after the first, each at the next server."""
    remote_token_file: Text | None = None
    """Remote: file with the servers' token; left out: the variable ``NEMO_EAGLE3_SGLANG_TOKEN``, or none."""
    remote_rows: Literal["native", "fp8"] = "native"
    """Remote: hidden states as the target computes them, or as FP8 with a scale per state, half of the bytes."""
    target_prefetch_depth: Index = 0
    """Batches asked for ahead of training. Remote: as many as written. In a process of its own (``target_process``) the
    target works on one batch ahead, whatever number above 0 is written."""
    cached_target_path: Text | None = None
    """Folder of supervision computed beforehand; no target is loaded then."""

    train_data_path: TextOrList | None = Field(None, examples=["./train.jsonl"])
    """Chats to train on: file, folder or hub id, or a list. Required without ``cached_target_path``."""
    train_split: Text | None = None
    """Split or slice, such as ``train[:1000]``."""
    train_shuffle: bool = True
    """Whether rows are shuffled anew every epoch."""
    val_data_path: TextOrList | None = None
    """Chats to evaluate on after every epoch; null for none."""
    val_split: Text | None = None
    """Split or slice of ``val_data_path``."""
    seq_length: Annotated[int, Field(ge=2)] | None = Field(None, examples=[2048])
    """Tokens of a row; longer chats are cut. Required without ``cached_target_path``."""
    packed_sequence_size: Index = 0
    """Tokens of a row that holds several whole chats; 0: one chat a row, padded to ``seq_length``."""
    mask_reasoning_content: bool = False
    """Whether reasoning traces carry no loss."""
    micro_batch_size: Count = Field(examples=[1])
    """Rows of one forward."""
    num_workers: Index = 0
    """Data loader processes."""
    shuffle_seed: Seed = 42
    """Seed of shuffling and of the training run."""

    draft_vocab_size: Count | None = None
    """Draft vocabulary D: the D tokens most frequent in the training answers; null: the target's whole vocabulary."""
    draft_config: Text | None = None
    """JSON file that describes the draft, a one-layer Llama; left out: it follows from the target's config."""
    selected_token_ids_path: Text | None = None
    """File that keeps the choice of draft tokens between runs; it is not redone when the data changes."""
    freeze_embeddings: bool = True
    """Whether the draft keeps the target's embeddings; false by default under ``parallel_drafting``."""
    trainer: Literal["auto", "flat", "automodel"] = "auto"
    """``flat``: this package's trainer over bare documents, same loss and checkpoints. ``automodel``: AutoModel's own
    module on padded or packed rows. ``auto``: flat wherever it can be."""
    draft_attn_implementation: Literal["eager", "flash_attention_2"] = "eager"
    """Attention of the draft under ``trainer: automodel``; the flat trainer has its own."""
    draft_gradient_checkpointing: bool = False
    """Whether activations of a P-EAGLE draft are recomputed in the backward pass."""
    draft_weights_path: Text | None = None
    """Trained draft to start from: a safetensors file or its folder."""
    fc_norm: bool = False
    """EAGLE-3.1: whether each aux state is normed before it enters the draft."""
    norm_output: bool = False
    """EAGLE-3.1: whether logits are taken after the output norm."""
    cp_zigzag: bool = False
    """Context parallelism: whether ranks take balanced chunks of the sequence."""

    output_dir: Text = Field(examples=["./outputs/eagle3"])
    """Folder of everything that the run writes."""
    num_epochs: Count = Field(examples=[1])
    """Passes over the training data."""
    grad_accumulation_steps: Count = 1
    """Micro-batches of one optimizer step."""
    max_grad_norm: Annotated[float, Field(gt=0, allow_inf_nan=True)] = 1.0
    """Norm to which gradients are clipped; ``.inf`` for no clipping."""
    ttt_steps: Count | None = Field(None, examples=[4])
    """Training-time-test steps: tokens that the draft predicts in a row. Required without ``parallel_drafting``."""
    lk_loss_type: Literal["alpha", "lambda"] | None = None
    """Acceptance objective in place of cross entropy: ``alpha``, or ``lambda`` for a mixture of the two."""
    lk_kl_scale: Share = 1.0
    """``lambda``: weight of the cross entropy at acceptance 0."""
    lk_kl_decay: Annotated[float, Field(ge=0)] = 3.0
    """``lambda``: how fast that weight falls as acceptance grows."""
    log_every_steps: Count = 10
    """Optimizer steps between two log lines."""
    ckpt_every_steps: int | None = None
    """Optimizer steps between two checkpoints; null or 0: none but the last."""
    save_checkpoint_every_epoch: bool = False
    """Whether every epoch ends with a checkpoint."""

    parallel_drafting: bool = False
    """P-EAGLE: predict all draft tokens in one forward, in place of training-time test."""
    mask_token_id: Index | None = None
    """P-EAGLE: reserved token for the masked slots; required there."""
    num_depths: Count = 8
    """P-EAGLE: tokens predicted at once."""
    num_draft_layers: Count = 1
    """P-EAGLE: decoder layers of the draft."""
    down_sample_ratio: PositiveShare = 0.7
    """P-EAGLE: share of positions kept from one depth to the next."""
    down_sample_ratio_min: Share = 0.2
    """P-EAGLE: least share kept."""
    sequence_partitions: Count = 1
    """P-EAGLE: segments of a sequence that are trained one after another, to save memory."""

    decode_eval: DecodeEval | None = None
    """Accept length measured in a vLLM server."""
    regen: Regen | None = None
    """Training answers rewritten by the target in a vLLM server."""

    @model_validator(mode="before")
    @classmethod
    def _prepare(cls, data: Any) -> Any:
        if not isinstance(data, Mapping):
            return data
        if OTHER_BACKEND_ARGS in data:
            raise ValueError(f"`{OTHER_BACKEND_ARGS}` stands for a name, e.g. sglang_args")
        others = {f"{name}_args" for name in backends.registered()} - cls.model_fields.keys()
        kept = {key: value for key, value in data.items() if key not in others}
        kept.setdefault("freeze_embeddings", not data.get("parallel_drafting", False))
        return {**kept, OTHER_BACKEND_ARGS: {key: data[key] for key in data if key in others}}

    @classmethod
    def yaml_keys(cls) -> list[str]:
        """Return the keys as the YAML spells them, those of registered backends included."""
        registered = [f"{name}_args" for name in backends.registered()]
        return sorted({*super().yaml_keys(), *registered} - {OTHER_BACKEND_ARGS})

    def backend_options(self) -> dict[str, Any]:
        """Return what the backend that ``target_model_backend`` selects is given: its ``<backend>_args``."""
        if self.target_model_backend == "remote":
            return {
                "urls": [*([self.remote_url] if self.remote_url else []), *(self.remote_urls or [])],
                "timeout_s": self.remote_timeout,
                "retries": self.remote_max_retries,
                "token_file": self.remote_token_file,
                "rows": self.remote_rows,
                "prefetch_depth": self.target_prefetch_depth,
            }
        key = f"{self.target_model_backend}_args"
        return getattr(self, key) if key in type(self).model_fields else self.other_backend_args.get(key, {})


class Config(Section):
    """The whole YAML. Sections typed as plain mappings are AutoModel's and are passed on as they are."""

    recipe: Annotated[Any, AfterValidator(_recipe)] = None
    """Recipe class: a name, or a section with ``_target_``. Read by ``automodel``."""
    dist_env: DistEnv = Field(default_factory=DistEnv)
    """Training process group."""
    recipe_args: RecipeArgs = Field(examples=["{target_model_name_or_path: …, output_dir: …, …}"])
    """Target, data, draft and training loop."""
    optimizer: Optimizer = Field(examples=["{lr: 1.0e-4}"])
    """AdamW and its schedule."""
    checkpoint: Checkpoint | None = Field(default_factory=Checkpoint)
    """Saving and resuming."""
    wandb: Passed = None
    """Arguments of ``wandb.init``; ``enable: false`` switches it off."""
    mlflow: Passed = None
    """MLflow logging; the EAGLE-3 recipe of 0.6.0 does not read it."""
    comet: Passed = None
    """Comet logging; the EAGLE-3 recipe of 0.6.0 does not read it."""
    distributed: Passed = None
    """Sharding of a colocated target."""
    compile: Passed = None
    """``torch.compile`` of the draft."""
    fp8: Passed = None
    """FP8 linears in the draft."""
    peft: Passed = None
    """LoRA on a draft that is already trained."""
    seed: Seed | None = None
    """Not read by the EAGLE-3 recipe, which takes ``recipe_args.shuffle_seed``."""
    rng: Passed = None
    """As ``seed``."""
    skypilot: Passed = None
    """Launch through SkyPilot."""
    nemo_run: Passed = None
    """Launch through NeMo-Run."""
    slurm: Passed = None
    """Launcher of older AutoModel releases."""


def sections(model: type[Section] = Config, path: str = "") -> dict[str, type[Section]]:
    """Return every closed section by its YAML path; the whole document is ``""``."""
    found = {path: model}
    for name, field in model.model_fields.items():
        for kind in (field.annotation, *get_args(field.annotation)):
            if isinstance(kind, type) and issubclass(kind, Section):
                found |= sections(kind, f"{path}.{name}".lstrip("."))
    return found
