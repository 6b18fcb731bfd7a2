"""An ordinal is the whole state of the prompt stream, unless its order learns."""

from collections.abc import Iterator

from hypothesis import given
from hypothesis import strategies as st

from rollout.prompts import PromptStream
from rollout.types import Prompt
from tests.support.rollouts import make_rows


def take(stream: PromptStream, count: int) -> list[Prompt]:
    return [stream.next() for _ in range(count)]


@given(num_rows=st.integers(1, 40), num_epochs=st.integers(1, 4), seed=st.integers(0, 2**32))
def test_every_epoch_has_every_row_exactly_once(num_rows: int, num_epochs: int, seed: int) -> None:
    prompts = take(PromptStream(make_rows(num_rows), seed), num_rows * num_epochs)
    assert [prompt.ordinal for prompt in prompts] == list(range(num_rows * num_epochs))
    for start in range(0, len(prompts), num_rows):
        assert {prompt.text for prompt in prompts[start : start + num_rows]} == {f"Q: q{i}" for i in range(num_rows)}


@given(num_rows=st.integers(1, 20), start=st.integers(0, 70), seed=st.integers(0, 9))
def test_a_stream_from_any_ordinal_is_the_tail_of_the_whole(num_rows: int, start: int, seed: int) -> None:
    rows = make_rows(num_rows)
    whole = take(PromptStream(rows, seed), start + 25)
    resumed = PromptStream(rows, seed)
    resumed.ordinal = start
    assert take(resumed, 25) == whole[start:]
    assert resumed.ordinal == start + 25


def test_the_order_changes_with_every_epoch_and_with_the_seed() -> None:
    rows = make_rows(50)
    texts = [prompt.text for prompt in take(PromptStream(rows, seed=0), 100)]
    other_seed = [prompt.text for prompt in take(PromptStream(rows, seed=1), 50)]
    in_file_order = [row.text for row in rows]
    orders = [texts[:50], texts[50:], other_seed, in_file_order]
    assert len({tuple(order) for order in orders}) == 4


def test_a_prompt_carries_everything_of_its_row() -> None:
    prompt = PromptStream(make_rows(1), seed=0).next()
    assert prompt == Prompt(
        ordinal=0, row=0, text="Q: q0", token_ids=(0, 7), ground_truth="a0", data_source="made", extra={"index": 0}
    )


class ReadOnce(list[Prompt]):
    """Rows that count how often all of them are read: a million of them stop the run's event loop for a while."""

    num_passes = 0

    def __iter__(self) -> Iterator[Prompt]:
        self.num_passes += 1
        return super().__iter__()


def test_the_checksum_is_of_all_rows_and_the_seed_and_reads_them_once() -> None:
    rows = ReadOnce(make_rows(9))
    stream = PromptStream(rows, seed=3)
    assert {stream.checksum, PromptStream(make_rows(9), seed=3).checksum, stream.checksum} == {stream.checksum}
    assert rows.num_passes == 1
    others = [PromptStream(make_rows(8), seed=3), PromptStream(make_rows(9), seed=4)]
    assert stream.checksum not in {other.checksum for other in others}
