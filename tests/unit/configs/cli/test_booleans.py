"""A switch is true or false: no other number means true."""

import re

import pytest

from configs.cli.overrides import check_overrides
from configs.load import key_docs
from configs.validate import ConfigError

SWITCHES = [key for key, (default, _) in key_docs().items() if default in ("true", "false")]


@pytest.mark.parametrize("value", ["-1", "2", "1" + 30 * "0", "0,3"])
@pytest.mark.parametrize("key", ["trainer.compile", "plain_console", "dry_run", "algorithm.filter_groups"])
def test_another_number_is_refused(key: str, value: str) -> None:
    assert key in SWITCHES
    with pytest.raises(ConfigError, match=rf"^{re.escape(key)}={value}: must be true or false$"):
        check_overrides([f"{key}={value}"])


@pytest.mark.parametrize("value", ["true", "False", "0", "1", "yes", "off", "true,false"])
def test_words_for_both_are_taken(value: str) -> None:
    check_overrides([f"{key}={value}" for key in SWITCHES])
    check_overrides(["rollout.top_k=-1", "trainer.total_steps=2,3"])
