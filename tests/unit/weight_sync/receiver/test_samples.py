"""Samples of tensors find one that was left behind, wherever it differs, in any layout."""

import pytest
import torch

from weight_sync.receiver.samples import RUN, SAMPLE, differing, sampled, shortened


@pytest.mark.parametrize("shape", [(), (0,), (3,), (SAMPLE,), (SAMPLE + 1,), (40, 64), (7, 3, 1000)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
def test_as_many_elements_as_there_are_up_to_a_bound_in_any_dtype(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    tensor = torch.zeros(shape, dtype=dtype)
    [part] = sampled([tensor])
    assert len(part) == min(tensor.numel(), SAMPLE) * tensor.element_size()
    assert differing(["a"], sampled([tensor]), sampled([tensor.clone()])) == []
    if tensor.numel():
        tensor.fill_(1)
        assert differing(["a"], sampled([tensor]), [part]) == ["a"]


def test_what_changes_in_few_rows_columns_or_bits_is_seen() -> None:
    before = torch.randn(2048, 512).bfloat16()
    old = sampled([before])
    places = {int(place) for place in sampled([torch.arange(before.numel())])[0].view(torch.int64)}
    assert len({place // 512 for place in places}) >= SAMPLE // RUN and len({place % 512 for place in places}) == 512
    after = before.clone()
    after[::50] *= 1.01
    assert differing(["a"], sampled([after]), old) == ["a"]


def test_a_transposed_weight_is_read_as_it_lies() -> None:
    whole = torch.randn(300, 50)
    lying, copied = whole.t(), torch.empty_like(whole.t())
    copied.copy_(lying)
    assert not lying.is_contiguous() and differing(["a"], sampled([lying]), sampled([copied])) == []
    assert sampled([lying])[0].data_ptr() != whole.data_ptr()


def test_many_names_are_cut() -> None:
    assert shortened(["a", "b"]) == "a, b" and shortened(list("abcdefghij")) == "a, b, c, d, e, f, g, h and 2 others"
