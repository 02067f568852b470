"""What SGLang 0.5.17 lacks or gets wrong on a CPU, put right for the length of a test.

None of this is the adapter's business: on a GPU the kernels that SGLang picks do it. Each substitute is scoped, and
says what it stands for. With it, the CPU shows that the capture is right; that the GPU kernels are is another matter.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import quantised
import torch


@contextlib.contextmanager
def attention() -> Iterator[None]:
    """Attention from q, k and v alone, with what ``torch_native`` leaves out or cannot do.

    It ignores ``logit_cap`` (Gemma-2), takes no sinks (gpt-oss), and cannot write MLA's keys and values, which are of
    different widths (DeepSeek). A batch here has no prefix, so the KV cache is not needed. With the cap applied, our
    own refusal of soft-capped attention on a CPU has no ground.
    """
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

    def forward_extend(_self, q, k, v, layer, batch, save_kv_cache=True, sinks=None, **_):
        heads, groups = layer.tp_q_head_num, layer.tp_k_head_num
        q, k = q.reshape(-1, heads, layer.qk_head_dim), k.reshape(-1, groups, layer.qk_head_dim)
        v = v.reshape(-1, groups, layer.v_head_dim)
        parts = [x.split(list(batch.extend_seq_lens_cpu)) for x in (q, k, v)]
        return torch.cat([attend(*qkv, layer, sinks) for qkv in zip(*parts, strict=True)])

    with (
        mock.patch.object(TorchNativeAttnBackend, "forward_extend", forward_extend),
        mock.patch("nemo_eagle3_sglang.engine.versions.check_attention"),
    ):
        yield


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: Any, sinks: torch.Tensor | None) -> torch.Tensor:
    """Return causal attention ``[n, heads * v_head_dim]`` of one sequence; q, k, v are ``[n, heads, dim]``."""
    (length, heads, _), repeat = q.shape, q.shape[1] // k.shape[1]
    q, k, v = q.transpose(0, 1), k.transpose(0, 1).repeat_interleave(repeat, 0), v.transpose(0, 1)
    v = v.repeat_interleave(repeat, 0)
    scores = q @ k.transpose(1, 2) * layer.scaling
    if layer.logit_cap:
        scores = layer.logit_cap * torch.tanh(scores / layer.logit_cap)
    back = torch.arange(length)[:, None] - torch.arange(length)
    window = length if layer.sliding_window_size is None or layer.sliding_window_size < 0 else layer.sliding_window_size
    scores = scores.masked_fill((back < 0) | (back > window), float("-inf"))
    if sinks is not None:
        scores = torch.cat([scores, sinks.to(scores).view(heads, 1, 1).expand(heads, length, 1)], -1)
    return (scores.softmax(-1)[..., :length] @ v).transpose(0, 1).reshape(length, -1)


def final_soft_cap() -> contextlib.AbstractContextManager[Any]:
    """The logits processor's soft cap in torch: SGLang's own is a Triton kernel, which needs a GPU."""
    from sglang.srt.layers import logits_processor

    def cap_in_place(logits: torch.Tensor, cap: float) -> None:
        logits.copy_(cap * torch.tanh(logits / cap))

    return mock.patch.object(logits_processor, "fused_softcap", cap_in_place)


def any_backend_for_gpt_oss() -> contextlib.AbstractContextManager[Any]:
    """Let gpt-oss start with ``torch_native``: SGLang asserts one of its GPU backends, for the sinks' sake."""
    from sglang.srt.server_args import ServerArgs

    adjust = ServerArgs._handle_model_specific_adjustments

    def adjust_or_pass(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return adjust(self, *args, **kwargs)
        except AssertionError as error:
            if "GptOss" not in str(error):
                raise
            return None

    return mock.patch.object(ServerArgs, "_handle_model_specific_adjustments", adjust_or_pass)


def rope_in_place() -> contextlib.AbstractContextManager[Any]:
    """Write rotated q and k into their inputs: Llama-4 drops what its rotary module returns.

    SGLang's CUDA kernel works in place; the CPU path returns new tensors, so that Llama-4 runs without positions there.
    """
    from sglang.srt.models.llama4 import Llama4Attention

    construct = Llama4Attention.__init__

    def with_rope_in_place(self: Any, *args: Any, **kwargs: Any) -> None:
        construct(self, *args, **kwargs)
        if self.rotary_emb is not None:
            # get_rope caches its modules: several layers share one.
            self.rotary_emb._forward_hooks.clear()
            self.rotary_emb.register_forward_hook(write_back)

    def write_back(_module: Any, inputs: Any, output: Any) -> None:
        for old, new in zip(inputs[1:3], output, strict=True):
            old.copy_(new.view_as(old))

    return mock.patch.object(Llama4Attention, "__init__", with_rope_in_place)


def router_weight_on_input() -> contextlib.AbstractContextManager[Any]:
    """Llama-4 weighs the experts' inputs; SGLang's native experts raise ``NotImplementedError`` for it."""
    from sglang.srt.layers.moe import fused_moe_native

    experts = fused_moe_native.moe_forward_native

    def weigh_input(layer: Any, x: torch.Tensor, topk: Any, config: Any) -> torch.Tensor:
        if config.apply_router_weight_on_input:
            x = x * topk.topk_weights.to(x.dtype)
            topk = topk._replace(topk_weights=torch.ones_like(topk.topk_weights))
            config = dataclasses.replace(config, apply_router_weight_on_input=False)
        return experts(layer, x, topk, config)

    return mock.patch.object(fused_moe_native, "moe_forward_native", weigh_input)


@contextlib.contextmanager
def int4_experts() -> Iterator[None]:
    """Experts of compressed-tensors ``pack-quantized`` by torch: SGLang's kernel for them is Marlin's."""
    from sglang.srt.layers.moe.fused_moe_native import fused_moe_forward_native
    from sglang.srt.layers.quantization.compressed_tensors import compressed_tensors
    from sglang.srt.layers.quantization.compressed_tensors.schemes import compressed_tensors_wNa16_moe as scheme

    def dequantise(_self: Any, layer: torch.nn.Module) -> None:
        for name in ("w13", "w2"):
            # As the loader leaves them, transposed: [E, K / 8, N] and [E, K / group, N].
            words, scales = getattr(layer, f"{name}_weight_packed"), getattr(layer, f"{name}_weight_scale")
            integers = quantised.unpacked(words.transpose(1, 2)) - 8
            scales = scales.transpose(1, 2).repeat_interleave(integers.shape[-1] // scales.shape[1], -1)
            weight = torch.nn.Parameter((integers * scales).to(scales), requires_grad=False)
            layer.register_parameter(f"{name}_weight", weight)

    def apply(self: Any, layer: torch.nn.Module, dispatch_output: Any) -> Any:
        return fused_moe_forward_native(layer, dispatch_output)

    with (
        any_dtype(compressed_tensors.CompressedTensorsConfig),
        mock.patch.object(scheme.CompressedTensorsWNA16MoE, "process_weights_after_loading", dequantise),
        mock.patch.object(scheme.CompressedTensorsWNA16MoE, "apply_weights", apply),
    ):
        yield


@contextlib.contextmanager
def gptq_linear() -> Iterator[None]:
    """GPTQ's projection by torch, of the head too: SGLang's kernels for it need a GPU."""
    from sglang.srt.layers.quantization.gptq import gptq
    from sglang.srt.layers.quantization.gptq.schemes.gptq_linear import GPTQLinearScheme

    def apply(_self: Any, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        integers = quantised.unpacked(layer.qweight.T) - 8
        weight = integers * layer.scales.T[:, layer.g_idx.long()]
        return torch.nn.functional.linear(x, weight.to(x), bias)

    with (
        any_dtype(gptq.GPTQConfig),
        mock.patch.object(GPTQLinearScheme, "process_weights_after_loading", return_value=None),
        mock.patch.object(GPTQLinearScheme, "apply_weights", apply),
    ):
        yield


@contextlib.contextmanager
def fp8_linear() -> Iterator[None]:
    """The product with fp8 blocks by torch, with activations as they are: SGLang's kernels need a GPU."""
    from sglang.srt.layers.quantization.fp8 import Fp8Config, Fp8LinearMethod

    def apply(_self: Any, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        rows, columns = layer.weight.shape
        scales = layer.weight_scale_inv.repeat_interleave(128, 0).repeat_interleave(128, 1)[:rows, :columns]
        return torch.nn.functional.linear(x, (layer.weight.float() * scales).to(x), bias)

    with (
        any_dtype(Fp8Config),
        mock.patch.object(Fp8LinearMethod, "process_weights_after_loading", return_value=None),
        mock.patch.object(Fp8LinearMethod, "apply", apply),
    ):
        yield


def any_dtype(config: type) -> contextlib.AbstractContextManager[Any]:
    """Let a quantised model run in float32, in which a test can be exact; kernels take 16 bits only."""
    return mock.patch.object(config, "get_supported_act_dtypes", classmethod(lambda _: [torch.float32]))


SUBSTITUTES: dict[str, Callable[[], contextlib.AbstractContextManager[Any]]] = {
    f.__name__: f
    for f in (
        attention,
        final_soft_cap,
        any_backend_for_gpt_oss,
        rope_in_place,
        router_weight_on_input,
        int4_experts,
        gptq_linear,
        fp8_linear,
    )
}


@contextlib.contextmanager
def substituted(names: tuple[str, ...]) -> Iterator[None]:
    """Put the named substitutes in place, and SGLang's own code back afterwards.

    Nothing is compiled meanwhile: SGLang decorates some small functions with ``torch.compile``, a minute each here.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        for name in names:
            stack.enter_context(SUBSTITUTES[name]())
        yield
