"""``recipe_args.sglang_args`` -> SGLang's ``ServerArgs``."""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING, Any

import torch

from nemo_eagle3_sglang.contracts import BackendRequest
from nemo_eagle3_sglang.engine import versions
from nemo_eagle3_sglang.errors import ConfigError, did_you_mean

if TYPE_CHECKING:
    from sglang.srt.server_args import ServerArgs

logger = logging.getLogger(__name__)

# SGLang's weights and KV pool take this share of the memory that is free when it starts; the draft, its optimizer
# and the activations live in the rest. SGLang's own default (about 0.88) would starve them.
MEM_FRACTION_STATIC = 0.5

# Under ``kv_pool: auto`` max_total_tokens bounds the pool, and this share only what SGLang may take at most.
MEM_FRACTION_AUTO = 0.9
# Room in the pool for whole pages of many short documents, as a share of a micro-batch. Where pages are long and
# documents very short it does not do, and the micro-batch is run in several forwards.
PAGE_ROOM = 8
# Tokens of the forwards at start-up that decide and check the capture; the pool never holds fewer.
PROBE_TOKENS = 16
# Documents of one forward; more are run in several. SGLang's own default, thousands, makes its request table
# (rows x context length) a gibibyte for a context of 131,072.
MAX_DOCUMENTS = 256

DTYPES = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}
DTYPE_NAMES = ("auto", "half", "float16", "bfloat16", "float", "float32")

LAYOUT = "the target is sharded over the GPUs of one group by tp_size (and its experts by ep_size), nothing else"
NO_SERVER = "no server, scheduler or tokenizer runs here"
EAGER = "every forward is a prefill that needs all hidden states"

# Fields that the adapter sets, by the reason that the refusal gives. A YAML may still say what the adapter says.
OWNED: dict[str, str] = {
    "model_path": "the target is recipe_args.target_model_name_or_path",
    "trust_remote_code": "it is recipe_args.trust_remote_code",
    "device": "it is recipe_args.device",
    **dict.fromkeys(
        (
            "pp_size",
            "dp_size",
            "moe_dp_size",
            "attn_cp_size",
            "dcp_size",
            "nnodes",
            "node_rank",
            "base_gpu_id",
            "gpu_id_step",
            "dist_init_addr",
            "enable_dp_attention",
            "enable_dp_lm_head",
        ),
        LAYOUT,
    ),
    **dict.fromkeys(
        (
            "host",
            "port",
            "nccl_port",
            "skip_tokenizer_init",
            "disable_radix_cache",
            "disable_overlap_schedule",
            "chunked_prefill_size",
            "is_embedding",
            "disaggregation_mode",
            "enable_return_hidden_states",
        ),
        NO_SERVER,
    ),
    **dict.fromkeys(
        (
            "disable_cuda_graph",
            "disable_piecewise_cuda_graph",
            "cuda_graph_bs",
            "cuda_graph_max_bs",
            "enable_two_batch_overlap",
            "enable_lora",
            "lora_paths",
        ),
        EAGER,
    ),
}
OWNED_PREFIXES = {"speculative_": "the draft is what is being trained; the target runs alone"}


def sglang_dtype(dtype: Any) -> str:
    """Return SGLang's name of a dtype: a torch dtype, one of SGLang's own names, or ``None`` for ``auto``.

    Raises:
        ConfigError: Anything else, float64 and integers included.
    """
    if dtype is None:
        return "auto"
    if isinstance(dtype, torch.dtype) and dtype in DTYPES:
        return DTYPES[dtype]
    if isinstance(dtype, str) and dtype.removeprefix("torch.") in DTYPE_NAMES:
        return dtype.removeprefix("torch.")
    raise ConfigError(
        f"recipe_args.sglang_args.dtype: {dtype} is not a dtype that SGLang computes in; use one of "
        f"{', '.join(DTYPE_NAMES)}"
    )


def check_options(request: BackendRequest) -> None:
    """Check names and ownership of ``request.options`` against the installed sglang.

    Raises:
        ConfigError: An unknown name (the nearest known one is given) or a field that the adapter sets itself.
    """
    _check_shards(request)
    names, fixed = versions.server_arg_names(), _adapter_fields(request)
    for name, value in request.options.items():
        where = f"recipe_args.sglang_args.{name}"
        if name not in names:
            raise ConfigError(f"{where}: the installed sglang has no such argument{did_you_mean(name, names)}")
        if name in fixed and fixed[name] == value:
            continue
        reason = OWNED.get(name) or next((r for p, r in OWNED_PREFIXES.items() if name.startswith(p)), None)
        if reason:
            raise ConfigError(f"{where}: {value!r} cannot be set, {reason}; remove it")
    _check_device(request)
    _check_sizes(request)
    sglang_dtype(request.options.get("dtype"))


def _check_device(request: BackendRequest) -> None:
    """Refuse an environment in which SGLang would look for a device that is not the trainer's."""
    if request.device.type == "cpu" and os.environ.get("SGLANG_USE_CPU_ENGINE"):
        raise ConfigError(
            "SGLANG_USE_CPU_ENGINE is set: SGLang's AMX engine is not supported here; unset it to train on a CPU"
        )
    if request.device.type == "cpu" and (method := request.options.get("quantization")):
        raise ConfigError(
            f"recipe_args.sglang_args.quantization: {method!r} runs in SGLang's GPU kernels; remove it on a CPU"
        )


