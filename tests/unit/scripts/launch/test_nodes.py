"""What a run refuses and remarks about the machines of a cluster, before anything starts there."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from configs.schema import Config, ModelKind, Transport
from scripts.launch.nodes import Look, Question, differences, look, make_question, remarks
from tests.support.compose import changed

QUESTION = Question(
    marks={"hydra.run.dir": Path("/runs/a/.seen")},
    needed=frozenset({"hydra.run.dir"}),
    secret="s",
    folders={"model.path": "/models/q"},
    modules={"rollout.reward=mine:r": "mine"},
    interface=None,
)
VERSIONS = {"Python": "3.11.9", "ray": "2.60.0", "torch": "2.9.0+cpu"}
HERE = Look(
    host="node1",
    address="10.77.0.1",
    computes=False,
    versions=VERSIONS,
    code="c0",
    modules={"rollout.reward=mine:r": "m0"},
)
LIKE_HERE = replace(HERE, host="node2", address="10.77.0.2", computes=True)
WORKS = replace(LIKE_HERE, host="node3", address="10.77.0.3")


def test_machines_that_have_what_the_driver_has_are_taken() -> None:
    assert differences(QUESTION, [HERE, LIKE_HERE, WORKS]) == []


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (
            {"unseen": frozenset({"hydra.run.dir"})},
            "hydra.run.dir=/runs/a: what node1 (10.77.0.1) writes there is not there on node3 (10.77.0.3): "
            "it must be a folder that all machines share",
        ),
        (
            {"lacking": ["model.path"]},
            "model.path=/models/q: there is no such folder on node3 (10.77.0.3): "
            "a model is at the same path on every machine, or is a name of the hub",
        ),
        (
            {"modules": {"rollout.reward=mine:r": ""}},
            "rollout.reward=mine:r: mine is not found on node3 (10.77.0.3): "
            "it must be in a folder that all machines have, on PYTHONPATH or as the current one",
        ),
        (
            {"modules": {"rollout.reward=mine:r": "m1"}},
            "rollout.reward=mine:r: mine is another file on node3 (10.77.0.3) than on node1 (10.77.0.1): "
            "it must be in a folder that all machines have, on PYTHONPATH or as the current one",
        ),
        (
            {"versions": VERSIONS | {"ray": "2.59.0"}},
            "ray is 2.59.0 on node3 (10.77.0.3) and 2.60.0 on node1 (10.77.0.1): all need the same",
        ),
        (
            {"versions": VERSIONS | {"vllm": "0.27.0"}},
            "vllm is 0.27.0 on node3 (10.77.0.3) and not installed on node2 (10.77.0.2): all need the same",
        ),
        (
            {"address": "127.0.1.1"},
            "no other machine reaches node3 (127.0.1.1): "
            "start Ray there with `ray start --node-ip-address=...`, or set ray.network_interface",
        ),
        ({"problem": "ray.network_interface=ib7: node3 has none"}, "ray.network_interface=ib7: node3 has none"),
    ],
)
def test_what_differs_is_refused_with_the_key_and_the_machine(changes: dict[str, Any], expected: str) -> None:
    assert differences(QUESTION, [HERE, LIKE_HERE, replace(WORKS, **changes)]) == [expected]


def test_other_code_is_refused_in_one_sentence_for_all_machines() -> None:
    (problem,) = differences(QUESTION, [HERE, replace(LIKE_HERE, code="c1"), replace(WORKS, code="c2")])
    assert "other code of this project is on node2 (10.77.0.2), node3 (10.77.0.3) than on node1" in problem


def test_a_machine_without_gpus_may_have_another_torch() -> None:
    on_gpus = VERSIONS | {"torch": "2.9.0+cu129", "vllm": "0.26.0"}
    gpus = [replace(LIKE_HERE, versions=on_gpus), replace(WORKS, versions=on_gpus)]
    head = replace(LIKE_HERE, host="node1", computes=False)
    assert differences(QUESTION, [HERE, head, *gpus]) == []


def test_variables_of_other_machines_are_named_without_their_values() -> None:
    looks = [replace(HERE, variables=["HF_HOME"]), replace(WORKS, variables=["HF_HOME", "NCCL_DEBUG"])]
    assert remarks(QUESTION, looks) == ["NCCL_DEBUG is set on node3 (10.77.0.3) and not in this shell"]


def test_a_run_folder_that_holds_no_model_need_not_be_shared(tmp_path: Path) -> None:
    question = replace(QUESTION, needed=frozenset[str]())
    looks = [HERE, replace(WORKS, unseen=frozenset({"hydra.run.dir"}))]
    assert differences(question, looks) == []
    assert remarks(question, looks) == [
        "hydra.run.dir=/runs/a is not shared: the logs and the sampled/ of processes on node3 (10.77.0.3) stay there, "
        "and the audit does not see them"
    ]
    assert make_question(Config(), tmp_path).needed == {"hydra.run.dir"}, "the tiny model is made there"
    assert make_question(changed(Config(), model__kind=ModelKind.hf, model__path="a/b"), tmp_path).needed == set()


def test_this_machine_is_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text("def r(prompt, text): return 1.0")
    (tmp_path / "model").mkdir()
    config = changed(
        Config(),
        model__path=str(tmp_path / "model"),
        rollout__reward="mine:r",
        weight_sync__transport=Transport.filesystem,
        weight_sync__directory=str(tmp_path / "weights"),
    )
    question = make_question(config, tmp_path)
    assert question.folders == {"model.path": str(tmp_path / "model")}
    for mark in question.marks.values():
        mark.parent.mkdir(exist_ok=True)
        mark.write_text(question.secret)
    seen = look(question)
    assert (seen.unseen, seen.lacking, seen.problem) == (set(), [], "")
    assert seen.code and seen.modules["rollout.reward=mine:r"] and "ray" in seen.versions
    assert differences(question, [seen, seen]) == []
    (tmp_path / "model").rmdir()
    (tmp_path / "mine.py").write_text("def r(prompt, text): return 2.0")
    question.marks["hydra.run.dir"].write_text("of another run")
    monkeypatch.setattr("scripts.launch.nodes.LOOK_S", 0)
    other = look(question)
    assert (other.unseen, other.lacking) == ({"hydra.run.dir"}, ["model.path"])
    assert len(differences(question, [seen, other])) == 3
