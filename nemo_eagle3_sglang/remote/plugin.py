"""SGLang's side: what every worker of a target server does beside serving.

Loaded by SGLang itself, through its entry point ``sglang.srt.plugins``, in every process of an engine; nothing of it is
patched but by its own ``HookRegistry``. Without the variable that ``serve-target`` sets it does nothing at all, since
SGLang loads the plugins of all installed distributions.

A forward whose request ids are :mod:`~nemo_eagle3_sglang.remote.ask` ones is run with taps and hooks on
(``engine/capture.py``, the same as in a trainer's process). Every tensor-parallel rank takes the argmax over its shard
of the head; the first one leaves the rows in a buffer and tells the front which request has which.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import socket
import threading
from collections.abc import Callable
from typing import Any

import torch

from nemo_eagle3_sglang.contracts import AuxPlan, TargetInfo, TargetStates
from nemo_eagle3_sglang.engine import self_check, versions
from nemo_eagle3_sglang.engine.capture import Capture
from nemo_eagle3_sglang.errors import CaptureError, ConfigError
from nemo_eagle3_sglang.remote import ask, rows
from nemo_eagle3_sglang.remote.buffers import Full, Pool
from nemo_eagle3_sglang.sidecar import wire
from nemo_eagle3_sglang.supervision.head import chunks

logger = logging.getLogger(__name__)

VARIABLE = "NEMO_EAGLE3_SGLANG_TARGET_SERVER"
FORWARD = "sglang.srt.model_executor.model_runner.ModelRunner.forward"


@dataclasses.dataclass(frozen=True)
class Settings:
    """What ``serve-target`` tells its workers, as JSON in :data:`VARIABLE`.

    Attributes:
        address: Abstract name of the front's socket.
        aux_layer_ids: The layers asked for.
        capture: ``serving`` or ``residual``.
        self_check: Whether SGLang's own capture is compared with.
        buffer_bytes: Of rows that wait to be fetched, at most.
    """

    address: str
    aux_layer_ids: list[int]
    capture: str
    self_check: bool
    buffer_bytes: int

    def text(self) -> str:
        """Return the variable's value."""
        return json.dumps(dataclasses.asdict(self))


def register() -> None:
    """Called by SGLang in every process of an engine."""
    text = os.environ.get(VARIABLE)
    if not text:
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    versions.prepare_server_process()
    HookRegistry.register(FORWARD, Worker(Settings(**json.loads(text))).forward, HookType.AROUND)


