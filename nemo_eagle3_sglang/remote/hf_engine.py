"""The reference engine behind a target server: the transformers model, in the server's own process."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from pathlib import PurePath

import torch
import transformers

from nemo_eagle3_sglang.contracts import AuxPlan, BackendRequest, Sequences
from nemo_eagle3_sglang.head_rows import HeadRows
from nemo_eagle3_sglang.hf_runner import build_runner
from nemo_eagle3_sglang.remote import frames, rows
from nemo_eagle3_sglang.remote.answer import Answer, TargetCard
from nemo_eagle3_sglang.remote.card import fingerprint, read_config
from nemo_eagle3_sglang.supervision.aux_layers import resolve_aux_layer_ids
from nemo_eagle3_sglang.supervision.source import RunnerSource


class HFEngine:
    """A :class:`~nemo_eagle3_sglang.remote.answer.TargetEngine` over transformers.

    Args:
        request: Target, device, dtype.
        aux_layer_ids: The layers asked for; ``None`` for the default ones.
    """

    def __init__(self, request: BackendRequest, aux_layer_ids: list[int] | None) -> None:
        runner = build_runner(request)
        self._source = RunnerSource(runner)
        ids = sorted(resolve_aux_layer_ids(aux_layer_ids, runner.info.num_hidden_layers))
        self._source.set_aux_layers(ids)
        self._threads = ThreadPoolExecutor(1, "eagle3-target")
        plan, config = AuxPlan(ids, ids), read_config(request.target)
        head = self._source.head_rows(torch.arange(runner.info.vocab_size))
        self.card = TargetCard(
            name=PurePath(request.target).name,
            engine=f"transformers {transformers.__version__}",
            info=runner.info,
            dtype=runner.dtype,
            limit=runner.max_sequence_length,
            plan=plan,
            capture=request.capture,
            config=config,
            fingerprint=fingerprint(runner.info, plan, config, self.input_embeddings(), head.weight.cpu()),
        )

    async def states(self, sequences: Sequences, rows: str) -> Answer:
        """See :meth:`TargetEngine.states`; one micro-batch at a time."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, self._run, sequences, rows)

    def _run(self, sequences: Sequences, kind: str) -> Answer:
        packed = rows.pack(self._source.states(sequences), kind)
        return Answer({name: [frames.data(tensor)] for name, tensor in packed.items()}, lambda: None)

    def head_rows(self, token_ids: torch.Tensor) -> HeadRows:
        """See :meth:`TargetEngine.head_rows`."""
        found = self._source.head_rows(token_ids)
        bias = None if found.bias is None else found.bias.cpu()
        return HeadRows(found.weight.cpu(), bias, found.scale, found.softcap)

    def input_embeddings(self) -> torch.Tensor:
        """See :meth:`TargetEngine.input_embeddings`."""
        return self._source.input_embeddings().cpu()

    def alive(self) -> bool:
        """See :meth:`TargetEngine.alive`."""
        return self._source.runner.model is not None

    def close(self) -> None:
        """See :meth:`TargetEngine.close`."""
        self._threads.shutdown(wait=True)
        self._source.close()
