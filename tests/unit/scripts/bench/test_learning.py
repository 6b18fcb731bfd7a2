"""The arms of the benchmark of learning are configs that can run."""

import pytest

from configs.schema import Config
from configs.validate import check
from scripts.bench.learning import KINDS, with_arm


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_arm_is_a_config_that_works_at_any_staleness(kind: str) -> None:
    for bound in (0, 16):
        config = with_arm(Config(), f"S{bound}_{kind}")
        assert config.rollout.max_staleness == bound
        check(config)
