"""The supervision of a micro-batch, spelt out on a runner whose states say which token they belong to."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from nemo_eagle3_sglang.contracts import HiddenStates, TargetBatch, TargetInfo, TargetRunner
from nemo_eagle3_sglang.errors import ConfigError
from nemo_eagle3_sglang.supervision.backend import RunnerBackend

VOCAB, HIDDEN, LAYERS = 11, 2, 8


class TellingRunner:
    """State of token x at place p of its sequence: ``[x, p]``; layer i adds 100*i. The next token is always x + 1."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        self.info = TargetInfo(LAYERS, HIDDEN, VOCAB)
        self.device, self.dtype, self.max_sequence_length = torch.device("cpu"), dtype, 64
        self.calls: list[tuple[list[int], list[int]]] = []
        self.projected = 0
        self.closed = 0

    def set_aux_layers(self, aux_layer_ids: Sequence[int]) -> None:
        self.aux_layer_ids = list(aux_layer_ids)

    def forward(self, tokens: torch.Tensor, lengths: Sequence[int]) -> HiddenStates:
        self.calls.append((tokens.tolist(), list(lengths)))
        place = torch.cat([torch.arange(n) for n in lengths])
        last = torch.stack((tokens, place), dim=-1).to(self.dtype)
        return HiddenStates(aux=torch.cat([last + 100 * i for i in self.aux_layer_ids], dim=-1), last=last)

    def head(self):
        def logits(hidden: torch.Tensor) -> torch.Tensor:
            self.projected += hidden.shape[0]
            following = (hidden[:, :1].float() + 1) % VOCAB
            return -(torch.arange(VOCAB) - following).abs()

        return logits

    def input_embeddings(self) -> torch.Tensor:
        return torch.arange(VOCAB * HIDDEN).view(VOCAB, HIDDEN).to(self.dtype)

    def close(self) -> None:
        self.closed += 1


def make(selected: Sequence[int] = tuple(range(VOCAB)), **kwargs) -> tuple[RunnerBackend, TellingRunner]:
    runner = TellingRunner(**kwargs)
    backend = RunnerBackend(runner)
    ids = torch.tensor(selected)
    backend.set_vocab_mapping(ids, torch.zeros(VOCAB, dtype=torch.bool).index_fill_(0, ids, True))
    return backend, runner


def batch_of(backend: RunnerBackend, ids: list, attention: list, loss: list) -> TargetBatch:
    return backend.generate_batch(torch.tensor(ids), torch.tensor(attention), torch.tensor(loss))


def test_the_fake_is_a_target_runner():
    assert isinstance(TellingRunner(), TargetRunner)


def test_one_row_token_by_token():
    backend, runner = make()
    batch = batch_of(backend, [[3, 4, 5, 6]], [[1, 1, 1, 1]], [[0, 0, 1, 1]])
    assert runner.calls == [([3, 4, 5, 6], [4])]
    # Unshifted: what layers 1, 3 and 4 gave for each token, side by side.
    states = [[100 * i + value for i in (1, 3, 4) for value in (x, place)] for place, x in enumerate([3, 4, 5, 6])]
    assert batch.aux_hidden_states.tolist() == [states]
    assert batch.attention_mask.tolist() == [[1, 1, 1, 1]]
    # Shifted: position t holds what follows token t.
    assert batch.input_ids.tolist() == [[4, 5, 6, 0]]
    assert batch.loss_mask.tolist() == [[0, 1, 1, 0]]
    assert batch.position_mask.squeeze(-1).tolist() == [[False, True, True, False]]
    # Token 5 and 6 are learnt; the target's answers after them, 6 and 7, stand at their slots minus one.
    assert batch.target_probs.argmax(-1)[0, 1:3].tolist() == [6, 7]
    assert not batch.target_probs[0, [0, 3]].any()
    assert batch.target_probs[0, 1:3].sum(-1).tolist() == pytest.approx([1, 1])


def test_only_learnt_positions_are_projected():
    backend, runner = make()
    batch_of(backend, [[1, 2, 3, 4], [5, 6, 7, 8]], [[1, 1, 1, 1], [1, 1, 0, 0]], [[0, 1, 0, 1], [0, 1, 0, 0]])
    assert runner.projected == 3


def test_padding_is_neither_run_nor_learnt():
    backend, runner = make()
    ids = [[9, 9, 1, 2], [3, 4, 9, 9], [9, 9, 9, 9], [9, 5, 9, 9]]
    attention = [[0, 0, 1, 1], [1, 1, 0, 0], [0, 0, 0, 0], [0, 1, 0, 0]]
    # A loss mask on padding and on empty rows is no loss: the target has no state there.
    batch = batch_of(backend, ids, attention, [[1, 1, 1, 1]] * 4)
    assert runner.calls == [([1, 2, 3, 4, 5], [2, 2, 1])]
    assert batch.position_mask.squeeze(-1).long().tolist() == [[0, 1, 1, 0], [1, 0, 0, 0], [0] * 4, [1, 0, 0, 0]]
    real = torch.tensor(attention).bool()
    assert not batch.aux_hidden_states[~real].any()
    assert batch.aux_hidden_states[real][:, 1].tolist() == [100, 101, 100, 101, 100], "each row starts at place 0"


