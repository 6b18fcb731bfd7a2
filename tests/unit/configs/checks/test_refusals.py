"""Values that contradict one another, or would silently do nothing, are refused with key, value and a way out."""

from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from configs.algorithm import CORRECTIONS, LOSSES, Correction
from configs.data import Generated
from configs.mixture import writable
from configs.schema import Config
from configs.validate import ConfigError, check
from tests.support.compose import changed, refusal

SEARCH = "rollout.environments.search.tags:agent_loop"
SOLVER = "rollout.environments.solver:agent"
GYM = "rollout.data.reasoning_gym:rows"
SERVED = "model.lora.rank=8 model.lora.serve=adapter"
EXPERTS = "model.lora.targets=[q_proj,experts.down_proj]"
TAUGHT = "teacher.path=org/model"

REFUSED = f"""
rollout.temperature=0.0: must be above 0 (evaluation may be greedy)
rollout.temperature=nan: must be above 0 (evaluation may be greedy)
rollout.stop=[END,''] => rollout.stop=['END', '']: an empty text would stop everything
rollout.top_k=0: must be -1 (the whole vocabulary) or at least 1
rollout.top_k=-2: must be -1 (the whole vocabulary) or at least 1
rollout.top_k=513: must be between -1 and 512
rollout.min_p=1.5: must be between 0 and 1
rollout.min_p=0.1 rollout.speculative.method=ngram: must be 0 with rollout.speculative.method: vLLM
algorithm.clip_ratio_c=1.0: must be above 1
algorithm.group_size=1: must be at least 2: group advantages of one trajectory are all 0
algorithm.group_size=0: must be at least 2: group advantages of one
model.kind=hf => model.path=None: model.kind=hf needs the folder or hub name
model.path=org/name: model.kind=tiny makes its own model; choose model=hf
data.train_files=/no/x: train_files and val_files are set both, or neither; data.val_share=0.05 ~ none nothing
data.train_files=/no/x: no such file (from /
data.val_files=/no/x: train_files and val_files are set both, or neither
data.val_share=0.1 data.train_files=/no/x data.val_files=none: data.val_files is set, too: leave out one
data.loader=os.path:basename data.val_files=none: needs data.train_files and data.val_files
data.val_share=0.1: needs data.train_files, of which it is a share
data.val_share=0.1 data.train_files=/no/x => data.train_files=/no/x: no such file (from /
data.val_share=0.1 data.train_files=/no/x data.val_files=/no/y: data.val_files is set, too: leave out one
data.chat_template=true => data.chat_template=True: needs a chat template, which the model of data.generated=arithmetic
rollout.agent={SOLVER}: needs a chat template, which the model of data.generated=arithmetic has not: set model=chat
rollout.agent_command=run-it: needs a chat template, which the model of data.generated=arithmetic has not
sessions.host=127.0.0.1:80 rollout.agent={SOLVER}: must be an address or a name of this machine
rollout.tool_processes=0: must be between 1 and 100000
rollout.agent_loop=multi: must be one of single_turn, or package.module
rollout.reward=no.such:f: no.such cannot be imported: ModuleNotFound
rollout.reward=gsm8k+math:pi => rollout.reward=math:pi: must be a function or a class
data.loader=no.such:f: needs data.train_files and data.val_files
data.loader=no.such:f: no.such cannot be imported
data.loader=math:pow: must be callable with (entries)
data.curriculum.order=random: must be one of uniform, frontier, stages, retry, or package.module
data.curriculum.order=math:sin: must be callable with (rows, passes, random)
data.curriculum.order=stages => data.curriculum.key=None: data.curriculum.order=stages needs the column of the diff
data.curriculum.key=level data.curriculum.order=frontier: needs data.train_files: generated problems have no columns
data.curriculum.key=level: data.curriculum.order=uniform does not read it; set that to frontier or stages, or to a func
data.curriculum.half_life=9.0 data.curriculum.order=retry: data.curriculum.order=retry does not read it; set that to fr
data.curriculum.retry_after=9 data.curriculum.order=math:pow: data.curriculum.order=math:pow does not read it
evaluation.samples=2: greedy samples are all the same
evaluation.replicas=2 rollout.num_replicas=2: must leave one of rollout.num_replicas=2 to the training
model.hidden_size=80: must be a multiple of 32
model.replay_routes=true => model.replay_routes=True: needs model.num_experts with model.kind=tiny: set it to null
model.num_experts=1: must be 0, for a dense model, or at least 2
model.num_experts=3 trainer.num_ranks=2 trainer.expert_parallel=true => trainer.expert_parallel=True: needs model.num_ex
weight_sync.interval=7: must divide trainer.total_steps=60
checkpoint.keep_every=40 weight_sync.interval=6 => checkpoint.every=20: with checkpoint.keep_every
checkpoint.keep_every=30: must be a multiple of checkpoint.every=20: no o
rollout.min_replicas=2: at most rollout.num_replicas=1
rollout.autoscale.min_replicas=2: needs rollout.autoscale.max_replicas
rollout.autoscale.max_replicas=2 rollout.num_replicas=3: at least rollout.num_replicas=3
rollout.autoscale.min_replicas=4 rollout.autoscale.max_replicas=4: from rollout.min_replicas=1 to
weight_sync.pause_mode=wait: must be keep or abort: an update
trainer.num_ranks=17: at most trainer.prompts_per_step=16
rollout.kv_cache_mb=None device=cpu: device=cpu needs a size in
trainer.num_ranks=2 gpu_share=0.5: at most 1 with gpu_share=0.5: each of several
rollout.kv_cache_mb=None gpu_share=0.5: gpu_share=0.5 needs a size in MiB
rollout.tensor_parallel_size=2 gpu_share=0.5: at most 1 with gpu
rollout.data_parallel_size=2 gpu_share=0.5: at most 1 with gpu_share
weight_sync.transport=collective gpu_share=0.5: with gpu_share=0.5, must be cuda_ipc, shared_memory or filesystem
rollout.agent_worker_timeout_s=120.0 rollout.group_timeout_s=120: must be less than rollout.group_timeout_s=120
tracking.sinks=[wandb]: must have jsonl, which the audit and a resumed run read
tracking.sinks=[jsonl,jsonl]: must name each sink once
tracking.sinks=[jsonl,mlflow] => tracking.sinks=mlflow: must be one of jsonl, wandb, tensorboard, or package.module:name
model.lora.alpha=8.0: needs model.lora.rank: without it, all weights are trained
model.lora.targets=[] model.lora.rank=8: must be [all_linear] or names of
model.lora.targets=[q_proj,all_linear] model.lora.rank=8 => model.lora.targets=['q_proj', 'all_linear']: ~ head: leave
model.lora.serve=adapter: needs model.lora.rank: without it
model.lora.serve=adapter model.lora.rank=8 {EXPERTS}: must be merged for adapters of experts
model.lora.dropout=0.1 model.lora.rank=8 {EXPERTS}: must be 0 for adapters of experts
trainer.compile=True model.lora.rank=8 {EXPERTS}: must be false for adapters of experts
trainer.expert_parallel=True model.num_experts=4 model.lora.rank=8 {EXPERTS}: must be false for adapters of experts
model.lora.rank=513 model.lora.serve=adapter: at most 512 with model.lora.serve=adapter, as in vLLM
rollout.dtype=float32 device=cuda {SERVED}: must be bfloat16 with model.lora.serve=adapter: vLLM's LoRA kernels for GPUs
model.lora.served_path=/quantized model.lora.rank=8: needs model.lora.serve=adapter: an adapter ~ into the weights
rollout.speculative.method=eagle3 rollout.speculative.model=x {SERVED}: none, ngram or suffix ~ serve=adapter: vLLM's
rollout.speculative.num_tokens=5: needs a rollout.speculative.method
rollout.speculative.max_match=5: needs rollout.speculative.method=ngram
rollout.speculative.min_match=5 rollout.speculative.method=ngram: at most rollout.speculative.max_match=4
rollout.speculative.model=x rollout.speculative.method=ngram: set with ~ method=draft_model, eagle, eagle3, and
weight_sync.delta=True model.lora.rank=8: with model.lora.rank=8, must be false: only the adapter travels
trainer.activation_offload=True: needs trainer.gradient_checkpointing=full: the inputs of recomputed
trainer.sequence_parallel=2: must divide trainer.num_ranks=1
trainer.sequence_parallel=3 trainer.num_ranks=3: must divide the 4 attention heads of the model
trainer.num_ranks=34 trainer.sequence_parallel=2: at most trainer.prompts_per_step=16 x sequence_parallel=2
trainer.attention=flex device=cpu: device=cpu needs dense or varlen: flex has no gradients on CPUs
trainer.attention=varlen: varlen is for trainer.layout=packed
trainer.mini_batches=17: at most 16: of trainer.prompts_per_step=16
trainer.mini_batches=9 trainer.num_ranks=2: at most 8: of trainer.prompts_per_step=16, each has a group for every rank
trainer.min_lr_ratio=0.1: only trainer.lr_schedule=linear and cosine read
trainer.lr_warmup_steps=60 trainer.lr_schedule=cosine: with trainer.lr_schedule=cosine ~ before the run's 60 opt
trainer.lr_warmup_steps=9 trainer.total_steps=4 trainer.epochs=2: at most the run's 8 optimizer steps ~ never be reached
trainer.lr_warmup_ratio=1.0 trainer.lr_schedule=cosine trainer.epochs=2: with trainer.lr ~ before the run's 120 o
trainer.lr_warmup_ratio=0.9 trainer.lr_schedule=cosine trainer.total_steps=4: with trainer.lr ~ before the run's 4 opt
algorithm.loss=reinforce algorithm.proximal=current trainer.mini_batches=4: with 4 optimizer steps ~ has no ratio
data.loader_args.n=1 => data.loader_args={{'n': 1}}: needs data.loader=package.module:function
data.demonstrations=m:f: needs data.loader=package.module:function
data.loader={GYM} data.loader_args.task=1: must be callable with (entries, task=...)
data.demonstrations=os.path:basename data.loader=os.path:basename: must be callable with (num, seed)
rollout.agent_loop={SEARCH} rollout.agent_args.retriever=1 rollout.agent_args.topp=1: must be ~ retriever=..., topp=...)
rollout.agent_loop={SEARCH}: must be callable with (tokenizer): missing
rollout.agent={SOLVER} rollout.agent_args.topk=1: must be callable with (task, client, topk=...): got an
rollout.agent_args.topk=1 => rollout.agent_args={{'topk': 1}}: are those of rollout.agent_loop=pack
rollout.agent_args.topk=1 rollout.agent_command=agent => rollout.agent_args={{'topk': 1}}: ~ of rollout.agent_loop=pack
sessions.command_reward=True: needs rollout.agent_command
sessions.folder_template=no_such: no such folder
sessions.folder_template=/ sessions.fresh_folder=False: needs sessions.fresh_folder=true
algorithm.gdpo_weights.a=1 => algorithm.gdpo_weights={{'a': 1.0}}: only algorithm.advantage=gdpo and your own
algorithm.advantage=gdpo => algorithm.gdpo_weights={{}}: gdpo needs two rewards or more
algorithm.gdpo_weights.a=1 algorithm.gdpo_weights.dapo=1 algorithm.advantage=gdpo rollout.reward=dapo+format => ~ no a
algorithm.advantage=otb rollout.top_p=0.9: otb reads the probabilities of the whole vocabulary
algorithm.overlong_buffer_tokens=2 algorithm.advantage=gdpo: must be 0: gdpo reads
algorithm.overlong_buffer_tokens=2 algorithm.advantage=maxrl: must be 0: the rewards of maxrl may not be below 0
algorithm.kl_reward_coef=0.1 algorithm.advantage=maxrl: must be 0: the rewards of maxrl
algorithm.loss=vespo algorithm.proximal=current: its weight is already that of the whole way
algorithm.loss=ppo: must be one of ppo_clip, gspo, cispo, sapo, gmpo, dppo_tv, dppo_kl,
algorithm.loss=no.such:loss: no.such cannot be imported
algorithm.loss=math:no_such: math has no no_such
algorithm.loss=math:sqrt: must be callable with (tokens, algorithm)
algorithm.advantage=gea: must be one of grpo, rloo, opo, grpo_passk, gpg, reinforce_plus_plus_baseline,
algorithm.advantage=math:sqrt: must be callable with (groups, algorithm)
algorithm.overlong_buffer_tokens=33: at most rollout.max_response_tokens=32
algorithm.filter_groups=True algorithm.advantage=gae algorithm.group_size=1: needs algorithm.group_size of at least 2
algorithm.loss_horizon=9: only seq_mean_token_sum_norm has a horizon, and loss_agg
algorithm.kl_loss_estimator=k1: k2 or k3
algorithm.kl_loss_estimator=k2 algorithm.kl_loss_unbiased=True algorithm.kl_loss_coef=0.1: k1 or k3
algorithm.kl_loss_unbiased=True: there is no KL in the loss
algorithm.rejections={{k1:[2]}} => algorithm.rejections={{'k1': [2]}}: k1: must be one of token_k1,
algorithm.rejections={{token_k1:[2]}} => algorithm.rejections={{'token_k1': [2]}}: token_k1: must be [low, high], 0 <
algorithm.rejections={{token_k1:[0.5,0.9]}} => algorithm.rejections={{'token_k1': [0.5, 0.9]}}: ~ must be [low, high]
algorithm.rejections={{opsm:[0.5,2]}} => algorithm.rejections={{'opsm': [0.5, 2]}}: opsm: must be [high], 0 < high
algorithm.rejections={{opsm:[x]}} => algorithm.rejections={{'opsm': ['x']}}: opsm: must be [high]
algorithm.rejection_high=None algorithm.rejection=opsm: ~ =opsm needs a number
algorithm.correction=token_is: its weights pi_old / mu are 1 with
algorithm.correction=geo_rs_seq_tis: its weights pi_old / mu
algorithm.loss=reinforce: this loss has no ratio pi / pi_old, so its importance
algorithm.loss=reinforce algorithm.proximal=interpolated: this loss has no ratio
algorithm.loss=reinforce algorithm.correction=seq_is: this loss has no ratio
algorithm.loss=reinforce algorithm.proximal=exact: this loss has no ratio
trainer.sequence_parallel=2 trainer.num_ranks=2 algorithm.proximal=exact => algorithm.proximal=exact: ranks that share
trainer.compile=True algorithm.proximal=exact => algorithm.proximal=exact: each version computes a part of a row
algorithm.gamma=0.9: only algorithm.advantage=gae reads it
algorithm.gae_lambda=0.9: only algorithm.advantage=gae reads it
algorithm.rejection_low=0.5: nothing is rejected: set algorithm.rejection
algorithm.rejection_high=2.0 algorithm.proximal=current: nothing is rejected
algorithm.rejection_low=0.5 algorithm.correction=k3_rs: seq_mean_k3 has no lower bound
algorithm.rejection_high=0.9 algorithm.correction=geo_rs: must be at least 1: seq_mean_k1 is kept in [low, high]
algorithm.rejection_low=None algorithm.rejection=token_k1 algorithm.rejection_high=2.0: ~ =token_k1 needs a number
algorithm.rejection_high=None algorithm.correction=geo_rs algorithm.rejection=token_k2: ~ =token_k2 needs a number
algorithm.advantage=opd: needs teacher.path
algorithm.teacher_coef=0.5: needs teacher.path
algorithm.teacher_coef=0.0 {TAUGHT}: nothing would be learned
algorithm.filter_groups=True {TAUGHT} algorithm.advantage=opd: with algorithm.advantage=opd ~ learned from rewards
algorithm.kl_reward_coef=0.1 {TAUGHT} algorithm.advantage=opd:
algorithm.group_size=1 {TAUGHT}: must be at least 2
teacher.min_replicas=2 {TAUGHT}: at most teacher.num_replicas=1
teacher.timeout_s=1200.0 {TAUGHT}: must be less than rollout.group_timeout_s
teacher.max_num_batched_tokens=63 {TAUGHT}: at least teacher.max_num
teacher.kv_cache_mb=None {TAUGHT} device=cpu: device=cpu needs
teacher.tensor_parallel_size=2 {TAUGHT} gpu_share=0.3: at most 1 with gpu_share=0.3
teacher.kv_cache_mb=None {TAUGHT} gpu_share=0.3: gpu_share=0.3 needs a size in MiB
""".strip().split("\n")
"""Overrides, the refused key first, and what is said of it; behind "=>", the whole message. "~" is for any words."""


