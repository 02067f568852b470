"""Our trainer against AutoModel's on the same batches: loss, metrics and every gradient.

The reference runs in float64, so that what separates ours from it is the maths and not a rounding.
"""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("nemo_automodel", reason="the reference is AutoModel itself")
from trainer_cases import DRAFT, VOCAB, backend, chats, draft, modules, packed, padded, run

from nemo_eagle3_sglang.supervision.documents import documents
from nemo_eagle3_sglang.training import trainer as trainer_module

MODES = {"plain": {}, "fc_norm": {"fc_norm": True}, "norm_output": {"norm_output": True}}
BIASES = {"attention_bias": True, "mlp_bias": True, "head_dim": 8}


BATCHES = {
    "packed": packed(chats()),
    "padded right": padded(chats()),
    "padded left": padded(chats(), left=True),
    "one document": padded(chats(1)),
    "long answers": packed([{"input_ids": list(range(1, 19)), "loss_mask": [0] * 6 + [1] * 12}] * 3),
}


def check(metrics, grads, wanted, wanted_grads, tolerance: float) -> None:
    assert abs(metrics.loss.item() - wanted.loss.item()) <= tolerance * max(1.0, abs(wanted.loss.item()))
    assert metrics.accuracy.item() == pytest.approx(wanted.accuracy.item(), abs=1e-6)
    assert int(metrics.valid_tokens) == int(wanted.valid_tokens)
    assert metrics.step_prefix_hits.tolist() == wanted.step_prefix_hits.tolist()
    assert metrics.step_valid.tolist() == wanted.step_valid.tolist()
    assert grads.keys() == wanted_grads.keys()
    for name, grad in wanted_grads.items():
        error = (grads[name].double() - grad).abs().max().item()
        assert error <= tolerance * max(grad.abs().max().item(), 1e-3), (name, error)


@pytest.mark.parametrize("batch", BATCHES.values(), ids=BATCHES.keys())
@pytest.mark.parametrize("mode", MODES.values(), ids=MODES.keys())
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_equal_to_automodel(batch, mode, dtype):
    """Loss, metrics and gradients of both trainers, against AutoModel's in float64."""
    target, model = backend(torch.float64), draft(torch.float64, **mode)
    reference, _ = modules(model, target, 4)
    # AutoModel's own loss is nan on rows that are padded left.
    right = BATCHES["padded right"] if batch is BATCHES["padded left"] else batch
    wanted = run(reference, target.generate_batch(**right).to_trainer_inputs())
    assert float(wanted[0].valid_tokens) > 0

    target, model = backend(dtype), draft(torch.float64, **mode).to(dtype)
    model.model.layers[0].self_attn.rotary_emb.dtype = dtype
    _, ours = modules(model, target, 4)
    tolerance = 1e-10 if dtype == torch.float64 else 1e-5
    # The log-sum-exp of the target is float32 by contract.
    check(*run(ours, {"batch": target.flat_batch(batch, 4)}), *wanted, max(tolerance, 1e-6))


def unsupervised() -> dict[str, torch.Tensor]:
    batch = padded(chats())
    return {**batch, "loss_mask": torch.zeros_like(batch["loss_mask"])}


def test_a_batch_without_supervision_has_zero_loss_and_gradients():
    """Zero and not None: under DDP every rank must have a gradient to reduce."""
    target = backend(torch.float32)
    _, ours = modules(draft(torch.float32), target, 3)
    metrics, grads = run(ours, {"batch": target.flat_batch(unsupervised(), 3)})
    assert metrics.loss.item() == metrics.accuracy.item() == metrics.valid_tokens.item() == 0
    assert metrics.step_valid.tolist() == metrics.step_prefix_hits.tolist() == [0, 0, 0]
    assert grads.keys() == run(ours, {"batch": target.flat_batch(BATCHES["packed"], 3)})[1].keys()
    assert not any(grad.any() for grad in grads.values())


def test_no_choice_of_the_targets_in_the_draft_vocabulary():
    """Supervised positions, and loss at none of them: AutoModel's zero, and zero gradients."""
    target, model = backend(torch.float64), draft(torch.float64)
    # A token that the target chooses nowhere, and others that it does not choose in this batch.
    chosen = (
        target.source.runner.head()(target.source.runner.forward(*_tokens(BATCHES["packed"])).last).argmax(-1).unique()
    )
    free = torch.tensor([i for i in range(VOCAB) if i not in chosen.tolist()])[:DRAFT]
    assert len(free) == DRAFT
    target.set_vocab_mapping(free, torch.zeros(VOCAB, dtype=torch.bool).index_fill_(0, free, True))
    reference, ours = modules(model, target, 4)
    batch = target.flat_batch(BATCHES["packed"], 4)
    assert batch.unroll.pairs.numel() > 0
    wanted = run(reference, target.generate_batch(**BATCHES["packed"]).to_trainer_inputs())
    metrics, grads = run(ours, {"batch": batch})
    assert metrics.loss.item() == 0
    check(metrics, grads, *wanted, 1e-12)


