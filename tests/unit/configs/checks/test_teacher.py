"""Teachers that cannot be, or that nothing would be learned from, are refused by key."""

from pathlib import Path

import pytest

from configs.schema import Config, Device
from configs.validate import ConfigError, check
from tests.support.compose import changed

TEACHER = {"teacher__path": "org/model"}


@pytest.mark.parametrize(
    ("values", "line"),
    [
        ({"algorithm__advantage": "opd"}, "algorithm.advantage=opd: needs teacher.path"),
        ({"algorithm__teacher_coef": 0.5}, "algorithm.teacher_coef=0.5: needs teacher.path"),
        ({**TEACHER, "algorithm__teacher_coef": 0.0}, "algorithm.teacher_coef=0.0: nothing would be learned"),
        ({**TEACHER, "algorithm__teacher_coef": -1.0}, "algorithm.teacher_coef=-1.0: must be between 0 and"),
        (
            {**TEACHER, "algorithm__advantage": "opd", "algorithm__filter_groups": True},
            "algorithm.filter_groups=True: with algorithm.advantage=opd nothing is learned from rewards",
        ),
        (
            {**TEACHER, "algorithm__advantage": "opd", "algorithm__kl_reward_coef": 0.1},
            "algorithm.kl_reward_coef=0.1: ",
        ),
        ({**TEACHER, "algorithm__group_size": 1}, "algorithm.group_size=1: must be at least 2"),
        ({**TEACHER, "teacher__min_replicas": 2}, "teacher.min_replicas=2: at most teacher.num_replicas=1"),
        (
            {**TEACHER, "teacher__timeout_s": 1200.0},
            "teacher.timeout_s=1200.0: must be less than rollout.group_timeout_s",
        ),
        (
            {**TEACHER, "teacher__max_num_batched_tokens": 63},
            "teacher.max_num_batched_tokens=63: at least teacher.max_num",
        ),
        ({**TEACHER, "device": Device.cpu, "teacher__kv_cache_mb": None}, "teacher.kv_cache_mb=None: device=cpu needs"),
        (
            {**TEACHER, "gpu_share": 0.3, "teacher__gpu_memory_utilization": 0.3, "teacher__tensor_parallel_size": 2},
            "teacher.tensor_parallel_size=2: at most 1 with gpu_share=0.3",
        ),
        ({**TEACHER, "gpu_share": 0.3}, "teacher.gpu_memory_utilization=0.85: at most gpu_share=0.3"),
    ],
)
def test_a_teacher_that_cannot_be_is_refused(values: dict[str, object], line: str) -> None:
    with pytest.raises(ConfigError) as refused:
        check(changed(Config(), **values))
    assert any(one.startswith(line) for one in str(refused.value).splitlines()), refused.value


def test_a_folder_that_is_no_model_is_no_teacher(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="teacher.path=/no/teacher: no such folder"):
        check(changed(Config(), teacher__path="/no/teacher"))
    with pytest.raises(ConfigError, match="teacher.path=.*no Hugging Face model: the folder has no config.json"):
        check(changed(Config(), teacher__path=str(tmp_path)))
    (tmp_path / "config.json").touch()
    check(changed(Config(), teacher__path=str(tmp_path)))


def test_a_distillation_needs_no_second_trajectory() -> None:
    check(changed(Config(), **TEACHER, algorithm__advantage="opd", algorithm__group_size=1))
