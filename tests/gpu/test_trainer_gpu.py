"""The flat trainer on a GPU: FlashAttention, the compiled kernels, no synchronisation, memory.

TRAINER_DEVICE=cpu is a dry run of what does not need CUDA.
"""

from __future__ import annotations

import os
import time

import pytest
import torch
from torch._inductor.utils import fresh_cache
from trainer_cases import backend, draft, modules, packed, run

from nemo_eagle3_sglang.losses import soft_cross_entropy
from nemo_eagle3_sglang.training.attention import Bounds, unrolled_attention, uses_flash

DEVICE = os.environ.get("TRAINER_DEVICE", "cuda")
BF16 = torch.bfloat16 if DEVICE == "cuda" else torch.float32
SIZES = {"hidden": 512, "vocab": 4096}


def bounds(query_lengths: list[int], slot_lengths: list[int]) -> Bounds:
    cumulative = [
        torch.tensor([0, *torch.tensor(n).cumsum(0)], dtype=torch.int32) for n in (query_lengths, slot_lengths)
    ]
    return Bounds(*(c.to(DEVICE) for c in cumulative), query_lengths, slot_lengths)


def dense(query, key, value, keys, values, lengths: tuple[list[int], list[int]], queries, scale: float):
    """The same attention by torch's own operators and autograd: a mask over all columns of a document, one softmax.

    ``queries`` are the places of the chains among the query slots; the last query slot of a document stands at its last
    key.
    """
    groups, place, slot, outs = query.shape[1] // key.shape[1], 0, 0, []
    for count, size in zip(*lengths, strict=True):
        chains = ((queries >= place) & (queries < place + count)).nonzero().squeeze(-1)
        own = queries[chains] - place + size - count
        q = query[chains]
        k, v = (x[slot : slot + size].repeat_interleave(groups, dim=1) for x in (key, value))
        scores = torch.einsum("qhd,khd->hqk", q, k) * scale
        hidden = torch.arange(size, device=query.device)[None, :] > own[:, None]
        columns = [scores.masked_fill(hidden, float("-inf"))]
        columns += [(q * x[chains].repeat_interleave(groups, dim=1)).sum(-1).T.unsqueeze(-1) * scale for x in keys]
        weights = torch.softmax(torch.cat(columns, dim=-1), dim=-1)
        out = torch.einsum("hqk,khd->qhd", weights[..., :size], v)
        for i, x in enumerate(values):
            out = out + weights[..., size + i].T.unsqueeze(-1) * x[chains].repeat_interleave(groups, dim=1)
        outs.append(out)
        place, slot = place + count, slot + size
    return torch.cat(outs)


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("gaps", [False, True])
@pytest.mark.parametrize("later", [0, 3, 6])
def test_flash_attention_against_float64(dim, gaps, later, report):
    """Fewer queries than keys in a document, grouped heads: the error of bf16, near that of a dense bf16."""
    query_lengths, slot_lengths, heads, groups = [70, 1, 33, 128], [70, 5, 200, 129], 8, 2
    chains = sum(query_lengths)
    queries = torch.arange(chains, device=DEVICE)
    if gaps:
        queries = queries[torch.arange(chains, device=DEVICE) % 3 != 1]
    generator = torch.Generator().manual_seed(0)

    def draw(rows: int, width: int) -> torch.Tensor:
        return torch.randn(rows, width, dim, generator=generator).to(DEVICE, BF16)

    slots, rows = sum(slot_lengths), queries.shape[0]
    tensors = [draw(rows, heads), draw(slots, groups), draw(slots, groups)]
    tensors += [draw(rows, groups) for _ in range(2 * later)]
    weight = draw(rows, heads)

    def evaluate(dtype: torch.dtype, ours: bool) -> list[torch.Tensor]:
        leaves = [t.to(dtype).requires_grad_() for t in tensors]
        query, key, value, *rest = leaves
        keys, values = rest[:later], rest[later:]
        if ours:
            limits = bounds(query_lengths, slot_lengths)
            out = unrolled_attention(query, key, value, keys, values, limits, queries if gaps else None, dim**-0.5)
        else:
            out = dense(query, key, value, keys, values, (query_lengths, slot_lengths), queries, dim**-0.5)
        return [out.detach(), *torch.autograd.grad((out * weight.to(dtype)).sum(), leaves)]

    def errors(found: list[torch.Tensor]) -> list[float]:
        assert all(torch.isfinite(x).all() for x in found)
        return [((got.double() - want).norm() / want.norm()).item() for got, want in zip(found, exact, strict=True)]

    assert uses_flash(tensors[0]) == (DEVICE == "cuda")
    assert not uses_flash(tensors[0].float())
    exact = evaluate(torch.float64, ours=False)
    found = {
        "ours": errors(evaluate(BF16, ours=True)),
        "dense": errors(evaluate(BF16, ours=False)),
        "ours in fp32": errors(evaluate(torch.float32, ours=True)),
    }
    report(f"attention_{dim}_{gaps}_{later}", found)
    assert max(found["ours in fp32"]) <= 1e-5, found
    # 2^-9 is half a unit of bf16; outputs and gradients pass through a few roundings.
    assert max(found["ours"]) <= 5 * 2**-9, found
    for ours, theirs in zip(found["ours"], found["dense"], strict=True):
        assert ours <= 2 * theirs + 2**-9, found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("columns", [32_000, 131_072, 131_073, 151_936, 163_840])
