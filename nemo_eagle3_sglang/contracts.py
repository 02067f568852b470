"""What passes between the parts: configuration -> engine -> supervision -> trainer.

Nothing here imports another module of this package, so that an engine in another distribution can implement
:class:`TargetRunner` and be registered under the entry-point group ``nemo_automodel.target_model_backends``
(see :mod:`nemo_eagle3_sglang.backends`) with no edit in this one.

Shape legend, used throughout the package::

    B  rows of a micro-batch              H  hidden size of the target's text model
    S  padded length of a row             V  target vocabulary (without the engine's padding)
    T  real tokens of all rows together   D  draft vocabulary, D <= V
    P  supervised positions, P <= T       A  aux layers, always 3 for EAGLE-3
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    # For annotations only: the command line reads this module and must answer at once.
    import torch

NUM_AUX_LAYERS = 3


@dataclass(frozen=True)
class TargetInfo:
    """Dimensions of the target's text model.

    Attributes:
        num_hidden_layers: Decoder layers N; aux ids lie in ``[0, N)``.
        hidden_size: H.
        vocab_size: V, the rows that carry a token, without any padding of the engine's.
    """

    num_hidden_layers: int
    hidden_size: int
    vocab_size: int


@dataclass(frozen=True)
class HiddenStates:
    """What one target forward yields, for the real tokens only, sequence after sequence.

    Attributes:
        aux: ``[T, A*H]``, the residual stream after each aux layer, concatenated in the order of the aux ids.
        last: ``[T, H]``, what the target's logits processor is handed (after the final norm).
    """

    aux: torch.Tensor
    last: torch.Tensor


@dataclass(frozen=True)
class AuxPlan:
    """Which layers are trained on, and which ids lead the serving engine to them.

    Attributes:
        trained: Layer ids in the order of the draft's input columns; id i is the output of layer i.
        written: Ids for the draft's config.json, read by the serving engine's own rule.
    """

    trained: list[int]
    written: list[int]


@runtime_checkable
class Head(Protocol):
    """The target's output head with everything its logits processor would have applied."""

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return logits ``[n, V]`` for ``hidden`` ``[n, H]``, scaled, soft-capped and trimmed to V columns."""


@runtime_checkable
class TargetRunner(Protocol):
    """The only seam between an inference engine and the supervision contract.

    A runner sees sequences, never padding: a batch is ``tokens`` ``[T]`` and the length of each sequence, and no
    token attends to another sequence. A runner whose engine also serves drafts may have
    ``plan_aux_layers(ids) -> AuxPlan``, which says what that engine would capture for them.
    """

    info: TargetInfo
    device: torch.device
    dtype: torch.dtype
    max_sequence_length: int
    """Tokens of the longest single sequence that a forward can take."""

    def set_aux_layers(self, aux_layer_ids: Sequence[int]) -> None:
        """Choose the decoder layers to capture; id i is the output of layer i. Replaces any earlier choice."""

    def forward(self, tokens: torch.Tensor, lengths: Sequence[int]) -> HiddenStates:
        """Run the target once over independent sequences.

        Args:
            tokens: ``[T]`` int64, the sequences one after another, on any device.
            lengths: Length of each sequence, each at least 1, summing to T.

        Returns:
            Hidden states on ``device`` in ``dtype``, with no autograd history and not inference tensors.
        """

    def head(self) -> Head:
        """Return the output head."""

    def input_embeddings(self) -> torch.Tensor:
        """Return the input embedding ``[V, H]`` on ``device``, without the engine's padding."""

    def close(self) -> None:
        """Free the engine and its memory; calling it again does nothing."""


@dataclass(frozen=True)
class BackendRequest:
    """What a backend's factory is given; see :mod:`nemo_eagle3_sglang.backends`.

    Attributes:
        target: Model folder or hub id.
        device: Where the hidden states must be.
        dtype: Dtype that the draft trains in; the default for the target's.
        trust_remote_code: Whether code shipped with the checkpoint may run.
        seq_length: Longest row of the training data, in tokens.
        micro_batch_size: Rows of one forward.
        kv_pool: ``half``: the engine may reserve its usual share of memory for KV. ``auto``: no more than one
            micro-batch of ``micro_batch_tokens`` needs. An engine that keeps no KV reads neither.
        capture: ``serving`` or ``residual``; see ``recipe_args.capture``.
        self_check: Whether the engine compares its states with what it would serve.
        options: The YAML's ``recipe_args.<backend>_args``.
    """

    target: str
    device: torch.device
    dtype: torch.dtype
    trust_remote_code: bool = False
    seq_length: int = 2048
    micro_batch_size: int = 1
    kv_pool: str = "half"
    capture: str = "serving"
    self_check: bool = True
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def micro_batch_tokens(self) -> int:
        """The most tokens that one forward is given."""
        return self.micro_batch_size * self.seq_length


@dataclass
class TargetBatch:
    """Supervision of one micro-batch, with the fields of AutoModel's ``Eagle3TargetBatch`` that a trainer reads.

    ``input_ids``, ``loss_mask``, ``target_probs`` and ``position_mask`` are shifted left by one (position t holds
    what follows token t, the last position is zero); ``aux_hidden_states`` and ``attention_mask`` are not.

    Attributes:
        aux_hidden_states: ``[B, S, A*H]``; zero where there is no token.
        input_ids: ``[B, S]`` int64.
        attention_mask: ``[B, S]``.
        loss_mask: ``[B, S]``.
        target_probs: ``[B, S, D]`` float32; zero where ``loss_mask`` is.
        position_mask: ``[B, S, 1]`` bool; true where the loss is taken and the target's argmax over all of V lies in
            the draft vocabulary.
        position_ids: ``[B, S]``, position in the document; packed rows only.
        seq_lens: ``[B, max_docs]``, slots of each document, zero-padded; packed rows only.
        doc_remaining: ``[B, S]``, tokens that follow in the document; packed rows only.
    """

    aux_hidden_states: torch.Tensor
    input_ids: torch.Tensor
    attention_mask: torch.Tensor
    loss_mask: torch.Tensor
    target_probs: torch.Tensor
    position_mask: torch.Tensor
    position_ids: torch.Tensor | None = None
    seq_lens: torch.Tensor | None = None
    doc_remaining: torch.Tensor | None = None

    def to_trainer_inputs(self) -> dict[str, torch.Tensor]:
        """Return the keyword arguments of AutoModel's ``Eagle3TrainerModule.forward``."""
        return {f.name: value for f in fields(self) if (value := getattr(self, f.name)) is not None}


@dataclass(frozen=True)
class FlatBatch:
    """Supervision of one micro-batch without padding, for a trainer that runs over bare documents.

    Attributes:
        unroll: Where each training-time-test step reads and is taught; see ``supervision/unroll.py``.
        aux: ``[T, A*H]``, the states after each aux layer.
        draft_logits: ``[P, D]``, the target's logits over the draft vocabulary, in the dtype that its head gives.
        draft_lse: ``[P]`` float32, their log-sum-exp: ``softmax = exp(draft_logits - draft_lse)``.
        draft_choices: ``[P]`` int64, their argmax, a draft id.
        in_draft_vocab: ``[P]`` bool, true where the target's argmax over all of V lies in the draft vocabulary; only
            there is loss taken.
    """

    unroll: Any
    aux: torch.Tensor
    draft_logits: torch.Tensor
    draft_lse: torch.Tensor
    draft_choices: torch.Tensor
    in_draft_vocab: torch.Tensor
