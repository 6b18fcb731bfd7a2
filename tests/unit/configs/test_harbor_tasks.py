"""data.harbor stands for the keys that tasks in Harbor's format need, in a run and in a source."""

from pathlib import Path

import pytest
from omegaconf import OmegaConf

from configs.cli.arguments import parse
from configs.cli.compose import compose_job
from configs.harbor import AGENT_LOOP, written_out
from configs.load import load, load_saved
from configs.mixture import sources_of
from configs.runtime.dotted import find_callable
from configs.schema import Config
from configs.validate import ConfigError
from tests.support.compose import changed, resolve

LONG = (
    "data.loader=rollout.environments.sandbox.harbor:rows",
    "data.train_files=slipstream/tasks",
    "data.val_files=none",
    "data.chat_template=true",
    'data.prompt_template="{question}"',
    "rollout.agent_loop=rollout.environments.sandbox.tools:agent_loop",
    "rollout.reward=rollout.environments.sandbox.hidden_tests:hidden_tests",
)


def without_short_form(config: Config) -> Config:
    return changed(config, data__harbor=None)


def composed(*words: str) -> Config:
    return resolve("model=chat", *parse(words).overrides)


def test_it_stands_for_the_keys_that_one_would_write() -> None:
    config = composed("data.harbor=slipstream/tasks")
    assert without_short_form(config) == composed(*LONG)
    for key in (config.data.loader, config.rollout.agent_loop, config.rollout.reward):
        find_callable("key", str(key))


def test_what_is_held_out_and_how_tasks_are_shown_may_be_set_beside_it() -> None:
    assert composed("data.harbor=a", "data.val_share=0.5").data.val_files is None
    config = composed("data.harbor=[a,b]", "data.val_files=c", "data.prompt_template='Do: {question}'")
    assert (config.data.train_files, config.data.val_files) == ("a,b", "c")
    assert config.data.prompt_template == "Do: {question}"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["data.train_files=b"], "data.train_files=b: data.harbor=a stands for data.train_files=a: leave out one"),
        (["data.loader=my:rows"], "data.loader=my:rows: data.harbor=a stands for data.loader=rollout.env"),
        (["rollout.reward=dapo"], "rollout.reward=dapo: data.harbor=a stands for rollout.reward=rollout.env"),
        (["rollout.agent=my:agent"], "rollout.agent=my:agent: data.harbor=a stands for rollout.agent=None"),
        (["data.chat_template=false"], "data.chat_template=False: data.harbor=a stands for data.chat_template=True"),
        (["recipe=gsm8k"], "data.train_files=data/gsm8k/train.parquet: data.harbor=a stands for"),
        (["data.sources.b.weight=1"], r"data.harbor=a: with data.sources, set data.sources.NAME.data.harbor"),
    ],
)
def test_keys_that_contradict_it_are_refused_even_with_the_values_of_defaults(words: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        composed("data.harbor=a", *words)
    assert message in str(refusal.value)


def test_a_source_has_it_for_itself_whatever_the_run_has() -> None:
    config = resolve(
        "recipe=mixture", "+data.sources.tasks.data.harbor=slipstream/tasks", "+data.sources.tasks.weight=2"
    )
    sources = {source.name: source for source in sources_of(config)}
    long = sources_of(composed("data.harbor=slipstream/tasks"))[0].config
    its, weight = sources["tasks"].config, sources["tasks"].weight
    assert (its.data.loader, its.data.train_files, its.data.val_files, its.data.chat_template, weight) == (
        *(long.data.loader, "slipstream/tasks", "none", True),
        2,
    )
    assert (its.rollout.agent_loop, its.rollout.reward) == (long.rollout.agent_loop, long.rollout.reward)
    assert sources["arithmetic"].config.data.loader is None


@pytest.mark.parametrize(
    "words", [["data.harbor=a", "model=chat"], ["data.sources={t:{data:{harbor:a}}}", "model=chat"], []]
)
def test_what_is_written_into_a_run_folder_is_the_long_form_and_is_read_as_the_same(
    words: list[str], tmp_path: Path
) -> None:
    composed_config = compose_job("train", words).config
    config = load(composed_config, overrides=words)
    file = tmp_path / "config.yaml"
    file.write_text(OmegaConf.to_yaml(written_out(composed_config, config), resolve=True))
    raw = OmegaConf.load(file)
    section = raw.data.sources.t if raw.data.sources else raw
    held_out = "none" if words else None
    assert (section.data.get("val_files"), load_saved(file)) == (held_out, config)
    assert (section.get("rollout", {}).get("agent_loop") == AGENT_LOOP) == bool(words)


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ("data:{harbor:a,train_files:b}", "data.sources.t.data.train_files=b: data.sources.t.data.harbor=a stands for"),
        ("data:{harbor:a},rollout:{agent:my_agent}", "data.sources.t.rollout.agent=my_agent: data.sources.t.data.harb"),
        ("data:{harbor:a},rollout:3", "data.sources.t.rollout=3: must be a mapping of keys"),
        ("data:{harbor:a,val_share:0.5,val_files:b}", "data.sources.t: data.val_share=0.5: data.val_files is set, too"),
    ],
)
def test_what_contradicts_it_in_a_source_is_refused_by_the_name_of_the_source(entry: str, message: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        composed(f"data.sources={{t:{{{entry}}}}}")
    assert message in str(refusal.value)


def test_a_list_of_folders_is_one_of_sources_with_their_names() -> None:
    config = composed("data.sources=[{harbor: slipstream/tasks}, {harbor: /srv/my-tasks/, weight: 2}]")
    first, second = sources_of(config)
    assert (first.name, first.config.data.train_files, first.weight) == ("tasks", "slipstream/tasks", 1)
    assert (second.name, second.config.data.train_files, second.weight) == ("my-tasks", "/srv/my-tasks/", 2)
    held = composed(
        'data.sources=[{harbor: "a folder/t", data: {val_files: b}, rollout: {stop: [x, "y z"], top_p: 0.5}}]'
    )
    (its,) = (source.config for source in sources_of(held))
    assert (its.data.train_files, its.data.val_files) == ("a folder/t", "b")
    assert (its.rollout.stop, its.rollout.top_p) == (["x", "y z"], 0.5)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("[{weight: 2}]", "each entry of a list must have harbor: FOLDER; other sources have names"),
        ("[tasks]", "each entry of a list must have harbor: FOLDER"),
        ("[{harbor: a/t}, {harbor: b/t}]", "two of the folders are called t"),
        ("[{harbor: 9tasks}]", "data.sources.9tasks='9tasks': a name must begin with a letter"),
    ],
)
def test_a_list_that_names_no_sources_is_refused(value: str, message: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        composed(f"data.sources={value}")
    assert message in str(refusal.value)
