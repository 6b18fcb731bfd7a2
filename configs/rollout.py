"""Keys of the rollouts (engines, agents, rewards, failures), of the sessions of harnesses, of the evaluation, which
runs on the same replicas, and of the teacher, which has replicas of its own."""

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from configs.model import DType

MOST_KEPT = 512
"""The largest number of tokens that truncated sampling leaves to draw from: each travels with the token that was
drawn."""
TIES = 16
"""The number of tokens beyond top_k that are looked at: those that are exactly as likely as the last are left, too."""
PROMPT_PLACEHOLDER = "{prompt}"
"""The word in rollout.agent_command that stands for the prompt."""


class StalePolicy(Enum):
    """The treatment of a group that would become too stale to train."""

    wait = "wait"
    """The trainer waits for it. Nothing is thrown away, and no token is staler than `max_staleness`."""
    mask = "mask"
    """It is trained late, without its stale tokens."""
    drop = "drop"
    """It is thrown away and counted, and another prompt takes its slot."""


class Concurrency(Enum):
    """The number of episodes that a replica has at most."""

    fixed = "fixed"
    """`max_num_seqs` x `data_parallel_size` x `episodes_per_seat`, and one group."""
    auto = "auto"
    """At first that number; then as many as fill every seat, or as many as have room in the KV cache, whichever samples
    more tokens per second."""


class RewardPlace(Enum):
    """The place where a synchronous reward runs. An async one is awaited on the event loop of its agent worker, and
    rewards of this project that are known to be quick are called there."""

    process = "process"
    """In processes of its own. One that hangs is killed, whatever it does."""
    thread = "thread"
    """In threads of the agent worker. One that hangs is abandoned; one that holds the GIL costs the worker."""
    loop = "loop"
    """The event loop of the agent worker, for rewards that take microseconds. One that hangs costs the worker."""


class ToolPlace(Enum):
    """The place where plain functions that are tools run, and the plain methods of environments. Async ones are awaited
    on the event loop of their agent worker."""

    process = "process"
    """In processes of their own. One that hangs is killed, whatever it does."""
    thread = "thread"
    """In threads of the agent worker. One that hangs is abandoned; one that holds the GIL costs the worker."""


