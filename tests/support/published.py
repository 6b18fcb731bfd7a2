"""Small files with the columns of published data sets."""

import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

from scripts.prepare_data import MATH_PROMPT


def math_prompt(question: str) -> str:
    return MATH_PROMPT.replace("{question}", question)


def dapo_record(question: str, answer: str, index: str) -> dict[str, Any]:
    """As BytedTsinghua-SIA/DAPO-Math-17k and AIME-2024 have it."""
    return {
        "data_source": "math_dapo",
        "prompt": [{"content": math_prompt(question), "role": "user"}],
        "ability": "MATH",
        "reward_model": {"ground_truth": answer, "style": "rule-lighteval/MATH_v2"},
        "extra_info": {"index": index},
    }


def search_r1_record(question: str, answers: list[str], source: str, index: int) -> dict[str, Any]:
    """As PeterJinGo/nq_hotpotqa_train has it; `metadata` of HotpotQA holds whole paragraphs, that of NQ is null."""
    return {
        "id": f"train_{index}",
        "question": question,
        "golden_answers": answers,
        "data_source": source,
        "prompt": [{"role": "user", "content": f"Answer the given question. [...] Question: {question}?\n"}],
        "ability": "fact-reasoning",
        "reward_model": {"ground_truth": {"target": answers}, "style": "rule"},
        "extra_info": {"index": index, "split": "train"},
        "metadata": {"type": "bridge", "context": {"title": ["A"], "sentences": [["B", "C"]]}} if index % 2 else None,
    }


def write_parquet(path: Path, records: list[dict[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(records), path)
    return path


def write_jsonl(path: Path, records: list[dict[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path
