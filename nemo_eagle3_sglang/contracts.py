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
    import numpy as np
    import torch

    from nemo_eagle3_sglang.head_rows import HeadRows

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
class Sequences:
    """What the target is asked for: independent sequences, and where their next-token distribution is learnt.

    Kept on the host, where a source in another process needs them; what is on the device already can be given too.

    Attributes:
        tokens: ``[T]`` int64, the sequences one after another.
        lengths: Tokens of each sequence, each at least 1, summing to T.
        supervised: ``[P]`` int64, ascending indices into T.
        device_tokens: ``tokens`` on the device.
        device_supervised: ``supervised`` on the device.
    """

    tokens: np.ndarray
    lengths: list[int]
    supervised: np.ndarray
    device_tokens: torch.Tensor | None = None
    device_supervised: torch.Tensor | None = None


@dataclass(frozen=True)
class DraftTargets:
    """The target over the draft vocabulary at P positions.

    Kept as logits and log-sum-exp, not as probabilities: a bf16 head's logits are bf16 numbers, so that nothing is lost
    and half of a float32 distribution is saved.

    Attributes:
        logits: ``[P, D]`` in the dtype of the head's logits.
        lse: ``[P]`` float32, log-sum-exp over the D columns: ``softmax = exp(logits - lse)``.
        choices: ``[P]`` int64, argmax over the D columns.
        in_draft_vocab: ``[P]`` bool, true where the argmax over all of V lies in the draft vocabulary.
    """

    logits: torch.Tensor
    lse: torch.Tensor
    choices: torch.Tensor
    in_draft_vocab: torch.Tensor


@dataclass(frozen=True)
class Supervision:
    """What the target says of :class:`Sequences`.

    Attributes:
        aux: ``[T, A*H]``, the states after each aux layer.
        targets: At the P supervised positions.
    """

    aux: torch.Tensor
    targets: DraftTargets


@dataclass(frozen=True)
class TargetStates:
    """What a target says of :class:`Sequences` before a draft vocabulary is chosen: what is shipped, or kept on disk.

    A quarter of the size of the distributions that follow from it, and good for every draft vocabulary.

    Attributes:
        aux: ``[T, A*H]``, the states after each aux layer.
        last: ``[P, H]``, what the target's logits processor is handed at the supervised positions.
        choices: ``[P]`` int64, argmax over all of V there.
    """

    aux: torch.Tensor
    last: torch.Tensor
    choices: torch.Tensor


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
    """The target's output head with everything its logits processor would have applied.

    A head that is one shard of several has ``columns``, the range of token ids that its logits are of. One whose states
    are shipped or kept on disk has ``rows_at(token_ids) -> HeadRows`` (see :mod:`nemo_eagle3_sglang.head_rows`), of
    token ids within its columns.
    """

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


@runtime_checkable
class SupervisionSource(Protocol):
    """Where supervision comes from: a runner in this process, one in another, a server, a cache.

    What is returned is valid until the next call: a source may write the next micro-batch over it. A source that runs
    elsewhere may also have ``submit(sequences)`` and ``collect() -> Supervision``, with one micro-batch submitted
    before the one in use has been trained on; what is collected is valid until the next ``submit`` but one.
    """

    info: TargetInfo
    device: torch.device
    dtype: torch.dtype

    def set_aux_layers(self, aux_layer_ids: Sequence[int]) -> None:
        """See :meth:`TargetRunner.set_aux_layers`."""

    def set_vocab_mapping(self, selected_token_ids: torch.Tensor, selected_token_mask: torch.Tensor) -> None:
        """Set the draft vocabulary: target id of each draft id ``[D]`` int64, and membership ``[V]`` bool."""

    def supervise(self, sequences: Sequences) -> Supervision:
        """Run the target once over T >= 0 tokens.

        Raises:
            RuntimeError: ``set_vocab_mapping`` was never called.
        """

    def input_embeddings(self) -> torch.Tensor:
        """Return the input embedding ``[V, H]`` on ``device``."""

    def close(self) -> None:
        """Free what the source holds; calling it again does nothing."""


class StatesProvider(Protocol):
    """States of a target that runs elsewhere, or ran once: a server's client, a cache's reader.

    Tensors are on the CPU or on the trainer's device, as the provider has them. ``info`` and ``dtype`` are those of the
    target.
    """

    info: TargetInfo
    dtype: torch.dtype

    def set_aux_layers(self, aux_layer_ids: Sequence[int]) -> None:
        """Check that the states are of these layers; raises ``ConfigError`` where they are not."""

    def plan_aux_layers(self, aux_layer_ids: Sequence[int]) -> AuxPlan | None:
        """See :class:`TargetRunner`."""

    def head_rows(self, token_ids: torch.Tensor) -> HeadRows:
        """Return the output head at ``token_ids`` ``[n]`` int64."""

    def input_embeddings(self) -> torch.Tensor:
        """Return the input embedding ``[V, H]``."""

    def submit(self, sequences: Sequences) -> None:
        """Ask for the states of a micro-batch."""

    def collect(self) -> TargetStates:
        """Return the states that were asked for first of those not collected."""

    def close(self) -> None:
        """Free what it holds; calling it again does nothing."""


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
        tp_rank: Which shard of a tensor-parallel target this process holds; ``options["tp_size"]`` processes in the
            default process group run every forward together, all on the same tokens.
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
    tp_rank: int = 0

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