class Speculation(Enum):
    """The method that drafts several tokens in a step, which the model then accepts or replaces. The sampled tokens
    and their logprobs are the model's. All but `none` are vLLM's methods, by vLLM's names."""

    none = "none"
    """Nobody: a token per step."""
    ngram = "ngram"
    """The tokens that followed the last ones at an earlier place, in the prompt or the response."""
    suffix = "suffix"
    """The same, with counts over all responses so far. Needs the package arctic-inference."""
    draft_model = "draft_model"
    """A smaller model."""
    eagle = "eagle"
    eagle3 = "eagle3"
    mtp = "mtp"
    """Layers of the model itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculativeConfig:
    method: Speculation = Speculation.none
    """Drafts tokens, of which the model accepts or replaces several in a step, as likely as without: none, ngram,
    suffix, draft_model, eagle, eagle3 or mtp. Only ngram has been run."""
    num_tokens: int = 4
    """Tokens drafted per step."""
    min_match: int = 2
    """The number of last tokens that must, at least, have been there before, with method=ngram."""
    max_match: int = 4
    """The number of last tokens that are looked for first, with method=ngram."""
    model: str | None = None
    """Folder or hub name of the model that drafts, with method=draft_model, eagle and eagle3. Updates leave it as it
    is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AutoscaleConfig:
    max_replicas: int | None = None
    """Most replicas that the run adds by itself while its trainer waits for batches; null: their number is fixed."""
    min_replicas: int = 1
    """Fewest replicas that are left when the run takes those away that it does not need."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutConfig:
    # -- replicas --
    num_replicas: int = 1
    """Number of vLLM engines, each owned by a Ray actor; with autoscale.max_replicas that of the beginning."""
    autoscale: AutoscaleConfig = field(default_factory=AutoscaleConfig)
    """Replicas that come and go with the load."""
    tensor_parallel_size: int = 1
    """GPUs over which each copy of the model is split."""
    data_parallel_size: int = 1
    """Copies of the model within a replica, each on tensor_parallel_size GPUs."""
    max_num_seqs: int = 256
    """Sequences that each copy of the model generates at once: its seats."""
    episodes_per_seat: int = 2
    """Episodes that a replica admits per seat, so that some generate while others wait for tools. Slow tools need more;
    each group needs a slot, too."""
    concurrency: Concurrency = Concurrency.auto
    """Episodes that a replica has at most: auto, which begins at what max_num_seqs and episodes_per_seat say and
    follows the reports of replicas about turns computed again, KV cache and queue; or fixed, which stays there."""
    dtype: DType = DType.float32
    """Number format of the engine's weights and activations."""
    enforce_eager: bool = True
    """Use neither torch.compile nor CUDA graphs: the engine starts sooner and generates more slowly on GPUs."""
    kv_cache_mb: int | None = 256
    """MiB of KV cache on each GPU, or on CPU of each engine; null takes what gpu_memory_utilization leaves."""
    gpu_memory_utilization: float = 0.85
    """Share of the GPU's memory that vLLM takes when kv_cache_mb is null."""
    engine_args: dict[str, Any] = field(default_factory=dict)
    """More arguments of vLLM's AsyncEngineArgs, by name: rollout.engine_args.max_num_batched_tokens=8192. Those that
    another key says are refused."""
    start_timeout_s: float = 600.0
    """Deadline in seconds for starting all replicas and train workers, warm-up included, for each later replica, and
    for encoding the prompts."""

    # -- sampling --
    max_response_tokens: int = 32
    """Most tokens sampled in one trajectory."""
    temperature: float = 1.0
    """Sampling temperature of training rollouts, above 0."""
    top_p: float = 1.0
    """Training rollouts sample from the most likely tokens that together have this probability. The tokens that were
    left travel with each sampled one, and the trainer normalizes over them."""
    top_k: int = -1
    """Training rollouts sample from this many most likely tokens, 512 at most; -1 is all, or, with top_p or min_p,
    512."""
    min_p: float = 0.0
    """Training rollouts leave out tokens whose probability is below this share of the most likely one's; 0 none."""
    stop: list[str] = field(default_factory=list)
    """Texts that end a response, or a turn of one, in training and evaluation; they stay in it."""
    seeded_sampling: bool = False
    """Give every trajectory its own sampling seed (from seed, ordinal and index): repeatable, a little slower."""

    speculative: SpeculativeConfig = field(default_factory=SpeculativeConfig)
    """Speculative decoding."""

    # -- staleness --
    max_staleness: int = 2
    """No trained token is older than this many versions of the weights; 0 is on-policy, the synchronous run."""
    stale_policy: StalePolicy = StalePolicy.wait
    """Treatment of a group that would exceed max_staleness: wait, mask or drop."""

    # -- agents and rewards --
    agent_loop: str = "single_turn"
    """Agent loop: single_turn, or `package.module:name` that makes one when called with (tokenizer)."""
    agent: str | None = None
    """A harness in place of an agent loop: claude_code, codex, opencode or mini_swe_agent, which must be installed; or
    `package.module:function`, an async function of (task, client), where client is an openai.AsyncOpenAI for the
    session of its episode."""
    agent_command: str | None = None
    """A harness in place of an agent loop: a command of the shell, a process per episode, with OPENAI_BASE_URL,
    OPENAI_API_KEY, ANTHROPIC_BASE_URL and others in its environment. It gets the prompt on stdin, or in place of the
    word {prompt}; rollout.reward scores the episode."""
    agent_sandbox: bool = False
    """Run each process of rollout.agent_command, and of an agent that rollout.agent names, in a sandbox of bubblewrap
    with the limits of sandbox.*: it can write its folder, reads the system's programs and its own, and reaches its
    session only."""
    agent_sandbox_folders: list[str] = field(default_factory=list[str])
    """Folders and files of this machine that such a sandbox shows besides, under the same names, and where nothing can
    be written: [/home/me/agent]."""
    agent_args: dict[str, Any] = field(default_factory=dict)
    """Arguments of rollout.agent_loop beside the tokenizer, or of rollout.agent beside the task and client, by name:
    rollout.agent_args.topk=5."""
    tools_run_in: ToolPlace = ToolPlace.thread
    """Place where tools that are plain functions run, and environments with plain methods: process (it can be killed)
    or thread. Async ones are awaited on the agent worker's event loop."""
    tool_processes: int = 16
    """Most processes per agent worker with tools_run_in=process. Each runs a call of a tool, or the environment of an
    episode from its beginning to its end; the others wait."""
    num_agent_workers: int = 1
    """Number of Ray actors that run agent loops and rewards."""
    reward: str = "gsm8k"
    """Reward: gsm8k, gsm8k_flexible, dapo, math_verify, format, `package.module:function` of (prompt, text), or a
    sum."""
    reward_runs_in: RewardPlace = RewardPlace.process
    """Place where a synchronous reward of your own runs: process (it can be killed), thread or loop. An async one is
    awaited on the agent worker's event loop."""
    reward_processes: int = 4
    """Processes per agent worker and reward with reward_runs_in=process, and with reward=math_verify. Each scores one
    response at a time."""
    reward_timeout_s: float = 60.0
    """Deadline in seconds for the reward of a response, from when it runs. One that is not there by then has failed."""
    max_failed_rewards: float = 0.01
    """Share of the run's trajectories whose reward may fail, which are then not trained. One more ends the run."""
    format_pattern: str = r"<think>(?>.*?</think>\s*<answer>).*</answer>\s*"  # (?>: takes time linear in the text
    """Regular expression that the whole response must match, with reward=format; a dot also matches newlines. A tag
    that the prompt has opened counts as the beginning of the response."""
    verify_timeout_s: float = 5.0
    """Deadline in seconds for one comparison, with reward=math_verify; past it the answer counts as wrong."""

    # -- failures --
    group_timeout_s: float = 1200.0
    """Deadline in seconds for an attempt at a group, rewards and pauses included; then max_group_retries applies.
    Episodes whose replica was lost wait this long for another one."""
    max_group_retries: int = 1
    """Number of times that a group is tried again after it raised, exceeded group_timeout_s, or crashed a process of
    its own."""
    max_failed_groups: float = 0.01
    """Share of the run's groups that may fail for good, each replaced by another prompt. One more ends the run."""
    agent_worker_timeout_s: float = 120.0
    """An agent worker that does not respond for this many seconds is lost and replaced: an agent loop or a reward
    blocks its event loop."""
    min_replicas: int = 1
    """The run ends when fewer replicas than this can serve and no replacement is starting."""
    max_replacements: int = 8
    """Lost replicas that are replaced by new ones, over the whole run; 0 replaces none. A resumed run counts anew."""
    progress_interval_s: float = 1.0
    """Seconds between two reports of a replica's health and new tokens: its death loses those of one interval."""
    replica_timeout_s: float = 60.0
    """A replica is lost when it does not respond for this many seconds or, unpaused, samples nothing for its
    requests."""
    answer_timeout_s: float = 5.0
    """Deadline in seconds for one question or order to a replica: its state, an abort, its last report when lost."""
    slow_factor: float | None = 8.0
    """A replica is lost when its requests are this many times slower than the others' median (tokens/s per request),
    as on a throttled or shared GPU, and it generates less than half of their tokens/s; at least 2, null: never."""