def test_kernel_at_any_vocabulary(columns, dtype):
    generator = torch.Generator(DEVICE).manual_seed(0)
    rows = 64
    logits = (3 * torch.randn(rows, columns, generator=generator, device=DEVICE)).to(dtype)
    target = (3 * torch.randn(7, columns, generator=generator, device=DEVICE)).to(dtype)
    index = torch.randint(0, 7, (rows,), generator=generator, device=DEVICE)
    weights = torch.rand(rows, generator=generator, device=DEVICE) + 0.1
    weights[5] = 0.0
    p = torch.softmax(target.double(), -1)[index]
    want = weights.double() * -(p * torch.log_softmax(logits.double(), -1)).sum(-1)
    want_grad = weights.double()[:, None] * (torch.softmax(logits.double(), -1) - p)
    choices, losses = torch.empty_like(index), torch.empty_like(weights)
    # The first of the largest: bf16 has ties, of which torch's argmax names any on a GPU.
    numbers = torch.arange(columns, device=DEVICE)
    best = torch.where(logits == logits.amax(-1, keepdim=True), numbers, columns).amin(-1)
    lse = torch.logsumexp(target.double(), -1).float()
    soft_cross_entropy.soft_cross_entropy_(logits, target, lse, index, weights, losses, choices, write_grad=True)
    assert torch.equal(choices, best)
    assert ((losses - want).abs() / want.clamp_min(1.0)).max() <= 1e-5
    # The gradient is rounded once, to the dtype of the logits.
    rounding = 2**-8 if dtype == torch.bfloat16 else 1e-5 if DEVICE == "cuda" else 5e-5  # torch's softmax on a CPU
    assert (logits - want_grad).abs().max() <= rounding * want_grad.abs().max()
    assert not logits[5].any(), "a row of weight 0 has no gradient"


def chats(count: int = 12, length: int = 150) -> list[dict[str, list[int]]]:
    generator = torch.Generator().manual_seed(0)
    rows = []
    for i in range(count):
        total = length + 13 * i
        gap = [0] * 20 + [1] * 30 + [0] * 30 + [1] * (total - 80)
        rows.append({"input_ids": torch.randint(0, 4096, (total,), generator=generator).tolist(), "loss_mask": gap})
    return rows


def trainers(dtype: torch.dtype, steps: int = 4):
    target = backend(dtype, 1024, device=DEVICE, **SIZES)
    overrides = {"num_attention_heads": 8, "num_key_value_heads": 2, "intermediate_size": 1024, "head_dim": 64}
    model = draft(
        torch.float32, **overrides, hidden_size=512, target_hidden_size=512, vocab_size=4096, draft_vocab_size=1024
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.3)
    model = model.to(DEVICE, dtype)
    model.model.layers[0].self_attn.rotary_emb.dtype = dtype
    return target, *(module.to(DEVICE) for module in modules(model, target, steps))


