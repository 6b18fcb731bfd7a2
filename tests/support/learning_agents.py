"""A tiny policy that learns inside a coding agent: made-up tasks about numbers, each of which one command of a shell
solves, and a model that knows the form of an episode, but seldom which command solves which task.

Nearly all that an agent sends with each request is the same: its instructions and its tools. Here the tokenizer has
pieces of them as tokens, and all that the model may say, too. So an episode has some hundred tokens in place of
thousands, and the model chooses among whole commands: it learns what to do, not how to write it.
"""

import json
import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken

from configs.named_agents import NamedAgent
from rollout.sessions.harness import CommandPlace
from rollout.types import Prompt
from scripts.plan.agent_trial import say_call
from tests.support.real_agents import QUESTION, run_agent
from trainer.tiny import model as tiny
from trainer.tiny.chat_templates import QWEN25
from trainer.tiny.warmup import Demonstration, tokenized_examples, warm_up

PIECE = 2000
"""The most characters of what the agent always sends that are one token."""
VOCAB_SIZE = 384
"""The tokens besides those: bytes, and what questions and results of the shell repeat."""
DEMONSTRATIONS, BATCH, LR = 1600, 16, 4e-3
SHOWN_RIGHT, SHOWN_FIRST = 3, 3
"""How often demonstrations call the right command, and the first one whatever the task is, for each time that they call
each of all: a policy learns within 20 minutes only what it sometimes does."""
DIGITS = 'grep -o "[0-9]" "$SLIPSTREAM_PROMPT_FILE"'
"""Prints the digits of the prompt, a line each. A shell that the agent starts inherits the variable."""


@dataclass(frozen=True)
class Kind:
    word: str
    """The word that tells the tasks of this kind from others."""
    command: str
    """A command that finds the answer among the digits."""
    answer: Callable[[Sequence[int]], int]


KINDS = (
    Kind("largest", "sort | tail -n 1", max),
    Kind("smallest", "sort | head -n 1", min),
    Kind("first", "head -n 1", lambda digits: digits[0]),
    Kind("last", "tail -n 1", lambda digits: digits[-1]),
    Kind("count", "wc -l", len),
)
FORMS = ("What is the {word} of {digits}?", "Find the {word} of the digits {digits}.", "{digits}: say the {word}")


@dataclass(frozen=True)
class Task:
    kind: Kind
    digits: tuple[int, ...]
    form: str
    """One of FORMS."""

    @property
    def question(self) -> str:
        return self.form.format(word=self.kind.word, digits=" ".join(map(str, self.digits)))


def draw_tasks(count: int, seed: int) -> list[Task]:
    """Draw distinct tasks, as many of each kind. For each of them, only the command of its own kind is right."""
    rng = random.Random(seed)
    tasks = dict[str, Task]()
    while len(tasks) < count:
        digits = tuple(rng.choices(range(10), k=rng.randint(5, 9)))
        if len({kind.answer(digits) for kind in KINDS}) == len(KINDS):
            task = Task(KINDS[len(tasks) % len(KINDS)], digits, rng.choice(FORMS))
            tasks[task.question] = task
    return list(tasks.values())


def write_tasks(path: Path, tasks: Sequence[Task]) -> None:
    rows = ({"question": task.question, "answer": f"#### {task.kind.answer(task.digits)}"} for task in tasks)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def ends_right(prompt: Prompt, text: str) -> float:
    """Reward an episode whose last words are right: a tiny model can read the answer off the shell only."""
    return float(text.rstrip().endswith(last_words(int(prompt.ground_truth))))


# -- what the model says -----------------------------------------------------------------------------------------------


def plan(kind: Kind) -> str:
    """Return what is said before a call: the task again, in short."""
    return f"I need the {kind.word}."


def call(kind: Kind) -> str:
    return say_call("exec_command", {"cmd": f'echo "It is $({DIGITS} | {kind.command})."'})


def last_words(answer: int) -> str:
    """Return what the commands print, and what is then said."""
    return f"It is {answer}."


# -- the model ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Surroundings:
    """What an agent puts around what matters."""

    before: str
    """All that the model reads before the question."""
    result: str
    """All that it reads between a call and its next words; `last_words(7)` stands for what the command printed."""


def look(agent: NamedAgent, place: CommandPlace) -> Surroundings:
    """Run an episode of the agent in which a model calls the shell once."""
    largest = KINDS[0]
    turns = (call(largest), last_words(7))
    outcome = run_agent(agent, lambda text, _: turns[text.count(call(largest))], place=place)
    first, second = (outcome.policy.tokenizer.decode(list(ids)) for ids in outcome.policy.prompts.values())
    before, _, after = first.partition(QUESTION)
    result = second.removeprefix(f"{before}{QUESTION}{after}{call(largest)}")
    assert before and last_words(7) in result, second[-1000:]  # the largest digit of the question
    return Surroundings(before=before, result=result)


def write_beginner(folder: Path, surroundings: Surroundings, max_tokens: int) -> Path:
    """Write a model which names the task, calls any command, and says what that printed. It reads up to `max_tokens`.

    It has learned this from examples that call the right command in 4 of 11 episodes, and in others most often the
    first of KINDS.
    """
    tokenizer = _tokenizer(surroundings)
    model = tiny.build_model(len(tokenizer), seed=0)
    examples = tokenized_examples(tokenizer, list(_demonstrations(surroundings)))
    for _ in warm_up(model, examples, batch_size=BATCH, lr=LR):
        pass
    model.config.max_position_embeddings = max_tokens
    tiny.write_model_directory(folder, model, tokenizer)
    return folder


def _tokenizer(surroundings: Surroundings) -> Any:
    questions = [task.question for task in draw_tasks(200, seed=1)]
    tokenizer = tiny.build_mixed_tokenizer([*questions, *[surroundings.result] * 8], VOCAB_SIZE)
    tokenizer.chat_template = QWEN25
    texts = re.split(r"<\|im_(?:start|end)\|>", surroundings.before)
    pieces = [text[at : at + PIECE] for text in texts for at in range(0, len(text), PIECE)]
    said = [*map(plan, KINDS), *map(call, KINDS), *map(last_words, range(10))]
    tokens = [AddedToken(text, normalized=False) for text in (*dict.fromkeys(pieces), *said) if len(text) > 1]
    tokenizer.add_tokens(tokens)  # pyright: ignore[reportArgumentType]
    return tokenizer


def _demonstrations(surroundings: Surroundings) -> Iterator[Demonstration]:
    rng = random.Random(0)
    for task in draw_tasks(DEMONSTRATIONS, seed=2):
        kind = rng.choice((task.kind,) * SHOWN_RIGHT + (KINDS[0],) * SHOWN_FIRST + KINDS)
        words = last_words(kind.answer(task.digits))
        result = re.sub(r"(?<=Chunk ID: )\w+", f"{rng.randrange(16**6):06x}", surroundings.result)
        result = result.replace(last_words(7), words)
        head = f"{surroundings.before}{task.question}<|im_end|>\n<|im_start|>assistant\n"
        yield head, plan(task.kind) + call(kind), result.removeprefix("<|im_end|>"), words