TAKEN = f"""
rollout.top_k=1
rollout.agent_loop=os.path:basename
rollout.agent_loop={SEARCH} rollout.agent_args.retriever.kind=world rollout.agent_args.topk=1
rollout.reward=0.5*os.path:join+math_verify
data.loader=os.path:basename data.train_files=a data.val_files=b
data.loader=os.path:basename data.train_files=a data.val_files=none
data.val_files=none
evaluation.samples=2 evaluation.temperature=0.6
evaluation.replicas=2 rollout.num_replicas=3
weight_sync.interval=6 checkpoint.every=12 checkpoint.keep_every=48
weight_sync.interval=6 checkpoint.every=0 checkpoint.keep_every=7
rollout.num_replicas=2 rollout.min_replicas=2
rollout.num_replicas=2 rollout.autoscale.min_replicas=1 rollout.autoscale.max_replicas=2
weight_sync.pause_mode=abort
trainer.num_ranks=16
gpu_share=0.3 rollout.num_replicas=2 weight_sync.transport=cuda_ipc
model.kind=hf model.path=org/name
device=cuda rollout.kv_cache_mb=None
algorithm.loss=os.path:join
algorithm.advantage=os.path:join
algorithm.overlong_buffer_tokens=32
algorithm.advantage=gae algorithm.group_size=1 algorithm.gamma=0.99 algorithm.gae_lambda=0.95
algorithm.advantage=reinforce_plus_plus algorithm.group_size=1
algorithm.advantage=remax algorithm.group_size=1
algorithm.advantage=opd algorithm.group_size=1 {TAUGHT}
algorithm.loss_horizon=1 algorithm.loss_aggregation=seq_mean_token_sum_norm
algorithm.correction=geo_rs algorithm.rejection_low=0.9 algorithm.rejection_high=1.0
algorithm.correction=none
algorithm.rejection=seq_max_k3 algorithm.rejection_high=0.001
algorithm.rejection=token_k1 algorithm.rejection_low=0.5 algorithm.rejection_high=2.0
algorithm.rejections={{token_k1:[0.5,2],seq_mean_k1:[0.99,1.01],seq_max_k1:[1e-4,100],opsm:[0.05]}}
algorithm.kl_loss_estimator=k1 algorithm.kl_loss_unbiased=True algorithm.kl_loss_coef=0.1
algorithm.loss=reinforce algorithm.proximal=current
algorithm.loss=reinforce algorithm.correction=none
algorithm.loss=reinforce algorithm.correction=geo_rs
algorithm.loss=reinforce rollout.max_staleness=0
algorithm.loss=vespo trainer.mini_batches=4
algorithm.loss=m2po algorithm.advantage=otb trainer.scale_lr_by_ess=true
algorithm.loss=vespo algorithm.proximal=current algorithm.correction=geo_rs
""".strip().split("\n")
TAKEN += [f"algorithm.loss={loss} algorithm.proximal=current" for loss in LOSSES if loss != "vespo"]
TAKEN += [f"algorithm.correction={how.value} algorithm.proximal=current" for how in Correction]
TAKEN += [f"algorithm.correction={how.value} algorithm.proximal=interpolated" for how in Correction]
TAKEN += [f"algorithm.correction={how.value} algorithm.proximal=exact" for how in Correction]


