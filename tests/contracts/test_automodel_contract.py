"""Our supervision against AutoModel's own HF backend and trainer, bit for bit.

Everything that is multiplied is a small whole number, which float32 and bfloat16 hold exactly, so that the order of a
sum (one padded GEMM there, chunks of bare sequences here) can change no bit and ``torch.equal`` is the right question.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Sequence
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from transformers import LlamaConfig

from nemo_eagle3_sglang.config.schema import RecipeArgs
from nemo_eagle3_sglang.contracts import HiddenStates, TargetBatch, TargetInfo
from nemo_eagle3_sglang.errors import ConfigError
from nemo_eagle3_sglang.supervision import head as head_module
from nemo_eagle3_sglang.supervision.aux_layers import resolve_aux_layer_ids
from nemo_eagle3_sglang.supervision.backend import RunnerBackend

pytest.importorskip("nemo_automodel", reason="the reference is AutoModel itself")
from nemo_automodel.components.speculative.eagle import core, target
from nemo_automodel.components.speculative.eagle.backend import Eagle3TargetBackend
from nemo_automodel.components.speculative.eagle.draft_llama import LlamaEagle3DraftModel

VOCAB, HIDDEN, LAYERS, LENGTH, DRAFT, TTT_STEPS = 53, 8, 9, 12, 17, 4


class Layer(nn.Module):
    """A causal layer on whole numbers from -3 to 3: every token adds up what the real tokens before it hold."""

    def __init__(self, factor: int) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, hidden: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
        seen = (hidden * real.unsqueeze(-1)).cumsum(dim=1)
        return (hidden + self.factor * seen).remainder(7) - 3


class IntegerLM(nn.Module):
    """A causal LM in the layout that AutoModel's capture looks for."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)

        def weight() -> torch.Tensor:
            return torch.randint(-3, 4, (VOCAB, HIDDEN), generator=generator).to(dtype)

        self.config = SimpleNamespace(num_hidden_layers=LAYERS)
        self.embedding = nn.Embedding(VOCAB, HIDDEN, _weight=weight())
        self.model = nn.Module()
        self.model.layers = nn.ModuleList(Layer(factor) for factor in range(1, LAYERS + 1))
        self.lm_head = nn.Parameter(weight())

    def get_input_embeddings(self) -> nn.Embedding:
        return self.embedding

    def last(self, input_ids: torch.Tensor, real: torch.Tensor) -> tuple[list[torch.Tensor], torch.Tensor]:
        hidden, outputs = self.embedding(input_ids), []
        for layer in self.model.layers:
            hidden = layer(hidden, real)
            outputs.append(hidden)
        return outputs, hidden.remainder(5) - 2

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> SimpleNamespace:
        _, last = self.last(input_ids, attention_mask)
        return SimpleNamespace(logits=last @ self.lm_head.T)


class IntegerRunner:
    """The same model as an engine runs it: sequences, no padding."""

    def __init__(self, model: IntegerLM) -> None:
        self.model, self.info = model, TargetInfo(LAYERS, HIDDEN, VOCAB)
        self.device, self.dtype, self.max_sequence_length = torch.device("cpu"), model.lm_head.dtype, 64

    def set_aux_layers(self, aux_layer_ids: Sequence[int]) -> None:
        self.aux_layer_ids = list(aux_layer_ids)

    def forward(self, tokens: torch.Tensor, lengths: Sequence[int]) -> HiddenStates:
        aux, last = [], []
        for sequence in tokens.split(list(lengths)):
            outputs, final = self.model.last(sequence[None], torch.ones(1, len(sequence), dtype=torch.long))
            aux.append(torch.cat([outputs[i][0] for i in self.aux_layer_ids], dim=-1))
            last.append(final[0])
        return HiddenStates(aux=torch.cat(aux), last=torch.cat(last))

    def head(self):
        return lambda hidden: hidden @ self.model.lm_head.T

    def input_embeddings(self) -> torch.Tensor:
        return self.model.embedding.weight.detach()

    def close(self) -> None:
        """Nothing to free."""


# name -> (tokens, padding on the left) of each row, in rows of LENGTH
SHAPES = {
    "equal": [(12, 0), (12, 0), (12, 0)],
    "unequal, right padded": [(12, 0), (5, 0), (9, 0)],
    "left padded": [(12, 0), (5, 7), (9, 3)],
    "both sides": [(6, 3), (1, 5), (11, 1)],
    "one token": [(1, 0), (1, 11), (1, 4)],
    "empty rows": [(0, 0), (7, 0), (0, 0)],
    "only empty rows": [(0, 0), (0, 0)],
    "one row": [(8, 0)],
}


