"""One target shared by a group of ranks: it runs once over the rows of all of them, and each gets back its own.

Every rank's engine holds a shard of the weights and must see the same forward, so a step begins with an agreement on
how much there is: counts first, then tokens. Only after that do collectives run whose shapes depend on them. A rank
that has left (its trainer ended) keeps taking part with nothing, until all have: nobody waits for rows that will never
come. Both exchanges are on the host, in a gloo group, which fails at once when a peer is gone.

The head's columns are sharded by token id. Of each position, every shard gives its best token and its columns of the
draft vocabulary; the latter go straight to the rank that owns the position. ``[tokens, V]`` never exists on any rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist

from nemo_eagle3_sglang.contracts import DraftTargets, Sequences, Supervision, TargetRunner, TargetStates
from nemo_eagle3_sglang.head_rows import HeadRows
from nemo_eagle3_sglang.supervision.head import chunks, draft_targets, summarise
from nemo_eagle3_sglang.supervision.source import RunnerSource


@dataclass(frozen=True)
class Share:
    """A rank's part of a step, on the host: tokens ``[T]``, lengths of the sequences, supervised tokens ``[P]``."""

    tokens: np.ndarray
    lengths: list[int]
    supervised: np.ndarray


class GroupSource(RunnerSource):
    """A :class:`~nemo_eagle3_sglang.contracts.SupervisionSource` of which each rank of the default group holds one.

    All methods are collective: every rank calls the same ones in the same order, :meth:`supervise` as often as it likes
    until it calls :meth:`close`.

    Args:
        runner: The rank's shard of the target.
        timeout: How long to wait for the slowest rank's rows.
    """

    def __init__(self, runner: TargetRunner, timeout: timedelta) -> None:
        super().__init__(runner)
        self._rank, self._size = dist.get_rank(), dist.get_world_size()
        self._host = dist.new_group(backend="gloo", timeout=timeout)
        self._shards: _Shards | None = None

    @torch.no_grad()
    def set_vocab_mapping(self, selected_token_ids: torch.Tensor, selected_token_mask: torch.Tensor) -> None:
        """See :meth:`RunnerSource.set_vocab_mapping`; the ranks tell each other which columns of the head they hold."""
        super().set_vocab_mapping(selected_token_ids, selected_token_mask)
        head, vocab = self.runner.head(), len(selected_token_mask)
        columns = self._columns()
        if all(len(part) == vocab for part in columns):
            self._shards = None
            return
        ids, _ = self.vocab_mapping()
        places = [((ids >= part.start) & (ids < part.stop)).nonzero().squeeze(-1) for part in columns]
        probe = torch.zeros((1, self.info.hidden_size), dtype=self.dtype, device=self.device)
        self._shards = _Shards(columns, places, head(probe).dtype)

    def _columns(self) -> list[range]:
        """Return the token ids of every rank's shard of the head."""
        own: range = getattr(self.runner.head(), "columns", range(self.info.vocab_size))
        return [range(*row.tolist()) for row in self._gathered(torch.tensor([own.start, own.stop]))]

    @torch.no_grad()
    def supervise(self, sequences: Sequences) -> Supervision:
        """Run the target over all ranks' sequences; return what belongs to this rank's.

        Raises:
            RuntimeError: A rank ended without leaving, or did not come within the timeout.
        """
        self.vocab_mapping()
        found = self._step(Share(sequences.tokens, sequences.lengths, sequences.supervised))
        assert isinstance(found, Supervision)
        return found

    @torch.no_grad()
    def states(self, sequences: Sequences) -> TargetStates:
        """See :meth:`RunnerSource.states`; for all ranks together, none of which has a draft vocabulary."""
        found = self._step(Share(sequences.tokens, sequences.lengths, sequences.supervised))
        assert isinstance(found, TargetStates)
        return found

    @torch.no_grad()
    def head_rows(self, token_ids: torch.Tensor) -> HeadRows:
        """See :meth:`RunnerSource.head_rows`; every rank gets the rows of all shards."""
        ids, columns = token_ids.to(self.device), self._columns()[self._rank]
        own = ((ids >= columns.start) & (ids < columns.stop)).nonzero().squeeze(-1)
        found = self._readable_head().rows_at(ids[own])
        # A sum with zeros puts the shards together, as exactly as it is simple.
        weight = found.weight.new_zeros((len(ids), self.info.hidden_size))
        weight[own] = found.weight
        bias = found.weight.new_zeros(len(ids))
        if found.bias is not None:
            bias[own] = found.bias
        dist.all_reduce(weight)
        dist.all_reduce(bias)
        return HeadRows(weight, bias if bool(bias.any()) else None, found.scale, found.softcap)

    def close(self) -> None:
        """Take part, with nothing, in what the others still run; free the target when all have left."""
        nothing = np.empty(0, dtype=np.int64)
        while self._step(Share(nothing, [], nothing), leaving=True) is not None:
            pass
        super().close()

    def _step(self, own: Share, leaving: bool = False) -> Supervision | TargetStates | None:
        """Run one step; ``None`` when every rank is leaving. Without a draft vocabulary it gives states."""
        shares = self._agree(own, leaving)
        if shares is None:
            return None
        lengths = [n for share in shares for n in share.lengths]
        starts = np.cumsum([0, *(len(share.tokens) for share in shares)])
        supervised = np.concatenate([share.supervised + at for share, at in zip(shares, starts, strict=False)])
        states = self.forward(Sequences(np.concatenate([share.tokens for share in shares]), lengths, supervised))
        hidden = states.last.index_select(0, torch.from_numpy(supervised).to(self.device))
        counts = [len(share.supervised) for share in shares]
        aux = states.aux[starts[self._rank] : starts[self._rank + 1]]
        if self._mapping is None:
            best = self._best(*self._own_choices(hidden)).split(counts)[self._rank]
            return TargetStates(aux, hidden.split(counts)[self._rank], best)
        return Supervision(aux, self._targets(hidden, counts, *self.vocab_mapping()))

    def _own_choices(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return this shard's best logit ``[n]`` and token ``[n]`` at every position."""
        head = self.runner.head()
        columns: range = getattr(head, "columns", range(self.info.vocab_size))
        best = torch.empty(len(hidden), dtype=torch.float32, device=self.device)
        best_ids = torch.empty(len(hidden), dtype=torch.int64, device=self.device)
        for part, logits in chunks(head, hidden, len(columns)):
            best[part], place = logits.float().max(dim=-1)
            best_ids[part] = place + columns.start
            del logits
        return best, best_ids

    def _agree(self, own: Share, leaving: bool) -> list[Share] | None:
        """Return every rank's share, or ``None`` when all are leaving."""
        counts = torch.tensor([int(leaving), len(own.tokens), len(own.lengths), len(own.supervised)])
        table = [row.tolist() for row in self._gathered(counts)]
        if all(row[0] for row in table):
            return None
        width = max(sum(row[1:]) for row in table)
        packed = torch.zeros(width, dtype=torch.int64)
        flat = np.concatenate([own.tokens, own.lengths, own.supervised]).astype(np.int64, copy=False)
        packed[: len(flat)] = torch.from_numpy(flat)
        shares = []
        for row, values in zip(table, self._gathered(packed), strict=True):
            tokens, lengths, supervised = (part.numpy() for part in values[: sum(row[1:])].split(row[1:]))
            shares.append(Share(tokens, lengths.tolist(), supervised))
        return shares

    def _gathered(self, values: torch.Tensor) -> list[torch.Tensor]:
        rows = [torch.empty_like(values) for _ in range(self._size)]
        try:
            dist.all_gather(rows, values, group=self._host)
        except RuntimeError as error:
            raise RuntimeError(
                f"rank {self._rank} of the {self._size} that share the target: another one ended or did not come with "
                f"its rows ({str(error).strip().splitlines()[-1]})"
            ) from error
        return rows

    def _targets(self, hidden: torch.Tensor, counts: list[int], ids: torch.Tensor, mask: torch.Tensor) -> DraftTargets:
        """Return the targets of this rank's positions.

        Args:
            hidden: ``[sum(counts), H]``, the states at the supervised positions of all ranks.
            counts: Positions of each rank.
            ids: ``[D]``, target id of each draft id.
            mask: ``[V]``, membership.
        """
        head, shards = self.runner.head(), self._shards
        if shards is None:
            return draft_targets(head, hidden.split(counts)[self._rank], ids, mask)
        columns = shards.columns[self._rank]
        local = ids[shards.places[self._rank]] - columns.start
        kept = torch.empty((len(hidden), len(local)), dtype=shards.dtype, device=self.device)
        best = torch.empty(len(hidden), dtype=torch.float32, device=self.device)
        best_ids = torch.empty(len(hidden), dtype=torch.int64, device=self.device)
        for part, logits in chunks(head, hidden, len(columns)):
            best[part], place = logits.float().max(dim=-1)
            best_ids[part] = place + columns.start
            torch.index_select(logits, -1, local, out=kept[part])
            del logits
        chosen = self._best(best, best_ids).split(counts)[self._rank]
        return summarise(self._own_rows(kept, counts, shards), mask[chosen])

    def _best(self, best: torch.Tensor, best_ids: torch.Tensor) -> torch.Tensor:
        """Return the target's argmax over all shards ``[n]``, from each shard's own best logit and token."""
        values, names = best.new_empty((self._size, len(best))), best_ids.new_empty((self._size, len(best)))
        dist.all_gather_into_tensor(values.view(-1), best)
        dist.all_gather_into_tensor(names.view(-1), best_ids)
        # Of equal logits the first shard's, as argmax over a whole row gives the first column on a CPU.
        shard = (values == values.amax(dim=0)).to(torch.uint8).argmax(dim=0, keepdim=True)
        return names.gather(0, shard).squeeze(0)

    def _own_rows(self, kept: torch.Tensor, counts: list[int], shards: _Shards) -> torch.Tensor:
        """Send each rank this shard's columns of its positions, and put those that come together: ``[P, D]``."""
        count, widths = counts[self._rank], [len(place) for place in shards.places]
        received = kept.new_empty(count * sum(widths))
        dist.all_to_all_single(
            received,
            kept.view(-1),
            output_split_sizes=[count * width for width in widths],
            input_split_sizes=[n * kept.shape[1] for n in counts],
        )
        logits = kept.new_empty((count, sum(widths)))
        parts = received.split([count * width for width in widths])
        for part, width, place in zip(parts, widths, shards.places, strict=True):
            logits[:, place] = part.view(count, width)
        return logits


@dataclass(frozen=True)
class _Shards:
    """How the head is spread over the ranks.

    Attributes:
        columns: Token ids of each rank.
        places: Draft ids of each rank, int64 on the device.
        dtype: Of the head's logits.
    """

    columns: list[range]
    places: list[torch.Tensor]
    dtype: torch.dtype
