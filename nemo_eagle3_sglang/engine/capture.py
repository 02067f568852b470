"""Hidden states out of a SGLang model: where they are tapped, and how that is decided.

Two places. The model's ``LogitsProcessor`` is replaced by a tap that keeps what it is handed, so all positions come
back and no logits are computed. The aux states come from forward hooks on the decoder layers of the text model, not
from ``set_eagle3_layers_to_capture``: hooks exist for every model, in any order of ids, and SGLang's setter adds one
to each id by rules that differ between models.

A decoder layer of SGLang returns ``(hidden, residual)`` or one tensor, and which of ``hidden`` and
``hidden + residual`` is the residual stream (HF's ``hidden_states[i + 1]``) cannot be told from the shape: on some
models the residual returned is stale. :meth:`Capture.calibrate` decides it by the final norm, and refuses a model
where neither fits.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from nemo_eagle3_sglang.contracts import HiddenStates, TargetInfo
from nemo_eagle3_sglang.engine import versions
from nemo_eagle3_sglang.engine.self_check import Observed, split_served
from nemo_eagle3_sglang.errors import CaptureError
from nemo_eagle3_sglang.head_rows import HeadRows, read_rows

# 1 - cos between the final norm of a candidate and the hidden state that the head is handed. Measured on some twenty
# architectures in fp32: at most 1e-14 for the right candidate, at least 1.7e-2 for the wrong one. bf16 adds about 1e-4.
PARALLEL = 1e-3


class Tap(nn.Module):
    """Stands in for a ``LogitsProcessor``: keeps what the model hands to it and computes nothing.

    ``LogitsProcessor.forward`` has the same leading arguments in sglang 0.5.9 to 0.5.23.
    """

    def __init__(self, processor: nn.Module, passes: bool = False) -> None:
        super().__init__()
        # In a tuple, so that the processor is not a submodule any more and cannot be found and run.
        self._processor = (processor,)
        # Whether the processor runs all the same: in a server, which samples a token before a request is done.
        self._passes = passes
        self.hidden: torch.Tensor | None = None
        self.aux: Any = None
        self.lm_head: tuple[nn.Module, ...] = ()

    @property
    def processor(self) -> nn.Module:
        """The ``LogitsProcessor`` that was replaced."""
        return self._processor[0]

    def forward(
        self,
        input_ids: Any,
        hidden_states: torch.Tensor,
        lm_head: nn.Module,
        logits_metadata: Any,
        aux_hidden_states: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Keep ``hidden_states`` ``[T, H]``, SGLang's own aux states and the head; return an output without logits."""
        from sglang.srt.layers.logits_processor import LogitsProcessorOutput

        self.hidden, self.aux, self.lm_head = hidden_states, aux_hidden_states, (lm_head,)
        if self._passes:
            arguments = (input_ids, hidden_states, lm_head, logits_metadata, aux_hidden_states, *args)
            return self.processor(*arguments, **kwargs)
        return LogitsProcessorOutput(next_token_logits=None)


@dataclass(frozen=True)
class TextModel:
    """The text decoder inside a model, however deep it is nested.

    Attributes:
        path: Dotted name of the module that owns the layers; empty for the root.
        layers: Its N decoder layers.
        embedding: Its input embedding, a ``VocabParallelEmbedding`` or ``nn.Embedding``.
        norms: Its own modules that could be the final norm, by name.
    """

    path: str
    layers: nn.ModuleList
    embedding: nn.Module
    norms: dict[str, nn.Module]


def find_text_model(model: nn.Module, info: TargetInfo) -> TextModel:
    """Find the module that owns the decoder layers and a vocabulary embedding, by walking the modules.

    A vision tower may have as many layers, but embeds no vocabulary.

    Raises:
        CaptureError: None or several modules fit.
    """
    found = [m for path, owner in model.named_modules() if (m := _text_model(path, owner, info)) is not None]
    if len(found) != 1:
        names = ", ".join(m.path or "(root)" for m in found) or "none"
        raise CaptureError(
            f"{type(model).__name__}: {len(found)} modules own {info.num_hidden_layers} decoder layers and a "
            f"vocabulary embedding ({names}); exactly one must"
        )
    return found[0]


