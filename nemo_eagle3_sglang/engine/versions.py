"""Every difference between sglang releases, and every internal of sglang that this package touches.

Public in the sense of sglang's own entry points: ``ServerArgs``, ``PortArgs``, ``ModelConfig``, ``ModelRunner``,
``ForwardBatch``. Everything else is named here, one function each, with the releases it was seen working in. A new
release is supported when ``tests/engine`` passes with it; nothing outside this module asks for a version.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import re
from collections.abc import Iterator
from importlib import metadata
from typing import TYPE_CHECKING, Any

import torch
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from nemo_eagle3_sglang.errors import ConfigError

if TYPE_CHECKING:
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.model_runner import ModelRunner
    from sglang.srt.server_args import ServerArgs

SUPPORTED = SpecifierSet(">=0.5.16,<0.5.18")
WORKING_PAIR = "nemo-automodel 0.6.0 with sglang 0.5.17 (torch 2.11.0, transformers 5.12.1)"
INSTALL = "pip install 'nemo-eagle3-sglang[all]'"

# Libraries whose version changes sglang's numbers without any error (sglang 0.5.9 beside transformers 5.12.1 gave
# wrong Qwen3 states), or whose kernels are built against one release.
PINNED_BY_SGLANG = ("torch", "transformers")


def check_installed() -> None:
    """Raise ``ConfigError`` that names the versions found and the pair that works.

    Reads package metadata only.
    """
    try:
        version = metadata.version("sglang")
    except metadata.PackageNotFoundError:
        raise ConfigError(
            f"target_model_backend: sglang needs sglang, which is not installed. {INSTALL} brings {WORKING_PAIR}."
        ) from None
    if not SUPPORTED.contains(version, prereleases=True):
        raise ConfigError(
            f"sglang {version} is installed; this version of nemo-eagle3-sglang works with {SUPPORTED} only. "
            f"Install {WORKING_PAIR}: {INSTALL}"
        )
    for requirement in _pins():
        found = metadata.version(requirement.name)
        if not requirement.specifier.contains(found, prereleases=True):
            raise ConfigError(
                f"sglang {version} requires {requirement}, but {requirement.name} {found} is installed; hidden states "
                f"could be silently wrong. Install {WORKING_PAIR}: {INSTALL}"
            )


def _pins() -> list[Requirement]:
    """Return sglang's own requirements on the libraries that must match."""
    requirements = (Requirement(line) for line in metadata.requires("sglang") or [])
    return [r for r in requirements if r.name in PINNED_BY_SGLANG and (r.marker is None or r.marker.evaluate())]


@functools.cache
def server_arg_names() -> frozenset[str]:
    """Return the field names of ``ServerArgs`` (0.5.16, 0.5.17: a dataclass)."""
    from sglang.srt.server_args import ServerArgs

    return frozenset(f.name for f in dataclasses.fields(ServerArgs) if f.init)


def construct(server_args: ServerArgs, gpu_id: int, tp_rank: int = 0) -> ModelRunner:
    """Build a ``ModelRunner`` for one rank and allocate its KV pool; no CUDA graphs are captured.

    0.5.16, 0.5.17: parallel sizes come as ``ps``, and pools and attention backends are built after the constructor.
    """
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.distributed.parallel_state_wrapper import ParallelState
    from sglang.srt.model_executor.model_runner import ModelRunner
    from sglang.srt.server_args import PortArgs

    tp, ep = server_args.tp_size, server_args.ep_size
    model_runner = ModelRunner(
        model_config=ModelConfig.from_server_args(server_args),
        mem_fraction_static=server_args.mem_fraction_static,
        gpu_id=gpu_id,
        ps=ParallelState.trivial(
            gpu_id=gpu_id,
            tp_rank=tp_rank,
            tp_size=tp,
            attn_tp_rank=tp_rank,
            attn_tp_size=tp,
            # Experts are spread over the same group: SGLang's hierarchy is TP > EP > MoE-TP, innermost last.
            moe_ep_rank=tp_rank // (tp // ep),
            moe_ep_size=ep,
        ),
        nccl_port=PortArgs.init_new(server_args).nccl_port,
        server_args=server_args,
    )
    with _sizing_errors():
        model_runner.alloc_memory_pool()
    model_runner.init_attention_backends()
    # Graphs are disabled by server_args, but this call also sets the eager runner up.
    model_runner.init_cuda_graphs()
    return model_runner


@contextlib.contextmanager
def _sizing_errors() -> Iterator[None]:
    """Turn SGLang's refusals to size a pool into a ``ConfigError`` that names the keys of the YAML.

    0.5.17: weights above ``mem_fraction_static``, a sliding-window pool (window x ``max_running_requests``) above the
    memory, a pool below one window. All are ``ValueError`` or ``RuntimeError`` and name command-line flags; what names
    none is something else and is not touched.
    """
    try:
        yield
    except (ValueError, RuntimeError) as error:
        message = re.sub(r"--([a-z]+(?:-[a-z]+)+)", _yaml_key, str(error))
        if message == str(error):
            raise
        raise ConfigError(f"sglang cannot size its KV pool: {message}") from error


