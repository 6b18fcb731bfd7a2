"""Sources of data.sources: what each sets, what it must not, and what is refused by its name."""

import pytest

from configs.mixture import longest_source, sources_of
from configs.rollout import RewardPlace
from configs.schema import Config
from configs.validate import ConfigError, check
from tests.support.compose import changed, resolve

STEP = {"trainer__prompts_per_step": 3, "trainer__lr_warmup_steps": 0}


def mixed(**sources: object) -> Config:
    return changed(Config(), data__sources=sources)


def test_a_run_without_sources_is_one_without_a_name() -> None:
    [source] = sources_of(config := Config())
    assert (source.name, source.weight, source.loss_coef, source.config) == ("", 1, 1, config)


def test_a_source_has_the_keys_of_the_run_with_its_own_over_them() -> None:
    config = changed(
        mixed(
            a={"weight": 2, "rollout": {"reward": "dapo", "reward_runs_in": "loop", "agent_args": {}}},
            b={"loss_coef": 0.5, "data": {"train_files": ["x.jsonl", "y.jsonl"], "curriculum": {"order": "retry"}}},
        ),
        rollout__max_response_tokens=48,
        rollout__agent_args={"of": "the run"},
        trainer__total_steps=7,
    )
    a, b = sources_of(config)
    assert (a.name, a.weight, a.loss_coef) == ("a", 2, 1) and (b.weight, b.loss_coef) == (1, 0.5)
    assert a.config.rollout.reward_runs_in is RewardPlace.loop, "as in YAML"
    assert a.config.rollout.agent_args == {}, "the run's are not mixed with its own"
    assert b.config.rollout.agent_args == {"of": "the run"}
    assert b.config.data.train_files == "x.jsonl,y.jsonl" and b.config.data.curriculum.order == "retry"
    for source in (a, b):
        assert source.config.rollout.max_response_tokens == 48 and source.config.trainer.total_steps == 7
        assert source.config.data.sources == {}, "it is the config of a run with one source"


def test_engines_have_room_for_the_longest_source() -> None:
    config = mixed(a={"data": {"max_prompt_tokens": 900}}, b={"rollout": {"max_response_tokens": 500}})
    assert longest_source(config).rollout.max_response_tokens == 500, "1024 + 500 is more than 900 + 32"


