"""A table-driven target, a tiny draft and both trainers over it, for the tests that compare them."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace

import torch
from nemo_automodel.components.datasets.llm.eagle3 import _pack_collate, build_packed_eagle3_dataset
from nemo_automodel.components.speculative.eagle.core import Eagle3TrainerModule
from nemo_automodel.components.speculative.eagle.draft_llama import LlamaEagle3DraftModel
from transformers import LlamaConfig

from nemo_eagle3_sglang.contracts import HiddenStates, TargetInfo
from nemo_eagle3_sglang.supervision.backend import RunnerBackend
from nemo_eagle3_sglang.training.trainer import FlatTrainer

VOCAB, HIDDEN, DRAFT = 61, 16, 23


class Trainer(FlatTrainer, Eagle3TrainerModule):
    """As the recipe mixes it."""


class TableRunner:
    """A target whose states are looked up by token and position in the sequence."""

    def __init__(self, dtype: torch.dtype, device: str = "cpu", hidden: int = HIDDEN, vocab: int = VOCAB) -> None:
        generator = torch.Generator().manual_seed(1)
        self.info = TargetInfo(num_hidden_layers=8, hidden_size=hidden, vocab_size=vocab)
        self.device, self.dtype, self.max_sequence_length = torch.device(device), dtype, 4096
        self.table = torch.randn(vocab, 4 * hidden, generator=generator).to(device, dtype)
        self.weight = (torch.randn(vocab, hidden, generator=generator) * (HIDDEN / hidden) ** 0.5).to(device, dtype)

    def set_aux_layers(self, aux_layer_ids: Sequence[int]) -> None:
        pass

    def forward(self, tokens: torch.Tensor, lengths: Sequence[int]) -> HiddenStates:
        positions = torch.cat([torch.arange(n, dtype=torch.float64) for n in lengths]).to(
            self.device, non_blocking=True
        )
        states = self.table[tokens.to(self.device)] * torch.cos(positions).to(self.dtype)[:, None]
        cut = 3 * self.info.hidden_size
        return HiddenStates(aux=states[:, :cut], last=states[:, cut:])

    def head(self):
        return lambda hidden: hidden @ self.weight.T

    def input_embeddings(self) -> torch.Tensor:
        return self.table[:, : self.info.hidden_size]

    def close(self) -> None:
        pass


def backend(dtype: torch.dtype, draft_vocab: int = DRAFT, **sizes) -> RunnerBackend:
    """Return a target with a draft vocabulary."""
    runner = TableRunner(dtype, **sizes)
    target, vocab = RunnerBackend(runner, [1, 3, 5]), runner.info.vocab_size
    ids = torch.randperm(vocab, generator=torch.Generator().manual_seed(2))[:draft_vocab].sort().values
    mask = torch.zeros(vocab, dtype=torch.bool)
    mask[ids] = True
    target.set_vocab_mapping(ids, mask)
    return target


def draft(dtype: torch.dtype, **overrides) -> LlamaEagle3DraftModel:
    """Return the same draft at every call."""
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
    mapping = dict(zip(("selected_token_ids", "selected_token_mask"), target.source.vocab_mapping(), strict=True))
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


def run(module: torch.nn.Module, inputs: dict) -> tuple[SimpleNamespace, dict[str, torch.Tensor]]:
    module.zero_grad(set_to_none=True)
    metrics = module(**inputs)
    metrics.loss.backward()
    grads = {n: p.grad.clone() for n, p in module.named_parameters() if p.requires_grad}
    return metrics, grads