def test_the_first_slot_of_a_row_has_nobody_to_learn_from():
    """Token 0 of a row without left padding would be supervised at slot -1, which is the row before's last."""
    backend, runner = make()
    batch = batch_of(backend, [[1, 2], [3, 4]], [[1, 1], [1, 1]], [[0, 0], [1, 0]])
    assert not batch.position_mask.any()
    assert not batch.target_probs.any()
    assert runner.projected == 0


def test_the_targets_choice_outside_the_draft_vocabulary_is_no_loss():
    backend, _ = make(selected=[6, 2])
    batch = batch_of(backend, [[4, 5, 6, 1]], [[1] * 4], [[1] * 4])
    # The target says 6 after 5, 7 after 6 and 2 after 1.
    assert batch.position_mask.squeeze(-1).tolist() == [[True, False, True, False]]
    assert batch.target_probs.shape == (1, 4, 2)
    # In the order of the draft's ids; 7 is not among them, the softmax over 6 and 2 is there all the same.
    assert batch.target_probs[0, :3].argmax(-1).tolist() == [0, 0, 1]
    assert batch.target_probs.dtype == torch.float32


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("length", [1, 5])
def test_only_empty_rows(rows, length):
    backend, runner = make(dtype=torch.bfloat16)
    zeros = [[0] * length] * rows
    batch = batch_of(backend, zeros, zeros, zeros)
    assert runner.calls == []
    assert batch.aux_hidden_states.shape == (rows, length, 3 * HIDDEN)
    assert batch.aux_hidden_states.dtype == torch.bfloat16
    assert batch.target_probs.shape == (rows, length, VOCAB)
    assert batch.position_mask.shape == (rows, length, 1)
    assert batch.position_mask.dtype == torch.bool
    assert not batch.position_mask.any()