def _check_shards(request: BackendRequest) -> None:
    """Refuse sizes of the target's group that are no numbers, or that do not divide."""
    for name in ("tp_size", "ep_size"):
        size = request.options.get(name, 1)
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise ConfigError(f"recipe_args.sglang_args.{name}: {size!r} is no number of GPUs; write 1, 2, 4, …")
    tp, ep = tp_size(request), request.options.get("ep_size", 1)
    if tp % ep:
        raise ConfigError(
            f"recipe_args.sglang_args.ep_size: {ep} does not divide tp_size: {tp}; experts are spread over the GPUs "
            "of the same group"
        )
    if not 0 <= request.tp_rank < tp:
        raise ConfigError(f"rank {request.tp_rank} of a target of tp_size {tp}")


def tp_size(request: BackendRequest) -> int:
    """Return the GPUs that share the target."""
    return int(request.options.get("tp_size", 1))


def _check_sizes(request: BackendRequest) -> None:
    """Refuse what is known to be too small or no share before any weights load."""
    if request.kv_pool == "auto" and request.options.get("max_total_tokens") is not None:
        raise ConfigError(
            "recipe_args.kv_pool: auto sizes the pool, and sglang_args.max_total_tokens: "
            f"{request.options['max_total_tokens']} does too; remove one of them"
        )
    share = request.options.get("mem_fraction_static", MEM_FRACTION_STATIC)
    if isinstance(share, bool) or not isinstance(share, (int, float)) or not 0 < share < 1:
        raise ConfigError(
            f"recipe_args.sglang_args.mem_fraction_static: {share!r} is no share of the GPU's memory; write a number "
            f"between 0 and 1, e.g. {MEM_FRACTION_STATIC}"
        )
    for name in ("max_total_tokens", "context_length"):
        size = request.options.get(name)
        if isinstance(size, int) and size < request.seq_length:
            raise ConfigError(
                f"recipe_args.seq_length: {request.seq_length} is longer than sglang_args.{name}: {size}; "
                f"raise recipe_args.sglang_args.{name} or lower seq_length"
            )


def _adapter_fields(request: BackendRequest) -> dict[str, Any]:
    """Return the fields that the adapter sets, whatever the YAML says."""
    fields = {
        "model_path": request.target,
        "trust_remote_code": request.trust_remote_code,
        "device": request.device.type,
        "skip_tokenizer_init": True,
        "disable_radix_cache": True,
        "disable_overlap_schedule": True,
        "disable_cuda_graph": True,
        "disable_piecewise_cuda_graph": True,
        "chunked_prefill_size": -1,
    }
    if tp_size(request) > 1:
        # The fused all-reduce leaves a layer's output unsummed until the next layer's norm, past our hooks.
        fields["enforce_disable_flashinfer_allreduce_fusion"] = True
    single = ("pp_size", "dp_size", "nnodes")
    names = versions.server_arg_names()
    return {k: v for k, v in {**fields, **dict.fromkeys(single, 1)}.items() if k in names}


def pool_tokens(request: BackendRequest, page: int) -> int:
    """Return the KV slots of ``kv_pool: auto``: every row of a micro-batch in whole pages, and some room."""
    rows = request.micro_batch_size * (-(-request.seq_length // page) * page)
    # SGLang rounds down to whole pages.
    return max(rows + request.micro_batch_tokens // PAGE_ROOM, -(-PROBE_TOKENS // page) * page)


def _defaults(request: BackendRequest, page: int) -> dict[str, Any]:
    """Return what the adapter uses unless the YAML says otherwise."""
    defaults: dict[str, Any] = {
        "dtype": sglang_dtype(request.dtype),
        "mem_fraction_static": MEM_FRACTION_STATIC,
        "log_level": "error",
    }
    if request.device.type == "cpu":
        # No kernels but torch's on a CPU, and a pool for one micro-batch rather than half of the host's memory.
        defaults.update(
            attention_backend="torch_native",
            sampling_backend="pytorch",
            max_total_tokens=max(4096, request.micro_batch_tokens),
            max_running_requests=max(MAX_DOCUMENTS, request.micro_batch_size),
        )
    if request.kv_pool == "auto":
        defaults.update(
            mem_fraction_static=MEM_FRACTION_AUTO,
            max_total_tokens=pool_tokens(request, page),
            max_running_requests=max(MAX_DOCUMENTS, request.micro_batch_size),
        )
    return defaults


def build_server_args(request: BackendRequest) -> ServerArgs:
    """Return ``ServerArgs`` for a request.

    Raises:
        ConfigError: See :func:`check_options`; also where SGLang itself rejects a value.
    """
    check_options(request)
    server_args = _construct(request, page=1)
    # SGLang chooses the page with the attention backend, so it is known only now.
    page = int(server_args.page_size or 1)
    return _construct(request, page) if request.kv_pool == "auto" and page > 1 else server_args


def _construct(request: BackendRequest, page: int) -> ServerArgs:
    from sglang.srt.server_args import ServerArgs

    options = {**_defaults(request, page), **request.options}
    options["dtype"] = sglang_dtype(options["dtype"])
    try:
        return ServerArgs(**{**options, **_adapter_fields(request)})
    except (ValueError, AssertionError, TypeError, NotImplementedError) as error:
        raise ConfigError(f"recipe_args.sglang_args: sglang rejects {dict(request.options)}: {error}") from error