def _tokens(batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, list[int]]:
    docs = documents(*(batch[name] for name in ("input_ids", "attention_mask", "loss_mask", "seq_lens")), trim=False)
    return torch.from_numpy(docs.tokens), docs.lengths.tolist()


def test_another_number_of_steps_is_refused():
    target = backend(torch.float32)
    _, ours = modules(draft(torch.float32), target, 3)
    with pytest.raises(ValueError, match="laid out for 2 steps, the trainer unrolls 3"):
        ours(batch=target.flat_batch(BATCHES["packed"], 2))


@pytest.mark.parametrize("steps", [1, 2, 7])
def test_any_number_of_steps(steps):
    target, model = backend(torch.float64), draft(torch.float64)
    reference, ours = modules(model, target, steps)
    wanted = run(reference, target.generate_batch(**BATCHES["packed"]).to_trainer_inputs())
    check(*run(ours, {"batch": target.flat_batch(BATCHES["packed"], steps)}), *wanted, 1e-6)


DRAFTS = {
    "biases and heads of their own size": BIASES,
    "one key head": {"num_key_value_heads": 1},
    "a key head each": {"num_key_value_heads": 4},
    "gelu": {"hidden_act": "gelu"},
    "scaled positions": {
        "rope_scaling": {
            "rope_type": "llama3",
            "rope_theta": 1000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 16,
        },
    },
}


@pytest.mark.parametrize("shape", DRAFTS.values(), ids=DRAFTS.keys())
def test_drafts_of_other_shapes(shape):
    target, model = backend(torch.float64), draft(torch.float64, **shape)
    reference, ours = modules(model, target, 4)
    wanted = run(reference, target.generate_batch(**BATCHES["packed"]).to_trainer_inputs())
    check(*run(ours, {"batch": target.flat_batch(BATCHES["packed"], 4)}), *wanted, 1e-6)


@pytest.mark.parametrize("batch", [BATCHES["packed"], unsupervised()], ids=["packed", "no supervision"])
def test_evaluation_gives_the_same_loss(batch):
    target = backend(torch.float32)
    _, ours = modules(draft(torch.float32), target, 4)
    batch = target.flat_batch(batch, 4)
    ours.eval()
    with torch.no_grad():
        evaluated = ours(batch=batch)
    assert not evaluated.loss.requires_grad
    ours.train()
    trained = run(ours, {"batch": batch})[0]
    for name in ("loss", "accuracy", "valid_tokens", "step_prefix_hits", "step_valid"):
        assert torch.equal(getattr(evaluated, name), getattr(trained, name).detach()), name


def test_the_table_of_angles_grows_with_the_documents(monkeypatch):
    """Kept between batches, so that a longer document must find it too short."""
    monkeypatch.setattr(trainer_module, "TABLE_STEP", 1)
    target, model = backend(torch.float64), draft(torch.float64)
    reference, ours = modules(model, target, 4)
    for length in (5, 18, 3):
        batch = padded([{"input_ids": list(range(length)), "loss_mask": [1] * length}])
        wanted = run(reference, target.generate_batch(**batch).to_trainer_inputs())
        check(*run(ours, {"batch": target.flat_batch(batch, 4)}), *wanted, 1e-6)
    # A slot of the longest document is read at most 17 + 4 places from its start, and the table is not made anew for 3.
    assert 21 <= len(ours._angles[0]) <= 22


def test_packed_loss_is_the_token_weighted_unpacked_loss():
    """Each step is a mean over its supervised positions, so documents weigh by theirs."""
    target, steps = backend(torch.float64), 4
    _, ours = modules(draft(torch.float64), target, steps)
    rows = chats(6)
    whole = ours(batch=target.flat_batch(packed(rows), steps))
    decay = [0.8**k for k in range(steps)]
    sums, counts = torch.zeros(steps, dtype=torch.float64), torch.zeros(steps, dtype=torch.float64)
    for row in rows:
        batch = target.flat_batch(padded([row]), steps)
        if not batch.unroll.lengths:
            continue
        valid = batch.in_draft_vocab[batch.unroll.pair_targets].split(batch.unroll.pair_sizes)
        for k in range(steps):
            # A loss of step k alone: the weight of every other step is taken away.
            ours._row_weights = lambda mask, sizes, *_, k=k: torch.cat(
                [part.float() * (i == k) for i, part in enumerate(mask.split(sizes))]
            )
            sums[k] += ours(batch=batch).loss.item()
            counts[k] += int(valid[k].sum())
    expected = sum(d * s / c for d, s, c in zip(decay, sums, counts.clamp_min(1), strict=True)) / sum(decay)
    assert whole.loss.item() == pytest.approx(expected.item(), rel=1e-6)