def test_one_token():
    backend, _ = make()
    batch = batch_of(backend, [[7]], [[1]], [[1]])
    assert not batch.position_mask.any()
    assert batch.input_ids.tolist() == [[0]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_states_keep_the_runners_dtype_and_carry_no_graph(dtype):
    backend, _ = make(dtype=dtype)
    batch = batch_of(backend, [[1, 2, 3]], [[1, 1, 1]], [[1, 1, 1]])
    assert batch.aux_hidden_states.dtype == dtype
    for tensor in batch.to_trainer_inputs().values():
        assert not tensor.requires_grad
        assert not tensor.is_inference()


def test_inputs_are_not_changed():
    backend, _ = make()
    given = [torch.tensor([[1, 2, 3]]), torch.tensor([[1, 1, 0]]), torch.tensor([[0, 1, 0]])]
    copies = [x.clone() for x in given]
    backend.generate_batch(*given)
    assert all(torch.equal(x, copy) for x, copy in zip(given, copies, strict=True))


def test_aux_ids_are_checked_and_handed_to_the_runner():
    runner = TellingRunner()
    assert RunnerBackend(runner).aux_layer_ids == runner.aux_layer_ids == [1, 3, 4]
    assert RunnerBackend(runner, [6, 0, 2]).aux_layer_ids == runner.aux_layer_ids == [6, 0, 2]
    with pytest.raises(ConfigError, match="last layer"):
        RunnerBackend(runner, [0, 1, LAYERS - 1])


def test_a_mapping_of_another_vocabulary_is_refused():
    with pytest.raises(ValueError, match=f"mapping for {VOCAB + 1} tokens; the target's head has {VOCAB}"):
        RunnerBackend(TellingRunner()).set_vocab_mapping(torch.arange(3), torch.ones(VOCAB + 1, dtype=torch.bool))


def test_a_batch_before_the_mapping_is_refused():
    backend, row = RunnerBackend(TellingRunner()), torch.ones(1, 2, dtype=torch.long)
    with pytest.raises(RuntimeError, match="set_vocab_mapping must be called"):
        backend.generate_batch(row, row, row)


def test_a_new_mapping_replaces_the_old_one():
    """AutoModel sets it a second time when a run is resumed."""
    backend, _ = make(selected=[1, 2])
    ids = torch.tensor([5, 6, 7])
    backend.set_vocab_mapping(ids, torch.zeros(VOCAB, dtype=torch.bool).index_fill_(0, ids, True))
    assert batch_of(backend, [[4, 5]], [[1, 1]], [[1, 1]]).target_probs.shape[-1] == 3


def test_embeddings_and_close_are_the_runners():
    backend, runner = make()
    assert torch.equal(backend.get_input_embeddings().weight, runner.input_embeddings())
    backend.close()
    assert runner.closed == 1
    assert not isinstance(backend, torch.nn.Module)
    assert not hasattr(backend, "state_dict"), "BaseRecipe would track it and refuse to set it twice"


@pytest.mark.parametrize("shape", [(1, 5), (2, 4), (4, 1)])
def test_a_loss_mask_of_another_shape_is_refused(shape):
    backend, _ = make()
    rows = torch.ones(1, 4, dtype=torch.long)
    with pytest.raises(ValueError, match="loss_mask"):
        backend.generate_batch(rows, rows, torch.ones(shape))


def packed() -> dict[str, torch.Tensor]:
    """Documents 1 2 3, 7 8 and 4 5 6 9 in rows of six, the last slot of each row a pad or a document's end."""
    return {
        "input_ids": torch.tensor([[1, 2, 3, 7, 8, 0], [4, 5, 6, 9, 0, 0]]),
        "attention_mask": torch.tensor([[1, 1, 1, 1, 1, 0], [1, 1, 1, 1, 0, 0]]),
        "loss_mask": torch.tensor([[0, 1, 1, 1, 0, 0], [0, 0, 1, 0, 0, 0]]),
        "position_ids": torch.tensor([[0, 1, 2, 0, 1, 2], [0, 1, 2, 3, 4, 5]]),
        "seq_lens": torch.tensor([[3, 3], [6, 0]]),
        "doc_remaining": torch.tensor([[2, 1, 0, 1, 0, 0], [3, 2, 1, 0, 0, 0]]),
    }


def test_packed_rows_token_by_token():
    backend, runner = make()
    given = packed()
    batch = backend.generate_batch(**given)
    assert runner.calls == [([1, 2, 3, 7, 8, 4, 5, 6, 9], [3, 2, 4])], "each document is a sequence"
    # Layer 1's second column is the place in the sequence: it starts anew at each document.
    assert batch.aux_hidden_states[..., 1].tolist() == [[100, 101, 102, 100, 101, 0], [100, 101, 102, 103, 0, 0]]
    # Token 7 stands first in its document; AutoModel masks what slot 2 is taught by doc_remaining, which is 0 there.
    assert batch.position_mask.squeeze(-1).long().tolist() == [[1, 1, 1, 0, 0, 0], [0, 1, 0, 0, 0, 0]]
    assert batch.target_probs.argmax(-1)[0, :3].tolist() == [3, 4, 8]
    assert batch.target_probs.argmax(-1)[1, 1].item() == 7
    for name in ("position_ids", "seq_lens", "doc_remaining"):
        assert torch.equal(getattr(batch, name), given[name]), name
        assert torch.equal(batch.to_trainer_inputs()[name], given[name]), name


def test_flat_batch_token_by_token():
    backend, runner = make(selected=[3, 4, 8])
    batch = backend.flat_batch(packed(), 2)
    # 7 8 has no supervised token but its first; 9 follows the last supervised one.
    assert runner.calls == [([1, 2, 3, 4, 5, 6], [3, 3])]
    assert batch.unroll.total == 9
    assert batch.aux[:, 0].tolist() == [101, 102, 103, 104, 105, 106]
    assert batch.aux[:, 1].tolist() == [100, 101, 102, 100, 101, 102]
    # Supervised are 2, 3 and 6, which 3, 4 and 7 follow; draft ids are places in [3, 4, 8], the nearest to 7 is 8.
    assert batch.unroll.tokens[batch.unroll.supervised].tolist() == [2, 3, 6]
    assert batch.draft_choices.tolist() == [0, 1, 2]
    assert batch.in_draft_vocab.tolist() == [True, True, False]
    assert batch.draft_logits.tolist() == [[0, -1, -5], [-1, 0, -4], [-4, -3, -1]]
    assert torch.allclose(batch.draft_lse, torch.logsumexp(batch.draft_logits.float(), -1))
    assert runner.projected == 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_flat_batch_of_nothing_runs_nothing(dtype):
    backend, runner = make(dtype=dtype)
    given = packed()
    given["loss_mask"].zero_()
    batch = backend.flat_batch(given, 3)
    assert runner.calls == []
    assert batch.aux.shape == (0, 3 * HIDDEN)
    assert batch.aux.dtype == dtype
    assert batch.draft_logits.shape == (0, VOCAB)
    assert batch.unroll.total == 9


def test_a_flat_batch_before_the_mapping_is_refused():
    with pytest.raises(RuntimeError, match="set_vocab_mapping must be called"):
        RunnerBackend(TellingRunner()).flat_batch(packed(), 2)
