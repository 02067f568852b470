"""SGLang's ``ModelRunner`` behind the :class:`~nemo_eagle3_sglang.contracts.TargetRunner` protocol."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist

from nemo_eagle3_sglang.contracts import AuxPlan, BackendRequest, Head, HiddenStates, TargetInfo
from nemo_eagle3_sglang.engine import self_check, versions
from nemo_eagle3_sglang.engine.batch import Capacity, capacity, forward_batch, plan
from nemo_eagle3_sglang.engine.capture import Capture
from nemo_eagle3_sglang.engine.server_args import MEM_FRACTION_STATIC, PROBE_TOKENS, build_server_args, tp_size
from nemo_eagle3_sglang.errors import ConfigError

if TYPE_CHECKING:
    from sglang.srt.model_executor.model_runner import ModelRunner

logger = logging.getLogger(__name__)

Result = TypeVar("Result")


class SGLangRunner:
    """The frozen target in this process; at most one at a time, since SGLang's state is global.

    Built by :meth:`build`. Works inside an initialised ``torch.distributed`` group of as many processes as share the
    target (``tp_size``, usually one), which it leaves as it was, and without one. Where several share it, everything
    that runs the model is collective: all ranks call it with the same tokens, and get the same states.
    """

    def __init__(self, model_runner: ModelRunner, request: BackendRequest, owns_group: bool) -> None:
        config = model_runner.model_config.hf_text_config
        self._model_runner: ModelRunner | None = model_runner
        self._request = request
        self._owns_group = owns_group
        self.info = TargetInfo(config.num_hidden_layers, config.hidden_size, config.vocab_size)
        self.device = torch.device(model_runner.device, model_runner.gpu_id if model_runner.device == "cuda" else None)
        self.dtype = request.dtype
        self.capacity: Capacity = capacity(model_runner)
        # The request table is a few columns wider than the context; past that a position has no rotary angle.
        self.max_sequence_length = min(self.capacity.sequence, int(model_runner.model_config.context_len))
        self._max_tokens = int(model_runner.server_args.max_prefill_tokens)
        self._capture = Capture(model_runner.model, self.info)

    @classmethod
    def build(cls, request: BackendRequest) -> SGLangRunner:
        """Load the target, allocate its KV pool, tap it and calibrate the capture.

        Raises:
            ConfigError: Versions, options or sizes that cannot work; the message names the YAML key.
            CaptureError: The model's hidden states cannot be captured with certainty.
        """
        versions.check_installed()
        versions.check_none_open()
        _check_group(tp_size(request))
        server_args = build_server_args(request)
        logging.getLogger("sglang").setLevel(server_args.log_level.upper())
        owns_group = not dist.is_initialized()
        free = torch.cuda.mem_get_info(request.device)[0] if request.device.type == "cuda" else None
        gpu_id = request.device.index or 0
        try:
            with versions.build_environment(request.device, tp_size(request)):
                model_runner = versions.construct(server_args, gpu_id, request.tp_rank)
            versions.check_attention(model_runner.model, server_args)
            runner = cls(model_runner, request, owns_group)
        except BaseException:
            versions.release_groups(owns_group)
            raise
        try:
            runner._check_length(request)
            runner._calibrate()
            runner._check_rows()
        except BaseException:
            runner.close()
            raise
        logger.info(runner.describe())
        if request.kv_pool == "auto":
            logger.info(runner.describe_pool(free))
        return runner

    def describe(self) -> str:
        """Return one line for the log: model, KV pool, memory."""
        line = (
            f"SGLang target: {type(self._runner().model).__name__}, {self.info.num_hidden_layers} layers, "
            f"KV pool {self.capacity.tokens} tokens, {self._max_tokens} tokens a forward"
        )
        if self.device.type == "cuda":
            free, total = torch.cuda.mem_get_info(self.device)
            line += f", {(total - free) / 2**30:.1f} of {total / 2**30:.1f} GiB in use"
        return line

    def describe_pool(self, free_before: int | None) -> str:
        """Return one line for the log: the pool of ``kv_pool: auto``, and what it leaves of SGLang's default share.

        Args:
            free_before: Bytes that were free on the GPU before the target was built; ``None`` on a CPU.
        """
        size = versions.kv_pool_bytes(self._runner())
        line = (
            f"KV pool: {self.capacity.tokens:,} tokens ({size / 2**30:.1f} GiB) for one micro-batch of "
            f"{self._request.micro_batch_tokens:,}"
        )
        if free_before is None:
            return line
        taken = free_before - torch.cuda.mem_get_info(self.device)[0]
        left = (free_before * MEM_FRACTION_STATIC - taken) / 2**30
        if left < 0:
            return f"{line}; target and pool take {-left:.1f} GiB more than SGLang's half"
        return f"{line}; {left:.1f} GiB of SGLang's half left to the draft"

    def set_aux_layers(self, aux_layer_ids: Sequence[int]) -> None:
        """See :meth:`TargetRunner.set_aux_layers`."""
        self._capture.set_layers(aux_layer_ids)

    @torch.no_grad()
    def forward(self, tokens: torch.Tensor, lengths: Sequence[int]) -> HiddenStates:
        """See :meth:`TargetRunner.forward`. Runs in as many forwards as the KV pool and ``max_prefill_tokens`` ask.

        Raises:
            ValueError: An empty sequence, lengths that do not sum to the tokens, or a sequence that no forward takes.
        """
        lengths = list(lengths)
        self._check_sequences(tokens, lengths)
        groups = plan(lengths, self.capacity, self._max_tokens)
        sizes = [lengths[g.start : g.stop] for g in groups]
        parts = tokens.to(self.device).split([sum(s) for s in sizes])
        states = [self._forward(part, size) for part, size in zip(parts, sizes, strict=True)]
        if len(states) == 1:
            return states[0]
        return HiddenStates(aux=torch.cat([s.aux for s in states]), last=torch.cat([s.last for s in states]))

    def _forward(self, tokens: torch.Tensor, lengths: list[int]) -> HiddenStates:
        runner = self._runner()
        with forward_batch(runner, tokens, lengths) as batch:
            states = self._capture.run(lambda: runner.forward(batch))
        return HiddenStates(aux=states.aux.to(self.dtype), last=states.last)

    def _check_sequences(self, tokens: torch.Tensor, lengths: list[int]) -> None:
        if tokens.dim() != 1 or not lengths or min(lengths) < 1 or sum(lengths) != tokens.shape[0]:
            raise ValueError(f"tokens {tuple(tokens.shape)} must be the sequences one after another, lengths {lengths}")
        if max(lengths) > self.max_sequence_length:
            raise ValueError(
                f"a sequence of {max(lengths)} tokens is longer than a forward takes ({self.max_sequence_length}); "
                "raise recipe_args.sglang_args.max_total_tokens or mem_fraction_static"
            )

    def head(self) -> Head:
        """See :meth:`TargetRunner.head`."""
        return self._capture.head()

    @torch.no_grad()
    def input_embeddings(self) -> torch.Tensor:
        """See :meth:`TargetRunner.input_embeddings`. SGLang pads the rows to a multiple of 64; they are cut off.

        Gathered from the ranks that share the target, which all hold them then.
        """
        embedding, vocab = self._capture.text_model.embedding, self.info.vocab_size
        weight = embedding.weight.detach()
        if versions.shard_of(embedding) is None:
            return weight[:vocab]
        return versions.gather_rows(weight)[:vocab]

    def free_slots(self) -> int:
        """Return the KV slots that are free now; all of ``capacity.tokens`` between two forwards."""
        return int(self._runner().token_to_kv_pool_allocator.available_size())

    @torch.no_grad()
    def plan_aux_layers(self, aux_layer_ids: Sequence[int]) -> AuxPlan:
        """Return which layers to train on and which ids to write, as ``recipe_args.capture`` asks.

        With ``serving``, SGLang's own capture is run beside the hooks on a few tokens (see ``self_check.py``).

        Raises:
            ConfigError: SGLang cannot serve a draft with the states of these layers.
        """
        ids, model = list(aux_layer_ids), self._runner().model
        if self._request.capture == "residual" or not self._request.self_check:
            return AuxPlan(trained=ids, written=ids)
        self_check.check_setter(model)

        def observe(written: list[int]) -> self_check.Observed:
            with self_check.serving_capture(model, written):
                return self._probe(self._capture.observe)

        return self_check.plan_aux_layers(ids, observe)

    @torch.no_grad()
    def _calibrate(self) -> None:
        self._probe(self._capture.calibrate)

    def _probe(self, use: Callable[[Callable[[], Any]], Result]) -> Result:
        """Call ``use`` with a function that runs one forward over a few tokens."""
        count = min(PROBE_TOKENS, self.max_sequence_length)
        # Spread over the vocabulary: any ids do, as long as the states differ between tokens.
        tokens = torch.arange(count, device=self.device) * (self.info.vocab_size // count)
        runner = self._runner()
        with forward_batch(runner, tokens, [count]) as batch:
            return use(lambda: runner.forward(batch))

    def _check_rows(self) -> None:
        embedding, head, vocab = self._capture.text_model.embedding, self._capture.head(), self.info.vocab_size
        # An embedding may hold more tokens than the head predicts (Mllama's image token); they are past the first V.
        claimed = min(getattr(embedding, "org_vocab_size", vocab), vocab)
        shard, held = versions.shard_of(embedding) or range(vocab), embedding.weight.shape[0]
        self_check.check_rows("input embedding", held, len(range(shard.start, min(shard.stop, vocab))), vocab, claimed)
        for claimed in head.claimed_rows:
            self_check.check_rows("output head", head.rows, len(head.columns), vocab, claimed)

    def _check_length(self, request: BackendRequest) -> None:
        if request.seq_length > self.max_sequence_length:
            pool, context = self.capacity.tokens, int(self._runner().model_config.context_len)
            raise ConfigError(
                f"recipe_args.seq_length: {request.seq_length} is longer than the target takes: "
                + (
                    f"its KV pool holds {pool} tokens; raise recipe_args.sglang_args.mem_fraction_static "
                    "(or max_total_tokens where the YAML sets it)"
                    if pool < request.seq_length
                    else f"its context is {context} tokens; lower seq_length or raise sglang_args.context_length"
                )
            )

    def close(self) -> None:
        """Free the model, its KV pool and SGLang's process groups; another runner can then be built.

        The default process group survives if it was there before. Tensors that were handed out as views of the
        target's weights (:meth:`input_embeddings`) are gone with it.
        """
        if self._model_runner is None:
            return
        model_runner, self._model_runner = self._model_runner, None
        self._capture.close()
        versions.free_memory(model_runner)
        del model_runner
        versions.release_groups(self._owns_group)
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def _runner(self) -> ModelRunner:
        if self._model_runner is None:
            raise RuntimeError("this SGLang runner has been closed")
        return self._model_runner


def _check_group(tp: int) -> None:
    """Refuse what ``initialize_model_parallel`` would: it wants a default group of tp * pp processes."""
    world = dist.get_world_size() if dist.is_initialized() else 1
    if world != tp:
        raise ConfigError(
            f"target_model_backend: sglang is built in a group of {tp} processes (sglang_args.tp_size), this one has "
            f"{world}: let it run in processes of its own, recipe_args.target_process: sidecar"
        )
