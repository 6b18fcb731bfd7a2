"""Old versions come back bit for bit, whole or from what has changed since, and leave the weights as they were."""

import pytest
import torch
from torch import nn

from trainer.worker.versions import Change, VersionStore


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [0, 1, 7, 8, 65])
@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_a_change_leads_from_either_version_to_the_other(dtype: torch.dtype, size: int, share: float) -> None:
    torch.manual_seed(0)
    before = torch.randn(size, 3).to(dtype)
    after = torch.where(torch.rand(size, 3) < share, -before * 1.5, before)
    change, there, back = Change.between(before, after), before.clone(), after.clone()
    change.apply(there)
    change.apply(back)
    assert torch.equal(there, after) and torch.equal(back, before)
    assert len(change.words) == (before != after).sum()


def test_nan_and_the_sign_of_zero_are_kept() -> None:
    before = torch.tensor([torch.nan, 0.0, -0.0, torch.inf])
    after = torch.tensor([1.0, -0.0, -0.0, torch.nan])
    Change.between(before, after).apply(after)
    assert after.view(torch.int32).tolist() == before.view(torch.int32).tolist()


def trained(module: nn.Module, number: int) -> None:
    """Change all of the first parameter, and a little of the second."""
    torch.manual_seed(number)
    with torch.no_grad():
        first, second, frozen = module.parameters()
        first += torch.randn_like(first)
        second[number % 20] += 1


@pytest.fixture
def module() -> nn.Module:
    torch.manual_seed(0)
    module = nn.ParameterList([torch.randn(50, 4), torch.randn(20, 10), torch.randn(3)])
    module[2].requires_grad_(False)
    return module


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_versions_come_back_bit_for_bit(module: nn.Module, dtype: torch.dtype) -> None:
    store, expected = VersionStore(module, dtype), dict[int, list[torch.Tensor]]()
    for version in range(5):
        store.keep(version)
        expected[version] = [values.detach().to(dtype, copy=True) for values in module.parameters()][:2]
        trained(module, version)
        store.drop_before(version - 2)
    assert [version in store for version in range(6)] == [False, False, True, True, True, False]
    whole = sum(values.nbytes for version in (2, 3, 4) for values in expected[version])
    most = expected[4][0].nbytes * 3 + expected[4][1].nbytes * 1.3
    assert store.nbytes <= most < whole, "what has changed as a whole is kept whole, and little as its changes"
    now = [values.detach().clone() for values in module.parameters()]
    with store.lent() as load:
        for version in (3, 2, 4, None, 2):
            load(version)
            first, second, frozen = (values.detach() for values in module.parameters())
            if version is not None:
                assert torch.equal(first.to(dtype), expected[version][0]), version
                assert torch.equal(second.to(dtype), expected[version][1]), version
            assert torch.equal(frozen, now[2])
    assert all(torch.equal(values, before) for values, before in zip(module.parameters(), now, strict=True))


def test_the_weights_come_back_after_an_error(module: nn.Module) -> None:
    store = VersionStore(module, torch.bfloat16)
    store.keep(0)
    trained(module, 0)
    now = [values.detach().clone() for values in module.parameters()]
    with pytest.raises(KeyError, match="7"), store.lent() as load:
        load(0)
        load(7)
    assert all(torch.equal(values, before) for values, before in zip(module.parameters(), now, strict=True))
