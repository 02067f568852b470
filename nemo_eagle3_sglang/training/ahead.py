"""The target works on the next micro-batch while the draft trains on this one."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch

from nemo_eagle3_sglang.supervision.unroll import Unroll


class Submitted(dict[str, torch.Tensor]):
    """A batch of the data loader whose supervision is under way.

    Attributes:
        plan: What to collect it by.
    """

    def __init__(self, batch: dict[str, torch.Tensor], plan: Unroll) -> None:
        super().__init__(batch)
        self.plan = plan


class AheadLoader:
    """A data loader that submits each batch to the target before the batches in front of it are trained on.

    A batch is handed out when ``depth`` batches behind it have been submitted. At that moment all work on the batch
    before it has been enqueued, which is what a target's process needs to know before it writes over that one's states.

    Args:
        loader: What it wraps; everything but iteration is its own.
        submit: Called with a batch; returns ``None`` where nothing can work ahead.
        depth: Batches that are submitted before they are needed.
    """

    def __init__(self, loader: Any, submit: Callable[[dict[str, torch.Tensor]], Unroll | None], depth: int = 1) -> None:
        self._loader, self._submit, self._depth = loader, submit, depth

    def __iter__(self) -> Iterator[Any]:
        """Yield the loader's batches, submitted."""
        held: deque[Any] = deque()
        for batch in self._loader:
            plan = self._submit(batch)
            held.append(batch if plan is None else Submitted(batch, plan))
            if len(held) > self._depth:
                yield held.popleft()
        yield from held

    def __len__(self) -> int:
        """Return the batches of an epoch."""
        return len(self._loader)

    def __getattr__(self, name: str) -> Any:
        """Return what is the loader's."""
        return getattr(self._loader, name)