def config_of(words: str) -> Config:
    """Return the defaults with these overrides, as a command line has them."""
    given = [word.replace("=None", "=null") for word in words.split()]
    config = OmegaConf.to_object(OmegaConf.merge(writable(OmegaConf.structured(Config)), OmegaConf.from_dotlist(given)))
    assert isinstance(config, Config)
    return config


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_work_is_refused(case: str) -> None:
    words, _, line = case.partition(" => ")
    if not line:
        words, _, reason = case.partition(": ") if ": " in case else case.partition(":")
        line = f"{words.split()[0]}: {reason}"
    start, *rest = line.split("~")
    said = [told for told in refusal(config_of(words)).splitlines() if told.startswith(start.rstrip())]
    assert any(all(part.strip() in told for part in rest) for told in said), said


@pytest.mark.parametrize(
    ("values", "line"),
    [
        ({"data__prompt_template": "Q: "}, "data.prompt_template='Q: ': must contain {question}"),
        ({"data__train_files": "", "data__val_files": ""}, "data.val_files=: no such file (from /"),
        ({"rollout__format_pattern": "(a"}, "rollout.format_pattern='(a': must be a regular expression: missing ), un"),
    ],
)
def test_texts_that_no_command_line_has_are_refused_too(values: dict[str, Any], line: str) -> None:
    said = refusal(changed(Config(), **values))
    assert any(one.startswith(line) for one in said.splitlines()), said


