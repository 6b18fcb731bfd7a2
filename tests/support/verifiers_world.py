"""An environment of verifiers, as users write them: its module has `load_environment`."""

from typing import Any

loads: list[str] = []
"""The kinds that were loaded."""


def right(completion: list[Any], answer: str) -> float:
    return float(bool(completion) and answer in str(completion[-1]["content"]))


def num_messages(completion: list[Any]) -> float:
    return float(len(completion))


def judged(completion: list[Any]) -> float:
    raise ConnectionError("no judge answers")


def best(completions: list[Any]) -> list[float]:
    return [1.0 for _ in completions]


def load_environment(kind: str = "right") -> Any:
    """`kind`: of the rubric, or what goes wrong."""
    import verifiers as vf  # pyright: ignore
    from datasets import Dataset

    class Again(vf.MultiTurnEnv):
        async def env_response(self, messages: Any, state: Any, **_: Any) -> Any:
            if kind == "broken":
                raise vf.Error("the sandbox is gone")
            return [{"role": "user", "content": "Look again."}]

    loads.append(kind)
    functions: dict[str, Any] = {"right": right, "judged": judged, "best": best}
    number: Any = int if kind == "numbers" else str
    first = 0 if kind == "numbers" else 6
    rows = [{"prompt": [{"role": "user", "content": f"{n} times 7?"}], "answer": number(7 * n)} for n in (first, 8)]
    info = [{**row, "example_id": number, "info": {"level": 1}} for number, row in enumerate(rows)]
    return Again(
        dataset=Dataset.from_list(info),
        eval_dataset=Dataset.from_list(info[:1]),
        rubric=vf.Rubric(funcs=[functions.get(kind, right), num_messages], weights=[1.0, 0.0]),
        max_turns=2,
        score_rollouts=kind != "unscored",
    )