def _yaml_key(flag: re.Match[str]) -> str:
    name = flag[1].replace("-", "_")
    return f"recipe_args.sglang_args.{name}" if name in server_arg_names() else flag[0]


@contextlib.contextmanager
def build_environment(device: torch.device, tp_size: int = 1) -> Iterator[None]:
    """Hold what building a runner changes in this process, and put it back.

    Three things, all seen in 0.5.16 and 0.5.17: ``ModelRunner.load_model`` calls ``torch.set_num_threads(1)`` on a GPU,
    which would slow the trainer's data path. ``RotaryEmbedding.__init__`` imports vLLM's kernels on a host without CUDA
    unless its module-level ``_is_cpu`` is true; that flag is read in the constructor alone. And for a target that ranks
    on CPUs share, SGLang wants a NUMA node each unless a variable of its own says which cores are whose (here all are
    everybody's), and starts NCCL wherever its library is found, unless another variable names none.
    """
    from sglang.srt.layers.rotary_embedding import base as rotary

    threads, is_cpu = torch.get_num_threads(), rotary._is_cpu
    variables: dict[str, str] = {}
    if device.type == "cpu":
        rotary._is_cpu = True
        variables = cpu_group_variables(tp_size)
    try:
        with _variables(variables):
            yield
    finally:
        rotary._is_cpu = is_cpu
        torch.set_num_threads(threads)


def cpu_group_variables(tp_size: int) -> dict[str, str]:
    """Return what a target that ranks on CPUs share needs in its environment; see :func:`build_environment`."""
    if tp_size == 1:
        return {}
    return {
        "SGLANG_CPU_OMP_THREADS_BIND": "|".join([f"0-{(os.cpu_count() or 1) - 1}"] * tp_size),
        "SGLANG_NCCL_SO_PATH": "none: this target is on CPUs",
    }


@contextlib.contextmanager
def _variables(variables: dict[str, str]) -> Iterator[None]:
    """Set the variables that the user has not set, and remove them again."""
    new = {name: value for name, value in variables.items() if name not in os.environ}
    os.environ.update(new)
    try:
        yield
    finally:
        for name in new:
            del os.environ[name]


def check_none_open() -> None:
    """Raise ``RuntimeError`` while a runner is open: SGLang's groups are global, and building would destroy them."""
    from sglang.srt.distributed import parallel_state

    if parallel_state.model_parallel_is_initialized():
        raise RuntimeError("another SGLangRunner is open in this process; close() it first")


def release_groups(owned: bool) -> None:
    """Destroy sglang's process groups, and the default group only where sglang made it (``owned``).

    ``destroy_distributed_environment`` would also destroy a default group that belongs to the trainer, so its
    world-group half is done here (0.5.16, 0.5.17: the module global ``_WORLD``). The expert locations that a MoE
    model leaves behind are dropped too: the next runner asserts that there are none.
    """
    from sglang.srt.distributed import parallel_state
    from sglang.srt.eplb.expert_location import set_global_expert_location_metadata

    set_global_expert_location_metadata(None, allow_overwrite=True)
    parallel_state.destroy_model_parallel()
    if owned:
        parallel_state.destroy_distributed_environment()
    elif parallel_state._WORLD is not None:
        parallel_state._WORLD.destroy()
        parallel_state._WORLD = None


def free_memory(model_runner: ModelRunner) -> None:
    """Give the memory of the weights and of the KV pools back, whoever still refers to the tensors.

    On a GPU something inside sglang keeps a closed ``ModelRunner`` alive (seen with 0.5.17 on an H200, 41.9 GiB for an
    8B target; on a CPU it is collected). So the storages are freed where they are, and the runner's attributes are
    dropped, so that whatever holds it holds an empty shell. Buffers of the model stay: rotary caches are shared with
    the next runner through a cache of sglang's. The pool of input buffers, a module global that is sized by the KV
    pool and outlives every runner, is emptied (0.5.16, 0.5.17).
    """
    from sglang.srt.model_executor import input_buffers

    input_buffers._forward_input_buffer_pool.clear()
    pools = (model_runner.req_to_token_pool, model_runner.token_to_kv_pool, model_runner.token_to_kv_pool_allocator)
    for tensor in {*model_runner.model.parameters(), *_pool_tensors(*pools)}:
        tensor.untyped_storage().resize_(0)
    vars(model_runner).clear()


