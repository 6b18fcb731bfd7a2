"""No secret reaches a file through the command line or the config."""

import pytest

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


def test_what_is_no_secret_passes() -> None:
    check_overrides([f"{key}={default}" for key, (default, _) in key_docs().items()])
    check_overrides(["serve.token_file=/run/secrets/token", "hydra.job.env_set.HF_TOKEN=${oc.env:MINE}"])
    check_overrides(["+hydra.job.env_set={HF_TOKEN:${oc.env:MINE},MAX_TOKENS:4}"])
    check_overrides(["data.train_files=s3://bucket/rows@v1.jsonl", "serve.require_token=false"])


def test_a_secret_in_a_value_from_any_source_is_refused_and_not_shown() -> None:
    """A recipe of the user's is merged by Hydra, after the command line was checked."""
    for config in (
        Config(model=ModelConfig(kind=ModelKind.hf, path="https://me:s3cret@models.example/policy")),
        Config(data=DataConfig(train_files="https://s3cret@data.example/a.jsonl", val_files="b.jsonl")),
        Config(rollout=RolloutConfig(engine_args={"hf_token": "s3cret"})),
        Config(data=DataConfig(loader="os.path:basename", loader_args={"api_key": "s3cret"})),
        Config(wandb=WandbConfig(tags=[HF])),
    ):
        key = r"(model\.path|data\.train_files|data\.loader_args\.api_key|rollout\.engine_args\.hf_token|wandb\.tags)"
        with pytest.raises(ConfigError, match=rf"^{key}=\(not shown\): holds a secret") as found:
            check(config)
        assert "s3cret" not in str(found.value) and HF not in str(found.value)
