"""README and docs say what is there: links, files, commands, keys, code and generated tables."""

import asyncio
import importlib
import importlib.util
import json
import re
import shlex
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from configs.cli.arguments import SWEEP_MODE, parse
from configs.cli.overrides import check_overrides
from configs.cli.peers import EQUIVALENTS, FRAMEWORKS
from configs.load import key_docs
from configs.schema import AlgorithmConfig, Config, ModelKind
from rollout.agents.encoding import encode
from rollout.agents.loop import EpisodeTask, load_agent_loop
from rollout.curriculum.adaptive import make_order
from rollout.data.rows import Columns, load_rows
from rollout.prompts import Row
from rollout.request_ids import RequestId
from rollout.rewards.scoring import load_scorer
from rollout.sessions.harness import FunctionHarness
from rollout.types import SamplingParams
from scripts.agent_check import split as agent_words
from scripts.docs import GRAFANA_FILE, TABLES, fresh, grafana_json
from scripts.plan import preview
from scripts.predict.command import parse as predict_arguments
from scripts.rehearse import split as rehearsal_words
from scripts.replay.command import OWN as REPLAY
from scripts.retriever import arguments
from scripts.slipstream import COMMANDS as SLIPSTREAM
from tests.support.compose import changed, resolve
from tests.support.episodes import episodes_of
from tests.support.fakes import make_prompt
from tests.support.harnesses import Policy, run_one
from tests.support.losses import make_tokens
from tests.support.paths import ROOT
from tests.support.sequences import only
from trainer.advantages.estimators import ScoredGroup, load_estimator
from trainer.losses.objective import load_policy_loss
from trainer.losses.policy import LossTokens
from trainer.tracking.metric_list import metric_list
from trainer.tracking.sinks import UserSink

README = ROOT / "README.md"
PAGES = [README, *sorted((ROOT / "docs").glob("*.md"))]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
COMMAND = re.compile(
    r"(?:^|\s)(?:make\s+[a-z]|python -m |(?:\.venv/bin/)?slipstream [a-z-]+(?= |$)|scripts/recipes/\w+\.sh)"
)
SECTIONS = {key.partition(".")[0] for key in key_docs() if "." in key}
PACKAGES = ("configs", "rollout", "scripts", "trainer", "weight_sync")

each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


