"""A run folder as the argument of an evaluation."""

from pathlib import Path

import pytest
from omegaconf import OmegaConf

from configs.cli.compose import compose_job
from configs.cli.evaluated_run import expand_folder
from configs.load import load
from configs.sandbox import SandboxBackend
from configs.schema import Config, ModelKind
from configs.validate import ConfigError
from tests.support.compose import resolve

OVERRIDES = ("model=small", "rollout.reward=0.5*gsm8k", "rollout.max_response_tokens=48")


def evaluation_of(*arguments: object) -> Config:
    composed = compose_job("evaluate", expand_folder([str(argument) for argument in arguments])).config
    return load(composed, ["val_files"])


def configure(run_dir: Path, *overrides: str) -> None:
    OmegaConf.save(compose_job("train", overrides).config, run_dir / "config.yaml", resolve=True)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run of the smallest model on CPU, as the command line made it."""
    (tmp_path / "checkpoints" / "step_000020").mkdir(parents=True)
    (tmp_path / "checkpoints" / "step_000020" / "COMPLETE.json").touch()
    configure(tmp_path, *OVERRIDES)
    return tmp_path


def test_a_run_is_evaluated_as_it_was_configured_and_overrides_go_first(run: Path) -> None:
    trained = resolve(*OVERRIDES)
    config = evaluation_of(run)
    assert (config.data, config.rollout, config.evaluation) == (trained.data, trained.rollout, trained.evaluation)
    assert (config.model.kind, config.model.path) == (ModelKind.hf, str(run))
    assert config.rollout.kv_cache_mb == 256 and not config.data.chat_template, "the sizes of small, not of hf"
    changed = evaluation_of(run, "rollout.max_response_tokens=64", "evaluation.samples=4", "evaluation.temperature=1")
    assert (changed.rollout.max_response_tokens, changed.evaluation.samples) == (64, 4)
    assert changed.rollout.reward == "0.5*gsm8k"


def test_episodes_are_evaluated_in_the_sessions_and_sandboxes_in_which_they_were_trained(run: Path) -> None:
    trained = (*OVERRIDES, "sessions.max_turns=8", "sandbox.backend=docker", "sandbox.image=mine")
    configure(run, *trained)
    config = evaluation_of(run, "sandbox.image=other")
    assert (config.sessions, config.sandbox.backend) == (resolve(*trained).sessions, SandboxBackend.docker)
    assert (config.sessions.max_turns, config.sandbox.image) == (8, "other")


def test_a_run_without_a_held_out_set_is_evaluated_on_files_that_are_named(run: Path) -> None:
    configure(run, *OVERRIDES, "data.val_files=none")
    with pytest.raises(ConfigError, match=r"data\.val_files=none: names nothing to evaluate: must be files, or null"):
        evaluation_of(run)
    rows = run / "rows.jsonl"
    rows.touch()
    assert evaluation_of(run, f"data.val_files={rows}").data.val_files == str(rows)
    assert evaluation_of(run, "data.val_files=null", "evaluation.samples=1").data.holds_out


def test_a_checkpoint_stands_for_itself_and_its_run(run: Path) -> None:
    step = run / "checkpoints" / "step_000020"
    config = evaluation_of(step)
    assert (config.model.path, config.rollout.reward) == (str(step), "0.5*gsm8k")


COMMANDS = [
    ("rollout.agent_command", "rollout.agent_command=\"sh -c 'id > PWNED'\""),
    ("data.sources.a.rollout.agent_command", "+data.sources.a.rollout.agent_command=\"sh -c 'id > PWNED'\""),
    ("rollout.agent", "rollout.agent=codex"),
    ("rollout.agent_args.server.command", "+rollout.agent_args.server.command=[sh,-c,id]"),
    ("sandbox.harbor_python", "sandbox.harbor_python=/tmp/id"),
]


@pytest.mark.parametrize(("key", "override"), COMMANDS)
def test_a_command_that_only_the_folder_names_is_refused(key: str, override: str, run: Path) -> None:
    """A run folder that somebody sent may hold any."""
    loop = "rollout.agent_loop=rollout.environments.mcp:agent_loop"
    configure(run, *OVERRIDES, override, *([loop] if "server" in key else []))
    with pytest.raises(ConfigError, match=rf"{key}=.*(id|codex).*: .*{run.name} has this command.*name it: '?{key}="):
        expand_folder([str(run)])
    assert expand_folder([str(run), override])[-1] == override


@pytest.mark.parametrize(
    ("override", "decides"),
    [
        ("data.sources={}", False),
        ("data.sources.a={weight: 2}", False),
        ("data.sources.a.rollout={top_k: 2}", False),
        ("data.sources.a={rollout: {agent_command: mine}}", True),
        ("~data.sources.a", True),
    ],
)
def test_a_dict_that_lacks_the_command_leaves_it_as_it_is_and_names_it_not(
    override: str, decides: bool, run: Path
) -> None:
    configure(run, *OVERRIDES, COMMANDS[1][1], "data.sources.b.weight=1")
    if not decides:
        with pytest.raises(ConfigError, match="data.sources.a.rollout.agent_command=.*has this command"):
            expand_folder([str(run), override])
    elif override.startswith("~"):
        assert list(compose_job("evaluate", expand_folder([str(run), override])).config.data.sources) == ["b"]
    else:
        assert expand_folder([str(run), override])[-1] == override


def test_the_weights_that_an_adapter_was_served_with_are_not_needed(run: Path) -> None:
    """The adapter is merged into those that it was trained on."""
    quantized = run / "quantized"
    quantized.mkdir()
    (quantized / "config.json").touch()
    adapter = ("model.lora.rank=8", "model.lora.serve=adapter", f"model.lora.served_path={quantized}")
    configure(run, "model=hf", "model.path=gpt2", *adapter)
    (quantized / "config.json").unlink()
    assert evaluation_of(run).model.lora.served_path is None


def test_what_is_no_run_is_refused_and_other_arguments_stay(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="/no/such: no such folder; slipstream evaluate takes a run folder"):
        expand_folder(["/no/such"])
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="neither a model nor a run with checkpoints"):
        expand_folder([str(tmp_path / "empty")])
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "config.yaml").write_text("model: [")
    with pytest.raises(ConfigError, match="config.yaml: while parsing"):
        expand_folder([str(tmp_path)])
    for arguments in ([], ["model=hf", "model.path=x"], ["--cfg", "job"]):
        assert expand_folder(arguments) == arguments
