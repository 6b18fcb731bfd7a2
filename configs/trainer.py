"""Keys of the trainer."""

from dataclasses import dataclass
from enum import Enum

from configs.model import DType

CHUNK_LOGITS = {"cpu": 2**20, "cuda": 2**26}
"""Logits that are in memory at once, by the kind of device: on a CPU they stay in its cache, on a GPU they keep all of
it busy."""

ADAM_BETAS = (0.9, 0.95)
"""The decays of AdamW's moments, those of GPT-3 and Llama. A run of reinforcement learning takes few steps on gradients
that change their scale: a second moment of 0.999 would remember a thousand of them."""


class Layout(Enum):
    """The layout of trajectories in a micro-batch. The arithmetic is the same."""

    tree = "tree"
    """Rows are prefix trees: what sequences of a group share (prompt, turns, any equal beginning) is computed once. A
    sequence that shares less than a quarter of its tokens has a row of its own."""
    packed = "packed"
    """Sequences end to end, without padding: rows of as many tokens as the budget allows."""
    rows = "rows"
    """One row per sequence, sorted by length and padded: for models whose state runs through a row."""


class AttentionKind(Enum):
    """The implementation of attention within rows. The arithmetic is the same."""

    auto = "auto"
    """The choice by layout and device: varlen where rows are sequences end to end; else flex on GPUs in bfloat16, and
    dense in float32 and on CPUs."""
    dense = "dense"
    """SDPA over masks in tensors, made block by block of queries."""
    flex = "flex"
    """The flex_attention of torch, over the blocks of pairs that a tree has. It has no gradients on CPUs."""
    varlen = "varlen"
    """Flash attention over sequences of any lengths, for rows without branches; on CPUs SDPA, one by one."""


class GradientCheckpointing(Enum):
    """The part of a layer that is computed again in the backward pass, instead of being kept."""

    none = "none"
    """Nothing."""
    selective = "selective"
    """All but products of matrices and attention."""
    full = "full"
    """Everything: a layer keeps its input only."""


