"""Tasks in Harbor's format are read from their folders, and what is not read is refused by name."""

from pathlib import Path

import pytest

from configs.sandbox import SandboxBackend, SandboxConfig
from rollout.data.rows import Columns, load_rows
from rollout.environments.sandbox.harbor import SHIPPED, TaskError, read_task, rows, task_of
from rollout.types import Prompt


def make_task(folder: Path, dockerfile: str | None = None, toml: str = 'version = "1.0"\n') -> Path:
    for name in ("environment/sub", "tests/data", "solution"):
        (folder / name).mkdir(parents=True)
    (folder / "instruction.md").write_text("Do it.\n")
    (folder / "task.toml").write_text(toml)
    (folder / "environment/sub/run.sh").write_text("echo hi")
    (folder / "environment/sub/run.sh").chmod(0o755)
    (folder / "environment/notes.txt").write_text("notes")
    (folder / "tests/test.sh").write_text("true")
    (folder / "tests/data/x").write_text("x")
    if dockerfile is not None:
        (folder / "environment/Dockerfile").write_text(dockerfile)
    return folder


def places(folder: Path) -> dict[str, int]:
    return {file.path: file.mode for file in read_task(folder).files}


def test_a_dockerfile_says_where_files_go(tmp_path: Path) -> None:
    dockerfile = """
        # Comment
        FROM python:3.12
        WORKDIR /work/here
        ENV A=1 B="two words"
        COPY sub ./scripts
        COPY --chown=me notes.txt ./
        COPY notes.txt renamed.txt
        CMD ["bash"]
    """
    task = read_task(make_task(tmp_path / "a", dockerfile))
    assert task.workdir == "/work/here" and task.env == {"A": "1", "B": "two words"}
    assert places(task.folder) == {
        "/work/here/scripts/run.sh": 0o755,
        "/work/here/notes.txt": 0o644,
        "/work/here/renamed.txt": 0o644,
    }
    assert [file.path for file in task.tests] == ["/tests/data/x", "/tests/test.sh"]


def test_without_a_dockerfile_all_files_are_in_app(tmp_path: Path) -> None:
    assert set(places(make_task(tmp_path / "a"))) == {"/app/notes.txt", "/app/sub/run.sh"}


def test_settings_of_a_task_are_read(tmp_path: Path) -> None:
    toml = """
        [environment]
        docker_image = "an/image:1"
        workdir = "/work"
        memory_mb = 2048
        [environment.env]
        X = "1"
        [verifier]
        timeout_sec = 12
        env = { KEY = "value" }
    """
    task = read_task(make_task(tmp_path / "a", "FROM x\nRUN apt-get install y\nCOPY . /work\n", toml))
    assert (task.docker_image, task.workdir, task.verifier_timeout_s) == ("an/image:1", "/work", 12.0)
    assert (task.env, task.verifier_env) == ({"X": "1"}, {"KEY": "value"})
    with pytest.raises(TaskError, match="needs memory_mb=2048, and sandbox.memory_mb=512: set that to 2048"):
        task.image(SandboxConfig())


@pytest.mark.parametrize(
    ("dockerfile", "toml", "problem"),
    [
        ("RUN pip install x", "", r"RUN needs an image that was built: name it as docker_image"),
        ("COPY ../secret /app/", "", r"there is no \.\./secret"),
        ("COPY missing /app/", "", r"there is no missing"),
        ("COPY notes.txt /etc/notes", "", r"must copy files of this folder into one of /work, "),
        ("COPY --from=build x /app", "", r"must copy files of this folder"),
        ("WORKDIR /root", "", r"its workdir /root must be in one of /work, "),
        (None, "environment = 3", r"task\.toml: environment must be a table"),
        (None, "= 3", r"task\.toml: "),
        (None, "[[steps]]\nname = 'a'", r"only tasks of one step are read"),
    ],
)
def test_a_task_that_needs_more_is_refused(dockerfile: str | None, toml: str, problem: str, tmp_path: Path) -> None:
    with pytest.raises(TaskError, match=problem):
        read_task(make_task(tmp_path / "a", dockerfile, toml)).image(SandboxConfig(image="/"))