def text(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def own_text(page: Path) -> str:
    """The page without the columns that hold the keys of other frameworks, and without figures."""
    lines: list[str] = []
    is_foreign = False
    for line in text(page).splitlines():
        is_foreign = line.startswith("|") and (is_foreign or line.startswith("| here |"))
        lines.append(line.split(" | ")[0] if is_foreign else line)
    known = re.sub(r"^Without an equivalent:\n.*?\n(?=<!--)", "", "\n".join(lines), flags=re.MULTILINE | re.DOTALL)
    return re.sub(r"^```mermaid\n.*?^```$", "", known, flags=re.MULTILINE | re.DOTALL)


def code(page: Path) -> list[str]:
    """Inline code and the lines of code blocks, continued lines joined and without their comments."""
    blocks = [block for language, block in FENCE.findall(own_text(page)) if language != "python"]
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    heads = [line for language, block in FENCE.findall(text(page)) for line in heads_of(block) if language == "python"]
    inline = re.findall(r"`([^`\n]+)`", FENCE.sub("", own_text(page)))
    return [re.sub(r"\s#\s.*", "", line) for line in lines] + inline + [head.partition(": ")[2] for head in heads]


def heads_of(block: str) -> list[str]:
    """The commands at the beginning of a snippet: one names its file, and another may be for a laptop."""
    return re.findall(r"^# (?:\w+\.py|On a laptop): .*$", block, re.MULTILINE)


# -- links and files ---------------------------------------------------------------------------------------------------


def anchors(page: Path) -> set[str]:
    """As GitHub makes them from headings."""
    headings = re.findall(r"^#+ (.*)$", FENCE.sub("", text(page)), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@each_page
def test_links_lead_somewhere(page: Path) -> None:
    wrong: list[str] = []
    for target in re.findall(r"\]\(([^)\s]+)\)", FENCE.sub("", text(page))):
        name, _, anchor = target.partition("#")
        path = (page.parent / name).resolve() if name else page
        if not path.exists() or (anchor and anchor not in anchors(path)):
            wrong.append(target)
    assert wrong == []


def test_every_page_is_linked_from_the_readme() -> None:
    linked = {(README.parent / name).resolve() for name in re.findall(r"\]\((docs/[\w.-]+\.md)", text(README))}
    assert linked == set(PAGES) - {README}


@each_page
def test_files_that_a_page_names_are_there(page: Path) -> None:
    named = re.findall(r"`((?:rollout|trainer|weight_sync|configs|scripts|tests|docs)/[\w./-]*)[`:]", text(page))
    files = {name for name in named if name.endswith(("/", ".py", ".sh", ".md", ".yaml", ".png"))}
    assert {name for name in files if not (ROOT / name).exists()} == set()


def test_the_tree_of_the_readme_is_the_tree() -> None:
    (tree,) = [block for _, block in FENCE.findall(text(README)) if block.startswith("rollout/")]
    shown: set[str] = set()
    package = ""
    for line in tree.splitlines():
        name = line.split()[0]
        package = package if line.startswith(" ") else name
        shown.add(name if name == package else package + name)
    assert {name for name in shown if not (ROOT / name).is_dir()} == set()
    for package in ("rollout", "trainer", "weight_sync"):
        folders = {f"{package}/{path.parent.name}/" for path in (ROOT / package).glob("*/__init__.py")}
        assert folders <= shown


# -- commands and keys -------------------------------------------------------------------------------------------------


def commands(page: Path) -> Iterator[list[str]]:
    """Command lines as words: make, python -m and the console scripts."""
    for line in code(page):
        if COMMAND.search(line) and "..." not in line:
            yield shlex.split(line)


@each_page
def test_commands_exist(page: Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    for words in commands(page):
        first = Path(words[0]).name
        if first == "make":
            assert words[1] in targets, words
        elif words[:2] == ["python", "-m"]:
            assert importlib.util.find_spec(words[2]) is not None, words
        elif first == "slipstream":
            assert first in scripts and words[1] in SLIPSTREAM, words
        elif first.endswith(".sh"):
            assert (ROOT / words[0]).is_file(), words


def is_slipstream(words: list[str]) -> bool:
    return Path(words[0]).name == "slipstream"


def overrides(words: list[str]) -> list[str]:
    """The keys of the config that a command is given. Some commands have arguments of their own."""
    own = ("retriever", "dashboard", "predict")
    if is_slipstream(words) and words[1] == "replay":
        return [word for word in words[3:] if word.partition("=")[0] not in REPLAY]
    if (words[0] == "make" or is_slipstream(words)) and words[1] in own:
        return []
    if is_slipstream(words) and words[1] == "rehearse":
        return rehearsal_words(words[2:])[1]
    if is_slipstream(words) and words[1] == "agent-check":
        return agent_words(words[2:])[1]
    if words[0] != "make":
        return [word for word in words if re.match(r"[a-z].*=", word)]
    assigned = dict(word.split("=", 1) for word in words if re.match(r"\w+=", word))
    return [word for word in shlex.split(assigned.get("ARGS", "")) if "=" in word]


@each_page
def test_overrides_in_commands_are_keys(page: Path) -> None:
    for words in commands(page):
        check_overrides(overrides(words))


def test_commands_that_serve_a_retriever_are_understood() -> None:
    calls = [words for page in PAGES for words in commands(page) if words[:2] == ["make", "retriever"]]
    given = [shlex.split(word.removeprefix("ARGS=")) for words in calls for word in words[2:]]
    assert given and all("corpus" in arguments(words) for words in given)


def test_commands_that_predict_are_understood() -> None:
    calls = [words for page in PAGES for words in commands(page) if words[1:2] == ["predict"]]
    given = [shlex.split(words[2].removeprefix("ARGS=")) if words[0] == "make" else words[2:] for words in calls]
    assert given and all(predict_arguments(words) for words in given)


def training(words: list[str]) -> list[str] | None:
    """The overrides of a command that trains; None for another command."""
    if words[0].startswith("scripts/recipes/"):
        return [f"recipe={Path(words[0]).stem}", *words[1:]]
    trains = words[1:2] == ["train"] and (words[0] == "make" or is_slipstream(words))
    return overrides(words) if trains else None


def training_commands() -> Iterator[tuple[str, ...]]:
    """The overrides of every command that trains, with the name of a model where a page leaves it open."""
    for page in PAGES:
        for line in code(page):
            line = line.replace("model.path=...", "model.path=org/name")
            if COMMAND.search(line) and "..." not in line and (given := training(shlex.split(line))) is not None:
                yield tuple(given)


@pytest.fixture
def own_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The modules that the pages have the user write, in the current folder."""
    names = set[str]()
    for page in PAGES:
        for language, block in FENCE.findall(text(page)):
            if language == "python" and (head := re.match(r"# (\w+)\.py: ", block)) is not None:
                (tmp_path / f"{head[1]}.py").write_text(block)
                names.add(head[1])
    monkeypatch.chdir(tmp_path)  # where there are no runs yet
    monkeypatch.syspath_prepend(tmp_path)
    yield
    for name in names:
        sys.modules.pop(name, None)


@pytest.mark.slow
@pytest.mark.usefixtures("own_modules")
@pytest.mark.parametrize("given", sorted(set(training_commands())), ids=" ".join)
def test_commands_that_train_are_not_refused(given: tuple[str, ...]) -> None:
    for job in parse([SWEEP_MODE, *given, "dry_run=true"]).jobs():  # one, unless it sweeps
        resolve(*job)


def test_no_command_of_a_snippet_is_left_out() -> None:
    """The first line of each snippet is a command that composes: also those with modules of the user's own."""
    heads = [block.splitlines()[0] for page in PAGES for language, block in FENCE.findall(text(page)) if language]
    heads = [head for head in heads if ".py: make train" in head]
    known = str(sorted(set(training_commands())))
    assert len(heads) > 15 and all(re.search(r"[=,](my_\w+:\w+)", head)[1] in known for head in heads)  # pyright: ignore


def snippet_heads() -> list[Any]:
    blocks = [block for page in PAGES for language, block in FENCE.findall(text(page)) if language == "python"]
    return [pytest.param(heads_of(block), id=block.partition(":")[0]) for block in blocks]


@pytest.fixture(scope="module")
def tokenizers() -> dict[tuple[object, ...], Any]:
    return {}


@pytest.mark.slow
@pytest.mark.usefixtures("own_modules")
@pytest.mark.parametrize("heads", snippet_heads())
def test_every_snippet_has_a_form_that_runs_on_a_laptop(
    heads: list[str], tokenizers: dict[tuple[object, ...], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a model that is made here, which has the chat template that the agent needs."""

    def tokenizer(config: Config) -> Any:
        key = (config.data.generated, config.seed, config.data.num_train)
        if key not in tokenizers:
            tokenizers[key] = load(config)
        return tokenizers[key]

    load = preview.load_policy_tokenizer
    monkeypatch.setattr(preview, "load_policy_tokenizer", tokenizer)
    given = training(shlex.split(heads[-1].partition(": ")[2]))
    assert given is not None and "..." not in str(given)
    ((config, *_),) = [(resolve(*job),) for job in parse([SWEEP_MODE, *given, "dry_run=true"]).jobs()]
    assert config.model.kind is ModelKind.tiny
    assert preview.check_agent_loop(config) is None
    assert "not looked at" not in (preview.chat_template_of_sessions(config) or "")


@each_page
def test_keys_that_a_page_names_exist(page: Path) -> None:
    """`section.key` alone, or `section.key=value`, also several in one piece of code."""
    keys = {key for part in code(page) for key in re.findall(r"(?<![\w./$:-])(\w+\.\w+)(?=$|[ =,;)])", part)}
    keys = {key for key in keys if key.partition(".")[0] in SECTIONS and not key.endswith((".json", ".py"))}
    keys = {key for key in keys if importable(key) is None}
    assert {key for key in keys if key not in key_docs()} == set()


def importable(name: str) -> object | None:
    """A module such as rollout.types looks like a key."""
    try:
        return importlib.util.find_spec(name)
    except ModuleNotFoundError:
        return None


def test_every_recipe_is_named_where_a_user_chooses_one() -> None:
    recipes = {path.stem for path in (ROOT / "configs" / "recipe").glob("*.yaml")}
    for page in (README, ROOT / "docs" / "configuration.md"):
        assert recipes <= set(re.findall(r"`(\w+)`", text(page))), page


# -- troubleshooting ---------------------------------------------------------------------------------------------------


def test_the_errors_of_troubleshooting_are_errors_of_the_code() -> None:
    """Each piece of a quoted text between its dots, numbers and keys is in the code."""
    product = [path for name in PACKAGES for path in (ROOT / name).rglob("*.*") if path.suffix in {".py", ".sh"}]
    sources = re.sub(r'"\n\s*f?"', "", "".join(text(path) for path in product))
    rows = [line.split(" | ")[0] for line in text(ROOT / "docs/troubleshooting.md").splitlines() if "|" in line]
    quoted = [part for row in rows for part in re.findall(r"`([^`]+)`", row) if " " in part]
    pieces = {piece.strip("() :;") for part in quoted for piece in re.split(r"\.\.\.|[\w.]+=", part)}
    assert len(pieces) > 15
    assert {piece for piece in pieces if piece not in sources} == set()


# -- code --------------------------------------------------------------------------------------------------------------


def snippets() -> Iterator[Any]:
    """(key, path, code) of all Python code, which begins with `# file.py: make train ARGS="key=path`."""
    for page in PAGES:
        for language, block in FENCE.findall(text(page)):
            if language == "python":
                head = re.match(r'# (\w+)\.py: make train ARGS="([\w.]+)=(?:\[jsonl,)?(\1:\w+)[] "]', block)
                assert head is not None, f"{page.name}: {block.splitlines()[0]}"
                yield pytest.param(head[2], head[3], block, id=f"{page.name} {head[3]}")


CALL = '<tool_call>\n{"name": "power", "arguments": {"base": 5, "exponent": 1}}\n</tool_call>'


def try_reward(path: str) -> None:
    scorer = load_scorer(changed(Config(), rollout__reward=path).rollout)
    prompt = make_prompt(5)
    right, wrong = asyncio.run(scorer.score([(prompt, "it is 5"), (prompt, "it is 4")]))
    assert right.error is wrong.error is None and right.reward > wrong.reward


def try_loss(path: str) -> None:
    logprobs = torch.tensor([-1.0, -2.0, -0.5], dtype=torch.float64, requires_grad=True)
    old = torch.tensor([-1.5, -1.0, -0.5], dtype=torch.float64)
    loss, _ = load_policy_loss(path)(make_tokens(logprobs, old, [1.0, -1.0, 0.5]), AlgorithmConfig())
    loss.sum().backward()
    assert logprobs.grad is not None and logprobs.grad.any()


def try_advantage(path: str) -> None:
    group = ScoredGroup(rewards=np.array([1, 0], np.float32), lengths=np.array([3, 4], np.int32))
    (advantages,) = load_estimator(path)([group], AlgorithmConfig())
    assert advantages[0] > advantages[1]


def try_agent_loop(path: str) -> None:
    """The policy calls the tool that it is shown, if it is, and then says 5."""
    policy = Policy(lambda text, _: CALL if '"power"' in text and "<tool_response>" not in text else "5")
    loop = load_agent_loop(path, policy.tokenizer)
    tools = getattr(loop, "prompt_tools", None) or ()
    row = Row(question="5?", ground_truth="5")
    (prompt,) = encode(policy.tokenizer, [row], "{question}", bool(tools), 999, tools)
    sampling = SamplingParams(max_tokens=200)
    task = EpisodeTask(request_id=RequestId(ordinal=5), prompt=prompt, index=0, sampling=sampling)
    (episode,) = asyncio.run(episodes_of(loop, [task], policy.generate))
    if episode.result is None:  # rollout.reward scores what it says last
        assert policy.tokenizer.decode(only(episode).response_ids, skip_special_tokens=True).endswith("5")
    else:
        assert (episode.result.reward, episode.result.error) == (1, None)
    assert only(episode).loss_mask.any() and episode.metrics.get("tool_calls", 0) == bool(tools)


def try_agent(path: str) -> None:
    policy = Policy(lambda text, request: "It is 42." if "Look again." in text else "Maybe 41.")
    episode = asyncio.run(run_one(FunctionHarness(path), policy))
    assert episode.result is not None and episode.result.reward == 1 and len(policy.sampled) == 2
    assert len(episode.sequences) == 1


def try_loader(path: str) -> None:
    rows = load_rows("3", Columns(prompt="question", answer="answer"), path)
    assert [row.ground_truth for row in rows] == ["1", "2", "3"]


def try_order(path: str) -> None:
    order = make_order(changed(Config(), data__curriculum__order=path), [make_prompt(number) for number in range(20)])
    order.draw(0)
    assert order.row(0) in range(20)


def try_sink(path: str) -> None:
    """MLflow itself is no package of the tests: these are its functions that the page calls."""
    told: list[Any] = []
    fake = ModuleType("mlflow")
    for name in ("start_run", "log_metrics", "end_run"):
        setattr(fake, name, lambda *args, name=name, **named: told.append((name, *args, *named.values())))
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "mlflow", fake)
        sink = UserSink(path, Path("runs/a"))
        sink.log(3, {"critic/rewards/mean": 0.5})
        sink.close(1)
    assert told == [("start_run", "a"), ("log_metrics", {"critic/rewards/mean": 0.5}, 3), ("end_run", "FAILED")]


TRY = {
    "tracking.sinks": try_sink,
    "rollout.reward": try_reward,
    "rollout.agent": try_agent,
    "rollout.agent_loop": try_agent_loop,
    "algorithm.loss": try_loss,
    "algorithm.advantage": try_advantage,
    "data.loader": try_loader,
    "data.curriculum.order": try_order,
}


@pytest.mark.parametrize(("key", "path", "block"), snippets())
def test_code_runs_as_the_config_would_load_it(
    key: str, path: str, block: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = path.partition(":")[0]
    (tmp_path / f"{module}.py").write_text(block)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, module, raising=False)
    try:
        TRY[key](path)
    finally:
        sys.modules.pop(module, None)


# -- the rest ----------------------------------------------------------------------------------------------------------


def test_the_grafana_dashboard_is_fresh_and_asks_for_every_metric() -> None:
    dashboard = grafana_json()
    assert GRAFANA_FILE.read_text() == dashboard, "run `make docs`"
    panels = [panel for panel in json.loads(dashboard)["panels"] if panel["type"] != "row"]
    queries = [target["expr"] for panel in panels for target in panel["targets"]]
    assert len(queries) == len(set(queries)) > len(metric_list())
    places = {(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in panels}
    assert len(places) == len(panels), "two charts lie in one place"


@pytest.mark.parametrize("page", TABLES, ids=lambda page: page.name)
def test_the_tables_of_keys_are_fresh(page: Path) -> None:
    assert text(page) == fresh(page, TABLES[page]()), "run `make docs`"


def test_what_the_table_of_equivalents_calls_ours_is_ours() -> None:
    keys = {one.here.partition("=")[0] for one in EQUIVALENTS if not one.is_sentence}
    assert {key for key in keys if key not in key_docs() and not key.startswith("hydra.")} == set()
    theirs = [key for one in EQUIVALENTS for framework in FRAMEWORKS for key in one.named[framework]]
    assert len(theirs) > 150 and all(re.fullmatch(r"[\w.]+", key) for key in theirs)


def test_the_readme_is_read_in_one_sitting() -> None:
    assert len(text(README).splitlines()) <= 260


def test_the_page_on_algorithms_names_every_field_of_a_losss_tokens() -> None:
    page = Path("docs/algorithms.md").read_text(encoding="utf-8")
    assert [name for name in LossTokens.__dataclass_fields__ if f"`{name}`" not in page] == []
