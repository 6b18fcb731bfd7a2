"""No secret reaches a file through the command line or the config."""

import pytest

from configs.checks.secrets import secret_problems
from configs.cli.overrides import check_overrides
from configs.load import key_docs
from configs.schema import Config, DataConfig, ModelConfig, ModelKind, RolloutConfig, WandbConfig
from configs.validate import ConfigError, check

HF = "hf_" + "aB3dE6gH9jK2mN5pQ8sT"
ARGUMENTS = [
    "serve.token=s3cret",
    "+serve.token=s3cret",
    "serve.token=${oc.env:TOKEN}",
    "+wandb.api_key=s3cret",
    "hydra.job.env_set.WANDB_API_KEY=s3cret",
    "+hydra.job.env_set.HF_TOKEN=s3cret",
    "+hydra.job.env_set={WANDB_API_KEY: s3cret}",
    "+hydra.job.env_set={A:1,'HF_TOKEN':'s3cret'}",
    "wandb.password=s3cret",
    "rollout.engine_args.hf_token=s3cret",
    "model.path=https://me:s3cret@models.example/policy",
    f"data.loader={HF}",
]


@pytest.mark.parametrize("argument", ARGUMENTS)
def test_a_secret_on_the_command_line_is_refused_and_not_repeated(argument: str) -> None:
    with pytest.raises(ConfigError) as refused:
        check_overrides(["trainer.lr=1e-4", argument])
    text = str(refused.value)
    assert "s3cret" not in text and HF not in text
    assert text.startswith(f"{argument.partition('=')[0].lstrip('+')}=(not shown): ") and "environment" in text


NESTED = [
    {"retriever": {"api_key": "s3cret"}},
    {"server": {"headers": {"x-api-key": "s3cret"}}},
    {"servers": [{"url": "http://localhost"}, {"headers": {"Authorization": "s3cret"}}]},
    *({name: "s3cret"} for name in ("authorization", "cookie", "bearer", "passphrase", "openai_key", "SERPER_KEY")),
    *({"git": {name: "s3cret"}} for name in ("GITHUB_PAT", "jwt")),
    {"server": {"db_password": 12345678}},
]


@pytest.mark.parametrize("arguments", NESTED)
def test_a_secret_at_any_depth_of_what_others_are_given_is_refused(arguments: dict[str, object]) -> None:
    for config in (
        Config(rollout=RolloutConfig(agent_args=arguments)),
        Config(rollout=RolloutConfig(engine_args=arguments)),
        Config(data=DataConfig(loader="os.path:basename", loader_args=arguments)),
    ):
        with pytest.raises(ConfigError, match=r"^\w+\.\w+_args\.[\w.-]+=\(not shown\): holds a secret") as refused:
            check(config)
        assert "s3cret" not in str(refused.value) and "12345678" not in str(refused.value)


def test_what_cannot_be_parsed_is_not_repeated_either() -> None:
    """Hydra takes no quotes around a key."""
    with pytest.raises(ConfigError, match=r"^rollout\.agent_args=\(not shown\): is not in Hydra's grammar$"):
        check_overrides(['rollout.agent_args={a: 1, headers: {token: s3cret, "X-Api-Key": s3cret}}'])


COMMANDS = {
    "OPENAI_API_KEY=s3cret python a.py": False,
    "cd /x && export HF_TOKEN='s3cret'; run": False,
    "agent --api-key s3cret": False,
    "agent --auth-token=s3cret": False,
    "curl -H 'Authorization: Bearer s3cret-s3cret' x": False,
    "OPENAI_API_KEY=$OPENAI_API_KEY agent --api-key $KEY --token-file /run/t --max-tokens 5": True,
    """agent --api-key "$KEY" --cookie-jar=x -H "Authorization: Bearer $TOKEN" {prompt}""": True,
    "agent --token --verbose": True,
}


@pytest.mark.parametrize(("command", "passes"), COMMANDS.items())
def test_a_command_names_its_secrets_and_does_not_hold_them(command: str, passes: bool) -> None:
    config = Config(rollout=RolloutConfig(agent_command=command))
    problems = [problem.line(config) for problem in secret_problems(config)]
    assert bool(problems) != passes
    assert all(line.startswith("rollout.agent_command=(not shown): holds a secret") for line in problems)


def test_what_is_no_secret_passes() -> None:
    check_overrides([f"{key}={default}" for key, (default, _) in key_docs().items()])
    check_overrides(["serve.token_file=/run/secrets/token", "hydra.job.env_set.HF_TOKEN=${oc.env:MINE}"])
    check_overrides(["+hydra.job.env_set={HF_TOKEN:${oc.env:MINE},MAX_TOKENS:4}"])
    assert not list(secret_problems(Config(rollout=RolloutConfig(agent_args={"eos_token": 2, "password": None}))))
    check_overrides(["data.train_files=s3://bucket/rows@v1.jsonl", "serve.require_token=false"])


def test_a_secret_in_a_value_from_any_source_is_refused_and_not_shown() -> None:
    """A recipe of the user's is merged by Hydra, after the command line was checked."""
    for config in (
        Config(model=ModelConfig(kind=ModelKind.hf, path="https://me:s3cret@models.example/policy")),
        Config(data=DataConfig(train_files="https://s3cret@data.example/a.jsonl", val_files="b.jsonl")),
        Config(rollout=RolloutConfig(engine_args={"hf_token": "s3cret"})),
        Config(rollout=RolloutConfig(engine_args={"additional_config": {"token": HF}})),
        Config(data=DataConfig(loader="os.path:basename", loader_args={"api_key": "s3cret"})),
        Config(wandb=WandbConfig(tags=[HF])),
    ):
        key = (
            r"(model\.path|data\.train_files|data\.loader_args\.api_key|rollout\.engine_args(\.hf_token)?|wandb\.tags)"
        )
        with pytest.raises(ConfigError, match=rf"^{key}=\(not shown\): holds a secret") as found:
            check(config)
        assert "s3cret" not in str(found.value) and HF not in str(found.value)