def test_equal_to_automodel(report):
    """float32 within 1e-5 of float64; in bf16 our error is not above twice AutoModel's."""
    batch = packed(chats(), 512)

    def gradients(dtype: torch.dtype, ours: bool):
        target, theirs, flat = trainers(dtype)
        if ours:
            return run(flat, {"batch": target.flat_batch(batch, 4)})
        on_device = {k: v.to(DEVICE) for k, v in batch.items()}
        return run(theirs, target.generate_batch(**on_device).to_trainer_inputs())

    metrics, exact = gradients(torch.float64, False)
    errors: dict[str, dict[str, float]] = {}
    for name, dtype in (("fp32", torch.float32), ("bf16", BF16)):
        for ours in (True, False):
            found, grads = gradients(dtype, ours)
            error = {n: ((grads[n].double() - g).norm() / g.norm()).item() for n, g in exact.items()}
            error["loss"] = abs(found.loss.item() - metrics.loss.item()) / metrics.loss.item()
            errors[f"{name} {'ours' if ours else 'automodel'}"] = error
    report("trainer_parity", errors)
    assert max(errors["fp32 ours"].values()) <= 1e-5, errors["fp32 ours"]
    for name, error in errors["bf16 ours"].items():
        assert error <= 2 * errors["bf16 automodel"][name] + 2e-3, (name, error, errors["bf16 automodel"][name])


def test_a_step_does_not_wait_for_the_device():
    target, _, flat = trainers(BF16)
    batch = {k: v.pin_memory() if DEVICE == "cuda" else v for k, v in packed(chats(), 512).items()}
    for _ in range(2):
        run(flat, {"batch": target.flat_batch(batch, 4)})
    if DEVICE == "cuda":
        torch.cuda.set_sync_debug_mode("error")
    try:
        flat(batch=target.flat_batch(batch, 4)).loss.backward()
    finally:
        if DEVICE == "cuda":
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.skipif(DEVICE != "cuda", reason="nothing is compiled on a CPU")
def test_compile_time(report):
    """The first step pays for compiling the elementwise parts; a batch of another shape compiles nothing."""
    target, _, flat = trainers(BF16)

    def seconds(rows: list[dict[str, list[int]]]) -> float:
        batch = target.flat_batch(packed(rows, 512), 4)
        start = time.perf_counter()
        flat(batch=batch).loss.backward()
        torch.cuda.synchronize()
        return time.perf_counter() - start

    seconds(chats())  # libraries, Triton's loss kernel
    torch.compiler.reset()
    with fresh_cache():
        first, second, other = seconds(chats()), seconds(chats()), seconds(chats(9, 211))
    report("trainer_compile_seconds", {"first": first, "second": second, "another_shape": other})
    assert first < 120
    assert other < max(1.0, first / 4), (first, second, other)


@pytest.mark.skipif(DEVICE != "cuda", reason="memory of a GPU")
def test_draft_logits_do_not_grow_with_the_steps(report):
    """The loss holds a chunk of rows, however many steps there are."""
    peaks = []
    for steps in (2, 8):
        hidden = torch.randn(steps * 1024, 256, device=DEVICE, dtype=BF16, requires_grad=True)
        weight = torch.randn(64_000, 256, device=DEVICE, dtype=BF16, requires_grad=True)
        target = torch.randn(1024, 64_000, device=DEVICE, dtype=BF16)
        lse = torch.logsumexp(target.float(), -1)
        index = torch.arange(1024, device=DEVICE).repeat(steps)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        loss, _ = soft_cross_entropy.linear_soft_cross_entropy(
            hidden, weight, target, lse, index, torch.ones(len(index), device=DEVICE)
        )
        loss.backward()
        peaks.append((torch.cuda.max_memory_allocated() - before) / 2**20)
        del hidden, weight, target, loss
    report("loss_memory_mib", peaks)
    # 250 MiB of logits a chunk; beside them only the rows' own gradient grows, by 3 MiB.
    assert peaks[1] - peaks[0] < 16, peaks