class Worker:
    """The hook around ``ModelRunner.forward`` of one worker.

    Args:
        settings: See :class:`Settings`.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._target: Target | None = None
        self._failure: Exception | None = None

    def forward(self, original: Callable[..., Any], runner: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        """Run a forward, and keep its rows where it is ours."""
        asks = [ask.parse(rid) for rid in batch.rids or []]
        if not asks or None in asks or not batch.forward_mode.is_extend():
            return original(runner, batch, *args, **kwargs)
        outputs: list[Any] = []

        def run() -> Any:
            outputs.append(original(runner, batch, *args, **kwargs))
            return outputs[-1]

        error: Exception | None = None
        try:
            target = self._open(runner, run)
            target.keep(runner, batch, [a for a in asks if a is not None], run)
        except (CaptureError, ConfigError, Full) as problem:
            error = problem
        if error is not None and self._target is not None:
            self._target.refuse([a.name for a in asks if a is not None], error)
        # SGLang must get its output, whatever became of the rows.
        return outputs[-1] if outputs else run()

    def _open(self, runner: Any, run: Callable[[], Any]) -> Target:
        if self._failure is not None:
            raise self._failure
        if self._target is None:
            self._target = Target(runner, self._settings)
            try:
                self._target.calibrate(run)
            except (CaptureError, ConfigError) as problem:
                # Told by the caller, and again to whoever asks later.
                self._failure = problem
                raise
        return self._target


class Target:
    """The captured model of one worker, and its line to the front.

    Args:
        runner: SGLang's ``ModelRunner``.
        settings: See :class:`Settings`.
    """

    def __init__(self, runner: Any, settings: Settings) -> None:
        config = runner.model_config.hf_text_config
        self._settings = settings
        self._info = TargetInfo(config.num_hidden_layers, config.hidden_size, config.vocab_size)
        self._dtype: torch.dtype = runner.model_config.dtype
        self._limit = min(int(runner.model_config.context_len), int(runner.max_total_num_tokens))
        self._rank, self._ranks = versions.tensor_rank()
        self._model = runner.model
        self._line = Line(settings) if self._rank == 0 else None
        self._capture: Capture | None = None

    def calibrate(self, run: Callable[[], Any]) -> None:
        """Tap the model, decide what is captured, and tell the front; any forward's tokens will do.

        Raises:
            CaptureError: See :class:`Capture`.
            ConfigError: SGLang cannot serve a draft with the states of these layers.
        """
        capture = Capture(self._model, self._info, passes=True)
        capture.calibrate(run)
        asked = self._settings.aux_layer_ids
        plan = AuxPlan(trained=asked, written=asked)
        if self._settings.capture == "serving" and self._settings.self_check:
            self_check.check_setter(self._model)

            def observe(written: list[int]) -> self_check.Observed:
                with self_check.serving_capture(self._model, written):
                    return capture.observe(run)

            plan = self_check.plan_aux_layers(asked, observe)
        capture.set_layers(plan.trained)
        self._capture = capture
        weights = {"embedding": self._embedding(), **self._head()}
        if self._line is not None:
            info = {**dataclasses.asdict(self._info), "dtype": dtype_name(self._dtype), "limit": self._limit}
            head = capture.head().rows_at(torch.tensor([capture.head().columns.start], device=self._device()))
            numbers = {"scale": head.scale, "softcap": head.softcap}
            self._line.ready({**info, **numbers, "plan": dataclasses.asdict(plan)}, weights)

    def _device(self) -> torch.device:
        return next(self._model.parameters()).device

    def _embedding(self) -> torch.Tensor:
        assert self._capture is not None
        embedding = self._capture.text_model.embedding
        weight = embedding.weight.detach()
        whole = weight if versions.shard_of(embedding) is None else versions.gather_rows(weight)
        return whole[: self._info.vocab_size]

    def _head(self) -> dict[str, torch.Tensor]:
        """Return weight ``[V, H]`` and bias ``[V]`` of the head, gathered from its shards."""
        assert self._capture is not None
        head = self._capture.head()
        own = head.rows_at(torch.arange(head.columns.start, head.columns.stop, device=self._device()))
        bias = own.weight.new_zeros(len(own.weight)) if own.bias is None else own.bias
        if self._ranks == 1 or len(head.columns) == self._info.vocab_size:
            return {"weight": own.weight, "bias": bias}
        # All shards but the last are as long; that one is filled up and cut again.
        longest = head.rows
        padded = own.weight.new_zeros((longest, own.weight.shape[1] + 1))
        padded[: len(bias), :-1], padded[: len(bias), -1] = own.weight, bias
        whole = versions.gather_rows(padded)[: self._info.vocab_size]
        return {"weight": whole[:, :-1], "bias": whole[:, -1]}

    def keep(self, runner: Any, batch: Any, asks: list[ask.Ask], run: Callable[[], Any]) -> None:
        """Run the forward and hand its rows to the front.

        Raises:
            CaptureError: The forward did not run over exactly the tokens that were asked for.
            Full: Nobody fetches what is there already.
            ConfigError: There is no memory for so many rows.
        """
        assert self._capture is not None
        lengths, prefixes = list(batch.extend_seq_lens_cpu), list(batch.extend_prefix_lens_cpu)
        if lengths != [a.length for a in asks] or any(prefixes):
            wanted = [a.length for a in asks]
            raise CaptureError(
                f"SGLang ran {lengths} tokens after prefixes of {prefixes} where sequences of {wanted} were asked for"
            )
        states = self._capture.run(run)
        if len(states.last) < sum(lengths):
            raise CaptureError(f"{len(states.last)} rows were captured of {sum(lengths)} tokens")
        starts = torch.tensor([0, *lengths[:-1]]).cumsum(0).tolist()
        places = [torch.from_numpy(a.supervised) + at for a, at in zip(asks, starts, strict=True)]
        supervised = torch.cat(places).to(states.last.device)
        last = states.last.index_select(0, supervised)
        choices = self._choices(last)
        if self._line is not None:
            self._line.send(asks, TargetStates(states.aux[: sum(lengths)].to(self._dtype), last, choices))

    def _choices(self, last: torch.Tensor) -> torch.Tensor:
        """Return the argmax over all of V; collective, every rank has the same positions."""
        assert self._capture is not None
        head = self._capture.head()
        best = torch.empty(len(last), dtype=torch.float32, device=last.device)
        names = torch.empty(len(last), dtype=torch.int64, device=last.device)
        for part, logits in chunks(head, last, len(head.columns)):
            best[part], place = logits.float().max(dim=-1)
            names[part] = place + head.columns.start
            del logits
        if len(head.columns) == self._info.vocab_size:
            return names
        values = versions.gather_rows(best.view(1, -1))
        shard = (values == values.amax(dim=0)).to(torch.uint8).argmax(dim=0, keepdim=True)
        return versions.gather_rows(names.view(1, -1)).gather(0, shard).squeeze(0)

    def refuse(self, names: list[str], error: Exception) -> None:
        """Tell the front what became of requests."""
        if self._line is not None:
            self._line.tell({"failed": names, "kind": type(error).__name__, "message": str(error)})


def dtype_name(dtype: torch.dtype) -> str:
    """Return a dtype's name, as JSON has it."""
    return str(dtype).removeprefix("torch.")


