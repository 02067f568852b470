"""Packed rows through the real engine: what each chat gives alone, and nothing that nobody needs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import tiny_models
import torch

pytest.importorskip("nemo_automodel", reason="the rows are packed by AutoModel")
from nemo_automodel.components.datasets.llm.eagle3 import _pack_collate, build_packed_eagle3_dataset

from nemo_eagle3_sglang.engine.runner import SGLangRunner
from nemo_eagle3_sglang.supervision.backend import RunnerBackend

VOCAB, STEPS, ROW = 500, 3, 64
MEMBER = torch.zeros(VOCAB, dtype=torch.bool).index_fill_(0, torch.arange(0, VOCAB, 2), True)


@pytest.fixture(scope="module")
def backend(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunnerBackend]:
    folder = tiny_models.save_target(tmp_path_factory.mktemp("packed"), "llama")
    runner = SGLangRunner.build(tiny_models.make_request(folder))
    target = RunnerBackend(runner)
    target.set_vocab_mapping(MEMBER.nonzero().squeeze(-1), MEMBER)
    yield target
    runner.close()


def chats() -> list[dict[str, list[int]]]:
    """Chats of 5 to 40 tokens; the third is not learnt, the fourth ends in tokens that are not."""
    generator = torch.Generator().manual_seed(7)
    rows = []
    for i, length in enumerate([21, 5, 12, 40, 17, 33]):
        loss = [0] * 3 + [1] * (length - 3)
        if i == 2:
            loss = [0] * length
        if i == 3:
            loss = [0] * 3 + [1] * 10 + [0] * (length - 13)
        rows.append({"input_ids": torch.randint(0, VOCAB, (length,), generator=generator).tolist(), "loss_mask": loss})
    return rows


def packed(rows: list[dict[str, list[int]]], size: int = ROW) -> dict[str, torch.Tensor]:
    return _pack_collate(build_packed_eagle3_dataset(rows, packed_sequence_size=size, pad_token_id=0))


FIELDS = ("aux", "draft_logits", "draft_lse", "draft_choices", "in_draft_vocab")


def test_packed_supervision_is_the_unpacked_bit_for_bit(backend):
    """The same chats one a row, padded to the longest."""
    rows = [{**row, "attention_mask": [1] * len(row["input_ids"])} for row in chats()]
    unpacked = {key: torch.tensor([row[key] + [0] * (40 - len(row[key])) for row in rows]) for key in rows[0]}
    whole, apart = backend.flat_batch(packed(chats()), STEPS), backend.flat_batch(unpacked, STEPS)
    assert len(packed(chats())["input_ids"]) < len(rows)
    assert whole.unroll.lengths == apart.unroll.lengths
    for name in FIELDS:
        assert torch.equal(getattr(whole, name), getattr(apart, name)), name


def test_packed_supervision_is_that_of_each_chat_in_a_forward_of_its_own(backend):
    whole = backend.flat_batch(packed(chats()), STEPS)
    parts = [backend.flat_batch(packed([row]), STEPS) for row in chats()]
    parts = [part for part in parts if part.unroll.lengths]
    assert whole.unroll.lengths == [length for part in parts for length in part.unroll.lengths]
    for name in FIELDS:
        together, apart = getattr(whole, name), torch.cat([getattr(part, name) for part in parts])
        # A matrix product of more rows rounds otherwise: the last bits of float32 states that reach 10, no more.
        torch.testing.assert_close(together, apart, atol=1e-4 if together.is_floating_point() else 0, rtol=0)


def test_padded_and_packed_batches_for_automodels_trainer_agree(backend):
    batch = packed(chats())
    rows = backend.generate_batch(**batch)
    flat = backend.flat_batch(batch, STEPS)
    assert torch.equal(rows.position_ids, batch["position_ids"])
    assert torch.equal(rows.seq_lens, batch["seq_lens"])
    assert torch.equal(rows.doc_remaining, batch["doc_remaining"])
    learnt = rows.loss_mask.bool() & (batch["doc_remaining"] > 0)
    probs = torch.exp(flat.draft_logits - flat.draft_lse[:, None])
    torch.testing.assert_close(rows.target_probs[learnt], probs, atol=1e-4, rtol=0)
    assert torch.equal(rows.position_mask[learnt].squeeze(-1), flat.in_draft_vocab)


def test_what_nobody_needs_is_not_run(backend, monkeypatch):
    """Padding, a chat without supervision, and the tail after a chat's last supervised token."""
    seen: list[tuple[list[int], list[int]]] = []
    forward = backend.source.runner.forward
    monkeypatch.setattr(
        backend.source.runner,
        "forward",
        lambda tokens, lengths: (seen.append((tokens.tolist(), lengths)), forward(tokens, lengths))[1],
    )
    backend.flat_batch(packed(chats()), STEPS)
    rows = chats()
    kept = [(rows[0], 21), (rows[1], 5), (rows[3], 13), (rows[4], 17), (rows[5], 33)]
    assert seen == [([x for row, n in kept for x in row["input_ids"][:n]], [n for _, n in kept])]
    backend.flat_batch(packed([rows[2]]), STEPS)
    assert len(seen) == 1, "nothing to learn, nothing to run"


def test_rows_for_automodels_trainer_are_the_same_packed_or_not(backend):
    """Bit for bit at every real token: both run the same sequences in the same order."""
    rows = [{**row, "attention_mask": [1] * len(row["input_ids"])} for row in chats()]
    unpacked = {key: torch.tensor([row[key] + [0] * (40 - len(row[key])) for row in rows]) for key in rows[0]}
    batch = packed(chats())
    whole, apart = backend.generate_batch(**batch), backend.generate_batch(**unpacked)
    real = [x["attention_mask"].bool() for x in (batch, unpacked)]
    assert torch.equal(batch["input_ids"][real[0]], unpacked["input_ids"][real[1]]), "packed in order"
    for name in ("aux_hidden_states", "target_probs", "position_mask"):
        together, alone = (getattr(x, name)[at] for x, at in zip((whole, apart), real, strict=True))
        assert torch.equal(together, alone), name