def _text_model(path: str, owner: nn.Module, info: TargetInfo) -> TextModel | None:
    children = dict(owner.named_children())
    stacks = [c for c in children.values() if isinstance(c, nn.ModuleList) and len(c) == info.num_hidden_layers]
    tables = [c for c in children.values() if _embeds_vocabulary(c, info)]
    if len(stacks) != 1 or len(tables) != 1:
        return None
    norms = {name: c for name, c in children.items() if "norm" in name or name.startswith("ln")}
    return TextModel(path, stacks[0], tables[0], norms)


def _embeds_vocabulary(module: nn.Module, info: TargetInfo) -> bool:
    """Return whether ``module`` maps token ids to ``[T, H]``; tables of positions and per-layer ones do not."""
    from sglang.srt.layers.vocab_parallel_embedding import VocabParallelEmbedding

    if isinstance(module, VocabParallelEmbedding):
        return module.embedding_dim == info.hidden_size
    # Gemma-3 does not shard its vocabulary.
    wide = isinstance(module, nn.Embedding) and module.embedding_dim == info.hidden_size
    return wide and module.num_embeddings >= info.vocab_size


def tap_logits_processors(model: nn.Module, passes: bool = False) -> list[Tap]:
    """Replace every ``LogitsProcessor`` in ``model`` by a :class:`Tap`, at its own parent.

    Raises:
        CaptureError: There is none, or one is still to be found afterwards.
    """
    from sglang.srt.layers.logits_processor import LogitsProcessor

    def sites() -> list[tuple[nn.Module, str, nn.Module]]:
        # A list before anything is replaced: named_modules must not be mutated while it is walked.
        return [
            (parent, name, child)
            for parent in model.modules()
            for name, child in parent.named_children()
            if isinstance(child, LogitsProcessor)
        ]

    taps: dict[int, Tap] = {}
    for parent, name, child in sites():
        # One processor may hang in two places; both must lead to the same tap.
        setattr(parent, name, taps.setdefault(id(child), Tap(child, passes)))
    if not taps or sites():
        raise CaptureError(f"{type(model).__name__}: the LogitsProcessor could not be tapped ({len(taps)} replaced)")
    return list(taps.values())


