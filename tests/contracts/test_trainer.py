"""Our trainer against AutoModel's on the same batches: loss, metrics and every gradient.

The reference runs in float64, so that what separates ours from it is the maths and not a rounding.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace

import pytest
import torch
from transformers import LlamaConfig

from nemo_eagle3_sglang.contracts import HiddenStates, TargetInfo
from nemo_eagle3_sglang.supervision.backend import RunnerBackend
from nemo_eagle3_sglang.training.trainer import FlatTrainer

pytest.importorskip("nemo_automodel", reason="the reference is AutoModel itself")
from nemo_automodel.components.datasets.llm.eagle3 import _pack_collate, build_packed_eagle3_dataset
from nemo_automodel.components.speculative.eagle.core import Eagle3TrainerModule
from nemo_automodel.components.speculative.eagle.draft_llama import LlamaEagle3DraftModel

VOCAB, HIDDEN, DRAFT = 61, 16, 23
MODES = {"plain": {}, "fc_norm": {"fc_norm": True}, "norm_output": {"norm_output": True}}
BIASES = {"attention_bias": True, "mlp_bias": True, "head_dim": 8}


class Trainer(FlatTrainer, Eagle3TrainerModule):
    """As the recipe mixes it."""


class TableRunner:
    """A target whose states are looked up by token and position in the sequence."""

    def __init__(self, dtype: torch.dtype) -> None:
        generator = torch.Generator().manual_seed(1)
        self.info = TargetInfo(num_hidden_layers=8, hidden_size=HIDDEN, vocab_size=VOCAB)
        self.device, self.dtype, self.max_sequence_length = torch.device("cpu"), dtype, 4096
        self.table = torch.randn(VOCAB, 4 * HIDDEN, generator=generator).to(dtype)
        self.weight = torch.randn(VOCAB, HIDDEN, generator=generator).to(dtype)

    def set_aux_layers(self, aux_layer_ids: Sequence[int]) -> None:
        pass

    def forward(self, tokens: torch.Tensor, lengths: Sequence[int]) -> HiddenStates:
        positions = torch.cat([torch.arange(n) for n in lengths]).to(self.dtype)
        states = self.table[tokens] * torch.cos(positions)[:, None]
        return HiddenStates(aux=states[:, : 3 * HIDDEN], last=states[:, 3 * HIDDEN :])

    def head(self):
        return lambda hidden: hidden @ self.weight.T

    def input_embeddings(self) -> torch.Tensor:
        return self.table[:, :HIDDEN]

    def close(self) -> None:
        pass


def backend(dtype: torch.dtype) -> RunnerBackend:
    target = RunnerBackend(TableRunner(dtype), [1, 3, 5])
    ids = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(2))[:DRAFT].sort().values
    mask = torch.zeros(VOCAB, dtype=torch.bool)
    mask[ids] = True
    target.set_vocab_mapping(ids, mask)
    return target


def draft(dtype: torch.dtype, **overrides) -> LlamaEagle3DraftModel:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=HIDDEN,
        intermediate_size=24,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=VOCAB,
        pad_token_id=0,
        rope_theta=1000.0,
        dtype=dtype,
        draft_vocab_size=DRAFT,
        target_hidden_size=HIDDEN,
        tie_word_embeddings=False,
        attn_implementation="eager",
    )
    for name, value in overrides.items():
        setattr(config, name, value)
    model = LlamaEagle3DraftModel(config).to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    model.freeze_embeddings()
    return model


def modules(model: LlamaEagle3DraftModel, target: RunnerBackend, steps: int) -> tuple[Eagle3TrainerModule, Trainer]:
    mapping = {"selected_token_ids": target._selected_token_ids, "selected_token_mask": target._selected_token_mask}
    return tuple(kind(model, ttt_steps=steps, **mapping) for kind in (Eagle3TrainerModule, Trainer))


def chats(count: int = 7, seed: int = 3) -> list[dict[str, list[int]]]:
    """Chats of 1 to 14 tokens with gaps in their loss masks; one without any supervision, one with all of it."""
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for i in range(count):
        length = int(torch.randint(1, 15, (), generator=generator))
        loss = (torch.rand(length, generator=generator) < 0.6).long()
        loss = loss * 0 if i == 1 else loss * 0 + 1 if i == 2 else loss
        rows.append(
            {"input_ids": torch.randint(0, VOCAB, (length,), generator=generator).tolist(), "loss_mask": loss.tolist()}
        )
    return rows


def packed(rows: list[dict[str, list[int]]], size: int = 20) -> dict[str, torch.Tensor]:
    return _pack_collate(build_packed_eagle3_dataset(rows, packed_sequence_size=size, pad_token_id=0))


def padded(rows: list[dict[str, list[int]]], size: int = 20, left: bool = False) -> dict[str, torch.Tensor]:
    batch = {
        key: torch.zeros(len(rows), size, dtype=torch.long) for key in ("input_ids", "attention_mask", "loss_mask")
    }
    for i, row in enumerate(rows):
        length = len(row["input_ids"])
        part = slice(size - length, size) if left else slice(0, length)
        batch["input_ids"][i, part] = torch.tensor(row["input_ids"])
        batch["loss_mask"][i, part] = torch.tensor(row["loss_mask"])
        batch["attention_mask"][i, part] = 1
    return batch


BATCHES = {
    "packed": packed(chats()),
    "padded right": padded(chats()),
    "padded left": padded(chats(), left=True),
    "one document": padded(chats(1)),
    "long answers": packed([{"input_ids": list(range(1, 19)), "loss_mask": [0] * 6 + [1] * 12}] * 3),
}


def run(module: torch.nn.Module, inputs: dict) -> tuple[SimpleNamespace, dict[str, torch.Tensor]]:
    module.zero_grad(set_to_none=True)
    metrics = module(**inputs)
    metrics.loss.backward()
    grads = {n: p.grad.clone() for n, p in module.named_parameters() if p.requires_grad}
    return metrics, grads


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