@pytest.mark.parametrize("words", TAKEN)
def test_what_can_work_is_taken(words: str) -> None:
    check(config_of(words))


def test_every_correction_but_auto_says_what_it_does() -> None:
    assert {*CORRECTIONS, Correction.auto} == set(Correction)
    for spec in CORRECTIONS.values():
        assert (spec.rejection is None) == (spec.high is None)
        assert (spec.low is not None) == (spec.rejection is not None and spec.rejection.value.endswith("k1"))


def test_a_folder_that_is_no_model_is_no_teacher(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="teacher.path=/no/teacher: no such folder"):
        check(changed(Config(), teacher__path="/no/teacher"))
    with pytest.raises(ConfigError, match="teacher.path=.*no Hugging Face model: the folder has no config.json"):
        check(changed(Config(), teacher__path=str(tmp_path)))
    (tmp_path / "config.json").touch()
    check(changed(Config(), teacher__path=str(tmp_path)))


@pytest.mark.parametrize(
    "command", ["run '{prompt}'", 'run "{prompt}"', "run 'Solve: {prompt}'", 'a; run "it\'s {prompt}"']
)
def test_the_prompt_of_a_command_must_not_be_quoted_twice(command: str) -> None:
    with pytest.raises(ConfigError, match=r"{prompt} must stand outside of quotes: it is quoted for the shell"):
        check(changed(Config(), rollout__agent_command=command))


@pytest.mark.parametrize(
    "command", ["run {prompt}", "run 'a' {prompt} \"b\"", "run it\\'s {prompt}", "run --p={prompt} '{}'"]
)
def test_the_prompt_of_a_command_may_stand_beside_quotes(command: str) -> None:
    check(changed(Config(), rollout__agent_command=command, data__generated=Generated.calculator))