def kv_pool_bytes(model_runner: ModelRunner) -> int:
    """Return the memory of the KV pool, whatever its class (MHA, MLA, sliding window)."""
    storages = [tensor.untyped_storage() for tensor in _pool_tensors(model_runner.token_to_kv_pool)]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def _pool_tensors(*pools: Any) -> set[torch.Tensor]:
    """Return the tensors of memory pools, however they are nested."""
    found: set[torch.Tensor] = set()
    todo: list[Any] = [*pools]
    seen: set[int] = set()
    while todo:
        value = todo.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, torch.Tensor):
            found.add(value)
        elif isinstance(value, list | tuple):
            todo.extend(value)
        elif isinstance(value, dict):
            todo.extend(value.values())
        elif type(value).__module__.startswith("sglang.srt.mem_cache"):
            todo.extend(getattr(value, "__dict__", {}).values())
    return found


def shard_of(module: torch.nn.Module) -> range | None:
    """Return the token ids whose rows an embedding or head holds; ``None`` where it holds them all.

    0.5.16, 0.5.17: ``VocabParallelEmbedding`` and its subclass ``ParallelLMHead`` pad the vocabulary to 64 rows a rank
    and state what is theirs in ``shard_indices``.
    """
    shard = getattr(module, "shard_indices", None)
    if shard is None or getattr(module, "tp_size", 1) == 1:
        return None
    return range(shard.org_vocab_start_index, shard.org_vocab_end_index)


def gather_rows(weight: torch.Tensor) -> torch.Tensor:
    """Return the rows of all tensor-parallel ranks, one rank after another; each holds as many (0.5.16, 0.5.17)."""
    from sglang.srt.distributed import parallel_state

    return parallel_state.get_tp_group().all_gather(weight.contiguous(), dim=0)


def prepare_server_process(tp_size: int = 1) -> None:
    """Let SGLang's own processes run on a host without CUDA; see :func:`build_environment` (0.5.16, 0.5.17).

    For the rest of this process and of those that it starts, which are SGLang's.
    """
    if not torch.cuda.is_available():
        from sglang.srt.layers.rotary_embedding import base as rotary

        rotary._is_cpu = True
        # SGLang compiles the embedding of a sharded target, on a CPU a minute for nothing.
        for name, value in {**cpu_group_variables(tp_size), "TORCHDYNAMO_DISABLE": "1"}.items():
            os.environ.setdefault(name, value)


def tensor_rank() -> tuple[int, int]:
    """Return this process's rank among those that share the target's weights, and their number (0.5.16, 0.5.17)."""
    from sglang.srt.distributed import parallel_state

    group = parallel_state.get_tp_group()
    return int(group.rank_in_group), int(group.world_size)


def replica_argument(replica: int | None) -> dict[str, int]:
    """Return what sends a request of ``Engine`` to one data-parallel replica (0.5.16, 0.5.17)."""
    return {} if replica is None else {"routed_dp_rank": replica}


def is_partial(states: torch.Tensor) -> bool:
    """Return whether ``states`` are still to be summed over the ranks (0.5.16, 0.5.17: fused into the next norm)."""
    return bool(getattr(states, "_sglang_needs_allreduce_fusion", False))


def check_attention(model: torch.nn.Module, server_args: ServerArgs) -> None:
    """Refuse soft-capped attention with ``torch_native``, which leaves the cap out without a word (0.5.16, 0.5.17)."""
    from sglang.srt.layers.radix_attention import RadixAttention

    capped = any(isinstance(m, RadixAttention) and m.logit_cap for m in model.modules())
    if capped and server_args.attention_backend == "torch_native":
        raise ConfigError(
            "recipe_args.sglang_args.attention_backend: 'torch_native', the only one on a CPU, ignores the soft cap of "
            f"{type(model).__name__}'s attention, so its hidden states would be wrong; run this target on a GPU"
        )


def make_forward_batch(**fields: Any) -> ForwardBatch:
    """Build a ``ForwardBatch`` from the fields that this release has (they come and go between releases)."""
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch

    return ForwardBatch(**{k: v for k, v in fields.items() if k in ForwardBatch.__dataclass_fields__})


def project(processor: torch.nn.Module, hidden: torch.Tensor, lm_head: torch.nn.Module) -> torch.Tensor:
    """Apply ``lm_head`` as the model's own ``LogitsProcessor`` does, quantised or not (0.5.16, 0.5.17).

    With one difference: the processor drops the bias of a head that has one (Phi-2, Phi-3.5-MoE, GPT-J). None of
    these can be served with a draft by SGLang, so the target's true distribution is the one to learn.

    Returns:
        ``[n, rows of lm_head]`` before scale, trim and soft cap.
    """
    logits = processor._compute_lm_head(hidden, lm_head)
    bias = getattr(lm_head, "bias", None)
    return logits if bias is None else logits.add_(bias)
