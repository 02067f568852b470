"""Memory of a run per GPU, computed from the target's config.json and a few numbers of the recipe.

``nemo-eagle3-sglang plan RECIPE`` prints it (see ``plan.py``).
Bytes follow from shapes: what is counted is in the docstring of each function. Not counted: the CUDA context and NCCL
(1 to 3 GiB), the allocator's fragmentation, kernels' workspaces. Weights quantised in groups carry one 16-bit scale a
group.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nemo_eagle3_sglang.contracts import NUM_AUX_LAYERS

GIB = 2**30
BF16, FP32 = 2, 4
# Rows of SGLang's vocabulary are padded to this.
VOCAB_PAD = 64
# Logits of one chunk of rows: of the target (supervision/head.py) and of the draft (losses/soft_cross_entropy.py).
HEAD_CHUNK, LOSS_CHUNK = 128 * 2**20, 256 * 2**20


@dataclass(frozen=True)
class Counts:
    """Parameters of a target's text model.

    Attributes:
        sharded: Divided among tensor-parallel ranks: embeddings, head, q/k/v/o (the per-head parts of MLA), dense and
            shared MLPs.
        replicated: On every rank: norms, routers, the low-rank inputs of MLA.
        experts: Weights of routed experts, divided among ranks; usually the quantised part.
    """

    sharded: int
    replicated: int
    experts: int

    @property
    def total(self) -> int:
        """All parameters."""
        return self.sharded + self.replicated + self.experts


def target_counts(config: Mapping[str, Any]) -> Counts:
    """Count a text model's parameters from the fields of its config.json.

    Sources: Llama's layer (q, k, v, o; gate, up, down; two norms); DeepSeek-V2, section 2.1 and appendix
    (https://arxiv.org/abs/2405.04434) for MLA; DeepSeek-V3's ``first_k_dense_replace`` for which layers are dense.
    Biases, which are less than a thousandth, are left out.
    """
    hidden, layers, vocab = config["hidden_size"], config["num_hidden_layers"], config["vocab_size"]
    attention, shared_in = _mla(config) if config.get("kv_lora_rank") else (_attention(config), 0)
    routed = config.get("n_routed_experts") or config.get("num_experts") or config.get("num_local_experts") or 0
    dense = min(config.get("first_k_dense_replace", 0), layers) if routed else layers
    width = config.get("moe_intermediate_size") or config["intermediate_size"]
    swiglu = 3 * hidden
    mlp = dense * swiglu * config["intermediate_size"]
    mlp += (layers - dense) * swiglu * width * (config.get("n_shared_experts") or 0)
    embeddings = vocab * hidden * (1 if config.get("tie_word_embeddings") else 2)
    router = (layers - dense) * routed * (hidden + 1)
    norms = layers * 2 * hidden + hidden
    return Counts(
        sharded=embeddings + layers * attention + mlp,
        replicated=layers * shared_in + router + norms,
        experts=(layers - dense) * routed * swiglu * width,
    )


def _attention(config: Mapping[str, Any]) -> int:
    heads, hidden = config["num_attention_heads"], config["hidden_size"]
    head_dim = config.get("head_dim") or hidden // heads
    return hidden * head_dim * (2 * heads + 2 * (config.get("num_key_value_heads") or heads))


def _mla(config: Mapping[str, Any]) -> tuple[int, int]:
    """Return the per-head and the shared parameters of a layer of multi-head latent attention."""
    heads, hidden, kv = config["num_attention_heads"], config["hidden_size"], config["kv_lora_rank"]
    query = config["qk_nope_head_dim"] + config["qk_rope_head_dim"]
    rank, value = config.get("q_lora_rank"), config["v_head_dim"]
    sharded = heads * ((rank or hidden) * query + kv * (config["qk_nope_head_dim"] + value) + value * hidden)
    replicated = hidden * (kv + config["qk_rope_head_dim"]) + kv
    return sharded, replicated + (hidden * rank + rank if rank else 0)


def expert_bits(config: Mapping[str, Any]) -> float:
    """Return bits a weight of the routed experts: 16, or those of ``quantization_config`` with one scale a group.

    Reads compressed-tensors' ``config_groups`` (https://github.com/neuralmagic/compressed-tensors); every other method
    is taken by its ``bits`` or as eight.
    """
    quantization = config.get("quantization_config")
    if not quantization:
        return 16.0
    groups = quantization.get("config_groups") or {}
    weights = next((group["weights"] for group in groups.values()), quantization)
    bits = weights.get("num_bits") or weights.get("bits") or 8
    group = weights.get("group_size") or 0
    return bits + (16 / group if group > 0 else 0)


def target_bytes(config: Mapping[str, Any], tp: int, linear_bits: int = 16) -> int:
    """Return a rank's bytes of target weights.

    Args:
        config: Text config.
        tp: Tensor-parallel size.
        linear_bits: Bits a weight of the linear layers but the head, 16 or what SGLang quantises them to at load;
            routed experts have theirs from the config where it says so. Embeddings, head and norms are in bf16.
    """
    counts = target_counts(config)
    tables = config["vocab_size"] * config["hidden_size"] * (1 if config.get("tie_word_embeddings") else 2)
    linear = (counts.sharded - tables) * linear_bits / 8
    experts = counts.experts * min(linear_bits, expert_bits(config)) / 8
    return math.ceil((tables * BF16 + linear + experts) / tp + counts.replicated * BF16)


def kv_bytes_per_token(config: Mapping[str, Any], tp: int) -> int:
    """Return a rank's bytes of KV cache a token: the latent and its rotary slice for MLA, on every rank the same."""
    layers = config["num_hidden_layers"]
    if config.get("kv_lora_rank"):
        return layers * (config["kv_lora_rank"] + config["qk_rope_head_dim"]) * BF16
    heads = config["num_attention_heads"]
    kv_heads = config.get("num_key_value_heads") or heads
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    return layers * 2 * max(1, kv_heads // tp) * head_dim * BF16


def forward_bytes(config: Mapping[str, Any], tokens: int, tp: int) -> int:
    """Return the peak of a rank's target forward over ``tokens``, weights and KV pool apart.

    Aux states and the last state that are kept, ``(A + 1) H`` a token; hidden, residual and the layer's output; the
    wider of one attention (q, k, v, out of a rank's heads; MLA's keys and values are expanded for a prefill) and one
    MLP (gate, up and their product; for experts those of each of the ``k`` that a token meets, and its ``k`` copies).
    """
    hidden, heads = config["hidden_size"], math.ceil(config["num_attention_heads"] / tp)
    if config.get("kv_lora_rank"):
        query = config["qk_nope_head_dim"] + config["qk_rope_head_dim"]
        attention = heads * (2 * query + 2 * config["v_head_dim"])
    else:
        head_dim = config.get("head_dim") or hidden // config["num_attention_heads"]
        attention = 4 * heads * head_dim
    chosen = config.get("num_experts_per_tok") or 0
    width = config.get("moe_intermediate_size") or config["intermediate_size"]
    mlp = 3 * math.ceil(config["intermediate_size"] / tp)
    if chosen:
        mlp = max(mlp, chosen * (3 * math.ceil(width / tp) + hidden))
    return tokens * BF16 * ((NUM_AUX_LAYERS + 1) * hidden + 3 * hidden + max(attention, mlp))


def supervision_bytes(config: Mapping[str, Any], tokens: int, supervised: int, draft_vocab: int, trainer: str) -> int:
    """Return the bytes of a micro-batch's supervision.

    Aux states in bf16, and of the target's distribution what each trainer keeps: bf16 logits at supervised positions
    (``flat``), or float32 probabilities of every slot (``automodel``).
    """
    aux = tokens * NUM_AUX_LAYERS * config["hidden_size"] * BF16
    return aux + (supervised * draft_vocab * BF16 if trainer == "flat" else tokens * draft_vocab * FP32)


def head_bytes(config: Mapping[str, Any], tokens: int, tp: int, draft_vocab: int) -> int:
    """Return the peak of the projection to the target's vocabulary, a chunk of positions at a time.

    A chunk's logits in bf16; of its columns in the draft vocabulary two float32 copies, for their log-sum-exp.
    """
    rows = math.ceil(config["vocab_size"] / VOCAB_PAD / tp) * VOCAB_PAD
    chunk = min(tokens, max(1, HEAD_CHUNK // (rows * BF16)))
    return chunk * (rows * BF16 + 2 * math.ceil(draft_vocab / tp) * FP32)


def draft_counts(draft: Mapping[str, Any]) -> tuple[int, int]:
    """Return trained and frozen parameters of a one-layer Llama draft; frozen are the embeddings.

    Trained: ``fc [H, 3H]``, q, k, v on ``[embed, hidden]`` (2H wide), o, a SwiGLU MLP, four norms, the draft head.
    """
    hidden, heads = draft["hidden_size"], draft["num_attention_heads"]
    head_dim = draft.get("head_dim") or hidden // heads
    kv_heads = draft.get("num_key_value_heads") or heads
    attention = 2 * hidden * head_dim * (heads + 2 * kv_heads) + heads * head_dim * hidden
    trained = NUM_AUX_LAYERS * hidden * hidden + attention + 3 * hidden * draft["intermediate_size"] + 4 * hidden
    return trained + draft["draft_vocab_size"] * hidden, draft["vocab_size"] * hidden


def draft_state_bytes(draft: Mapping[str, Any], world: int) -> int:
    """Return weights, gradients and AdamW's two moments, all bf16 as AutoModel keeps them, and DDP's buckets.

    PyTorch's DDP copies gradients to buckets of their size unless ``gradient_as_bucket_view`` is set, which AutoModel
    0.6.0 does not.
    """
    trained, frozen = draft_counts(draft)
    copies = 4 + (1 if world > 1 else 0)
    return BF16 * (copies * trained + frozen)


def flat_activation_bytes(draft: Mapping[str, Any], tokens: int, supervised: int, steps: int) -> int:
    """Return what the flat trainer keeps for the backward, and the loss with its gradients.

    A is the width of all query heads, G that of all key heads. Kept in bf16 a chain and step: embedding, the normed
    pair, the states before and after the MLP with its normed input (6H); query and attended values (2A), key and value
    (2G); gate, up and their product (3I). Once a token: the projected states, the normed pair, step 0's keys and values
    (4H + 2G). At the loss: the states of all steps, gathered, normed, and their gradient (4H a step), one chunk of
    logits, the gradient of the output layer.

    Args:
        draft: Draft config.
        tokens: Tokens of a micro-batch.
        supervised: Those that carry loss, about the chains there are.
        steps: Training-time-test steps.
    """
    hidden, heads, vocab = draft["hidden_size"], draft["num_attention_heads"], draft["draft_vocab_size"]
    head_dim = draft.get("head_dim") or hidden // heads
    wide, grouped = heads * head_dim, (draft.get("num_key_value_heads") or heads) * head_dim
    chain = 6 * hidden + 2 * wide + 2 * grouped + 3 * draft["intermediate_size"]
    loss = supervised * steps * 4 * hidden + vocab * hidden
    kept = supervised * steps * chain + tokens * (4 * hidden + 2 * grouped)
    return BF16 * (kept + loss) + min(LOSS_CHUNK, supervised * steps * vocab * BF16)


def draft_activation_bytes(draft: Mapping[str, Any], rows: int, length: int, steps: int) -> int:
    """Return what training-time test keeps for the backward, and the transients of the widest operation.

    As counted by ``torch.autograd.graph.saved_tensors_hooks`` in AutoModel 0.6.0's draft (the test does it again); S is
    ``length``, A the width of all heads. Per step and token: the norms' seven float32 states (28H), the concatenation
    and the inputs of MLP and head (8H), q, k, v and the attention's output (8A), gate, activation, up and product (8I),
    and of eager attention the softmax in float32 with its bf16 copy (6S a head). Step k also keeps the k earlier keys
    and values (4A each). Loss: bf16 logits, and the target distribution shifted for the step, in float32 (6D).
    Transient: scores, masked scores and the softmax's input, or as many gradients (8S a head), of one step.
    """
    hidden, heads, vocab = draft["hidden_size"], draft["num_attention_heads"], draft["draft_vocab_size"]
    wide = heads * (draft.get("head_dim") or hidden // heads)
    kept = 36 * hidden + 8 * wide + 8 * draft["intermediate_size"] + 6 * heads * length
    earlier = 4 * wide * steps * (steps - 1) // 2
    loss = steps * (BF16 + FP32) * vocab
    return rows * length * (steps * kept + earlier + loss + NUM_AUX_LAYERS * hidden * BF16 + 8 * heads * length)


@dataclass(frozen=True)
class Run:
    """Numbers of a recipe and its launch.

    Attributes:
        target: Text config, from config.json.
        draft: Draft config, with ``draft_vocab_size``.
        world: Processes, one a GPU.
        tp: Tensor-parallel size of the target; ``tp`` ranks run the target once over the rows of all of them.
        rows: Micro-batch of a rank.
        length: Tokens of a row.
        ttt_steps: Training-time-test steps.
        kv_tokens: Slots of the KV pool; by default what one forward needs.
        trainer: ``flat`` or ``automodel``; see ``recipe_args.trainer``.
        supervised: Share of the tokens that carry loss.
        linear_bits: Bits a weight of the target's linear layers.
    """

    target: Mapping[str, Any]
    draft: Mapping[str, Any]
    world: int
    tp: int
    rows: int
    length: int
    ttt_steps: int
    kv_tokens: int | None = None
    trainer: str = "flat"
    supervised: float = 1.0
    linear_bits: int = 16

    @property
    def forward_tokens(self) -> int:
        """Tokens of one target forward."""
        return self.tp * self.rows * self.length

    def parts(self) -> dict[str, int]:
        """Return the bytes of a rank by name; the first four are always there, of the last two the larger counts."""
        tokens = self.rows * self.length
        learnt = math.ceil(tokens * self.supervised)
        kv = self.kv_tokens or self.forward_tokens
        vocab = self.draft["draft_vocab_size"]
        if self.trainer == "flat":
            activations = flat_activation_bytes(self.draft, tokens, learnt, self.ttt_steps)
        else:
            activations = draft_activation_bytes(self.draft, self.rows, self.length, self.ttt_steps)
        return {
            "target weights": target_bytes(self.target, self.tp, self.linear_bits),
            "KV pool": kv * kv_bytes_per_token(self.target, self.tp),
            "draft, gradients, AdamW": draft_state_bytes(self.draft, self.world),
            "supervision": supervision_bytes(self.target, tokens, learnt, vocab, self.trainer),
            "target forward": forward_bytes(self.target, self.forward_tokens, self.tp)
            + head_bytes(self.target, self.forward_tokens, self.tp, vocab),
            "draft activations": activations,
        }

    def peak(self) -> int:
        """Return the bytes of a rank at the worse of its two peaks: the target's forward, the draft's backward."""
        *resident, forward, backward = self.parts().values()
        return sum(resident) + max(forward, backward)

    def lines(self, gpu_bytes: float) -> list[str]:
        """Return the table, GiB a GPU, one part a line, as recipes carry it in comments."""
        rows = [f"{name + ':':<26}{size / GIB:8.1f} GiB" for name, size in self.parts().items()]
        peak, free = self.peak() / GIB, gpu_bytes / GIB
        return [*rows, f"{'peak of ' + format(free, '.1f') + ' GiB:':<26}{peak:8.1f} GiB"]


def read_text_config(path: str | Path) -> dict[str, Any]:
    """Return the text config of a config.json, with the quantisation that a wrapper keeps beside it."""
    config = json.loads(Path(path).read_text(encoding="utf-8"))
    text = dict(config.get("text_config") or config)
    if "quantization_config" in config:
        text.setdefault("quantization_config", config["quantization_config"])
    return text
