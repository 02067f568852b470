"""The FLOP count against what torch counts on the model itself."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import LlamaConfig, LlamaForCausalLM

from nemo_eagle3_sglang.supervision.documents import documents
from nemo_eagle3_sglang.supervision.unroll import unroll
from nemo_eagle3_sglang.training.flops import StepFlops, peak_flops

pytest.importorskip("nemo_automodel", reason="the formulas are AutoModel's")
from nemo_automodel.components.utils import flops_utils
from trainer_cases import backend, draft, modules, packed

CONFIG = {
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 300,
}


def plan(lengths: list[int], steps: int = 4):
    total = sum(lengths)
    mask, loss = torch.ones(1, total, dtype=torch.long), torch.ones(1, total, dtype=torch.long)
    ids = torch.zeros(1, total, dtype=torch.long)
    return unroll(documents(ids, mask, loss, torch.tensor([lengths]), trim=True), steps, torch.device("cpu"))


def test_target_is_what_torch_counts():
    config = LlamaConfig(**CONFIG)
    model = LlamaForCausalLM._from_config(config, attn_implementation="eager")
    counter = FlopCounterMode(display=False)
    with counter, torch.no_grad():
        model.model(torch.zeros(1, 48, dtype=torch.long))
    counted = counter.get_total_flops()
    # Torch multiplies the whole square of scores, of which causal attention needs half.
    square = 3 * 2 * 2 * 48 * 48 * 64
    formula = flops_utils.get_flops_formula_for_hf_config(config)
    layout = plan([48])
    ours = StepFlops(formula, config, SimpleNamespace()).target(layout)
    head = 2 * 300 * 64 * layout.supervised.shape[0]
    # Torch also counts the outer product of the rotary angles.
    assert ours - head == pytest.approx(counted - square / 2, rel=1e-4)


def test_draft_is_what_torch_counts():
    """Forward and backward of the real trainer, but for what is attention there."""
    model, target = draft(torch.float32), backend(torch.float32)
    _, ours = modules(model, target, 4)
    rows = [{"input_ids": list(range(1, 19)), "loss_mask": [0] * 6 + [1] * 12}] * 3
    batch = target.flat_batch(packed(rows, 20), 4)
    counter = FlopCounterMode(display=False)
    with counter:
        ours(batch=batch).loss.backward()
    counts = counter.get_flop_counts()["Global"]
    products = sum(n for op, n in counts.items() if str(op) in ("aten.mm", "aten.addmm"))
    counted = StepFlops(lambda *a, **k: 0.0, LlamaConfig(**CONFIG), model).draft(batch.unroll)
    # The projected target states are no parameter: nothing is propagated into them.
    into_states = 2 * model.model.fc.weight.numel() * batch.unroll.tokens.shape[0]
    # Torch does not count addmm_, by which the gradient of the output layer is added up.
    output_gradient = 2 * model.lm_head.weight.numel() * batch.unroll.pairs.shape[0]
    assert products + output_gradient == pytest.approx(counted - into_states, rel=1e-6)


@pytest.mark.parametrize(
    ("name", "peak"),
    [("NVIDIA H200", 989e12), ("NVIDIA H100 PCIe", 756e12), ("NVIDIA H100 80GB HBM3", 989e12), ("Some GPU", None)],
)
def test_peak_by_name(monkeypatch, name, peak):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    assert peak_flops(torch.device("cuda", 0)) == peak


def test_no_peak_of_a_cpu():
    assert peak_flops(torch.device("cpu")) is None