class Head:
    """The target's output head: what its ``LogitsProcessor`` does after the hidden state, at any position.

    Args:
        processor: The model's own ``LogitsProcessor``.
        lm_head: The head that the model hands to it; the embedding where the two are tied.
        vocab_size: V; rows of ``lm_head`` past it are padding.
        probe: ``[T, H]``, some of the hidden states that it is handed, for their size and dtype.

    Attributes:
        columns: The token ids that its logits are of: all V, or a rank's shard of them.
    """

    def __init__(self, processor: nn.Module, lm_head: nn.Module, vocab_size: int, probe: torch.Tensor) -> None:
        self._processor = processor
        self._lm_head = lm_head
        self._vocab_size = vocab_size
        self._hidden_size, self._dtype = probe.shape[-1], probe.dtype
        shard = versions.shard_of(lm_head)
        self.columns = range(vocab_size) if shard is None else range(shard.start, min(shard.stop, vocab_size))
        self._scale: float | None = processor.logit_scale
        self._softcap: float | None = processor.final_logit_softcapping

    @property
    def rows(self) -> int:
        """Rows that the head holds, padding included; as many as it claims where they cannot be counted (packed)."""
        weight = getattr(self._lm_head, "weight", None)
        return len(self.columns) if weight is None else weight.shape[0]

    @property
    def claimed_rows(self) -> set[int]:
        """What the processor trims the logits to, and the rows without padding as the head states them, if it does."""
        return {self._processor.vocab_size, getattr(self._lm_head, "org_vocab_size", self._processor.vocab_size)}

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return logits ``[n, len(columns)]`` of ``hidden`` ``[n, H]``: projection, scale, trim, soft cap."""
        logits = versions.project(self._processor, hidden, self._lm_head)
        if self._scale is not None:
            logits = logits.mul_(self._scale)
        logits = logits[:, : len(self.columns)]
        if self._softcap:
            # In float32, as SGLang does it: a bf16 tanh would tie neighbouring logits.
            logits = torch.tanh(logits.float() / self._softcap) * self._softcap
        return logits

    def rows_at(self, token_ids: torch.Tensor) -> HeadRows:
        """Return the rows of ``token_ids`` ``[n]`` int64, which lie in ``columns``."""

        def project(hidden: torch.Tensor) -> torch.Tensor:
            return versions.project(self._processor, hidden, self._lm_head)

        local = token_ids - self.columns.start
        return read_rows(project, local, self._hidden_size, self._dtype, self._scale, self._softcap)


class Capture:
    """Taps and hooks on one model.

    Args:
        model: SGLang's model, as its runner holds it.
        info: Dimensions of the text config.
        passes: Whether logits are computed behind the taps, as a server needs them.
    """

    def __init__(self, model: nn.Module, info: TargetInfo, passes: bool = False) -> None:
        self.text_model = find_text_model(model, info)
        self._taps = tap_logits_processors(model, passes)
        self._vocab_size = info.vocab_size
        self._hooks: list[Any] = []
        self._aux_layer_ids: list[int] = []
        self._states: dict[int, torch.Tensor] = {}
        self._add_residual = True
        self._head: Head | None = None

    def set_layers(self, aux_layer_ids: Sequence[int]) -> None:
        """Hook exactly these layers; their states come back in this order."""
        layers = {i: self.text_model.layers[i] for i in aux_layer_ids}
        self._unhook()
        self._aux_layer_ids = list(aux_layer_ids)
        self._hooks = [layer.register_forward_hook(self._keep(i)) for i, layer in layers.items()]

    def _keep(self, layer_id: int) -> Callable[..., None]:
        def hook(_module: nn.Module, _inputs: Any, output: Any) -> None:
            self._states[layer_id] = self._stream(output)

        return hook

    def _stream(self, output: Any) -> torch.Tensor:
        """Return the residual stream of a layer's output as a tensor of its own: later fused norms write in place."""
        hidden, residual = output[:2] if isinstance(output, tuple) else (output, None)
        if versions.is_partial(hidden):
            raise CaptureError(
                "a decoder layer leaves its sum over the ranks of the target to the next layer (fused all-reduce): its "
                "output is no hidden state. Remove flashinfer_allreduce_fusion_backend from recipe_args.sglang_args"
            )
        if self._add_residual and residual is not None:
            return hidden + residual
        return hidden.clone()

    @contextlib.contextmanager
    def _fresh(self) -> Iterator[None]:
        """Let nothing of another forward be mistaken for this one's, whether it ends well or not."""
        self._drop()
        try:
            yield
        finally:
            self._drop()

    def _drop(self) -> None:
        self._states.clear()
        for tap in self._taps:
            tap.hidden = tap.aux = None

    def run(self, forward: Callable[[], Any]) -> HiddenStates:
        """Call ``forward`` once and return what passed the taps and hooks.

        Raises:
            CaptureError: Not exactly one tap was reached, or a hooked layer did not run.
        """
        with self._fresh():
            forward()
            last = self._reached().hidden
            assert last is not None
            return HiddenStates(aux=torch.cat(self._kept(), dim=-1), last=last)

    def _kept(self) -> list[torch.Tensor]:
        """Return the states of the hooked layers, in the order of the ids."""
        missing = [i for i in self._aux_layer_ids if i not in self._states]
        if missing:
            raise CaptureError(f"decoder layers {missing} did not run in this forward")
        return [self._states[i] for i in self._aux_layer_ids]

    def _reached(self) -> Tap:
        reached = [tap for tap in self._taps if tap.hidden is not None]
        if len(reached) != 1:
            raise CaptureError(f"{len(reached)} of {len(self._taps)} logits processors ran; exactly one must")
        return reached[0]

    def calibrate(self, forward: Callable[[], Any]) -> None:
        """Decide what the residual stream is, and take the head, by one forward over a few tokens.

        The final norm of the last layer's stream must be parallel to the hidden state at the tap (parallel, not
        equal: some models scale it).

        Raises:
            CaptureError: Neither ``hidden`` nor ``hidden + residual`` fits, under any norm of the text model.
        """
        outputs: list[tuple[torch.Tensor, torch.Tensor | None]] = []
        last_layer = self.text_model.layers[-1]

        def keep(_module: nn.Module, _inputs: Any, output: Any) -> None:
            hidden, residual = output[:2] if isinstance(output, tuple) else (output, None)
            outputs.append((hidden.clone(), None if residual is None else residual.clone()))

        handle = last_layer.register_forward_hook(keep)
        try:
            with self._fresh():
                forward()
                tap = self._reached()
                self._add_residual = self._choose(outputs, tap.hidden)
                self._head = Head(tap.processor, tap.lm_head[0], self._vocab_size, tap.hidden)
                if not bool(self._head(tap.hidden).isfinite().all()):
                    raise CaptureError("the target's logits hold inf or nan: its weights are damaged")
        finally:
            handle.remove()

    def _choose(self, outputs: list[tuple[torch.Tensor, torch.Tensor | None]], last: torch.Tensor) -> bool:
        """Return whether the residual is to be added; see :meth:`calibrate`."""
        if len(outputs) != 1:
            raise CaptureError(f"the last decoder layer ran {len(outputs)} times in one forward")
        hidden, residual = outputs[0]
        candidates = {False: hidden} if residual is None else {True: hidden + residual, False: hidden}
        distance = {
            (add, name): _distance(norm, stream, last)
            for add, stream in candidates.items()
            for name, norm in self.text_model.norms.items()
        }
        if not distance or min(distance.values()) > PARALLEL:
            readable = {f"{'h + residual' if add else 'h'} by {name}": d for (add, name), d in distance.items()}
            raise CaptureError(
                "the last layer's state does not lead to the hidden state that the head is handed "
                f"(1 - cos, at most {PARALLEL}: {readable}); this model's capture is not understood"
            )
        return min(distance, key=distance.__getitem__)[0]

    def observe(self, forward: Callable[[], Any]) -> Observed:
        """Call ``forward`` once with every layer hooked, and return what SGLang's own capture yields beside it.

        The layers chosen by :meth:`set_layers` are hooked again afterwards. Meant for a few tokens.
        """
        chosen = self._aux_layer_ids
        self.set_layers(range(len(self.text_model.layers)))
        try:
            with self._fresh():
                forward()
                tap = self._reached()
                assert tap.hidden is not None
                return Observed(split_served(tap.aux, tap.hidden.shape[-1]), self._kept())
        finally:
            self.set_layers(chosen)

    def head(self) -> Head:
        """Return the output head that the calibrating forward was handed."""
        assert self._head is not None, "calibrate() comes first"
        return self._head

    def _unhook(self) -> None:
        for handle in self._hooks:
            handle.remove()
        self._hooks.clear()

    def close(self) -> None:
        """Remove the hooks and drop every reference to the model."""
        self._unhook()
        self._drop()
        self._head = None
        self._taps = []
        del self.text_model


def _distance(norm: nn.Module, stream: torch.Tensor, last: torch.Tensor) -> float:
    """Return the largest ``1 - cos`` over the tokens between ``norm(stream)`` and ``last``, both ``[T, H]``.

    A token whose state is zero (a padding token with a zero embedding, seen first) has no direction and is left out.
    """
    # A clone: SGLang's norms may work in place.
    normed = norm(stream.clone())
    normed = normed[0] if isinstance(normed, tuple) else normed
    has_direction = last.abs().amax(dim=-1) > 0
    cosine = torch.nn.functional.cosine_similarity(normed[has_direction].double(), last[has_direction].double(), dim=-1)
    distance = float((1 - cosine).max()) if cosine.numel() else math.inf
    return math.inf if math.isnan(distance) else distance
