"""Metrics are reduced by their type, and NaN is never lost on the way."""

from __future__ import annotations

import math

import pytest

from trainer.metrics import EffectiveSampleSize, Last, Max, Mean, Metric, Sum, merge_metrics, to_floats


def test_every_type_is_reduced_in_its_own_way() -> None:
    parts: list[dict[str, Metric]] = [
        {"mean": Mean(10.0, 4), "sum": Sum(1.0), "max": Max(3.0), "last": Last(3.0)},
        {"mean": Mean(2.0, 1), "sum": Sum(2.0), "max": Max(5.0), "last": Last(5.0)},
        {"mean": Mean(0.0, 1), "sum": Sum(4.0), "max": Max(4.0), "last": Last(4.0)},
    ]
    assert to_floats(merge_metrics(parts)) == {"mean": 2.0, "sum": 7.0, "max": 5.0, "last": 4.0}


def test_effective_sample_size_is_of_all_weights_together() -> None:
    """Weights 1, 2 and 3 in two parts: 6^2 / (3 * 14), whatever the parts."""
    parts = [EffectiveSampleSize(3.0, 5.0, 2), EffectiveSampleSize(3.0, 9.0, 1)]
    assert merge_metrics([{"ess": part} for part in parts]) == {"ess": EffectiveSampleSize(6.0, 14.0, 3)}
    assert parts[0].merge(parts[1]).value == pytest.approx(36 / 42)
    assert EffectiveSampleSize(8.0, 32.0, 2).value == 1
    assert EffectiveSampleSize(1.0, 1.0, 4).value == 0.25
    assert math.isnan(EffectiveSampleSize(0.0, 0.0, 4).value)


def test_mean_of_nothing_is_nan_and_takes_no_part_in_a_merge() -> None:
    assert math.isnan(Mean(0.0, 0).value)
    assert Mean(0.0, 0).merge(Mean(3.0, 2)).value == 1.5


@pytest.mark.parametrize("kind", [Max, Sum])
@pytest.mark.parametrize("values", [(math.nan, 1.0), (1.0, math.nan)])
def test_nan_survives_in_either_order(kind: type[Max | Sum], values: tuple[float, float]) -> None:
    merged = merge_metrics([{"k": kind(values[0])}, {"k": kind(values[1])}])
    assert math.isnan(merged["k"].value)


def test_parts_may_lack_keys_and_are_left_unchanged() -> None:
    first: dict[str, Metric] = {"a": Sum(1.0)}
    second: dict[str, Metric] = {"a": Sum(1.0), "b": Max(2.0)}
    assert merge_metrics([first, second, {}]) == {"a": Sum(2.0), "b": Max(2.0)}
    assert first == {"a": Sum(1.0)}
    assert second == {"a": Sum(1.0), "b": Max(2.0)}
    assert merge_metrics([]) == {}
