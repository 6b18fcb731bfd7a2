"""Predictions as tables, and as JSON."""

from collections.abc import Mapping, Sequence
from typing import Any

from scripts.bench.common import show_table, write_line
from scripts.predict.counterfactual import Cost
from scripts.predict.profile import Profile
from scripts.predict.simulate import Prediction
from scripts.predict.sweep import Choice, Marginal

HEADER = ["configuration", "samples/s", "tokens/s", "trainer idle", "replica idle", "staleness p50", "max"]


def show_profile(profile: Profile) -> None:
    rows = [
        ["decoding step", f"{1e3 * profile.step_s:.3g} ms + {1e3 * profile.step_s_per_request:.3g} ms a request"],
        ["prefill", f"{1e3 * profile.prefill_s_per_token:.3g} ms a token"],
        ["turns", f"{profile.turns.mean:.3g}, 99%: {profile.turns.at(0.99):.3g}"],
        ["tokens of a turn", f"{profile.turn_tokens.mean:.4g}, 99%: {profile.turn_tokens.at(0.99):.4g}"],
        ["tool", f"{profile.tool_s.mean:.3g} s, 99%: {profile.tool_s.at(0.99):.3g} s"],
        ["reward", f"{profile.reward_s.mean:.3g} s, 99%: {profile.reward_s.at(0.99):.3g} s"],
        ["optimizer step", f"{profile.train_s:.3g} s + {1e3 * profile.train_s_per_token:.3g} ms a token"],
        ["update", f"{profile.publish_s:.3g} s publish, {profile.stage_s:.3g} s stage, {profile.swap_s:.3g} s swap"],
        ["cores", f"{profile.cores:g}; an engine asks for {profile.engine_cores:.2f}, a rank {profile.rank_cores:.2f}"],
    ]
    show_table("profile", ["what", "takes"], rows)
    for sentence in profile.assumed:
        write_line(f"assumed: {sentence}")
    write_line("")


def show_choices(title: str, choices: Sequence[Choice]) -> None:
    show_table(title, HEADER, [_row(choice.name, choice.prediction) for choice in choices])


def _row(name: str, prediction: Prediction) -> list[str]:
    return [
        name,
        f"{prediction.samples_per_s:.4g}",
        f"{prediction.tokens_per_s:,.0f}",
        f"{prediction.trainer_idle:.0%}",
        f"{prediction.replica_idle:.0%}",
        f"{prediction.staleness_p50:g}",
        str(prediction.staleness_max),
    ]


def show_marginal(found: Marginal) -> None:
    rows = [
        [name, f"{more:+.3g}", f"{more / found.base:+.1%}"]
        for name, more in (("replica", found.replica), ("rank", found.rank))
    ]
    show_table("one more", ["of", "samples/s", ""], rows)


def show_costs(found: Sequence[Cost]) -> None:
    rows = [[cost.of, f"{cost.step_s:+.3f}", f"{cost.wait_s:+.3f}"] for cost in found]
    show_table("the same run without it: seconds less a step", ["without", "step", "of it wait for a batch"], rows)


def as_figures(prediction: Prediction) -> dict[str, Any]:
    """For the last line."""
    return {
        "samples_per_s": round(prediction.samples_per_s, 4),
        "tokens_per_s": round(prediction.tokens_per_s, 1),
        "trainer_idle": round(prediction.trainer_idle, 4),
        "replica_idle": round(prediction.replica_idle, 4),
        "staleness_p50": prediction.staleness_p50,
        "staleness_max": prediction.staleness_max,
    }


def of_choices(choices: Sequence[Choice]) -> list[Mapping[str, Any]]:
    return [{"change": dict(choice.change)} | as_figures(choice.prediction) for choice in choices]
