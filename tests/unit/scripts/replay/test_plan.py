"""What a replay takes again, and from where: read from run folders of every kind."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from omegaconf import OmegaConf

from configs.mixture import loss_coefficients
from configs.schema import Config, ModelKind
from configs.validate import ConfigError
from scripts.observe.files import RunError
from scripts.observe.run import Run
from scripts.replay.command import Request, replay_folder
from scripts.replay.plan import ReplayPlan, differences, make_plan, parse_steps
from tests.support.checkpoints import write_state
from tests.support.compose import resolve
from trainer.checkpoint.store import CheckpointStore
from trainer.tracking.set_aside import SET_ASIDE
from trainer.tracking.trajectories import TOKEN_FORMAT

HERE = {"device": "a", "num_ranks": 1, "num_threads": 1, "software": {"torch": "2", "vllm": "1"}, "weights": "w0"}


def save(config: Config, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    OmegaConf.save(OmegaConf.structured(config), folder / "config.yaml")


def make_run(folder: Path, config: Config, steps: Sequence[int], checkpoints: Sequence[int] = ()) -> Run:
    save(config, folder)
    (folder / "trajectories").mkdir()
    (folder / "initial_model").mkdir()
    for step in steps:
        (folder / f"trajectories/step_{step:06d}.jsonl").touch()
        np.savez(folder / f"trajectories/step_{step:06d}.npz", format=TOKEN_FORMAT)
    store = CheckpointStore(folder / "checkpoints")
    for step in checkpoints:
        aside = store.begin(step)
        write_state(aside / "train", {"weights": b"1"})
        store.publish(aside, step, store.seal(aside, step, {}))
    return Run.open(folder)


def plan(run: Run, first: int | None = None, last: int | None = None, checkpoint: Path | None = None) -> ReplayPlan:
    return make_plan(run, first=first, last=last, checkpoint=checkpoint)


def spans(planned: ReplayPlan) -> list[tuple[int, int, float]]:
    return [(span.first, span.last, span.config.trainer.lr) for span in planned.spans]


@pytest.fixture
def config() -> Config:
    return resolve("trainer.total_steps=20")


def test_a_run_is_taken_again_from_its_first_policy(tmp_path: Path, config: Config) -> None:
    planned = plan(make_run(tmp_path / "a", config, range(1, 13), checkpoints=[5, 10]))
    assert (planned.start, planned.first, planned.last, planned.checkpoint) == (0, 1, 12, None)
    assert planned.model == str(tmp_path / "a" / "initial_model")
    assert planned.config.trainer.total_steps == 20


def test_later_steps_begin_at_the_newest_checkpoint_before_them(tmp_path: Path, config: Config) -> None:
    run = make_run(tmp_path / "a", config, range(1, 13), checkpoints=[5, 10])
    for first, start in ((4, 0), (6, 5), (10, 5), (11, 10)):
        assert plan(run, first).start == start and plan(run, first).first == first
    (run.folder / "checkpoints/step_000010/train/weights").write_bytes(b"2")
    assert plan(run, 12).start == 5, "a damaged one is passed over"
    named = plan(run, checkpoint=run.folder / "checkpoints/step_000005")
    assert (named.first, named.last) == (6, 12)


def test_a_folder_that_goes_on_from_another_begins_where_that_one_was(tmp_path: Path, config: Config) -> None:
    first = make_run(tmp_path / "a", config, range(1, 6), checkpoints=[5])
    run = make_run(tmp_path / "b", replace(config, resume=str(first.folder)), range(6, 9))
    planned = plan(run)
    assert planned.checkpoint is not None and planned.checkpoint.path.is_relative_to(first.folder)
    assert (planned.start, planned.first, planned.last) == (5, 6, 8)
    (first.folder / "checkpoints/step_000005").rename(tmp_path / "elsewhere")
    with pytest.raises(
        RunError, match=r"b goes on from step 5 of .*/a, whose checkpoint is not there.*from=CHECKPOINT"
    ):
        plan(run)
    assert plan(run, checkpoint=tmp_path / "elsewhere").start == 5


def test_processes_with_one_config_are_one_segment_and_another_begins_a_new_one(tmp_path: Path, config: Config) -> None:
    other = replace(config, trainer=replace(config.trainer, lr=1e-5), resume="auto")
    run = make_run(tmp_path, other, range(1, 16))
    resumes = [(0, config), (3, replace(config, resume="auto")), (3, config), (9, replace(config, dashboard=True))]
    for number, (_, before) in enumerate(resumes):
        went_on_from = [3, 3, 9, 11][number]
        save(before, tmp_path / SET_ASIDE / f"2026-01-0{number + 1}_00-00-00-step_{went_on_from:06d}")
    assert [began for began, _ in run.config_files()] == [0, 3, 3, 9, 11]
    lr = config.trainer.lr
    assert spans(plan(run)) == [(1, 11, lr), (12, 15, 1e-5)]
    assert spans(plan(run, 5, 10)) == [(1, 10, lr)]
    changed = plan(run).changed(["algorithm.loss=gspo", "trainer.max_grad_norm=0.5"])
    assert [span.config.algorithm.loss for span in changed] == ["gspo", "gspo"]
    assert [span.config.trainer.lr for span in changed] == [lr, 1e-5]


@pytest.mark.parametrize(
    ("first", "last", "why"),
    [
        (0, 3, "steps=0:3: must lie within the recorded steps, 1:12"),
        (4, 3, "steps=4:3: must lie"),
        (4, 13, "steps=4:13: must lie within the recorded steps, 1:12"),
        (1, 9, "step 7 has no records, and all from 1 on are needed"),
    ],
)
def test_steps_that_are_not_there_are_refused(tmp_path: Path, config: Config, first: int, last: int, why: str) -> None:
    run = make_run(tmp_path / "a", config, [*range(1, 7), *range(8, 13)])
    with pytest.raises(RunError, match=why):
        plan(run, first, last)


def test_a_folder_without_records_or_without_its_first_policy_is_refused(tmp_path: Path, config: Config) -> None:
    with pytest.raises(RunError, match="holds no records of steps to take again: a supervised run"):
        plan(make_run(tmp_path / "a", config, []))
    run = make_run(tmp_path / "b", config, [1, 2])
    (run.folder / "initial_model").rmdir()
    with pytest.raises(RunError, match=r"b: the policy before its first step is not in it \(initial_model"):
        plan(run)
    save(replace(config, model=replace(config.model, kind=ModelKind.hf, path="Qwen/Qwen3-0.6B")), run.folder)
    assert plan(run).model == "Qwen/Qwen3-0.6B"
    with pytest.raises(RunError, match=r"from=.*: is of step 5, and step 3 comes before it"):
        store = make_run(tmp_path / "c", config, range(1, 9), checkpoints=[5])
        plan(store, 3, None, store.folder / "checkpoints/step_000005")
    np.savez(store.folder / "trajectories/step_000004.npz", rewards=1)
    with pytest.raises(
        RunError, match=r"c: step 4: its tokens are recorded in format 1, and a replay reads formats 2 to 5$"
    ):
        plan(store)
    assert plan(store, 6).start == 5, "what is not taken again may be older"
    with pytest.raises(RunError, match=r"from=.*/nothing: .*it is no checkpoint"):
        plan(store, checkpoint=tmp_path / "nothing")


def test_the_chain_gives_the_digests_and_what_computed(tmp_path: Path, config: Config) -> None:
    run = make_run(tmp_path, config, range(1, 4))
    assert plan(run).chain.weights == {}
    there = HERE | {"device": "b", "num_ranks": 2, "software": {"torch": "2.1", "vllm": "0"}}
    lines = [
        {"kind": "beginning", "global_steps": 0, "origin": HERE},
        *({"kind": "step", "global_steps": step, "weights": f"w{step}"} for step in (1, 2)),
        {"kind": "beginning", "global_steps": 2, "origin": there | {"weights": "w2"}},
        {"kind": "step", "global_steps": 3, "weights": "w3"},
    ]
    (tmp_path / "proof.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    chain = plan(run).chain
    assert chain.weights == {0: "w0", 1: "w1", 2: "w2", 3: "w3"}
    assert [chain.origin_of(step).get("num_ranks") for step in (1, 2, 3)] == [1, 1, 2]
    assert differences(HERE, HERE) == []
    assert differences(there, HERE) == ["device b, here a", "num_ranks 2, here 1", "torch 2.1, here 2"]


def test_steps_are_told_by_their_first_and_last() -> None:
    assert [parse_steps(text) for text in ("3:9", "3:", ":9", ":")] == [(3, 9), (3, None), (None, 9), (None, None)]
    for text in ("3", "a:b", "3:9:1", "-1:2"):
        with pytest.raises(RunError, match=f"steps={text}: must be A:B"):
            parse_steps(text)


def test_a_command_line_is_one_replay_or_several(tmp_path: Path, config: Config) -> None:
    run = make_run(tmp_path / "a", config, range(1, 5), checkpoints=[2])
    folder = str(run.folder)
    assert Request.parse([folder]).changes == [] and not Request.parse([folder]).evaluates
    request = Request.parse([folder, "steps=3:4", "evaluate=true", "algorithm.loss=gspo,cispo", "trainer.lr=1e-4"])
    assert request.plan.first == 3 and request.plan.start == 2 and request.evaluates
    assert request.changes == [("algorithm.loss=gspo", "trainer.lr=1e-4"), ("algorithm.loss=cispo", "trainer.lr=1e-4")]
    names = [replay_folder(run, changes).name for changes in ((), *request.changes)]
    assert names == ["exact", "algorithm.loss-gspo-trainer.lr-1e-4", "algorithm.loss-cispo-trainer.lr-1e-4"]
    assert replay_folder(run, ("algorithm.loss=../../x:y",)).parent == run.folder / "replays"
    long = ("algorithm.loss_aggregation=seq_mean_token_mean", "algorithm.advantage=reinforce_plus_plus_baseline")
    rates = [
        replay_folder(run, (*long, f"trainer.lr_warmup_steps={steps}", f"trainer.lr={steps}e-6")) for steps in (1, 2)
    ]
    assert rates[0] != rates[1] and len(rates[0].name) < 128


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ([], "the first word must be the folder of a run"),
        (["steps=1:2"], "the first word must be the folder of a run"),
        (["/no/such"], "run=/no/such: must be the folder of a run"),
        (["RUN", "fast"], "fast: must be key=value; steps, from, evaluate or a key of the config"),
        (["RUN", "evaluate=maybe"], "evaluate=maybe: must be true or false"),
        (["RUN", "rollout.max_staleness=0"], "rollout.max_staleness: a replay changes what is learned"),
        (["RUN", "algorithm.group_size=4"], "algorithm.group_size: a replay changes what is learned"),
        (["RUN", "trainer.num_ranks=2"], "trainer.num_ranks: a replay changes what is learned"),
        (["RUN", "algorithm.los=gspo"], "algorithm.los"),
        (["RUN", "algorithm.advantage=remax"], "algorithm.advantage=remax: compares with greedy responses, of which"),
        (
            ["RUN", "algorithm.proximal=exact"],
            "algorithm.proximal=exact: needs what the versions that sampled computed",
        ),
        (["RUN", "algorithm.loss=nothing"], "algorithm.loss=nothing"),
        (["RUN", "trainer.lr=-1"], "trainer.lr=-1"),
    ],
)
def test_a_wrong_command_line_is_refused_before_anything_starts(
    tmp_path: Path, config: Config, words: list[str], why: str
) -> None:
    run = make_run(tmp_path / "a", config, range(1, 5))
    with pytest.raises((RunError, ConfigError), match=why):
        Request.parse([str(run.folder) if word == "RUN" else word for word in words])
    assert not (run.folder / "replays").exists()


def test_the_loss_coefficient_of_a_source_is_learned_by_and_its_weight_is_not(tmp_path: Path) -> None:
    config = resolve("trainer.total_steps=20", "data.sources.a.weight=2", "data.sources.b.loss_coef=0.5")
    folder = str(make_run(tmp_path / "a", config, range(1, 3)).folder)
    request = Request.parse([folder, "data.sources.a.loss_coef=0.25,2"])
    changed = [request.plan.changed(change)[0].config for change in request.changes]
    assert [loss_coefficients(each) for each in changed] == [{"a": 0.25, "b": 0.5}, {"a": 2.0, "b": 0.5}]
    for word in ("data.sources.a.weight=3", "data.sources.none_such.loss_coef=1"):
        with pytest.raises(
            ConfigError, match=f"{word.partition('=')[0]}: a replay changes .*, data.sources.b.loss_coef"
        ):
            Request.parse([folder, word])