def make_rows(shape: Sequence[tuple[int, int]], loss: str, seed: int = 0) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, VOCAB, (len(shape), LENGTH), generator=generator)
    attention = torch.zeros_like(ids)
    for row, (size, left) in enumerate(shape):
        attention[row, left : left + size] = 1
    gappy = (torch.rand(ids.shape, generator=generator) < 0.6).long()
    return ids, attention, attention * {"gappy": gappy, "all": 1, "none": 0}[loss]


def mapping(size: int) -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(3))[:size]
    return ids, torch.zeros(VOCAB, dtype=torch.bool).index_fill_(0, ids, True)


def both(dtype: torch.dtype, aux_ids: list[int] | None, selected: tuple[torch.Tensor, torch.Tensor]):
    """Return AutoModel's backend and ours over the same model."""
    model = IntegerLM(dtype)
    ours = RunnerBackend(IntegerRunner(model), aux_ids)
    ours.set_vocab_mapping(*selected)
    return target.HFEagle3TargetModel(model, aux_layer_ids=aux_ids), ours


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
@pytest.mark.parametrize("loss", ["gappy", "all", "none"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(("aux_ids", "draft"), [(None, DRAFT), ([7, 0, 3], VOCAB)], ids=["default", "unsorted, full V"])
def test_supervision_is_automodels_bit_for_bit(monkeypatch, shape, loss, dtype, aux_ids, draft):
    # Five positions a chunk, so that a row is spread over several and the last chunk is a rest.
    monkeypatch.setattr(head_module, "CHUNK_BYTES", 5 * VOCAB * dtype.itemsize)
    selected = mapping(draft)
    hf, ours = both(dtype, aux_ids, selected)
    rows = make_rows(shape, loss)
    expected, batch = hf.generate_batch(*rows), ours.generate_batch(*rows)
    probs, position_mask = core._compute_target_distribution(expected.logits, *selected, expected.loss_mask)

    for name in ("input_ids", "loss_mask", "attention_mask"):
        assert torch.equal(getattr(batch, name), getattr(expected, name)), name
        assert getattr(batch, name).dtype == getattr(expected, name).dtype, name
    real = rows[1].bool()
    assert batch.aux_hidden_states.shape == expected.aux_hidden_states.shape
    assert batch.aux_hidden_states.dtype == expected.aux_hidden_states.dtype
    assert torch.equal(batch.aux_hidden_states[real], expected.aux_hidden_states[real])
    assert batch.position_mask.dtype == position_mask.dtype
    assert torch.equal(batch.position_mask, position_mask)
    # Where a loss is taken; elsewhere the distribution is never read, and ours is zero.
    learnt = expected.loss_mask.bool()
    assert batch.target_probs.dtype == probs.dtype
    assert torch.equal(batch.target_probs[learnt], probs[learnt])
    assert not batch.target_probs[~learnt].any()


def test_the_cases_test_something():
    """The draft vocabulary must hold some of the target's choices and miss others, and the states must differ."""
    _, ours = both(torch.float32, None, mapping(DRAFT))
    batch = ours.generate_batch(*make_rows(SHAPES["equal"], "gappy"))
    learnt = batch.loss_mask.bool()
    assert 0 < batch.position_mask.sum() < learnt.sum()
    assert len(batch.target_probs[learnt].unique(dim=0)) > 5
    low, middle, high = batch.aux_hidden_states.chunk(3, dim=-1)
    assert not torch.equal(low, middle)
    assert not torch.equal(middle, high)


def test_trainer_takes_our_keywords():
    tensors = [torch.empty(0)] * len(dataclasses.fields(TargetBatch))
    inspect.signature(core.Eagle3TrainerModule.forward).bind(None, **TargetBatch(*tensors).to_trainer_inputs())


def test_batch_is_automodels():
    """Same field names, and AutoModel's own class takes them and hands the trainer the same inputs."""
    names = {field.name for field in dataclasses.fields(TargetBatch)}
    assert names <= {field.name for field in dataclasses.fields(target.Eagle3TargetBatch)}
    _, ours = both(torch.float32, None, mapping(DRAFT))
    batch = ours.generate_batch(*make_rows(SHAPES["left padded"], "gappy"))
    theirs = target.Eagle3TargetBatch(**vars(batch)).to_trainer_inputs()
    assert {k: id(v) for k, v in theirs.items()} == {k: id(v) for k, v in batch.to_trainer_inputs().items()}


def test_backend_has_all_that_automodels_recipe_calls():
    for name in Eagle3TargetBackend.__abstractmethods__ | {"set_vocab_mapping", "get_input_embeddings"}:
        wanted = inspect.signature(getattr(Eagle3TargetBackend, name)).parameters
        ours = inspect.signature(getattr(RunnerBackend, name)).parameters
        # What the recipe passes for packed rows is not in the abstract signature.
        packing = ["position_ids", "seq_lens", "doc_remaining"] if name == "generate_batch" else []
        assert list(ours) == [*wanted, *packing], name
    assert RunnerBackend.supports_async is False


def make_trainer(selected: tuple[torch.Tensor, torch.Tensor], **options) -> core.Eagle3TrainerModule:
    """Return AutoModel's trainer over a tiny draft, the same one at every call."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=16,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=4,
        num_hidden_layers=1,
        max_position_embeddings=64,
        draft_vocab_size=len(selected[0]),
        target_hidden_size=HIDDEN,
        tie_word_embeddings=False,
        attn_implementation="eager",
    )
    draft = LlamaEagle3DraftModel(config).float()
    draft.set_vocab_mapping(selected[0])
    return core.Eagle3TrainerModule(
        draft, selected_token_ids=selected[0], selected_token_mask=selected[1], ttt_steps=TTT_STEPS, **options
    )


@pytest.mark.parametrize("shape", ["equal", "unequal, right padded", "left padded"])
@pytest.mark.parametrize("options", [{}, {"lk_loss_type": "lambda"}], ids=["soft CE", "LK"])
def test_loss_and_gradients_are_those_of_full_logits(shape, options):
    selected = mapping(DRAFT)
    hf, ours = both(torch.float32, None, selected)
    ids, attention, loss = make_rows(SHAPES[shape], "gappy")
    # Not the first TTT_STEPS tokens of a row: AutoModel shifts the loss by one slot a TTT step and so starts chains at
    # the padding left of them, from states that the target made of padding and that do not exist here. A chat begins
    # with a prompt.
    loss = loss * (attention.cumsum(dim=1) > TTT_STEPS)
    results = []
    for backend in (hf, ours):
        trainer = make_trainer(selected, **options)
        metrics = trainer(**backend.generate_batch(ids, attention, loss).to_trainer_inputs())
        metrics.loss.backward()
        results.append((metrics, {n: p.grad for n, p in trainer.named_parameters() if p.grad is not None}))
    (expected, expected_grads), (got, grads) = results

    assert expected.loss > 1, "there must be a loss"
    torch.testing.assert_close(got.loss, expected.loss, atol=1e-6, rtol=0)
    assert grads.keys() == expected_grads.keys()
    assert len(grads) > 8
    for name, grad in grads.items():
        torch.testing.assert_close(grad, expected_grads[name], atol=1e-6, rtol=1e-5, msg=lambda m, n=name: f"{n}: {m}")
    for name in ("accuracy", "valid_tokens", "step_prefix_hits", "step_valid"):
        assert torch.equal(getattr(got, name), getattr(expected, name)), name


def automodels_ids(ids: list[int] | None, layers: int) -> list[int] | None:
    try:
        if ids is None:
            return target.default_eagle3_aux_layer_ids(layers)
        return target.validate_eagle3_aux_layer_ids(ids, layers)
    except ValueError:
        return None


def our_ids(ids: list[int] | None, layers: int) -> list[int] | None:
    try:
        return resolve_aux_layer_ids(ids, layers)
    except ConfigError:
        return None


@pytest.mark.parametrize("layers", range(1, 97))
def test_default_aux_ids_are_automodels_or_both_refuse(layers):
    assert our_ids(None, layers) == automodels_ids(None, layers)


@pytest.mark.parametrize("ids", [[0, 1, 2], [7, 3, 5], [1, 1, 2], [0, 1], [0, 1, 2, 3], [-1, 0, 1], [0, 1, 9]])
def test_explicit_aux_ids_are_judged_as_automodel_does(ids):
    assert our_ids(ids, LAYERS) == automodels_ids(ids, LAYERS)


def test_the_last_layer_is_where_we_are_stricter():
    """SGLang serves without it; AutoModel does not know."""
    assert automodels_ids([0, 1, LAYERS - 1], LAYERS) is not None
    assert our_ids([0, 1, LAYERS - 1], LAYERS) is None


def test_backend_names_known_to_automodel_are_known_here():
    """The recipe relies on AutoModel's own `sglang` branch, and the schema on its default."""
    from nemo_automodel.recipes.llm.train_eagle3 import TrainEagle3Recipe

    source = inspect.getsource(TrainEagle3Recipe._setup_online_target)
    assert 'backend not in ("colocated", "sglang", "vllm", "remote")' in source
    assert "self._setup_sglang_target(recipe_cfg, target_path)" in source
    assert RecipeArgs.model_fields["target_model_backend"].default == "colocated"
