import pytest
import torch

from nemo_eagle3_sglang.contracts import TargetStates
from nemo_eagle3_sglang.remote import rows


def states(tokens: int, positions: int, dtype: torch.dtype) -> TargetStates:
    generator = torch.Generator().manual_seed(0)
    aux = torch.randn((tokens, 3 * 32), generator=generator)
    if tokens:
        # As a first token's residual stream has it: one value far above the others.
        aux[0, 5] = 3000.0
    last = torch.randn((positions, 32), generator=generator)
    return TargetStates(aux.to(dtype), last.to(dtype), torch.arange(positions))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("tokens", "positions"), [(7, 4), (1, 1), (3, 0), (0, 0)])
@pytest.mark.parametrize("kind", ["native", "fp8"])
def test_shapes_are_those_of_what_is_packed(dtype: torch.dtype, tokens: int, positions: int, kind: str):
    packed = rows.pack(states(tokens, positions, dtype), kind)
    found = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in packed.items()}
    assert found == rows.shapes(tokens, positions, 32, dtype, kind)


def test_native_rows_are_as_they_were():
    given = states(5, 3, torch.bfloat16)
    found = rows.unpack(rows.pack(given, "native"), torch.bfloat16)
    assert torch.equal(found.aux, given.aux)
    assert torch.equal(found.last, given.last)
    assert torch.equal(found.choices, given.choices)


def test_fp8_rows_are_within_the_format_state_by_state():
    given = states(6, 6, torch.float32)
    found = rows.unpack(rows.pack(given, "fp8"), torch.float32)
    for a, b in ((found.aux.view(-1, 3, 32), given.aux.view(-1, 3, 32)), (found.last, given.last)):
        # E4M3: three places, so half a unit is 2^-4 of the value; below 2^-6 of 448 the steps are all 2^-9.
        bound = torch.maximum(b.abs() * 2**-4, b.abs().amax(-1, keepdim=True) / 448 * 2**-10) * 1.01
        assert bool(((a - b).abs() <= bound).all())
    # The outlier of one state is no matter of the two beside it.
    assert (found.aux[0, 32:] - given.aux[0, 32:]).abs().max() < 0.2


def test_zero_rows_stay_zero_and_nan_stays_nan():
    zero = TargetStates(torch.zeros((2, 96)), torch.zeros((2, 32)), torch.zeros(2, dtype=torch.int64))
    assert torch.equal(rows.unpack(rows.pack(zero, "fp8"), torch.float32).aux, zero.aux)
    zero.aux[1, 7] = float("nan")
    assert bool(rows.unpack(rows.pack(zero, "fp8"), torch.float32).aux[1].isnan().any())
