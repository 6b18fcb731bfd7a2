"""Whole runs with a teacher: the policy learns what it knows, what it says is exact, and its death costs nothing."""

import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM

from configs.schema import Config
from rollout.data import arithmetic
from scripts.launch.models import generated_problems
from tests.support.whole_runs import (
    END_DEADLINE_S,
    PROMPTS_PER_STEP,
    SIZES,
    START_DEADLINE_S,
    Run,
    check_tokens,
    small,
    started,
    steps_of,
    trained,
)
from trainer.tiny.model import build_model, build_tokenizer, save_tiny_model, write_model_directory
from trainer.tiny.warmup import WarmupSpec, tokenized_examples, warm_up

pytestmark = pytest.mark.slow

BATCH = 16
CLEAN_STEPS, SLOPPY_STEPS = 900, 150
"""The steps of a supervised warm-up on worked answers. The teacher has seen right ones; the student has then seen
sloppy ones, as the models that runs begin with."""
STEPS = 40


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A student, and the teacher that it was before it became sloppy about the default word problems."""
    folder = tmp_path_factory.mktemp("distillation")
    problems, _ = generated_problems(Config())
    counts = {"num_clean": BATCH * CLEAN_STEPS, "num_sloppy": BATCH * SLOPPY_STEPS}
    pairs = arithmetic.demonstrations(problems, **counts, seed=0)
    template = Config().data.prompt_template
    texts = [(template.replace("{question}", question), answer) for question, answer in pairs]
    spec = WarmupSpec(seed=0)
    tokenizer = spec.tokenizer(texts)
    model = build_model(len(tokenizer), spec.seed, spec.size)
    examples = tokenized_examples(tokenizer, texts)
    for name, part in (("teacher", examples[: counts["num_clean"]]), ("student", examples[counts["num_clean"] :])):
        for _ in warm_up(model, part, batch_size=BATCH, lr=spec.lr):
            pass
        write_model_directory(folder / name, model, tokenizer)
    return folder / "student", folder / "teacher"


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_the_policy_learns_what_the_teacher_knows(tmp_path: Path, models: tuple[Path, Path]) -> None:
    """No reward is learned from: that of the last trajectories is only looked at."""
    student, teacher = models
    with started(
        tmp_path,
        *(*SIZES, "model.kind=hf", f"model.path={student}", f"teacher.path={teacher}"),
        *("algorithm.advantage=opd", "algorithm.group_size=4", "trainer.prompts_per_step=16", "data.num_val=64"),
        *(f"trainer.total_steps={STEPS}", "trainer.eval_every=0", "trainer.lr=1e-3", "rollout.max_num_seqs=64"),
    ) as run:
        assert run.wait_for_end(START_DEADLINE_S + END_DEADLINE_S) == 0, run.output.read_text()
    check_tokens(run.run_dir)
    distances = [record["teacher/kl"] for record in steps_of(run.run_dir, "teacher/kl")]
    assert len(distances) == STEPS
    assert np.mean(distances[-10:]) < 0.5 * np.mean(distances[:3]), distances
    before, after = (record["eval/accuracy"] for record in steps_of(run.run_dir, "eval/accuracy"))
    assert after > before + 0.1, (before, after)
    check_logprobs(run.run_dir, teacher)


@pytest.fixture
def another_model(tmp_path: Path) -> Path:
    """Write a model with the tokenizer of `tiny_model`, and other weights."""
    folder = tmp_path / "another"
    corpus = ["Question: Tom has 3 pens and buys 4 more.\nAnswer: 3+4=7\n#### 7"] * 4
    save_tiny_model(folder, build_tokenizer(corpus), seed=1)
    return folder


@pytest.mark.timeout(900)
def test_a_teacher_that_dies_is_replaced_and_what_it_was_to_score_is_scored(
    tmp_path: Path, tiny_model: Path, another_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its only replica, while groups of several turns are scored; the run waits for the replacement."""
    num_steps = 10
    with started(
        tmp_path,
        *small(tiny_model),
        *(
            "algorithm.advantage=opd",
            f"teacher.path={another_model}",
            "rollout.agent_loop=tests.support.echo:agent_loop",
        ),
        *(f"trainer.total_steps={num_steps}", "trainer.eval_every=0", "rollout.max_staleness=1"),
    ) as run:
        run.wait_for("step  1/")
        os.kill(logging_to(run, "teacher-0.log").pid, signal.SIGKILL)
        run.wait_for("teacher-0 is given up: ")
        assert run.wait_for_end(START_DEADLINE_S + END_DEADLINE_S) == 0, run.output.read_text()
        assert run.survivors() == []
    assert "teacher-1 is in service" in run.output.read_text()
    steps = trained(run)
    seen = sorted((record["ordinal"], record["index"]) for step in steps for record in step)
    assert seen == [(ordinal, index) for ordinal in range(num_steps * PROMPTS_PER_STEP) for index in range(8)]
    assert not (run.run_dir / "discarded").exists(), "no group was given up"
    last = steps_of(run.run_dir, "teacher/kl")[-1]
    assert last["teacher/replicas_lost"] == 1 and last["teacher/replicas_ready"] == 1
    assert last["rollout/replicas_lost"] == last["rollout/retried_groups"] == 0
    check_tokens(run.run_dir)
    assert check_logprobs(run.run_dir, another_model) > 0, "there are tokens that nobody sampled"


def logging_to(run: Run, log: str) -> psutil.Process:
    """The first process of the run that writes into this file."""
    run.watch_children()
    for child in sorted(run.children.values(), key=lambda process: process.pid):
        with suppress(OSError):
            if os.readlink(f"/proc/{child.pid}/fd/1").endswith(log):
                return child
    raise AssertionError(f"no process writes into {log}")


def check_logprobs(run_dir: Path, teacher: Path) -> int:
    """Hold what the teacher said of every trained token against a plain forward pass, and the advantages against both.
    Returns how many tokens of responses nobody sampled."""
    model = AutoModelForCausalLM.from_pretrained(teacher, dtype=torch.float32)
    num_others = 0
    for path in sorted((run_dir / "trajectories").glob("*.npz")):
        arrays = np.load(path)
        advantages = arrays["teacher_logprobs"] - arrays["rollout_logprobs"]
        np.testing.assert_allclose(arrays["token_advantages"], advantages[arrays["loss_mask"]], atol=1e-6)
        for prompt_ids, ids, mask, said in sequences(arrays):
            tokens = torch.tensor(np.concatenate([prompt_ids, ids])[None].astype(np.int64))
            with torch.no_grad():
                logprobs = F.log_softmax(model(tokens).logits[0, :-1].float(), -1)
            plain = logprobs.gather(1, tokens[0, 1:, None])[len(prompt_ids) - 1 :, 0].numpy()
            np.testing.assert_allclose(said, np.where(mask, plain, 0), atol=1e-4)
            num_others += int((~mask).sum())
    return num_others


def sequences(arrays: Any) -> Iterator[tuple[np.ndarray, ...]]:
    """Yield each sequence's prompt ids, response ids, loss mask, and what the teacher said."""
    prompts = np.split(arrays["prompt_ids"], np.cumsum(arrays["prompt_lengths"])[:-1])
    ends = np.cumsum(arrays["response_lengths"])[:-1]
    names = ("response_ids", "loss_mask", "teacher_logprobs")
    yield from zip(prompts, *(np.split(arrays[name], ends) for name in names), strict=True)