class OnLimit(Enum):
    """The treatment of an episode whose session reached a limit, or whose harness was ended at its deadline."""

    train = "train"
    """It is trained with the reward it has."""
    mask = "mask"
    """Its reward counts in its group, and its tokens are not trained."""
    zero = "zero"
    """It is trained with reward 0."""


class OnMismatch(Enum):
    """The treatment of a prompt in which the answers of the policy are written in another way than it wrote them. Other
    messages, tools and options of the template that differ always begin a new sequence."""

    bridge = "bridge"
    """The sequence goes on from the tokens that were sampled; the change is passed over, and counted."""
    fork = "fork"
    """A new sequence begins with the history as the harness sent it."""


class ReasoningHistory(Enum):
    keep = "keep"
    """Reasoning that was sampled stays in the sequence, though the harness or the template drops it."""
    strip = "strip"
    """Reasoning that the harness or the template drops begins a new sequence without it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionsConfig:
    host: str = "127.0.0.1"
    """Address that agent workers serve sessions on, each at a free port. Harnesses run beside their agent worker.
    0.0.0.0 serves on all addresses, and URLs have the one that other machines use."""
    max_turns: int = 64
    """Answers of the policy in one session. The next one is empty and ends with "length", those after it get 403."""
    max_turn_tokens: int | None = None
    """Most tokens of one answer; null is what is left of rollout.max_response_tokens."""
    timeout_s: float = 600.0
    """Seconds that a harness may take, without those in which it waits for the policy; past it the harness is ended."""
    idle_timeout_s: float = 300.0
    """Seconds without a request under way after which a harness is ended."""
    max_running: int | None = None
    """Harnesses that run at once beside each agent worker. The time of the others begins when they do. null is 256
    functions, or 4 commands for each core of the machine."""
    fresh_folder: bool = True
    """Give each process of rollout.agent_command a new folder, which is its working directory and HOME and is removed
    when the episode ends. With false it has those of the agent worker."""
    folder_template: str | None = None
    """Folder whose content is copied into each new folder of sessions.fresh_folder, such as the settings of an
    agent."""
    kept_folders: int = 8
    """Folders of failed episodes that are kept beside each agent worker, whose log says where; later ones are
    removed."""
    command_reward: bool = False
    """Let rollout.agent_command post the reward, to SLIPSTREAM_REWARD_URL with the key SLIPSTREAM_REWARD_KEY. The
    command must then keep both from the agent."""
    max_open: int = 1024
    """`make serve` only: sessions that may be open at once; beyond it one more is answered with 429."""
    on_limit: OnLimit = OnLimit.train
    """Treatment of an episode that reached a limit or a deadline: train, mask or zero. If it has posted no reward,
    rollout.reward scores it."""
    on_mismatch: OnMismatch = OnMismatch.fork
    """Treatment of a history in which the policy's own answers are changed: fork or bridge. What else a harness changes
    always forks."""
    reasoning: ReasoningHistory = ReasoningHistory.keep
    """Treatment of the reasoning in earlier answers: keep or strip."""
    tool_parser: str | None = None
    """Name of vLLM's parser of tool calls, as `vllm serve --tool-call-parser` takes it; null reads
    <tool_call>{"name": ..., "arguments": ...}</tool_call>, the form of Hermes and Qwen."""
    reasoning_parser: str | None = None
    """Name of vLLM's parser of reasoning, as `vllm serve --reasoning-parser` takes it; null reads
    <think>...</think>."""
    replayable: bool = True
    """A harness that starts again, in a run that is resumed for one, hears the answers that it had. With false it gets
    new ones: for harnesses that act on something outside, where a second run would not ask the same."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationConfig:
    samples: int = 1
    """Responses per held-out prompt; with k > 1, avg@k, pass@k and maj@k are reported."""
    temperature: float = 0.0
    """Sampling temperature; 0 is greedy."""
    top_p: float = 1.0
    """Evaluation samples from the most likely tokens that together have this probability."""
    replicas: int = 1
    """Replicas that leave the training during an evaluation and keep its version of the weights; one always stays in
    training. With 0, or a single replica, evaluation and training share the replicas, and updates continue."""
    timeout_s: float = 1200.0
    """Deadline in seconds for one evaluation; past it the run ends. Pauses count, so it must be longer than any."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TeacherConfig:
    """The model that a distillation learns from. Its health is watched as that of the other replicas, by rollout.*."""

    path: str | None = None
    """Hugging Face folder or hub name, run folder (its newest checkpoint) or checkpoint folder of the model that scores
    every sampled token; null: there is no teacher."""
    max_position_embeddings: int | None = None
    """Longest sequence of the teacher, as model.max_position_embeddings. It must be above data.max_prompt_tokens +
    rollout.max_response_tokens, because vLLM samples a token after what it scores; null takes that of the teacher's
    config."""
    num_replicas: int = 1
    """Number of vLLM engines that score."""
    tensor_parallel_size: int = 1
    """GPUs over which each is split."""
    max_num_seqs: int = 64
    """Sequences that each scores at once."""
    max_num_batched_tokens: int = 2048
    """Tokens that each reads at once, a whole distribution of each. The distributions lie beside weights and KV cache:
    6 bytes per token and word of the vocabulary in bfloat16, 8 in float32."""
    dtype: DType = DType.float32
    """Number format of its weights and activations."""
    kv_cache_mb: int | None = 256
    """MiB of KV cache on each GPU, or on CPU of each engine; null takes what gpu_memory_utilization leaves."""
    gpu_memory_utilization: float = 0.85
    """Share of the GPU's memory that vLLM takes when kv_cache_mb is null."""
    min_replicas: int = 1
    """The run ends when fewer than this can score and no replacement is starting."""
    max_replacements: int = 8
    """Lost ones that are replaced by new ones, over the whole run; 0 replaces none."""
    timeout_s: float = 600.0
    """Deadline in seconds for scoring a group, waiting for a replacement included; then rollout.max_group_retries
    applies. Less than rollout.group_timeout_s, which contains it."""