class LearningRateSchedule(Enum):
    """The course of the learning rate after its warm-up, until the run's last optimizer step."""

    constant = "constant"
    linear = "linear"
    """Falls along a line to min_lr_ratio * lr."""
    cosine = "cosine"
    """Falls along half a cosine to min_lr_ratio * lr."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerConfig:
    total_steps: int = 60
    """Steps of the run, each on a batch of its own; a multiple of weight_sync.interval."""
    prompts_per_step: int = 16
    """Groups in the batch of a step."""
    mini_batches: int = 1
    """Parts of a batch, of whole groups and about equally many tokens. Each takes an optimizer step of its own."""
    epochs: int = 1
    """Times that each batch is gone through (verl's ppo_epochs), every time with its mini-batches in another order."""
    num_ranks: int = 1
    """FSDP ranks, each on its own GPU or in its own CPU process."""
    dtype: DType = DType.float32
    """Compute type of forward and backward; master weights and gradient reduction are float32."""
    lr: float = 3e-4
    """AdamW's learning rate after warm-up."""
    scale_lr_by_ess: bool = False
    """Multiply the policy's learning rate in each optimizer step by sqrt(actor/sequence_ess): the more a few stale
    sequences outweigh the others, the shorter the step (VCPO)."""
    lr_schedule: LearningRateSchedule = LearningRateSchedule.constant
    """The learning rate after warm-up: constant, linear or cosine, by optimizer steps of the whole run."""
    lr_warmup_steps: int | None = None
    """Optimizer steps of linear warm-up, at most those of the run; null is 5, or fewer in a run of fewer than 6."""
    lr_warmup_ratio: float | None = None
    """Warm-up as a share of the run's optimizer steps, in place of lr_warmup_steps; null takes lr_warmup_steps."""
    min_lr_ratio: float = 0.0
    """Fraction of the learning rate to which it falls, with lr_schedule=linear or cosine."""
    weight_decay: float = 0.0
    """AdamW's decoupled weight decay."""
    max_grad_norm: float = 1.0
    """Gradients are clipped to this global norm."""
    layout: Layout = Layout.tree
    """Rows of a micro-batch: tree (what a group's sequences share is computed once), packed (sequences end to end) or
    rows (one per sequence, with padding, for recurrent models)."""
    attention: AttentionKind = AttentionKind.auto
    """Implementation of attention: auto (by device and layout), dense, flex (GPUs) or varlen (layout=packed)."""
    sequence_parallel: int = 1
    """Ranks that share each row (Ulysses): a rank has a part of its tokens, and in attention a part of the heads. It
    divides num_ranks and the model's attention heads."""
    expert_parallel: bool = False
    """Divide the experts of a mixture among the ranks, and send tokens to them, in place of gathering the weights of
    all experts on every rank. num_ranks divides the number of experts."""
    tokens_per_micro_batch: int = 2048
    """Tokens of one forward and backward pass, padding included, by sequence_parallel ranks together. A longer single
    sequence still runs, alone."""
    unsharded_gradients_mb: int = 8192
    """A model (policy, critic) whose float32 gradients take more MiB reduces them over the ranks after every
    micro-batch; a smaller one keeps them whole on each rank until the step's last. Without effect on the result."""
    gradient_checkpointing: GradientCheckpointing = GradientCheckpointing.none
    """Part of each layer that is computed again in the backward pass to save memory: none, selective (all but
    products of matrices and attention) or full (everything; about a third more time)."""
    activation_offload: bool = False
    """Keep the inputs of layers in host memory until their backward pass. Needs gradient_checkpointing=full."""
    optimizer_on_host: bool = False
    """Keep AdamW's moments in host memory, 8 bytes per trained parameter; an optimizer step brings those of one
    parameter at a time to the GPU."""
    compile: bool = False
    """Compile each layer with torch.compile: the first steps take minutes, and the later ones less time and memory."""
    record_tokens: bool = True
    """Write what is trained, about 23 bytes per token (ids, versions, logprobs of rollout and trainer, advantages, what
    was clipped; with top_p, top_k or min_p, 4 bytes more and 4 for each token that was left to draw from), and what
    replicas sample, 8 to 12 bytes: the audit holds one against the other, the page shows it."""
    events: bool = True
    """Write what happens in events.jsonl: groups, turns, tools, rewards, updates, load. false: only steps, evaluations,
    checkpoints, and what becomes of replicas."""
    eval_every: int = 10
    """Steps between evaluations on the held-out set; 0 evaluates only before the first step and after the last."""
    max_skipped_steps: int = 3
    """Steps that may be skipped because loss, logprobs or gradient norm is NaN or infinite. One more ends the run."""
    max_logprob_diff: float | None = None
    """Largest mean difference, in nats a token, between the logprobs of a replica and of the trainer for the same
    tokens and weights: 64 tokens at the start, 8 after updates (weight_sync.check_every). Beyond it the run ends. null:
    0.001, or 0.1 where one of both computes in bfloat16, and no comparison with quantized replicas; 0: none at all."""
    batch_timeout_s: float = 1800.0
    """Deadline in seconds for waiting for a batch; then the run ends. Pauses count, so it must be longer than any."""
    step_timeout_s: float = 1800.0
    """Deadline in seconds for training on a batch and for scoring it; then train workers restart (max_restarts)."""
    start_timeout_s: float = 600.0
    """Deadline in seconds for starting the train workers and for loading a checkpoint into them."""
    answer_timeout_s: float = 10.0
    """Seconds within which a train worker must answer after a failed call; after that it counts as lost."""
    spare_processes: bool = True
    """Keep a second process of each rank that has imported everything and takes over in a restart, which saves the
    seconds of that. They start after the first checkpoint; each takes about 0.3 GB of host memory."""
    max_restarts: int = 3
    """Number of times that the train workers may restart from the newest checkpoint after one died or hung."""

    @property
    def data_parallel(self) -> int:
        """Ranks, or groups of them that share rows, with micro-batches of their own."""
        return self.num_ranks // self.sequence_parallel

    @property
    def optimizer_steps_per_batch(self) -> int:
        """The largest number of optimizer steps per batch: a mini-batch with nothing to learn from takes none."""
        return self.mini_batches * self.epochs

    @property
    def total_optimizer_steps(self) -> int:
        return self.total_steps * self.optimizer_steps_per_batch
