"""Environments of SkyRL-gym's protocol in whole episodes, and those of the real package where it is installed."""

import importlib.util
from typing import Any

import pytest

from rollout.agents.loop import Episode, load_agent_loop
from rollout.agents.multi_turn import MultiTurn
from tests.support.chat_models import chat_tokenizer
from tests.support.environments import error_of, play_row, played_in_both_places, told
from tests.support.harnesses import FAMILY
from tests.support.sequences import only
from tests.support.skyrl_envs import Guess

needs_the_package = pytest.mark.skipif(
    importlib.util.find_spec("skyrl_gym") is None, reason="the package skyrl-gym is not installed"
)


def loop_of(env: str, **args: Any) -> MultiTurn:
    """Make the loop as rollout.agent_args does."""
    path = env if env.islower() else f"tests.support.skyrl_envs:{env}"
    args = {"env": path, **args}
    loop = load_agent_loop("rollout.environments.skyrl_gym:agent_loop", chat_tokenizer(FAMILY), args)
    assert isinstance(loop, MultiTurn)
    return loop


@pytest.fixture(autouse=True)
def events() -> list[str]:
    Guess.events.clear()
    return Guess.events


def test_an_episode_is_that_of_the_environment(events: list[str]) -> None:
    episode = play_row(loop_of("Guess", max_turns=5), ["Is it 3?", "It is 7."], ground_truth="7", level=2)
    assert events == ["init user 2 5", "step Is it 3?", "step It is 7.", "close"]
    assert told(episode) == "Higher." and episode.finish_reason == "stop"
    assert episode.result is not None and (episode.result.reward, episode.result.error) == (1.25, None)
    assert [turn.reward for turn in only(episode).turn_rewards] == [0.25, 1.0]
    assert episode.metrics["guesses"] == 2 and episode.metrics["level"] == 2
    assert episode.metrics["turns"] == episode.metrics["env_turns"] == 2, "a name of MultiTurn's own is not taken"


def test_an_episode_in_a_process_is_the_same(events: list[str]) -> None:
    def episode() -> Episode:
        loop = loop_of("Guess", max_turns=5, env_config={"first": "From 1 to 9. "})
        return play_row(loop, ["Is it 3?", "It is 7."], ground_truth="7", level=2)

    played_in_both_places(episode, events)
    assert events == [], "all of it is elsewhere"


def test_messages_are_written_by_the_chat_template() -> None:
    loop = loop_of("Guess", chat=True, env_config={"first": "From 1 to 9."})
    episode = play_row(loop, ["Is it 3?", "It is 7."], ground_truth="7")
    assert told(episode) == (
        "user\nFrom 1 to 9.<|im_end|>\n<|im_start|>assistant\n"
        "\n<|im_start|>user\nHigher.<|im_end|>\n<|im_start|>assistant\n"
    )


def test_what_init_adds_is_read_before_the_first_turn() -> None:
    episode = play_row(loop_of("Guess", env_config={"first": "From 1 to 9. "}), ["It is 7."], ground_truth="7")
    assert told(episode) == "From 1 to 9. "


def test_a_postprocessed_action_is_refused_and_the_error_names_both_ways_out() -> None:
    error = error_of(play_row(loop_of("Trims"), ["3 I think"], ground_truth="7"))
    assert "'3 I think' to '3'" in error and "stop" in error and "allow_postprocessed=true" in error


def test_with_leave_the_sampled_tokens_are_kept_and_counted() -> None:
    loop = loop_of("Trims", allow_postprocessed=True)
    episode = play_row(loop, ["3 I think", "7"], ground_truth="7")
    assert episode.metrics["postprocessed_actions"] == 1 and episode.result is not None and not episode.result.error
    sequence = only(episode)
    assert chat_tokenizer(FAMILY).decode(sequence.response_ids[sequence.loss_mask], True) == "3 I think7"


@pytest.mark.parametrize(
    ("env", "error"),
    [
        ("Fails", "OSError: the sandbox is gone"),
        ("Forgets", "ValueError: a step of Forgets has no 'reward'"),
        ("Rewrites", "ValueError: init of Rewrites changes the prompt"),
    ],
)
def test_an_environment_that_fails_is_not_reward_0(env: str, error: str) -> None:
    episode = play_row(loop_of(env), ["3"], ground_truth="7")
    assert error in error_of(episode)


@pytest.mark.skipif(importlib.util.find_spec("skyrl_gym") is not None, reason="the package is installed")
def test_a_name_needs_the_package_and_the_error_says_which() -> None:
    with pytest.raises(ImportError, match="pip install skyrl-gym"):
        loop_of("gsm8k")


@needs_the_package
def test_an_environment_of_the_real_package() -> None:
    loop = loop_of("gsm8k_multi_turn", max_turns=3)
    episode = play_row(loop, ["#### 3", "Seven", "#### 7"], question="3 + 4?", ground_truth="7")
    assert episode.result is not None and episode.result.error is None
    wrong = 0.2 / 3
    assert [turn.reward for turn in only(episode).turn_rewards] == pytest.approx([wrong, 0.0, 1.0])
    assert "provide your step-by-step reasoning" in told(episode) and episode.metrics["steps"] == 3


@needs_the_package
def test_a_name_that_the_real_package_does_not_know_is_refused() -> None:
    with pytest.raises(ValueError, match=r"rollout\.agent_args\.env=gms8k: must be one of aime, gsm8k, "):
        loop_of("gms8k")