@pytest.mark.parametrize("name", ["tests/data/x", "environment/notes.txt"])
def test_a_task_with_files_that_no_sandbox_takes_is_refused(name: str, tmp_path: Path) -> None:
    """Tests that could not be copied would give reward 0, whatever the agent has done."""
    folder = make_task(tmp_path / "a")
    with (folder / name).open("wb") as file:
        file.truncate(17 * 2**20)
    with pytest.raises(TaskError, match=r"has 17825792 bytes, and at most 16777216 are copied"):
        read_task(folder).image(SandboxConfig())
    with (folder / name).open("wb") as file:
        file.truncate(15 * 2**20)
    read_task.cache_clear()
    assert read_task(folder).image(SandboxConfig()) is None
    with pytest.raises(TaskError, match=r"its files have 157\d+ bytes, and sandbox.disk_mb=15: set that to more"):
        read_task(folder).image(SandboxConfig(disk_mb=15))
    assert read_task(folder).image(SandboxConfig(disk_mb=15, backend=SandboxBackend.harbor)) is None


def test_harbor_builds_what_needs_a_build_where_no_image_is_named(tmp_path: Path) -> None:
    config = SandboxConfig(backend=SandboxBackend.harbor, image="some/image:1")
    folder = make_task(tmp_path / "a", "FROM x\nRUN pip install y\nCOPY notes.txt /app/\n")
    assert read_task(folder).image(config) == str(folder / "environment")
    named = make_task(tmp_path / "b", "FROM x\nRUN pip install y\n", "[environment]\ndocker_image = 'an/image:1'")
    assert read_task(named).image(config) == "an/image:1"
    plain = make_task(tmp_path / "c", "FROM x\nCOPY notes.txt /app/\n")
    assert read_task(plain).image(config) is None, "its files are copied into any image"


def test_a_link_in_a_task_is_refused_because_it_may_lead_out(tmp_path: Path) -> None:
    folder = make_task(tmp_path / "a")
    (folder / "environment/sub/link").symlink_to("/etc/passwd")
    with pytest.raises(TaskError, match="is a link, and must be a file"):
        read_task(folder)


def test_rows_are_the_tasks_of_folders_and_those_that_ship(tmp_path: Path) -> None:
    for name in ("b", "a"):
        make_task(tmp_path / "many" / name)
    alone = make_task(tmp_path / "alone")
    made = rows(f"{tmp_path / 'many'}, {alone}, {SHIPPED}")
    assert [row["answer"] for row in made] == ["a", "b", "alone", "count_errors", "repair_total", "sort_files"]
    loader = "rollout.environments.sandbox.harbor:rows"
    row = load_rows(str(alone), Columns(prompt="question", answer="answer"), loader)[0]
    assert row.question == "Do it.\n"
    prompt = Prompt(ordinal=0, text="", token_ids=(), ground_truth=row.ground_truth, extra=row.extra)
    task = task_of(prompt)
    assert task is not None and task.folder == alone.resolve()


@pytest.mark.parametrize(("entry", "problem"), [("nowhere", "nowhere: no such folder"), (".", "has no task.toml")])
def test_an_entry_that_is_no_task_is_refused(
    entry: str, problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(TaskError, match=problem):
        rows(entry)


def test_a_task_without_tests_or_instruction_is_refused(tmp_path: Path) -> None:
    folder = make_task(tmp_path / "a")
    (folder / "instruction.md").unlink()
    with pytest.raises(TaskError, match="instruction.md: cannot be read"):
        read_task(folder)
    (folder / "tests/test.sh").unlink()
    with pytest.raises(TaskError, match="has no tests/test.sh"):
        read_task(folder)