@pytest.mark.parametrize(
    ("sources", "message"),
    [
        ({"a/b": {}}, r"data.sources.a/b='a/b': a name must begin with a letter, and have letters, digits, - and _"),
        ({"a": 3}, r"data.sources.a=3: must be a mapping"),
        ({"a": {"weight": 0}}, r"data.sources.a.weight=0: must be a number above 0"),
        ({"a": {"weight": float("nan")}}, r"data.sources.a.weight=nan: must be a number above 0"),
        ({"a": {"loss_coef": "2"}}, r"data.sources.a.loss_coef='2': must be a number"),
        ({"a": {"trainer": {"lr": 1}}}, r"data.sources.a.trainer=.*: a source has weight, loss_coef, data, rollout"),
        (
            {"a": {"rollout": {"max_staleness": 3}}},
            r"data.sources.a.rollout.max_staleness=3: all sources share rollout.max_staleness: set it there; a source",
        ),
        ({"a": {"rollout": {"temperature": 2}}}, r"a.rollout.temperature=2: all sources share rollout.temperature"),
        ({"a": {"rollout": {"rewrad": "dapo"}}}, r"data.sources.a.rollout.rewrad='dapo': there is no such key"),
        ({"a": {"data": {"generated": "poems"}}}, r"data.sources.a.data.generated='poems': Invalid value 'poems'"),
        ({"a": {}, "b": {"rollout": {"reward": "no"}}}, r"^data.sources.b: rollout.reward=no: must be one of"),
        ({"a": {"algorithm": {"group_size": 1}}}, r"data.sources.a: algorithm.group_size=1: must be at least 2"),
        (
            {"a": {"data": {"train_files": "/no/such.jsonl", "val_files": "none"}}},
            r"a: data.train_files=/no/such.jsonl",
        ),
        ({"a": {"rollout": {"stop": [["END"]]}}}, r"a.rollout.stop=\[\['END'\]\]: must be a list of texts"),
        ({"a": {"data": {"chat_template": 2}}}, r"data.sources.a.data.chat_template=2: must be true or false"),
        (
            {"a": {"weight": 1e-6}, "b": {}},
            r"data.sources.a.weight=1e-06: its share of the \d+ groups of the run \(trainer.total_steps x",
        ),
        ({"a": {"rollout": {"agent_command": "API_KEY=abcdefgh run"}}}, r"holds a secret"),
    ],
)
def test_what_is_wrong_with_a_source_is_refused_by_its_name(sources: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check(mixed(**sources))


def test_what_all_sources_share_is_refused_once() -> None:
    with pytest.raises(ConfigError) as caught:
        check(changed(mixed(a={}, b={}), trainer__lr=7.0))
    assert str(caught.value) == "trainer.lr=7.0: must be between 0 and 1"


def test_one_value_of_a_recipe_is_changed_on_the_command_line() -> None:
    config = resolve("recipe=mixture", "data.sources.search.weight=2", "+data.sources.agent.loss_coef=0.5")
    sources = {source.name: source for source in sources_of(config)}
    assert {name: source.weight for name, source in sources.items()} == {"arithmetic": 1, "agent": 1, "search": 2}
    assert sources["agent"].loss_coef == 0.5
    assert sources["search"].config.rollout.agent_loop == "rollout.environments.search.tags:agent_loop"
    with pytest.raises(ConfigError, match=r"data.sources.search.wieght=2: a source has weight"):
        resolve("recipe=mixture", "+data.sources.search.wieght=2")


def test_a_source_that_is_misspelled_on_a_command_line_is_not_one_more() -> None:
    there_is = r"data.sources.serch: there is no such source, only arithmetic, agent, search; \+data.sources.serch.KEY"
    with pytest.raises(ConfigError, match=there_is):
        resolve("recipe=mixture", "data.sources.serch.weight=2")
    with pytest.raises(ConfigError, match=there_is):
        resolve("recipe=mixture", "data.sources={search: {weight: 3}, serch: {weight: 2}}")
    config = resolve("recipe=mixture", "+data.sources.more.weight=2", "~data.sources.search")
    assert [source.name for source in sources_of(config)] == ["arithmetic", "agent", "more"]
    assert [source.name for source in sources_of(resolve("data.sources.a.weight=2", "data.sources.b.weight=3"))] == [
        *"ab"
    ]


def test_a_key_of_the_run_that_every_source_sets_is_refused_on_a_command_line() -> None:
    with pytest.raises(
        ConfigError, match=r"data.generated=calculator: has no effect, .* set data.sources.NAME.data.gen"
    ):
        resolve("recipe=mixture", "data.generated=calculator")
    some_do = resolve("recipe=mixture", "rollout.max_response_tokens=64")
    assert [source.config.rollout.max_response_tokens for source in sources_of(some_do)] == [32, 64, 64]


def test_a_source_has_its_share_of_at_least_one_group_where_it_is_trained() -> None:
    """Sums of weights are rounded: of three groups each of three equal sources has one."""
    check(changed(mixed(a={"weight": 0.1}, b={"weight": 0.1}, c={"weight": 0.1}), trainer__total_steps=1, **STEP))
    check(mixed(a={"weight": 1e-6}, b={}), needed_files=("val_files",))


def test_an_evaluation_asks_the_sources_that_hold_something_out() -> None:
    nothing = {"data": {"val_files": "none"}}
    check(mixed(a=nothing, b={}), needed_files=("val_files",))
    with pytest.raises(ConfigError, match="data.val_files=none: names nothing to evaluate"):
        check(mixed(a=nothing, b=nothing), needed_files=("val_files",))
