"""The screen Evaluations: the accuracy over the run, and the samples of one evaluation with their texts."""

from collections import defaultdict
from collections.abc import Callable
from statistics import fmean
from typing import Any

from configs.data import NO_FILES
from scripts.dashboard.groups import shortened
from scripts.observe.files import RunError
from scripts.observe.run import Run
from trainer.tracking.trajectories import SampleRecord

SAMPLES = 50
"""The number of samples on a page."""
WHICH: dict[str, Callable[[SampleRecord], bool]] = {
    "all": lambda sample: True,
    "right": lambda sample: sample.accuracy >= 1,
    "wrong": lambda sample: not sample.accuracy >= 1,
    "failed": lambda sample: sample.error is not None,
}
"""The filters of the samples."""


def is_of_evaluation(name: str) -> bool:
    """Return whether the screen draws the metric over the steps."""
    return name == "eval/accuracy" or name.startswith("val/")


def evaluations(run: Run) -> Any:
    """Return the versions that were evaluated and have a file of samples, and whether the run has a held-out set."""
    return {"versions": run.evaluations(), "holds_out": run.flat_config().get("data.val_files") != NO_FILES}


def evaluation(run: Run, version: int, which: str = "all", text: str = "", offset: int = 0) -> Any:
    """Return the accuracy of an evaluation by data source, and a page of its samples."""
    if which not in WHICH:
        raise RunError(f"which={which}: must be one of {', '.join(WHICH)}")
    if version not in (known := run.evaluations()):
        there = ", ".join(map(str, known)) or "none"
        raise RunError(f"version={version}: no such evaluation; the versions are {there}")
    read = run.evaluation(version)
    sources: defaultdict[str, list[SampleRecord]] = defaultdict(list)
    for sample in read.records:
        sources[_whence(sample)].append(sample)
    wanted = text.casefold()
    chosen = [sample for sample in read.records if WHICH[which](sample) and wanted in _words(sample)]
    offset = max(0, offset)
    return {
        "version": version,
        "sources": [_source(name, samples) for name, samples in sorted(sources.items())],
        "total": len(chosen),
        "offset": offset,
        "page": SAMPLES,
        "rows": [_row(sample) for sample in chosen[offset : offset + SAMPLES]],
        "damaged": len(read.problems),
    }


def _whence(sample: SampleRecord) -> str:
    """Return the source in data.sources and the data set of a sample, as far as there are any."""
    return "/".join(filter(None, (sample.source, sample.data_source)))


def _words(sample: SampleRecord) -> str:
    return "\n".join((_whence(sample), sample.prompt, sample.response, sample.ground_truth)).casefold()


def _source(name: str, samples: list[SampleRecord]) -> dict[str, Any]:
    return {
        "name": name,
        "samples": len(samples),
        "prompts": len({sample.ordinal for sample in samples}),
        "accuracy": fmean(sample.accuracy for sample in samples),
        "failed": sum(sample.error is not None for sample in samples),
        "tokens": fmean(sample.response_tokens for sample in samples),
    }


def _row(sample: SampleRecord) -> dict[str, Any]:
    return {
        "ordinal": sample.ordinal,
        "index": sample.index,
        "source": _whence(sample),
        "prompt": shortened(sample.prompt),
        "response": shortened(sample.response),
        "truth": shortened(sample.ground_truth),
        "answer": shortened(sample.answer),
        "accuracy": sample.accuracy,
        "error": shortened(sample.error),
        "tokens": sample.response_tokens,
        "versions": sample.versions,
    }
