"""A distribution ``toy-engine`` as an installer leaves it: an engine of another package, and the quickest to start."""

from __future__ import annotations

from pathlib import Path

from nemo_eagle3_sglang import backends

ENGINE = '''\
"""An engine that needs no weights: random embeddings that are mixed along the sequence."""

import torch

from nemo_eagle3_sglang.contracts import HiddenStates, TargetInfo
from nemo_eagle3_sglang.errors import ConfigError

VOCAB, HIDDEN, LAYERS = 500, 64, 8


class ToyRunner:
    def __init__(self, request, scale):
        self.info, self.device, self.dtype = TargetInfo(LAYERS, HIDDEN, VOCAB), request.device, request.dtype
        self.max_sequence_length = request.seq_length
        generator = torch.Generator().manual_seed(0)
        self.weight = (torch.randn(VOCAB, HIDDEN, generator=generator) * scale).to(self.device, self.dtype)

    def set_aux_layers(self, aux_layer_ids):
        print("toy: layers", list(aux_layer_ids))
        self.aux_layer_ids = list(aux_layer_ids)

    def forward(self, tokens, lengths):
        aux, last = [], []
        for sequence in tokens.to(self.device).split(list(lengths)):
            hidden, outputs = self.weight[sequence], []
            for _ in range(LAYERS):
                hidden = (hidden + hidden.cumsum(0) / torch.arange(1, len(hidden) + 1).unsqueeze(-1)) / 2
                outputs.append(hidden)
            aux.append(torch.cat([outputs[i] for i in self.aux_layer_ids], dim=-1))
            last.append(self.weight[sequence])
        return HiddenStates(aux=torch.cat(aux), last=torch.cat(last))

    def head(self):
        # The next token is the one that was just seen, which a draft learns at once.
        return lambda hidden: hidden @ self.weight.T

    def input_embeddings(self):
        return self.weight

    def close(self):
        print("toy: closed")


def build_runner(request):
    print("toy: options", dict(request.options), request.seq_length, request.micro_batch_size, request.dtype)
    return ToyRunner(request, **request.options)


def check_request(request):
    if unknown := set(request.options) - {"scale"}:
        raise ConfigError(f"recipe_args.toy_args: the toy engine has no {sorted(unknown)}; write scale")
'''


def install(site: Path) -> Path:
    """Lay out the distribution ``toy-engine`` as an installer leaves it, and return its folder."""
    info = site / "toy_engine-1.0.dist-info"
    info.mkdir(parents=True)
    (site / "toy_engine.py").write_text(ENGINE)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: toy-engine\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[{backends.GROUP}]\ntoy = toy_engine:build_runner\n")
    (info / "RECORD").write_text("")
    return site