class Line:
    """A worker's connection to the front, on one host.

    Args:
        settings: See :class:`Settings`.
    """

    def __init__(self, settings: Settings) -> None:
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._sock.connect("\0" + settings.address)
        self._pool = Pool(settings.buffer_bytes, pinned=torch.cuda.is_available())
        threading.Thread(target=self._listen, name="eagle3-released", daemon=True).start()

    def _listen(self) -> None:
        try:
            while True:
                self._pool.release(wire.receive(self._sock).header["release"])
        except wire.PeerGone:
            # The front ended, and SGLang's engine with it.
            return

    def tell(self, header: dict[str, Any], fd: int | None = None) -> None:
        """Send a header; only the thread of the forwards sends."""
        wire.send(self._sock, header, fd=fd)

    def ready(self, info: dict[str, Any], weights: dict[str, torch.Tensor]) -> None:
        """Send what the target is, and its embedding and head, which stay with the front."""
        pool = Pool(limit=2**62)
        for name, weight in weights.items():
            buffer = pool.take(weight.numel() * weight.element_size())
            _into(buffer.memory, 0, weight)
            place = {"dtype": dtype_name(weight.dtype), "shape": list(weight.shape), "size": len(buffer.memory)}
            self.tell({"weight": name, **place}, buffer.fd)
            os.close(buffer.fd)
        self.tell({"ready": info})

    def send(self, asks: list[ask.Ask], states: TargetStates) -> None:
        """Leave the rows of one forward in a buffer and say whose they are.

        Raises:
            Full: See :class:`Pool`.
            ConfigError: See :class:`Pool`.
        """
        kinds = {a.rows for a in asks}
        packed = {kind: rows.pack(states, kind) for kind in kinds}
        size = sum(_aligned(t) for tensors in packed.values() for t in tensors.values())
        buffer = self._pool.take(size)
        offset, places = 0, {}
        for kind, tensors in packed.items():
            for name, tensor in tensors.items():
                _into(buffer.memory, offset, tensor)
                row = tensor.element_size() * (tensor.numel() // max(len(tensor), 1))
                places[kind, name] = {"offset": offset, "row": row}
                offset += _aligned(tensor)
        if states.aux.is_cuda:
            torch.cuda.current_stream().synchronize()
        requests, token, position = [], 0, 0
        for a in asks:
            tensors = {}
            for name in packed[a.rows]:
                place, of_tokens = places[a.rows, name], name.startswith("aux")
                at, count = (token, a.length) if of_tokens else (position, len(a.supervised))
                tensors[name] = [place["offset"] + at * place["row"], count * place["row"]]
            requests.append({"name": a.name, "tensors": tensors})
            token, position = token + a.length, position + len(a.supervised)
        header = {
            "buffer": buffer.number,
            "size": len(buffer.memory),
            "requests": requests,
            "dropped": self._pool.dropped(),
        }
        self.tell(header, None if buffer.shared else buffer.fd)
        buffer.shared = True


def _aligned(tensor: torch.Tensor) -> int:
    return -(-tensor.numel() * tensor.element_size() // 64) * 64


def _into(memory: torch.Tensor, offset: int, tensor: torch.Tensor) -> None:
    size = tensor.numel() * tensor.element_size()
    if size:
        memory[offset : offset + size].view(tensor.dtype).view(tensor.shape).copy_(tensor, non_blocking=True)
