import pytest
import tiny_models
import torch

from nemo_eagle3_sglang.contracts import TargetInfo
from nemo_eagle3_sglang.head_rows import read_rows
from nemo_eagle3_sglang.hf_runner import HFHead

IDS = torch.tensor([7, 0, 19, 3])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [True, False])
def test_rows_are_the_weight_to_the_last_bit(dtype: torch.dtype, bias: bool, monkeypatch: pytest.MonkeyPatch):
    # Several passes over the identity.
    monkeypatch.setattr("nemo_eagle3_sglang.head_rows.READ_ELEMENTS", 20 * 5)
    torch.manual_seed(0)
    head = torch.nn.Linear(16, 20, bias=bias, dtype=dtype).requires_grad_(False)
    found = read_rows(head, IDS, 16, dtype)
    assert found.weight.dtype == dtype
    if bias:
        # (w + b) - b, in the head's own dtype.
        torch.testing.assert_close(found.weight, head.weight[IDS])
        assert torch.equal(found.bias, head.bias[IDS])
    else:
        assert torch.equal(found.weight, head.weight[IDS])
        assert found.bias is None


@pytest.mark.parametrize(
    "changes", [{}, {"tie_word_embeddings": True}, {"final_logit_softcapping": 3.0}, {"logit_scale": 0.25}]
)
def test_logits_are_those_of_the_whole_head_at_these_tokens(changes: dict):
    model = tiny_models.make_model("llama", **changes)
    head = HFHead(model, TargetInfo(8, 64, 500))
    hidden = torch.randn(5, 64)
    torch.testing.assert_close(head.rows_at(IDS)(hidden), head(hidden)[:, IDS])
